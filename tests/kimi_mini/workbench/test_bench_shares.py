"""What is left of a step, taken sample by sample."""

import types

import pytest
import torch

from kimi_mini.workbench import bench_shares
from kimi_mini.workbench.bench import Limits
from kimi_mini.workbench.bench_parts import Kind
from kimi_mini.workbench.bench_products import Product
from kimi_mini.workbench.bench_shares import Shares, StepTimer

MS = {Kind.PREPARING: 1, Kind.PRODUCTS: 50, Kind.ATTENTION: 6, Kind.RECURRENCE: 9, Kind.STATES: 4,
      Kind.CALLING: 2}  # fmt: skip


def timer_of(monkeypatch, kinds, clock):
    """A timer of two steps of 100 ms whose parts take MS, each times clock.slow."""

    def seconds():
        return {kind: MS[kind] * 1e-3 * clock.slow for kind in kinds}

    def step(*_):
        clock.now += 0.1 * clock.slow

    product = Product(torch.ones(3, 8), torch.ones(5, 8))
    parts = types.SimpleNamespace(seconds=seconds, products=[product] * 2)
    monkeypatch.setattr(bench_shares, "Parts", lambda *_: parts)
    monkeypatch.setattr(bench_shares.time, "perf_counter", lambda: clock.now)
    return StepTimer(types.SimpleNamespace(forward_batch=step), None, ["step"] * 2)


@pytest.mark.parametrize(
    ("left_out", "overhead"),
    [
        (None, 100 - 50 - 6 - 4),  # decode: behind states; the recurrence should hide
        (Kind.STATES, 100 - 50 - 6 - 9),
    ],
)
def test_overhead_is_what_the_parts_leave_of_the_step(left_out, overhead, monkeypatch):
    """Sample by sample: a moment in which all is five times slower leaves the rest as they are."""
    clock = types.SimpleNamespace(now=0.0, slow=1.0)
    timer = timer_of(monkeypatch, [kind for kind in Kind if kind is not left_out], clock)
    for clock.slow in (9, 9, 1, 5, 1):
        timer()
    shares = timer.shares(Limits(flops=1e6, traffic=1e5), warm_up=2)
    assert shares.step_ms == pytest.approx(100)
    for kind in Kind:
        expected = None if kind is left_out else pytest.approx(MS[kind])
        assert getattr(shares, f"{kind}_ms") == expected
    assert shares.overhead_ms == pytest.approx(overhead)
    assert shares.as_json()["overhead"] == shares.overhead == pytest.approx(overhead / 100)
    assert (shares.product_flops, shares.matrix_bytes) == (2 * 240, 2 * 160)
    assert shares.bound_ms == pytest.approx(2 * 160 / 1e5 * 1e3)


@pytest.mark.parametrize(("target", "cell"), [(None, "-"), (0.25, "25% !"), (0.5, "50%")])
def test_a_target_stands_beside_the_overhead_and_is_marked_where_it_is_missed(target, cell):
    shares = Shares(10, 1, 5, 0.5, 1, 0.6, 0.2, 4, 10**6, 10**6, 4, target)
    row = shares.as_row()
    assert row["overhead"] == "4.00 (40%)" and row["at most"] == cell
    assert Shares(10, 1, 5, 0.5, 1, None, 0.2, 4, 10**6, 10**6, 4).as_row()["states"] == "-"
