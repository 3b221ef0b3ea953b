"""What is done again, part by part, must be what the step does: in its order, on its own states."""

import pytest
import torch

from kimi_mini.workbench import bench_parts
from kimi_mini.workbench.bench_cells import Cell, Work
from kimi_mini.workbench.bench_parts import ATTEND, CORE, Kind, Parts, recorded, states_of
from tests.kimi_mini.workbench.stages import calls_of, small_stage

DECODE = Cell(Work.DECODE, 5, 2, 1)


def parts_of(stage, step):
    with torch.inference_mode():
        return Parts(stage.model, stage.state, step)


def order(groups):
    return [kind for kind, _ in groups]


def test_calls_are_written_down_while_the_block_runs_and_change_nothing():
    stage = small_stage()
    (step,) = stage.decode_steps(DECODE, 1)
    before = [x.clone() for x in stage.state]
    backend = stage.model.dispatcher.backend
    plain = stage.model.forward_batch(step, stage.state)
    for x, kept in zip(stage.state, before, strict=True):
        x.copy_(kept)
    with recorded(stage.model.dispatcher) as calls:
        assert torch.equal(stage.model.forward_batch(step, stage.state), plain)
    count = len(calls)
    config = stage.model.config
    assert [c.name for c in calls].count(CORE) == len(config.kda_layer_ids)
    assert [c.name for c in calls].count(ATTEND) == len(config.mla_layer_ids)
    assert stage.model.dispatcher.backend is backend
    stage.model.forward_batch(step, stage.state)
    assert len(calls) == count


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_a_decode_step_has_its_parts_in_the_order_of_its_layers(backend):
    """nano: KDA, KDA, KDA, MLA, MLA. States are moved in one pass, cores run in another; each
    state is moved as often as read and written in the step."""
    stage = small_stage(backend)
    (step,) = stage.decode_steps(DECODE, 1)
    parts = parts_of(stage, step)
    cores, moves, calling = parts._passes
    kinds = [Kind.STATES] * 3 + [Kind.ATTENTION] * 2
    between = [kind for one in kinds for kind in (one, Kind.PRODUCTS)]
    assert order(moves) == [Kind.PREPARING, Kind.PRODUCTS, *between]
    swap = {Kind.STATES: Kind.RECURRENCE}
    assert order(cores) == [swap.get(kind, kind) for kind in order(moves)]
    assert order(calling) == [Kind.CALLING]
    assert parts.decode
    products = [len(runs) for kind, runs in moves if kind is Kind.PRODUCTS]
    assert sum(products) == len(parts.products)
    assert len(calling[0][1]) == len(parts.products) + 2 * 3
    with torch.inference_mode():
        assert set(parts.seconds()) == set(Kind)


def test_a_piece_of_a_prompt_moves_no_states_alone():
    stage = small_stage()
    (step,) = stage.prefill_steps(Cell(Work.PREFILL, 0, 1, 30), 30)
    parts = parts_of(stage, step)
    assert not parts.decode
    with torch.inference_mode():
        assert set(parts.seconds()) == set(Kind) - {Kind.STATES}


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_attention_and_cores_are_those_of_the_backend_on_the_rows_of_the_step(backend):
    """Done again from the same states, they leave the bits that the step left."""
    stage = small_stage(backend)
    (step,) = stage.decode_steps(DECODE, 1)
    before = stage.state.recurrent.clone(), stage.state.conv.clone()
    parts = parts_of(stage, step)
    after = stage.state.recurrent.clone(), stage.state.conv.clone()
    for pool, kept in zip(stage.state, before, strict=False):
        pool.copy_(kept)
    with torch.inference_mode():
        for kind, runs in parts._passes[0]:
            for run in runs if kind is Kind.RECURRENCE else ():
                run()
    for pool, kept in zip(stage.state, after, strict=False):
        assert torch.equal(pool, kept)
    functions = stage.model.dispatcher.functions
    for kind, (run, *_) in parts._passes[0]:
        if kind is Kind.ATTENTION:
            assert run.__self__.function is functions.attend


def test_states_are_where_they_lie():
    stage = small_stage()
    (step,) = stage.decode_steps(DECODE, 1)
    cores = [call for call in calls_of(stage, step) if call.name == CORE]
    stage.state.recurrent.fill_(2.0)
    for call in cores:
        for x in states_of(call, torch.tensor([2, 3])):
            x.zero_()
    assert not stage.state.recurrent[:, [2, 3]].any() and not stage.state.conv[:, [2, 3]].any()
    assert (stage.state.recurrent[:, 1] == 2).all()


def test_moving_a_state_leaves_it_as_it_is():
    x = torch.randn(2, 3)
    before = x.clone()
    bench_parts._moving(x)()
    assert torch.equal(x, before)


def test_a_model_that_goes_another_way_is_not_timed_part_by_part():
    """Or else what it does unseen would count as overhead."""
    stage = small_stage()
    (step,) = stage.decode_steps(DECODE, 1)
    stage.model.forward_batch = lambda step, state: None
    with pytest.raises(RuntimeError, match="3 layers must call 'mixed' once each .* 0 calls"):
        parts_of(stage, step)
