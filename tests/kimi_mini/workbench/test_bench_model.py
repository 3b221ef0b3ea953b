"""What a run gives for every cell, and how ours and the peer are set side by side."""

import contextlib

import pytest
import torch

from kimi_mini import KimiForCausalLM, preset
from kimi_mini.workbench import bench, bench_model
from kimi_mini.workbench.bench_cells import SHALLOW, Cell, Plan, Work
from kimi_mini.workbench.bench_model import (
    PEER_DEEPEST,
    StepFigure,
    growth,
    measure,
    overhead_target,
)
from kimi_mini.workbench.bench_shares import Shares


@pytest.fixture(scope="module")
def model():
    return KimiForCausalLM.from_config(preset("nano"), seed=3)


@pytest.fixture(autouse=True)
def small_machine(monkeypatch):
    monkeypatch.setattr(bench, "SIDE", 32)
    monkeypatch.setattr(bench, "COPIED", 1 << 10)
    monkeypatch.setattr(bench, "SAMPLE_SECONDS", 1e-4)


def test_nothing_that_fits_is_an_error(model):
    with pytest.raises(ValueError, match="nothing can be measured: 5000 .* 1024"):
        measure(model, Plan([5000], [1], 30, 16, 2), threads=1, repeats=1)


class FakePeer:
    def __init__(self):
        self.log = []

    def prefill(self, ids):
        assert ids.shape == (1, 24)
        return lambda: self.log.append("prefill")

    def decode(self, context, ids):
        assert ids.shape == (1, 2)
        return lambda: self.log.append(context.shape[1])


def test_a_peer_is_timed_in_the_same_rounds(model):
    peer = FakePeer()
    report = measure(model, Plan([0, 40], [1, 2], 24, 16, 2), threads=1, repeats=1, peer=peer)
    assert [(c.work, c.depth, c.tokens) for c in report.compared] == [
        ("prefill", 0, 24),
        ("decode", 40, 2),
    ]
    assert {"prefill", 40} == set(peer.log)
    ours = {(f.work, f.depth): f.rate for f in (*report.prefill, *report.decode) if f.batch == 1}
    for c in report.compared:
        assert c.ours == ours[c.work, c.depth] and c.ratio == c.ours / c.peer
    assert len(report.prefill) == 4 and not report.skipped
    assert [f.cell.shallow for f in report.decode] == [None] * 4 + [SHALLOW]
    for f in report.prefill:
        assert f.steps == 2 and f.rate == pytest.approx(f.batch * f.row_tokens / f.seconds)
    pieces = [(f.cell.depth, f.batch, f.tokens, f.pack_ms) for f in report.pieces]
    assert pieces == [(0, 1, 8, None), (40, 1, 8, None)]
    for f in report.decode:
        assert f.tokens == f.batch and f.pack_ms > 0
        assert f.rate == pytest.approx(f.batch / f.shares.step_ms * 1e3)
        assert f.rest_ms < f.shares.step_ms


@pytest.mark.parametrize(
    ("cell", "follows"),
    [
        (Cell(Work.PREFILL, 0, 1, 24), True),
        (Cell(Work.PREFILL, 40, 1, 24), False),
        (Cell(Work.DECODE, 0, 1, 1), False),
        (Cell(Work.DECODE, PEER_DEEPEST, 1, 1), True),
        (Cell(Work.DECODE, PEER_DEEPEST + 1, 1, 1), False),
        (Cell(Work.DECODE, 40, 2, 1), False),
    ],
)
def test_a_peer_begins_with_nothing_or_goes_on_behind_a_prompt(cell, follows):
    assert bench_model._peer_can(cell) == follows


def test_everything_is_timed_with_the_threads_asked_for(model, monkeypatch):
    def stop(model, cells):
        raise InterruptedError(f"{torch.get_num_threads()} threads")

    monkeypatch.setattr(bench_model, "set_stage", stop)
    before = torch.get_num_threads()
    with pytest.raises(InterruptedError, match=f"{before + 1} threads"):
        measure(model, Plan([0], [1], 8, 8, 1), threads=before + 1, repeats=7)
    assert torch.get_num_threads() == before


def test_a_target_was_set_for_the_overhead_of_mini_alone(model):
    assert overhead_target(preset("mini")) == 0.25
    assert overhead_target(preset("bench")) is None


def test_a_target_is_for_decode_on_one_thread(model, monkeypatch):
    monkeypatch.setattr(bench_model, "OVERHEAD_TARGETS", {"nano": 0.25})
    plan = Plan([0], [1], 8, 8, 1)
    report = measure(model, plan, threads=1, repeats=1)
    assert [f.shares.target for f in report.decode] == [0.25]
    assert [f.shares.target for f in report.pieces] == [None]
    monkeypatch.setattr(bench_model, "using_threads", lambda threads: contextlib.nullcontext())
    report = measure(model, plan, threads=2, repeats=1)
    assert [f.shares.target for f in report.decode] == [None]


def decoded(depth, batch, step, preparing, attention, shallow=None):
    shares = Shares(step, preparing, 5, attention, 1, 1, 1, 3, 10, 10, 5)
    return StepFigure(Cell(Work.DECODE, depth, batch, 1, shallow), batch, shares, 1)


def test_growth_says_what_grew():
    figures = [
        decoded(2048, 1, 15, 1, 3),
        decoded(0, 1, 12, 0.5, 0.5),
        decoded(0, 4, 20, 1, 1),
        decoded(2048, 4, 90, 1, 60, shallow=16),
    ]
    (line,) = growth(figures)  # batch 4 has one depth only, and a mixed step
    assert line == (
        "batch 1, from depth 0 to 2,048: +3.00 ms a step, of it latent attention +2.50, "
        "preparing +0.50, all the rest +0.00"
    )
