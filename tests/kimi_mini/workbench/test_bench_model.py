"""The bench's own arrangements: what a row "at a depth" is, what is timed, and what is left out."""

import importlib.util
import sys
import types

import pytest
import torch

from kimi_mini import KimiForCausalLM, preset
from kimi_mini.batch import allocate_state
from kimi_mini.workbench import bench_model, bench_peer
from kimi_mini.workbench.bench_model import (
    PAGE,
    Cell,
    DecodeFigure,
    DecodeTimer,
    Plan,
    Work,
    growth,
    measure,
    set_stage,
)
from kimi_mini.workbench.bench_peer import PeerMissing, find_peer, peer_options

DEPTH, BATCH = 37, 2  # inside a page, more than one page
DECODE = Cell(Work.DECODE, DEPTH, BATCH, 1)


@pytest.fixture(scope="module")
def model():
    return KimiForCausalLM.from_config(preset("nano"), seed=3)


def prefilled(model, ids):
    """A state of its own after ids [B, T], latent rows [MLA layers, B, T, L+R] beside it."""
    B, T = ids.shape
    each = -(-(T + 1) // PAGE)
    state = allocate_state(model.config, num_slots=B, num_pages=B * each)
    table = 1 + torch.arange(B * each).view(B, each)
    stage = bench_model.Stage(model, state, table.flatten())
    stage.run([stage.step(table, ids, 0)])
    return stage, state.latent[:, table].flatten(2, 3)[:, :, :T]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_slot_and_page_is_filled_and_finite(dtype):
    model = KimiForCausalLM.from_config(preset("nano"), dtype=dtype)
    stage = set_stage(model, [DECODE, Cell(Work.PREFILL, 0, 3, 40)])
    assert stage.state.recurrent.shape[1] == 1 + 3
    assert stage.state.latent.shape[1] == 1 + max(2 * 3, 3 * 3)
    for tensor in stage.state:
        assert bool(tensor.isfinite().all())
        assert 0.01 < float(tensor.float().std()) < 2
        assert float((tensor == 0).float().mean()) < 1e-3
    assert sorted(stage.pages.tolist()) == list(range(1, 10))


def test_a_decode_step_reads_exactly_the_rows_and_slots_of_its_depth(model):
    """With the state of a real prompt in those places, and NaN in all others, a step gives the bits
    of a step after that prompt."""
    stage = set_stage(model, [DECODE, Cell(Work.PREFILL, 0, 3, 2 * DEPTH)])
    real, rows = prefilled(model, stage.random_ids(BATCH, DEPTH))
    for tensor in stage.state:
        tensor.fill_(float("nan"))
    stage.state.recurrent[:, 1 : BATCH + 1] = real.state.recurrent[:, 1:]
    stage.state.conv[:, 1 : BATCH + 1] = real.state.conv[:, 1:]
    places = torch.arange(DEPTH)
    table = stage.page_table(BATCH, DEPTH + 1)
    stage.state.latent[:, table[:, places // PAGE], places % PAGE] = rows

    (step,) = stage.decode_steps(DECODE, 1)
    logits = stage.run([step])
    ids = step.token_ids.view(BATCH, 1)
    assert torch.equal(logits, real.run([real.step(real.pages.view(BATCH, -1), ids, DEPTH)]))
    assert bool(logits.isfinite().all())


def test_of_a_mixed_step_one_row_is_deep(model):
    cell = Cell(Work.DECODE, DEPTH, 3, 1, shallow=4)
    stage = set_stage(model, [cell])
    (step,) = stage.decode_steps(cell, 1)
    assert step.context_len.tolist() == [4, 4, DEPTH]
    table = step.page_table
    last = int(table[2, DEPTH // PAGE]) * PAGE + DEPTH % PAGE
    assert step.out_rows.tolist() == [*(table[:2, 0] * PAGE + 4).tolist(), last]
    assert bool(stage.run([step]).isfinite().all())


@pytest.mark.parametrize("shallow", [None, 4])
def test_what_is_packed_is_the_step_that_is_timed(model, shallow):
    """But for the tokens, and for the pages that a short row does not have."""
    cell = Cell(Work.DECODE, DEPTH, 3, 1, shallow)
    stage = set_stage(model, [cell])
    (step,) = stage.decode_steps(cell, 1)
    packed = stage.packing(cell)()
    for name in ("query_start", "context_len", "slots", "out_rows"):
        assert torch.equal(getattr(packed, name), getattr(step, name)), name
    used = packed.page_table >= 0
    assert torch.equal(packed.page_table[used], step.page_table[used])
    assert used.sum(1).tolist() == [3 if shallow is None else 1] * 2 + [3]


def test_a_step_counts_all_its_rows(model):
    """The first and the last filled row matter, so that no shallower depth is timed."""
    for place in (0, DEPTH - 1):
        stage = set_stage(model, [DECODE])
        (step,) = stage.decode_steps(DECODE, 1)
        before = stage.state.recurrent.clone(), stage.state.conv.clone()
        logits = stage.run([step])
        for tensor, saved in zip(stage.state, before, strict=False):
            tensor.copy_(saved)
        stage.state.latent[:, step.page_table[:, place // PAGE], place % PAGE] += 1
        assert bool((stage.run([step]) != logits).any(1).all()), place


def test_a_repeated_step_stays_at_its_depth(model):
    """Only the latent row at the depth is written, again and again; recurrent states move on."""
    stage = set_stage(model, [DECODE])
    steps = stage.decode_steps(DECODE, 3)
    assert len({tuple(step.token_ids.tolist()) for step in steps}) == 3
    before = [tensor.clone() for tensor in stage.state]
    stage.run(steps)
    changed = (stage.state.latent != before[2]).any(-1).any(0).flatten().nonzero().flatten()
    assert sorted(changed.tolist()) == sorted(steps[0].out_rows.tolist())
    moved = (stage.state.recurrent != before[0]).flatten(2).any(2).any(0)
    assert moved.tolist() == [False, True, True]


@pytest.mark.parametrize("chunk", [1, 24, 1000])
def test_a_prefill_is_the_prompt_in_pieces(model, chunk):
    cell = Cell(Work.PREFILL, 0, BATCH, 29)
    stage = set_stage(model, [cell])
    steps = stage.prefill_steps(cell, chunk)
    size = max(1, chunk // BATCH)
    assert len(steps) == -(-29 // size)
    assert [int(step.context_len[0]) for step in steps] == list(range(0, 29, size))
    assert all(len(step.token_ids) <= max(chunk, BATCH) for step in steps)
    ids = stage.random_ids(BATCH, 29)
    torch.testing.assert_close(stage.run(steps), model(ids)[:, -1], rtol=1e-4, atol=1e-4)


def test_from_a_depth_a_prefill_begins_there(model):
    cell = Cell(Work.PREFILL, DEPTH, 1, 20)
    stage = set_stage(model, [cell])
    steps = stage.prefill_steps(cell, 8)
    assert [int(step.context_len) for step in steps] == [DEPTH, DEPTH + 8, DEPTH + 16]
    assert (
        torch.cat([step.token_ids for step in steps]).tolist()
        == stage.random_ids(1, 20)[0].tolist()
    )
    assert bool(stage.run(steps).isfinite().all())


def test_what_does_not_fit_is_skipped_with_its_reason():
    config = preset("nano")  # context 1024
    cells, skipped = Plan([0, 1000, 1000, 1024], [1, 8], 30, 16, 2).cells(config)
    assert cells.pop() == Cell(Work.DECODE, 1000, 8, 1, bench_model.SHALLOW)
    done = {(c.work, c.depth, c.batch): c.length for c in cells}
    assert done == {
        ("prefill", 0, 1): 30,
        ("prefill", 0, 8): 3,
        ("prefill", 1000, 8): 3,
        ("decode", 0, 1): 1,
        ("decode", 0, 8): 1,
        ("decode", 1000, 1): 1,
        ("decode", 1000, 8): 1,
    }
    reasons = {(s.work, s.depth, s.batch): s.reason for s in skipped}
    assert len(reasons) == 5
    assert reasons["prefill", 1000, 1].startswith("1000 + 30 tokens a row are beyond")
    assert reasons["decode", 1024, 1].startswith("1024 + 1 tokens a row are beyond")
    assert "max_position_embeddings" in reasons["decode", 1024, 8]
    (short,) = Plan([0], [4], 3, 16, 2).cells(config)[1]
    assert (short.work, short.reason) == ("prefill", "3 tokens of prompt are not one for each row")


def test_nothing_that_fits_is_an_error(model):
    with pytest.raises(ValueError, match="nothing can be measured: 5000 .* 1024"):
        measure(model, Plan([5000], [1], 30, 16, 2), threads=1, repeats=1)


def test_a_state_beyond_this_machine_is_refused(model):
    with pytest.raises(ValueError, match="a state of .* slots"):
        set_stage(model, [Cell(Work.DECODE, 1000, 10**9, 1)])


class FakePeer:
    def __init__(self):
        self.log = []

    def prefill(self, ids):
        assert ids.shape == (1, 24)
        return lambda: self.log.append("prefill")

    def decode(self, context, ids):
        assert ids.shape == (1, 2)
        return lambda: self.log.append(context.shape[1])


def test_a_peer_is_timed_in_the_same_rounds_where_it_can_follow(model, monkeypatch):
    monkeypatch.setattr(bench_model, "PEER_DEEPEST", 40)
    peer = FakePeer()
    report = measure(model, Plan([0, 40, 50], [1, 2], 24, 16, 2), threads=1, repeats=2, peer=peer)
    assert [(c.work, c.depth, c.tokens) for c in report.compared] == [
        ("prefill", 0, 24),
        ("decode", 40, 2),
    ]
    assert {"prefill", 40} == set(peer.log)
    ours = {(f.work, f.depth): f.rate for f in (*report.prefill, *report.decode) if f.batch == 1}
    for c in report.compared:
        assert c.ours == ours[c.work, c.depth] and c.ratio == c.ours / c.peer
    assert len(report.prefill) == 6 and not report.skipped
    assert [f.shallow for f in report.decode] == [None] * 6 + [bench_model.SHALLOW]
    for f in report.prefill:
        assert f.steps == 2 and f.rate == pytest.approx(f.batch * f.row_tokens / f.seconds)
    for f in report.decode:
        assert 0 < f.attention_ms < f.step_ms and 0 < f.prepare_ms < f.step_ms and f.pack_ms > 0
        assert f.rate == pytest.approx(f.batch / f.step_ms * 1e3)


def test_everything_is_timed_with_the_threads_asked_for(model, monkeypatch):
    def stop(functions, repeats):
        raise InterruptedError(f"{torch.get_num_threads()} threads, {repeats} repeats")

    monkeypatch.setattr(bench_model, "medians", stop)
    before = torch.get_num_threads()
    with pytest.raises(InterruptedError, match=f"{before + 1} threads, 7 repeats"):
        measure(model, Plan([0], [1], 8, 8, 1), threads=before + 1, repeats=7)
    assert torch.get_num_threads() == before


def test_the_parts_of_a_step_are_timed_beside_it_and_subtracted_pair_by_pair(monkeypatch):
    """A moment in which all is five times slower leaves the rest of the others as it is."""
    clock = types.SimpleNamespace(now=0.0, slow=1.0)

    def taking(seconds):
        def run(*_):
            clock.now += seconds * clock.slow

        return run

    monkeypatch.setattr(bench_model.time, "perf_counter", lambda: clock.now)
    stage = types.SimpleNamespace(
        run=taking(0.010), attention_alone=lambda _: taking(0.003), prepare=taking(0.001)
    )
    timer = DecodeTimer(stage, ["step"] * 4, pack=taking(0.002))
    for clock.slow in (9, 9, 1, 5, 1):
        timer()
    figure = timer.figure(Cell(Work.DECODE, 64, 3, 1), warm_up=2)
    assert figure == pytest.approx(DecodeFigure(64, 3, 10, 3, 1, 6, 2))


def test_growth_says_what_grew():
    figures = [
        DecodeFigure(2048, 1, 15, 3, 1, 11, 1),
        DecodeFigure(0, 1, 12, 0.5, 0.5, 11, 1),
        DecodeFigure(0, 4, 20, 1, 1, 18, 1),
        DecodeFigure(2048, 4, 90, 60, 1, 29, 1, shallow=16),
    ]
    (line,) = growth(figures)  # batch 4 has one depth only, and a mixed step
    assert line == (
        "batch 1, from depth 0 to 2,048: +3.00 ms a step, of it latent attention +2.50, "
        "preparing +0.50, all the rest +0.00"
    )


def without_transformers(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "transformers" else find(name)
    )


def test_a_missing_peer_is_a_reason_or_if_asked_for_an_error(monkeypatch):
    without_transformers(monkeypatch)
    config = preset("nano")
    peer, reason = find_peer(None, config, torch.float32)
    assert peer is None
    assert reason.startswith("transformers is not installed") and "[bench]" in reason
    with pytest.raises(PeerMissing, match="not installed"):
        find_peer(True, config, torch.float32)
    assert find_peer(False, config, torch.float32) == (None, "--no-peer was given")
    assert "float64" in find_peer(None, config, torch.float64)[1]


def test_a_transformers_that_cannot_be_used_is_said_so(monkeypatch):
    """Too old, or its look at a distribution called `kernels` went wrong."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "transformers", types.ModuleType("transformers"))
    _, reason = find_peer(None, preset("nano"), torch.float32)
    assert "gives no kimi_linear" in reason and "kernels" in reason and "[bench]" in reason


def test_the_peer_has_our_widths_and_layers():
    options = peer_options(preset("bench"))
    attention = [i for i, kind in enumerate(options["layer_types"]) if kind == "full_attention"]
    assert attention == [3, 7]
    assert options["mlp_layer_types"] == ["dense"] + ["sparse"] * 7
    assert (options["hidden_size"], options["kv_lora_rank"], options["linear_head_dim"]) == (
        512,
        128,
        64,
    )
    assert (options["num_local_experts"], options["num_experts_per_tok"]) == (16, 4)


def test_transformers_runs_as_the_peer_of_62_million_parameters():
    pytest.importorskip("transformers")
    config = preset("nano")
    peer = bench_peer.TransformersPeer(config, torch.float32)
    assert peer.describe()["attention"] == "sdpa"
    ids = torch.arange(3, 3 + 70).unsqueeze(0)
    whole = peer.prefill(ids)()
    assert whole.logits.shape == (1, 1, config.vocab_size)
    step = peer.decode(ids[:, :-1], ids[:, -1:])
    torch.testing.assert_close(step().logits, whole.logits, rtol=1e-4, atol=1e-4)
    assert step().cache.get_seq_length() == 69  # every call starts at the same depth

    large = bench_peer.TransformersPeer(preset("bench"), torch.float32)
    assert large.parameters == 62_161_584
