"""Decay gates: which formula, which parameter belongs to what, and that e is the base."""

import math

import pytest
import torch

from kernels.gates import bounded_gate, decay_gate, softplus_gate
from kimi_mini.workbench.cases import relative_error


def at(z, gate, A_log=0.0, **options):
    """One gate value for z = r + dt_bias, the bias holding a third of it."""
    r, bias = torch.tensor([[[z * 2 / 3]]]), torch.tensor([[z / 3]])
    return float(gate(r, torch.tensor([A_log]), bias, **options))


def test_the_two_gates_have_the_values_worked_out_by_hand():
    """BR-49; a clamp of the softplus form would give -1.31326 where the bounded form has -3.65529,
    and -0.69315 where it has -2.5 (pitfall 2)."""
    assert at(1.0, softplus_gate) == pytest.approx(-1.31326, abs=5e-6)
    assert at(1.0, bounded_gate, lower_bound=-5.0) == pytest.approx(-3.65529, abs=5e-6)
    assert at(0.0, softplus_gate) == pytest.approx(-math.log(2), abs=1e-6)
    assert at(0.0, bounded_gate, lower_bound=-5.0) == -2.5
    assert at(0.0, bounded_gate, lower_bound=-3.0) == -1.5
    assert at(1.0, softplus_gate, A_log=1.0) == pytest.approx(-math.e * 1.31326, abs=2e-5)
    steep = -5 / (1 + math.exp(-math.e))  # A_log scales the logit here, not the result
    assert at(1.0, bounded_gate, A_log=1.0, lower_bound=-5.0) == pytest.approx(steep, abs=2e-6)


@pytest.mark.parametrize("z", [-50.0, 50.0])
def test_gates_keep_their_range_far_from_zero(z):
    """BR-49: softplus is z for large z and e^z, not 0, for very negative z."""
    softplus = -50.0 if z > 0 else -math.exp(-50.0)
    bounded = -5.0 if z > 0 else -5 * math.exp(-50.0)
    assert at(z, softplus_gate) == pytest.approx(softplus, rel=1e-5)
    assert at(z, bounded_gate, lower_bound=-5.0) == pytest.approx(bounded, rel=1e-5)


def test_a_checkpoint_with_a_lower_bound_gets_the_bounded_gate():
    r, A_log, dt_bias = torch.randn(4, 2, 3), torch.randn(2), torch.randn(2, 3)
    bounded = bounded_gate(r, A_log, dt_bias, -5.0)
    assert torch.equal(decay_gate(r, A_log, dt_bias, -5.0), bounded)
    assert torch.equal(decay_gate(r, A_log, dt_bias, None), softplus_gate(r, A_log, dt_bias))


@pytest.mark.parametrize("lower_bound", [-5.0, None], ids=["bounded", "softplus"])
@pytest.mark.parametrize(("N", "H", "K"), [(1, 3, 16), (33, 3, 7), (33, 5, 5)])
def test_gates_agree_with_their_formula_in_float64(lower_bound, N, H, K):
    """A_log belongs to heads, dt_bias to heads and channels; H = K hides a mix-up of the two
    unless the values differ (pitfall 1)."""
    r, A_log, dt_bias = 3 * torch.randn(N, H, K), 1.5 * torch.rand(H) - 0.5, torch.randn(H, K)
    g = decay_gate(r, A_log, dt_bias, lower_bound)
    assert g.dtype == torch.float32
    assert g.shape == (N, H, K)
    r, A_log, dt_bias = r.double(), A_log.double(), dt_bias.double()
    exact = torch.empty(N, H, K, dtype=torch.float64)
    for h in range(H):
        for d in range(K):
            z, rate = r[:, h, d] + dt_bias[h, d], A_log[h].exp()
            exact[:, h, d] = (
                -rate * torch.log1p(z.exp())
                if lower_bound is None
                else lower_bound / (1 + torch.exp(-rate * z))
            )
    # relative to each value, for small gates decide what is remembered; e^-x is known to about x
    # roundings of x, and x = e^A_log z reaches 30 here
    assert torch.allclose(g.double(), exact, rtol=5e-6, atol=0)
    in64 = decay_gate(r, A_log, dt_bias, lower_bound)
    assert in64.dtype == torch.float64
    assert relative_error(in64, exact) < 1e-14


@pytest.mark.parametrize("lower_bound", [-5.0, None], ids=["bounded", "softplus"])
def test_bf16_logits_are_only_read_in_bf16(lower_bound):
    """BR-64: everything after the load is float32."""
    r, A_log, dt_bias = torch.randn(5, 2, 3).bfloat16(), torch.randn(2), torch.randn(2, 3)
    g = decay_gate(r, A_log, dt_bias, lower_bound)
    assert torch.equal(g, decay_gate(r.float(), A_log, dt_bias, lower_bound))


@pytest.mark.parametrize("lower_bound", [-5.0, None], ids=["bounded", "softplus"])
def test_a_token_gets_the_same_gate_bits_in_any_batch(lower_bound):
    """Prefill and decode call the same function on other numbers of tokens; so must the bits be."""
    r, A_log, dt_bias = torch.randn(19, 3, 7), torch.randn(3), torch.randn(3, 7)
    whole = decay_gate(r, A_log, dt_bias, lower_bound)
    for t in range(19):
        assert torch.equal(whole[t : t + 1], decay_gate(r[t : t + 1], A_log, dt_bias, lower_bound))
    assert torch.equal(whole, decay_gate(r.mT.contiguous().mT, A_log, dt_bias, lower_bound))
