"""What a row "at a depth" is: the bits of a real one, wherever it lies."""

import pytest
import torch

from kimi_mini import KimiForCausalLM, preset
from kimi_mini.batch import allocate_state
from kimi_mini.workbench.bench_cells import Cell, Work
from kimi_mini.workbench.bench_stage import PAGE, Stage, set_stage

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
    stage = Stage(model, state, table.flatten())
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


@pytest.mark.parametrize(("chunk", "length"), [(1, 5), (24, 29), (1000, 29)])
def test_a_prefill_is_the_prompt_in_pieces(model, chunk, length):
    cell = Cell(Work.PREFILL, 0, BATCH, length)
    stage = set_stage(model, [cell])
    steps = stage.prefill_steps(cell, chunk)
    size = max(1, chunk // BATCH)
    assert len(steps) == -(-length // size)
    assert [int(step.context_len[0]) for step in steps] == list(range(0, length, size))
    assert all(len(step.token_ids) <= max(chunk, BATCH) for step in steps)
    ids = stage.random_ids(BATCH, length)
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


def test_a_state_beyond_this_machine_is_refused(model):
    with pytest.raises(ValueError, match="a state of .* slots"):
        set_stage(model, [Cell(Work.DECODE, 1000, 10**9, 1)])
