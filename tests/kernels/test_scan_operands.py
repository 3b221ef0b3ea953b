"""Operands of a scan as callers have them: any layout, never changed, refused if ill-fitting."""

import pytest
import torch

from kernels.chunked import kda_chunk_scan
from kernels.recurrent import kda_step, kda_token_scan
from kernels.reference import kda_reference
from kimi_mini.workbench.cases import scan_case
from tests.kernels.scans import FAST, FORMS, assert_same_bits

LAYOUTS = {
    "slice of a wider tensor": lambda x: torch.cat([torch.full_like(x, float("nan")), x], -1)[
        ..., x.shape[-1] :
    ],
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "transposed within heads": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "every second row": lambda x: x.repeat_interleave(2, 0)[::2],
    "every second channel": lambda x: x.repeat_interleave(2, -1)[..., ::2],
}


@pytest.mark.parametrize("form", ["token scan", "decode steps", "chunks of 16", "chunks of 64"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("K", "V"), [(16, 24), (7, 5)])
def test_the_layout_of_operands_and_states_changes_no_bit(layout, form, K, V):
    """BR-44."""
    case = scan_case("mixed", [5, 40, 2, 17], K=K, V=V)
    other = [LAYOUTS[layout](x) for x in case[:6]]
    assert not all(x.is_contiguous() for x in other)
    assert_same_bits(FORMS[form](*other, case.query_start), FORMS[form](*case))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_decode_step_of_several_rows_takes_any_layout_too(layout):
    """BR-44: rows and heads of the state, merged for a batched product, may not be mergeable."""
    case = scan_case("mixed", [1] * 4)
    other = [LAYOUTS[layout](x) for x in case[:6]]
    for got, expected in zip(kda_step(*other), kda_step(*case[:6]), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("form", FAST)
def test_expanded_operands_and_a_shared_state_are_read_right(form):
    """BR-44, BR-34: stride 0, and one initial state for all rows."""
    case = scan_case("mixed", [5, 40, 17])
    one_head = [x[:, :1].expand(x.shape) for x in case.tokens]
    shared = case.S0[:1].expand(case.S0.shape)
    got = FORMS[form](*one_head, shared, case.query_start)
    copies = [x.contiguous() for x in (*one_head, shared)]
    assert_same_bits(got, FORMS[form](*copies, case.query_start))


@pytest.mark.parametrize("form", FORMS)
def test_operands_are_not_changed_and_results_are_no_views_of_them(form):
    """BR-34, I-42: the same call again gives the same result."""
    case = scan_case("mixed", [20, 3])
    kept = [x.clone() for x in case[:6]]
    first = FORMS[form](*case)
    copies = [x.clone() for x in first]
    second = FORMS[form](*case)
    for a, b in zip(copies, second, strict=True):
        assert torch.equal(a, b)
    for result in (*first, *second):
        result.fill_(float("nan"))
    assert all(torch.equal(a, b) for a, b in zip(kept, case[:6], strict=True))


@pytest.mark.parametrize("form", [kda_reference, kda_token_scan, kda_chunk_scan])
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("k", lambda c: c._replace(k=c.k[..., :8])),
        ("v", lambda c: c._replace(v=c.v[:, :1])),
        ("g", lambda c: c._replace(g=c.g[..., :1])),
        ("beta", lambda c: c._replace(beta=c.beta[:, :1])),
        ("S0", lambda c: c._replace(S0=c.S0.mT)),
        ("S0", lambda c: c._replace(S0=c.S0[:1])),
    ],
    ids=["narrow k", "v of one head", "g per head", "beta of one head", "S0 key-first", "S0 short"],
)
def test_operands_that_do_not_fit_are_refused_by_name(form, name, change):
    """BR-22: most of these would broadcast in silence."""
    with pytest.raises(ValueError, match=f"^{name} must have shape"):
        form(*change(scan_case("slow", [4, 3])))


def test_a_bad_kernel_chunk_is_refused():
    with pytest.raises(ValueError, match="kernel_chunk must be at least 1, got 0"):
        kda_chunk_scan(*scan_case("slow", [4]), kernel_chunk=0)
