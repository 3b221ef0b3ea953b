"""The product of few rows: near float64, the same bits in any company, refusals in words."""

import pytest
import torch

from kernels.native.library import operators

pytestmark = pytest.mark.needs_native

# (N, K): nothing, one number, below a vector, no multiple of two, whole vectors and more
SHAPES = [(3, 0), (0, 3), (1, 1), (5, 7), (33, 100), (64, 512)]
ROWS = (0, 1, 2, 3, 8, 9, 21)


def drawn(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture
def threads():
    """Set the number of torch threads; one again afterwards."""
    yield torch.set_num_threads
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("dtype", "near"),
    [(torch.float32, 1e-6), (torch.float64, 1e-14), (torch.bfloat16, 2**-8)],  # one rounding each
    ids=str,
)
@pytest.mark.parametrize(("N", "K"), SHAPES)
@pytest.mark.parametrize("M", ROWS)
def test_it_is_the_product_in_float64(M, N, K, dtype, near):
    x = drawn(M, K + 5, dtype=dtype)[:, 2 : K + 2]  # as a part of a fused projection lies
    weight = drawn(N, K + 3, dtype=dtype, seed=1)[:, :K]
    got = operators().few_rows(x, weight)
    exact = x.double() @ weight.double().T
    assert got.dtype == dtype and got.shape == (M, N)
    scale = (x.double().abs() @ weight.double().abs().T).clamp(min=1e-300)
    assert ((got.double() - exact).abs() <= near * scale).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_neighbours_and_threads_change_no_bit_of_a_row(dtype, threads):
    x, weight = drawn(21, 200, dtype=dtype), drawn(700, 200, dtype=dtype, seed=1)
    together = operators().few_rows(x, weight)
    for count in (1, 2, 5):
        threads(count)
        for rows in (slice(0, 1), slice(3, 5), slice(1, 9), slice(8, 21)):
            assert torch.equal(operators().few_rows(x[rows], weight), together[rows])


def test_what_is_not_a_number_stays_in_its_row():
    x, weight = drawn(9, 64, dtype=torch.bfloat16), drawn(16, 64, dtype=torch.bfloat16)
    clean = operators().few_rows(x, weight)
    x[4, 7], x[5, 0] = float("nan"), float("inf")
    poisoned = operators().few_rows(x, weight)
    others = [0, 1, 2, 3, 6, 7, 8]
    assert torch.equal(poisoned[others], clean[others])
    assert poisoned[4].isnan().all() and not poisoned[5].isfinite().any()


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (torch.zeros(3), torch.zeros(2, 3), "x must have two axes"),
        (torch.zeros(3, 3).T, torch.zeros(2, 3), "x must have two axes, the last one contiguous"),
        (torch.zeros(1, 3), torch.zeros(3, 2).T, "weight must have two axes, the last one contig"),
        (torch.zeros(1, 3), torch.zeros(2, 4), "x has rows of 3 numbers, weight of 4"),
        (torch.zeros(1, 3), torch.zeros(2, 3).double(), "weight must be Float, got Double"),
        (torch.zeros(1, 3).half(), torch.zeros(2, 3).half(), "Float, Double or BFloat16, got Half"),
    ],
)
def test_what_does_not_fit_is_refused(x, weight, message):
    with pytest.raises(ValueError, match=message):
        operators().few_rows(x, weight)
