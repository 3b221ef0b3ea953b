"""FLOP-aware eviction (serving.md 4.11, 9.12: M01, M02, M05, M12)."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.policy.cost_model import PrefixFlops, mamba_flops
from cache.policy.eviction import Evictable, FlopAware

NOW = 10
X, Y, Z = Evictable(0, 64, 2), Evictable(64, 128, 5), Evictable(0, 16, 9)
NAMES = {X: "X", Y: "Y", Z: "Z"}


def m01(alpha=0.0):
    return FlopAware(PrefixFlops(1000, 1), state_bytes=4096, row_bytes=32, alpha=alpha)


def test_m01_flops_saved_by_a_byte():
    assert [m01().efficiency(v) for v in (X, Y, Z)] == pytest.approx(
        [11.083, 12.417, 3.528], abs=5e-4
    )


@pytest.mark.parametrize(
    "alpha, scores, victim",
    [(0, (0, 0.0857, 1), "X"), (1, (0.85, 1.0857, 1), "X"), (2, (1.7, 2.0857, 1), "Z")],
)
def test_m02_the_smallest_score_goes(alpha, scores, victim):
    candidates = [X, Y, Z]
    assert m01(alpha).scores(candidates, NOW) == pytest.approx(scores, abs=1e-4)
    assert NAMES[candidates[m01(alpha).victim(candidates, NOW)]] == victim


def test_a_state_that_saves_nothing_is_worth_nothing_even_if_it_weighs_nothing():
    nothing = FlopAware(PrefixFlops(1000, 1), state_bytes=0, row_bytes=32)
    assert [policy.efficiency(Evictable(8, 8, 1)) for policy in (m01(), nothing)] == [0, 0]


@pytest.mark.parametrize("alpha", [0.0, 0.7, 2.0])
def test_m05_of_equal_candidates_the_first_goes(alpha):
    twins = [Evictable(8, 16, 3)] * 3
    assert m01(alpha).scores(twins, NOW) == [1 + alpha] * 3
    assert m01(alpha).victim(twins, NOW) == 0


def test_m05_of_equal_scores_the_oldest_goes():
    """Recency and efficiency weigh out here: (0, 1) against (1, 0)."""
    younger, older = Evictable(0, 16, 9), Evictable(64, 128, 1)
    assert m01(1.0).scores([younger, older], NOW) == [1, 1]
    assert m01(1.0).victim([younger, older], NOW) == 1


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50), st.integers(0, 9)), min_size=1),
    st.randoms(use_true_random=False),
)
def test_without_weight_of_flops_it_is_least_recently_used(spans, shuffler: random.Random):
    states = [Evictable(start, start + length, used) for start, length, used in spans]
    shuffler.shuffle(states)
    victim = states[m01().victim(states, NOW)]
    assert victim.last_used == min(state.last_used for state in states)


def test_a_state_of_the_future_is_refused():
    with pytest.raises(ValueError, match="must have been used before 9"):
        m01().victim([X, Z], 9)


def test_m12_the_flops_of_the_paper():
    kinds = dict(mamba=0, attention=0, mlp=0, width=4096, state=128)
    layer = {
        kind: mamba_flops(**kinds | {kind: 1}).of(1024) for kind in ("mamba", "attention", "mlp")
    }
    assert layer == {
        "mamba": 214_790_307_840,  # with its 10 L D, not 10 L
        "attention": 154_618_822_656,
        "mlp": 274_877_906_944,
    }
    model = mamba_flops(**kinds | dict(mamba=24, attention=4, mlp=28))
    assert model.of(1024) == 13_470_024_073_216


# what the artifact of the paper gets wrong


def test_what_an_mlp_saves_has_nothing_to_do_with_attention():
    """The parent is subtracted with its own kind of layer: only the edge is left."""
    mlp = mamba_flops(mamba=0, attention=0, mlp=1, width=64, state=16)
    policy = FlopAware(mlp, state_bytes=100, row_bytes=0)
    assert policy.efficiency(Evictable(512, 520, 0)) == 16 * 64**2 * 8 / 100


def test_rows_that_go_are_those_of_the_edge_not_of_the_whole_prefix():
    policy = FlopAware(PrefixFlops(1, 0), state_bytes=0, row_bytes=2)
    assert policy.efficiency(Evictable(1000, 1008, 0)) == 8 / 16


@given(st.permutations([X, Y, Z, Evictable(16, 400, 1)]), st.sampled_from([0.0, 0.5, 1.0, 2.0]))
def test_a_score_is_of_its_own_bytes_whoever_comes_before(candidates, alpha):
    by_name = dict(zip(candidates, m01(alpha).scores(candidates, NOW), strict=True))
    ordered = sorted(candidates)
    assert [by_name[v] for v in ordered] == m01(alpha).scores(ordered, NOW)
