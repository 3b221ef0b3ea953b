"""Fakes have the shapes, dtypes and strides of real results, and refuse several devices."""

import pytest
import torch

from kernels.native.library import operators

pytestmark = pytest.mark.needs_native

EPS, GLU = 1e-5, (True, 4.0, 25.0)


def x(*shape):
    return torch.randn(shape)


def router(width):
    return x(6, width), x(6)


def chosen(N):
    """Two of six experts for each token, as a part of a wider tensor."""
    return torch.rand(N, 6).argsort(1)[:, :2]


def cases(N):
    """(operator, arguments) in every form that sublayers are called in."""
    experts = x(6, 8, 16), x(6, 16, 4)
    scan = x(N, 2, 8), x(N, 2, 8), x(N, 2, 6), -x(N, 2, 8).abs(), x(N, 2)
    rest = [0, N], [0] if N else [], [N] if N else [], 0.5
    rule = 2, 1, 1, True, 1.0
    end, latent = (*rule, *GLU), (x(16), EPS, x(9, 16), x(9, 5))
    return [
        ("kda_scan", (*scan, x(1, 2, 6, 8), *rest)),
        ("kda_scan", (*scan, x(1, 2, 8, 6).mT, *rest)),
        ("few_rows", (x(N, 16), x(5, 16))),
        ("linear", (x(N, 16), x(5, 16))),
        ("linear", (x(N, 2, 16).transpose(0, 1), x(5, 16))),
        ("rms_norm", (x(N, 16, 3).mT, x(16).bfloat16(), EPS)),
        ("gated_norm", (x(N, 2, 8), x(16, N).T, x(8), EPS)),
        ("gated", (x(N, 16), x(16, N).T)),
        ("glu", (x(N, 3, 16), *GLU)),
        ("mix_norm", (x(N, 16), x(N, 2, 16), x(N, 2), x(16), x(16), x(16).bfloat16(), EPS)),
        ("route", (x(N, 16), *router(16), *rule, None)),
        ("route", (x(N, 16), *router(16), *rule, chosen(N))),
        ("mix_experts", (x(N, 16), chosen(N), x(N, 2), *experts, *GLU)),
        ("kda_output", (x(N, 2, 8), x(N, 16), x(8), EPS, x(24, 16))),
        ("kda_inputs", (x(N, 16), x(71, 16), [48, 5, 2, 16], x(16, 5), None, 2)),
        ("kda_inputs", (x(N, 16), x(60, 16), [48, 5, 2, 5], x(16, 5), x(16, 5), 2)),
        (
            "mla_inputs",
            (x(N, 16), x(35, 16), [7, 8, 4, 16], x(7), x(24, 7), x(8), EPS, 2),
        ),
        ("mla_inputs", (x(N, 16), x(36, 16), [24, 8, 4, 0], None, None, x(8), EPS, 2)),
        ("mla_output", (x(N, 2, 8), x(N, 16), x(24, 16))),
        ("mla_output", (x(N, 2, 8), x(N, 0), x(24, 16))),
        ("mlp", (x(N, 16), x(20, 16), x(9, 10), *GLU)),
        (
            "moe",
            (x(N, 16), *router(16), None, [0, 0], *experts, *[None, EPS, None, None], *end, None),
        ),
        ("moe", (x(N, 24), *router(24), x(26, 24), [16, 10], *experts, *latent, *end, chosen(N))),
    ]


@pytest.mark.parametrize("N", [0, 1, 3, 12])
def test_fakes_are_like_real_results(N):
    for name, given in cases(N):
        operator = getattr(operators(), name).default
        # inputs of a core are parts of one product, which no schema can say
        schema = [] if name in ("kda_inputs", "mla_inputs") else ["test_schema"]
        torch.library.opcheck(operator, given, test_utils=[*schema, "test_faketensor"])


def test_no_operator_takes_tensors_on_several_devices():
    """Torch gives a call with one tensor on meta to the fake, whose result nobody fills."""
    for name, given in cases(3):
        places = [i for i, part in enumerate(given) if isinstance(part, torch.Tensor)]
        for place in places if len(places) > 1 else ():
            parts = list(given)
            parts[place] = parts[place].to("meta")
            with pytest.raises(ValueError, match="on one device, got .'cpu', 'meta'"):
                getattr(operators(), name)(*parts)
