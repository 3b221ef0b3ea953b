"""The verify script's checks over more presets, types and seeds than its default: the long way.

The default run takes a seeded sample of what `-m slow` runs whole.
"""

import itertools

import pytest
import torch

from kimi_mini.workbench.verify_kernels import kernel_checks
from kimi_mini.workbench.verify_stack import layer_checks, model_checks, open_subject
from tests.kimi_mini.golden_cases import FOLDER, NAMES

BACKENDS = ("torch", "reference", "native")
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
SHAPES = ((1, 8), (2, 48), (3, 17), (5, 64))  # heads, head width
MODELS = ("nano", "mini", "deep", *(str(FOLDER / name) for name in NAMES))


def failed(checks):
    return [check for check in checks if not check.ok]


def sample(cases, count, seed):
    """`count` of the cases for the default run, the others marked slow."""
    cases = list(cases)
    order = torch.randperm(len(cases), generator=torch.Generator().manual_seed(seed)).tolist()
    chosen = set(order[:count])
    return [
        case if i in chosen else pytest.param(*case, marks=pytest.mark.slow)
        for i, case in enumerate(cases)
    ]


@pytest.mark.parametrize(
    ("shape", "dtype", "backend", "seed"),
    sample(itertools.product(SHAPES, DTYPES, BACKENDS, range(3)), 2, seed=12),
)
def test_kernels_agree_with_float64(shape, dtype, backend, seed):
    assert not failed(kernel_checks(backend, dtype, seed, *shape))


@pytest.mark.parametrize(
    ("name", "dtype", "backend", "seed"),
    sample(itertools.product(MODELS, DTYPES[::2], BACKENDS[::2], range(3)), 3, seed=6),
)
def test_layers_and_models_agree_with_float64(name, dtype, backend, seed):
    net = open_subject(name, dtype, seed, backend)
    layer = net.model.layers[net.config.kda_layer_ids[0]].self_attn
    assert not failed(layer_checks(layer, backend, dtype, seed))
    assert not failed(model_checks(net, seed))


@pytest.mark.parametrize(
    ("name", "backend", "seed"),
    sample(itertools.product(("nano", "mini"), BACKENDS[::2], range(4)), 1, seed=9),
)
def test_bf16_models_stay_within_three_per_cent(name, backend, seed):
    assert not failed(model_checks(open_subject(name, torch.bfloat16, seed, backend), seed))
