"""What a checkpoint costs and saves (serving.md 8.2, 8.3, 9.12)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.policy.cost_model import (
    CostModel,
    best_interval,
    break_even,
    interval_cost,
    interval_for_budget,
    mean_replay,
)

M08 = dict(path=16384, grid=1, holding=100, replay=2)
K3 = CostModel(27_648, 449_372_160, 2 * 104_190_000_000, 24 * 96 * (192 + 128) * 2)


def test_m08_the_best_interval_and_what_its_neighbours_cost():
    assert best_interval(**M08) == 1280
    costs = {k: interval_cost(k, **M08) for k in (1280, 1024, 1536)}
    assert costs == pytest.approx({1280: 2559, 1024: 2623, 1536: 2601.7}, abs=0.05)


def test_m09_a_hit_replays_half_an_interval_on_average():
    assert mean_replay(10_000, 1) == 4999.5


def test_m10_a_budget_of_bytes():
    assert interval_for_budget(K3.checkpoint_bytes, 131_072, 10**9) == 58_901
    assert 131_072 // 65_536 == 10**9 // K3.checkpoint_bytes == 2


def test_a_budget_that_holds_no_checkpoint_is_refused():
    with pytest.raises(ValueError, match="99 bytes do not hold one checkpoint of 100"):
        interval_for_budget(100, 1000, 99)
    assert interval_for_budget(100, 1000, 100) == 1000


def test_m11_break_even():
    assert break_even(K3.checkpoint_bytes, K3.row_bytes) == pytest.approx(16_253.3, abs=0.05)
    assert break_even(100, 0) == float("inf")


def test_replaying_5000_tokens_of_k3_takes_a_petaflop_before_attention():
    assert 5000 * K3.flops == pytest.approx(1.04e15, rel=0.005)
    assert K3.attention_flops == pytest.approx(1.47e6, rel=0.005)


@given(
    path=st.integers(64, 1 << 20),
    grid=st.sampled_from([1, 16, 64]),
    holding=st.floats(1e-3, 1e9),
    replay=st.floats(1e-3, 1e9),
)
def test_no_multiple_of_the_grid_within_the_path_is_cheaper(path, grid, holding, replay):
    prices = dict(path=path, grid=grid, holding=holding, replay=replay)
    best = best_interval(**prices)
    assert best % grid == 0 and grid <= best <= path
    cost = interval_cost(best, **prices)
    for other in {grid, 2 * grid, best - grid, best + grid, path // grid * grid}:
        if grid <= other <= path:
            assert cost <= interval_cost(other, **prices) * (1 + 1e-12)


def test_without_hits_one_checkpoint_a_path_is_enough():
    assert best_interval(path=1000, grid=64, holding=1, replay=0) == 960


def test_the_last_boundary_of_a_path_is_the_longest_interval():
    """Also where K* lies between that and the path's end."""
    ideal_95 = dict(holding=95**2, replay=200)
    assert best_interval(path=100, grid=64, **ideal_95) == 64


@pytest.mark.parametrize("path, grid", [(10, 64), (63, 64)])
def test_a_path_without_a_boundary_is_refused(path, grid):
    with pytest.raises(ValueError, match=f"a path of {path} tokens has no boundary on a grid of"):
        best_interval(path=path, grid=grid, holding=1, replay=1)
