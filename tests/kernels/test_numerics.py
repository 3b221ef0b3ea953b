"""Elementwise functions and the L2 norm: exact values, no seams, no NaN."""

import pytest
import torch

from kernels.numerics import l2_normalise, sigmoid, silu

EXTREMES = [-1e30, -1e4, -104.0, -88.0, -87.0, 0.0, 87.0, 104.0, 1e4, 1e30]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("amplitude", "norm"), [(1e-2, 0.99996), (1e-3, 0.9961), (1e-4, 0.7493), (0.0, 0.0)]
)
def test_epsilon_of_the_l2_norm_stands_inside_the_root(amplitude, norm, dtype):
    """BR-21: an RMS norm rescaled gives 0.9950, 0.7071, 0.0995 here, a clamp gives 1, 1, 1."""
    x = torch.full((1, 128), amplitude, dtype=dtype)
    result = l2_normalise(x)
    assert result.dtype == torch.float32
    exact = x.double()
    exact = (exact / (exact.square().sum() + 1e-6).sqrt()).norm()
    assert float(result.norm()) == pytest.approx(float(exact), abs=1e-6)
    if dtype == torch.float32:
        assert float(result.norm()) == pytest.approx(norm, abs=5e-5)  # four digits are recorded


def test_l2_norm_keeps_float64():
    x = torch.randn(5, 3, 7, dtype=torch.float64)
    expected = x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    assert torch.allclose(l2_normalise(x), expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("width", [1, 7, 16, 24, 128])
def test_a_vector_is_normalised_alike_whatever_lies_around_it(width):
    x = torch.randn(9, 3, width)
    together = l2_normalise(x)
    assert all(torch.equal(together[t, h], l2_normalise(x[t, h])) for t in range(9) for h in (0, 2))
    backwards = x.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    assert torch.equal(together, l2_normalise(backwards))


@pytest.mark.parametrize("function", [sigmoid, silu])
@pytest.mark.parametrize("length", [1, 3, 7, 8, 15, 16, 17, 31, 33, 112, 257])
def test_a_value_gets_the_same_bits_at_every_place_of_a_tensor(function, length):
    """torch.sigmoid and silu treat the elements left over by vector registers differently."""
    x = 4 * torch.randn(length, generator=torch.Generator().manual_seed(length))
    whole = function(x)
    alone = torch.cat([function(x[i : i + 1]) for i in range(length)])
    assert torch.equal(whole, alone)
    assert torch.equal(whole, function(x.repeat_interleave(2)[::2]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_sigmoid_and_silu_are_the_functions_of_torch(dtype):
    x = torch.linspace(-30, 30, 1001, dtype=dtype)
    rounding = 4 * torch.finfo(dtype).eps  # exp and division round in another order
    assert torch.allclose(sigmoid(x), torch.sigmoid(x), rtol=rounding, atol=0)
    assert torch.allclose(silu(x), torch.nn.functional.silu(x), rtol=rounding, atol=0)


@pytest.mark.parametrize("function", [sigmoid, silu])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_values_and_gradients_stay_finite_at_the_extremes(function, dtype):
    x = torch.tensor(EXTREMES, dtype=dtype, requires_grad=True)
    y = function(x)
    y.sum().backward()
    assert y.isfinite().all()
    assert x.grad.isfinite().all()
