"""Exports: recurrent state and window of the same boundary, in the slot they were meant for."""

import pytest
import torch

from kernels.dispatcher import KDAKernelDispatcher
from kimi_mini.workbench.cases import relative_error
from tests.kernels.steps import (
    BACKENDS,
    STATES,
    assert_slot,
    assert_untouched,
    at,
    copied,
    make_inputs,
    make_state,
    make_weights,
    run,
    run_alone,
)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_export_is_the_state_and_the_window_after_exactly_that_many_tokens(backend):
    """BR-50: packed with others, lengths 130, 200, 300 and chunks of 64, one row resumed."""
    lengths, slots, context = [130, 200, 300], [1, 2, 3], [0, 7, 0]
    starts = [0, 130, 330, 630]
    weights, inputs, state = make_weights(), make_inputs(630), make_state(9)
    exports = torch.tensor([[2, 256, 4], [0, 128, 5], [1, 192, 6], [2, 64, 7], [0, 130, 8]])
    before = copied(state)
    dispatcher = KDAKernelDispatcher(backend, kernel_chunk=64)
    run(dispatcher, inputs, weights, state, starts, slots, context, exports)
    assert_untouched(state, before, [0, 9])
    for row, offset, slot in exports.tolist():
        tokens = at(inputs, (starts[row], starts[row] + offset))
        start = before if context[row] else None
        assert_slot(state, slot, run_alone(tokens, weights, start, slots[row]))
    for row, slot in enumerate(slots):
        start = before if context[row] else None
        tokens = at(inputs, (starts[row], starts[row] + lengths[row]))
        assert_slot(state, slot, run_alone(tokens, weights, start, slot))


@pytest.mark.parametrize("backend", BACKENDS)
def test_exporting_changes_no_bit_of_outputs_and_states(backend):
    """Decision 7: the partition of the computation stays."""
    weights, inputs, state = make_weights(), make_inputs(71), make_state(9)
    other, dispatcher = copied(state), KDAKernelDispatcher(backend)
    rows = ([0, 50, 70, 71], [1, 2, 3], [4, 0, 9])
    exports = [(0, 16, 4), (0, 48, 5), (1, 20, 6), (2, 1, 7)]
    plain = run(dispatcher, inputs, weights, state, *rows)
    asked = run(dispatcher, inputs, weights, other, *rows, exports)
    assert torch.equal(plain, asked)
    assert_untouched(state, other, [0, 1, 2, 3, 8, 9])


@pytest.mark.parametrize("length", [1, 2])
def test_a_window_exported_after_fewer_tokens_than_it_holds_keeps_older_ones(length):
    weights, inputs, state = make_weights(), make_inputs(5), make_state(3)
    before = copied(state)
    exports = [(0, length, 2)]
    run(KDAKernelDispatcher("reference"), inputs, weights, state, [0, 5], [1], [8], exports)
    window = torch.cat([before.conv[1], inputs.qkv[:length]])[-3:]
    assert torch.equal(state.conv[2], window)


@pytest.mark.parametrize("destination", [-1, 0])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_export_without_a_destination_is_for_nobody(backend, destination):
    weights, inputs, state = make_weights(), make_inputs(33), make_state(3)
    before = copied(state)
    exports = [(0, 16, destination), (1, 1, destination)]
    dispatcher = KDAKernelDispatcher(backend)
    run(dispatcher, inputs, weights, state, [0, 32, 33], [1, 2], [0, 4], exports)
    assert_untouched(state, before, [0, 3])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_decoding_row_may_export_its_end(backend):
    weights, inputs, state = make_weights(), make_inputs(3), make_state(6)
    before = copied(state)
    exports = [(2, 1, 4), (0, 1, 5)]
    dispatcher = KDAKernelDispatcher(backend)
    run(dispatcher, inputs, weights, state, range(4), [1, 2, 3], [9, 0, 9], exports)
    for exported, slot in ((4, 3), (5, 1)):
        assert torch.equal(state.recurrent[exported], state.recurrent[slot])
        assert torch.equal(state.conv[exported], state.conv[slot])
    assert_untouched(state, before, [0, 6])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_prompt_resumed_from_an_export_is_the_prompt(backend):
    """What checkpoints are for: kernel chunks later, from another slot, with the same bits."""
    weights, inputs, state = make_weights(), make_inputs(90), make_state(3)
    dispatcher = KDAKernelDispatcher(backend, kernel_chunk=16)
    whole = run(dispatcher, inputs, weights, state, [0, 90], [1], [0], [(0, 48, 2)])
    rest = run(dispatcher, at(inputs, (48, 90)), weights, state, [0, 42], [2], [48])
    assert torch.equal(rest, whole[48:])
    assert torch.equal(state.recurrent[2], state.recurrent[1])
    assert torch.equal(state.conv[2], state.conv[1])
    # pitfall 18: the recurrent state without its window is not a checkpoint
    other = make_state(1)
    other.conv.zero_()
    run(dispatcher, at(inputs, (0, 48)), weights, other, [0, 48], [1], [0])
    other.conv.zero_()
    run(dispatcher, at(inputs, (48, 90)), weights, other, [0, 42], [1], [48])
    assert relative_error(other.recurrent[1], state.recurrent[1]) > 100 * STATES
