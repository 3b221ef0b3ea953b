"""How near every form of the recurrence stays to float64: gates, lengths, chunks, dtypes.

Truth is the token-by-token reference in float64, from the very numbers the case holds. Tolerances
are those of decision 9 or tighter, in `scans.TOLERANCE`.
"""

import math

import pytest
import torch

from kernels.packing import Export
from kimi_mini.workbench.cases import GATES, ScanCase, relative_error, scan_case
from tests.kernels.scans import FAST, FORMS, assert_near, assert_same_bits, chunk, truth


@pytest.mark.parametrize("form", FAST)
@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize(
    ("H", "K", "V", "T"), [(3, 16, 24, 150), (2, 24, 16, 150), (3, 64, 64, 130), (2, 128, 128, 97)]
)
def test_every_form_stays_near_the_recurrence_in_float64(form, gates, H, K, V, T):
    case = scan_case(gates, [T], H=H, K=K, V=V)
    assert_near(FORMS[form](*case), truth(case), gates)


def test_cases_with_slow_gates_carry_their_state_through():
    """Pitfall 26: were S_0 forgotten anyway, a lost state would pass every test of this folder."""
    for gates, T in (("slow", 200), ("mixed", 64), ("equal keys", 200)):
        case = scan_case(gates, [T])
        with_state, without = truth(case), truth(case._replace(S0=torch.zeros_like(case.S0)))
        assert relative_error(without.S, with_state.S) > 0.1, gates
        assert relative_error(without.o[-16:], with_state.o[-16:]) > 0.1, gates


@pytest.mark.parametrize("C", [16, 64])
@pytest.mark.parametrize("resumed", [False, True], ids=["from zeros", "from a state"])
@pytest.mark.parametrize("gates", ["mixed", "unbounded"])
def test_no_length_is_special(gates, resumed, C):
    """BR-43: chunks whose tail is shorter than the inner block go wrong at 65, 66, 71, 79."""
    case = scan_case(gates, [130])
    if not resumed:
        case = case._replace(S0=torch.zeros_like(case.S0))
    # the recurrence is causal: one run with all its states is the truth for every length
    true = truth(case, tuple(Export(0, T) for T in range(1, 131)))
    outputs, states = 1e-6, 2e-6
    for T in range(1, 131):
        got = chunk(C)(*case.piece(0, T, case.S0))
        assert relative_error(got.o, true.o[:T]) <= outputs, T
        assert relative_error(got.S[0], true.exported[T - 1]) <= states, T


@pytest.mark.parametrize("C", [1, 5, 16, 48, 64, 100, 1000])
@pytest.mark.parametrize("gates", ["mixed", "saturated"])
def test_any_chunk_length_computes_the_same_map(gates, C):
    case = scan_case(gates, [203, 1, 64])
    assert_near(chunk(C)(*case), truth(case), gates)


@pytest.mark.parametrize("C", [16, 64])
@pytest.mark.parametrize("strong", [-1.3, -1.4, -2.0, -5.0, -20.0, -100.0, -1e4])
def test_strong_decay_beside_weak_never_overflows(strong, C):
    """BR-05: e^(G_i) e^(-G_j) leaves float32 once a chunk decays by e^88: NaN from -1.4 on."""
    case = scan_case("slow", [64, 64], K=16, V=8)
    case.g[..., :8] = -0.01
    case.g[..., 8:] = strong
    got, true = chunk(C)(*case), truth(case)
    assert relative_error(got.o, true.o) <= 1e-6
    assert relative_error(got.S, true.S) <= 2e-6


@pytest.mark.parametrize("C", [16, 64])
def test_forgetting_everything_at_every_token_leaves_the_last_write(C):
    """g = -100 throughout: e^(G_C) underflows to exact zero, and 0 * inf must not arise."""
    case = scan_case("slow", [50])
    case.g.fill_(-100.0)
    got = chunk(C)(*case)
    written = case.beta[-1, :, None, None] * case.v[-1, :, :, None] * case.k[-1, :, None, :]
    assert relative_error(got.S[0], written) <= 1e-6
    assert_near(got, truth(case), "unbounded")


@pytest.mark.parametrize("C", [16, 32, 64])
@pytest.mark.parametrize("beta", [0.95, 1 - 1e-6, 1.0])
@pytest.mark.parametrize("noise", [1e-3, 0.0], ids=["nearly equal", "equal"])
def test_nearly_equal_keys_do_not_explode(noise, beta, C):
    """BR-65, pitfall 12: powers of the triangular matrix reach 1e17 before they cancel; in float32
    the doubling product errs by 1e-4 at C = 16 and by 1e9 at 64. One token repeated is the natural
    trigger. Exactly equal keys written with beta = 1 leave differences of rounding alone, so
    outputs are compared to what was written, in the same units."""
    case = scan_case("equal keys", [64, 130], K=16, V=24)
    if not noise:
        case.k[:] = case.k[:1]
    case.beta.fill_(beta)
    got, true = chunk(C)(*case), truth(case)
    assert relative_error(got.o, true.o) <= 2e-6  # decision 9 asks for 1e-5
    assert relative_error(got.S, true.S) <= 2e-6


@pytest.mark.parametrize(("T", "resumed"), [(64, True), (128, False), (128, True)])
def test_a_large_prior_state_is_read_with_the_right_weights(T, resumed):
    """BR-86: with a zero state one of the two auxiliary matrices has no effect."""
    case = scan_case("slow", [T])
    case.g[:] = -0.01 - 0.99 * torch.rand(case.g.shape)
    case = case._replace(S0=10 * case.S0 / case.S0.norm() if resumed else 0 * case.S0)
    got, true = chunk(64)(*case), truth(case)
    assert relative_error(got.o, true.o) <= 1e-6
    assert relative_error(got.S, true.S) <= 2e-6


@pytest.mark.parametrize("form", FAST)
def test_small_writes_into_a_full_state_are_not_lost(form):
    """BR-48: S += 0.002 (1 - S), 4000 times, from bf16 inputs: exact 0.99967, a bf16 state stalls
    at 0.5."""
    T = 4000
    one = torch.ones(T, 1, 1, dtype=torch.bfloat16)
    beta = 0.002 * one[..., 0]
    got = FORMS[form](one, one, one, 0 * one, beta, torch.zeros(1, 1, 1, 1), [0, T])
    assert got.S.dtype == got.o.dtype == torch.float32
    assert float(got.S) == pytest.approx(1 - (1 - float(beta[0])) ** T, abs=1e-4)
    assert float(got.S) == pytest.approx(0.9997, abs=1e-3)


@pytest.mark.parametrize("form", FAST)
@pytest.mark.parametrize(("g", "steps"), [(-8e-5, 4096), (-1e-3, 1000), (-2e-3, 1000)])
def test_weak_decay_is_not_rounded_away(form, g, steps):
    """BR-64: in bf16 e^-8e-5 is 1 and nothing is ever forgotten."""
    zero = torch.zeros(steps, 1, 1, dtype=torch.bfloat16)
    gate = torch.full((steps, 1, 1), g)
    got = FORMS[form](zero, zero, zero, gate, zero[..., 0], torch.ones(1, 1, 1, 1), [0, steps])
    assert float(got.S) == pytest.approx(math.exp(g * steps), abs=1e-4)


@pytest.mark.parametrize("form", FAST)
def test_bf16_operands_are_only_read_in_bf16(form):
    """States stay float32 (decision 8); everything else is as if the operands had been float32."""
    half = scan_case("mixed", [70, 3], dtype=torch.bfloat16)
    case = ScanCase(*half.tokens, half.S0.float(), half.query_start)
    got = FORMS[form](*case)
    assert got.o.dtype == got.S.dtype == torch.float32
    assert_same_bits(got, FORMS[form](*case.to(torch.float32)))


@pytest.mark.parametrize("form", FAST)
@pytest.mark.parametrize("gates", GATES)
def test_float64_operands_are_computed_in_float64(form, gates):
    case = scan_case(gates, [130], dtype=torch.float64)
    got, true = FORMS[form](*case), truth(case)
    assert got.o.dtype == got.S.dtype == torch.float64
    assert relative_error(got.o, true.o) <= 2e-13  # a sum of g near -600 is known to 1e-13
    assert relative_error(got.S, true.S) <= 2e-13
