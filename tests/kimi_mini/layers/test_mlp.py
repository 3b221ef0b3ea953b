"""SiTU-GLU and the dense MLP."""

import math

import torch

from kernels.glu import situ_glu


def test_situ_follows_the_formula_with_the_sigmoid_of_the_uncapped_gate():
    """Pitfall 22: at a = 8 a capped sigmoid would see 4 tanh 2 = 3.86."""
    a, b = torch.tensor(8.0, dtype=torch.float64), torch.tensor(30.0, dtype=torch.float64)
    expected = 4 * math.tanh(2) / (1 + math.exp(-8)) * 25 * math.tanh(30 / 25)
    assert abs(situ_glu(a, b, 4.0, 25.0) - expected) < 1e-12


def test_situ_is_not_symmetric_in_gate_and_up():
    a, b = torch.tensor(-2.0), torch.tensor(3.0)
    assert situ_glu(a, b, 4.0, 25.0) * situ_glu(b, a, 4.0, 25.0) > 0
    assert (situ_glu(a, b, 4.0, 25.0) - situ_glu(b, a, 4.0, 25.0)).abs() > 1


def test_without_a_linear_beta_the_up_side_is_not_capped():
    a, b = torch.tensor([1.0]), torch.tensor([1000.0])
    uncapped = situ_glu(a, b, 3.0, None)
    torch.testing.assert_close(uncapped, 1000 * 3 * (a / 3).tanh() * a.sigmoid())
    torch.testing.assert_close(situ_glu(a, b, None, None), 1000 * a.tanh() * a.sigmoid())


def test_the_output_never_exceeds_the_product_of_the_caps():
    x = torch.tensor([1e4, -1e4, 50.0])
    assert situ_glu(x, x, 4.0, 25.0).abs().max() <= 100


def test_bf16_is_computed_in_float32_and_rounded_once():
    a = torch.linspace(-6, 6, 101).bfloat16()
    b = torch.linspace(20, -20, 101).bfloat16()
    exact = situ_glu(a.double(), b.double(), 4.0, 25.0)
    got = situ_glu(a, b, 4.0, 25.0)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, exact.float().bfloat16())
