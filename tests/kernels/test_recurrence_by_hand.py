"""The recurrence worked out by hand, against every form of it.

Two tokens on one head with K = 2 and V = 1, from S_0 = (1, 2) and scale 1:

    alpha_1 = (1/2, 1/4)   k_1 = (1, 0)      v_1 = 3    beta_1 = 1/2   q_1 = (1, 1)
    decayed (0.5, 0.5), u = (3 - 0.5)/2 = 1.25, S_1 = (1.75, 0.5), o_1 = 2.25

    alpha_2 = (1/2, 1/2)   k_2 = (0.6, 0.8)  v_2 = -1   beta_2 = 1/4   q_2 = (0, 1)
    decayed (0.875, 0.25), u = (-1 - 0.725)/4 = -0.43125, S_2 = (0.61625, -0.095), o_2 = -0.095

Reading the undecayed state for the delta, or the old state for the output, gives other numbers
(pitfall 9), and so does a triangular matrix with the wrong diagonal (pitfall 10).
"""

import math

import pytest
import torch

from kernels.reference import attention_reference
from tests.kernels.scans import FORMS


def two_tokens(dtype=torch.float32):
    q = torch.tensor([[1.0, 1.0], [0.0, 1.0]], dtype=dtype).view(2, 1, 2)
    k = torch.tensor([[1.0, 0.0], [0.6, 0.8]], dtype=dtype).view(2, 1, 2)
    v = torch.tensor([3.0, -1.0], dtype=dtype).view(2, 1, 1)
    g = torch.tensor([[0.5, 0.25], [0.5, 0.5]], dtype=dtype).log().view(2, 1, 2)
    beta = torch.tensor([0.5, 0.25], dtype=dtype).view(2, 1)
    S0 = torch.tensor([1.0, 2.0], dtype=dtype).view(1, 1, 1, 2)
    return q, k, v, g, beta, S0, [0, 2]


@pytest.mark.parametrize("form", FORMS)
def test_two_tokens_come_out_as_worked_out_by_hand(form):
    got = FORMS[form](*two_tokens(), scale=1.0)
    assert got.o.flatten().tolist() == pytest.approx([2.25, -0.095], abs=1e-6)
    assert got.S.flatten().tolist() == pytest.approx([0.61625, -0.095], abs=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_outputs_are_scaled_by_the_root_of_the_key_width_unless_told_otherwise(form):
    got = FORMS[form](*two_tokens())
    assert got.o.flatten().tolist() == pytest.approx(
        [2.25 / math.sqrt(2), -0.095 / math.sqrt(2)], abs=1e-6
    )
    assert got.S.flatten().tolist() == pytest.approx([0.61625, -0.095], abs=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_run_in_float64(form):
    got = FORMS[form](*two_tokens(torch.float64), scale=1.0)
    assert got.o.dtype == got.S.dtype == torch.float64
    assert got.o.flatten().tolist() == pytest.approx([2.25, -0.095], abs=1e-15)
    assert got.S.flatten().tolist() == pytest.approx([0.61625, -0.095], abs=1e-15)


@pytest.mark.parametrize("form", FORMS)
def test_decay_has_base_e(form):
    """BR-89: with base 2 a state of 1 under g = -1 would be 0.5, not 0.36788."""
    zero, one = torch.zeros(1, 1, 1), torch.ones(1, 1, 1)
    got = FORMS[form](one, zero, zero, -one, zero[..., 0], one[None], [0, 1])
    assert float(got.S) == pytest.approx(0.36788, abs=5e-6)
    assert float(got.o) == pytest.approx(0.36788, abs=5e-6)


@pytest.mark.parametrize("form", FORMS)
def test_the_state_is_stored_value_first(form):
    """One write of v k^T: S[value, key]."""
    k, v = torch.tensor([[[1.0, 0.0, 0.0]]]), torch.tensor([[[3.0, 4.0]]])
    g, beta, S0 = torch.zeros(1, 1, 3), torch.ones(1, 1), torch.zeros(1, 1, 2, 3)
    got = FORMS[form](k, k, v, g, beta, S0, [0, 1])
    assert got.S[0, 0].tolist() == [[3, 0, 0], [4, 0, 0]]


def test_attention_without_preference_is_the_mean_of_what_is_visible():
    """Zero queries see all rows alike; the values are the last rows of kv_b times the latent."""
    rows = torch.tensor([[1.0, 9.0], [2.0, 9.0], [6.0, 9.0]])  # latent c, shared part r
    kv_b = torch.tensor([[[1.0], [10.0]]])  # nope 1, V 1
    o = attention_reference(torch.zeros(2, 1, 2), rows, kv_b, context_len=1)
    assert o.flatten().tolist() == pytest.approx([15.0, 30.0])


def test_attention_scores_use_the_full_width_of_the_query():
    """Score (q_nope k + q_rope r) / sqrt(nope + rope): here 4 / sqrt(2) against 0."""
    rows = torch.tensor([[2.0, 1.0], [0.0, 0.0]])
    kv_b = torch.tensor([[[1.0], [1.0]]])
    o = attention_reference(torch.tensor([[[1.0, 2.0]]]), rows, kv_b, context_len=1)
    weight = 1 / (1 + math.exp(-4 / math.sqrt(2)))
    assert float(o) == pytest.approx(2 * weight, abs=1e-6)
