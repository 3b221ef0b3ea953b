"""One step of the dispatcher: its rows as if alone, everything else untouched (serving 9.10)."""

import pytest
import torch

from kernels.dispatcher import KDAKernelDispatcher
from kernels.kda import KDAInputs
from kimi_mini.workbench.cases import relative_error
from tests.kernels.steps import (
    BACKENDS,
    NAN,
    OUTPUTS,
    H,
    V,
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
@pytest.mark.parametrize("context", [[9, 9, 9], [0, 0, 0]], ids=["resumed", "fresh"])
def test_d02_a_row_without_tokens_leaves_its_slot_alone(backend, context):
    """I-44, BR-33: also when it claims to start from zeros."""
    weights, inputs, state = make_weights(), make_inputs(5), make_state(6)
    before = copied(state)
    run(KDAKernelDispatcher(backend), inputs, weights, state, [0, 2, 2, 5], [4, 1, 6], context)
    assert_untouched(state, before, [0, 1, 2, 3, 5])
    for slot, span in ((4, (0, 2)), (6, (2, 5))):
        start = before if context[0] else None
        assert_slot(state, slot, run_alone(at(inputs, span), weights, start, slot))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lower_bound", [-5.0, None], ids=["bounded", "softplus"])
@pytest.mark.parametrize("T", [1, 3, 4, 5, 9])
def test_d03_decoding_token_by_token_is_extending_by_all_of_them(backend, lower_bound, T):
    """I-43. The convolution is the same to the bit, so windows are equal, not near."""
    weights, inputs = make_weights(lower_bound), make_inputs(T)
    whole = make_state(1)
    steps = copied(whole)
    dispatcher = KDAKernelDispatcher(backend, kernel_chunk=4)
    extended = run(dispatcher, inputs, weights, whole, [0, T], [1], [7], extend_only=True)
    decoded = torch.cat(
        [
            run(dispatcher, at(inputs, (t, t + 1)), weights, steps, [0, 1], [1], [7 + t])
            for t in range(T)
        ]
    )
    assert relative_error(decoded, extended) <= 1e-6
    assert relative_error(steps.recurrent[1], whole.recurrent[1]) <= 1e-6
    assert torch.equal(steps.conv[1], whole.conv[1])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("slots", [[5, -1], [5, 0], [-1, -1]], ids=str)
def test_d04_minus_one_is_skipped_and_zero_is_the_sink(backend, slots):
    weights, inputs, state = make_weights(), make_inputs(2), make_state(6)
    before = copied(state)
    o = run(KDAKernelDispatcher(backend), inputs, weights, state, [0, 1, 2], slots, [3, 3])
    assert_untouched(state, before, set(range(7)) - set(slots))
    for row, slot in enumerate(slots):
        if slot == -1:
            assert not o[row].any()
    if slots[0] == 5:
        true = run_alone(at(inputs, (0, 1)), weights, before, 5)
        assert relative_error(o[:1], true.o) <= OUTPUTS
        assert_slot(state, 5, true)


@pytest.mark.parametrize("backend", BACKENDS)
def test_br62_a_padding_row_lands_on_no_live_slot(backend):
    """Plain indexing writes slot -1 to the last one. Padding rows may hold anything, NaN too."""
    weights, inputs, state = make_weights(), make_inputs(3), make_state(3)
    for x in inputs:
        x[1:] = NAN
    before = copied(state)
    o = run(
        KDAKernelDispatcher(backend), inputs, weights, state, [0, 1, 2, 3], [2, -1, -1], [4] * 3
    )
    assert_untouched(state, before, [0, 1, 3])
    assert_slot(state, 2, run_alone(at(inputs, (0, 1)), weights, before, 2))
    assert o.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_d05_a_mixed_step_is_its_rows_run_alone(backend):
    """I-43; slot 3 decodes and is not exported."""
    weights, inputs, state = make_weights(), make_inputs(8), make_state(5)
    before = copied(state)
    dispatcher = KDAKernelDispatcher(backend)
    exports = [(1, 7, 5)]
    o = run(dispatcher, inputs, weights, state, [0, 1, 8], [3, 2], [9, 9], exports)
    assert_untouched(state, before, [0, 1, 4])
    for slot, span in ((3, (0, 1)), (2, (1, 8))):
        true = run_alone(at(inputs, span), weights, before, slot)
        assert relative_error(o[slice(*span)], true.o) <= OUTPUTS
        assert_slot(state, slot, true)
        alone = copied(before)
        length = span[1] - span[0]
        o_alone = run(dispatcher, at(inputs, span), weights, alone, [0, length], [slot], [9])
        assert relative_error(o[slice(*span)], o_alone) <= 1e-6
    assert torch.equal(state.recurrent[5], state.recurrent[2])
    assert torch.equal(state.conv[5], state.conv[2])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("T", [1, 2, 20])
def test_d06_a_row_that_does_not_resume_starts_from_zeros_whatever_its_slot_holds(backend, T):
    """BR-08: NaN, too, which 0 * slot would keep; row 1 resumes beside it (BR-09)."""
    weights, inputs, state = make_weights(), make_inputs(2 * T), make_state(2)
    state.recurrent[1] = NAN
    state.conv[1] = NAN
    before = copied(state)
    o = run(KDAKernelDispatcher(backend), inputs, weights, state, [0, T, 2 * T], [1, 2], [0, 5])
    fresh = run_alone(at(inputs, (0, T)), weights)
    resumed = run_alone(at(inputs, (T, 2 * T)), weights, before, 2)
    assert relative_error(o, torch.cat([fresh.o, resumed.o])) <= OUTPUTS
    assert_slot(state, 1, fresh)
    assert_slot(state, 2, resumed)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("query_start", "slots"), [([0], []), ([0, 0, 0], [1, 2]), ([0, 2, 4], [-1, -1])], ids=str
)
def test_d07_a_step_without_real_tokens_gives_zeros_and_changes_no_byte(
    backend, query_start, slots
):
    weights, inputs, state = make_weights(), make_inputs(4), make_state(2)
    before = copied(state)
    dispatcher = KDAKernelDispatcher(backend)
    context = [0] * len(slots)
    o = run(dispatcher, inputs, weights, state, query_start, slots, context, num_tokens=4)
    assert (o.shape, o.dtype) == ((4, H, V), torch.float32)
    assert not o.any()
    assert_untouched(state, before, range(3))


@pytest.mark.parametrize("backend", BACKENDS)
def test_d08_tokens_beyond_the_last_row_are_padding(backend):
    weights, inputs, state = make_weights(), make_inputs(8), make_state(2)
    for x in inputs:
        x[5:] = NAN
    dispatcher = KDAKernelDispatcher(backend)
    o = run(dispatcher, inputs, weights, state, [0, 5], [2], [0], num_tokens=8)
    true = run_alone(at(inputs, (0, 5)), weights)
    assert relative_error(o[:5], true.o) <= OUTPUTS
    assert not o[5:].any()
    assert_slot(state, 2, true)


@pytest.mark.parametrize("backend", BACKENDS)
def test_d09_d10_a_refused_step_changes_no_byte(backend):
    weights, inputs, state = make_weights(), make_inputs(8), make_state(3)
    before = copied(state)
    dispatcher = KDAKernelDispatcher(backend)
    attempts = [
        ([0, 4, 8], [3, 3], [0, 0], None, "uses already"),
        ([0, 4, 8], [3, 4], [0, 0], None, "names slot 4"),
        ([0, 4, 8], [3, 2], [0, 0], [(0, 5, 1)], "offset must be"),
        ([0, 4, 7], [3, 2], [0, 0], None, "tokens of qkv must be 7, got 8"),
    ]
    if backend == "torch":
        attempts.append(([0, 4, 8], [3, 2], [0, 0], [(0, 3, 1)], "multiple of 16"))
    for query_start, slots, context, exports, message in attempts:
        with pytest.raises(ValueError, match=message):
            run(dispatcher, inputs, weights, state, query_start, slots, context, exports)
    assert_untouched(state, before, range(4))


@pytest.mark.parametrize("name", ["qkv", "gate", "beta", "recurrent", "conv"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_tensors_that_do_not_fit_are_refused_and_nothing_is_written(backend, name):
    weights, inputs, state = make_weights(), make_inputs(4), make_state(2)
    before, given = copied(state), state
    if name in KDAInputs._fields:
        narrow = getattr(inputs, name)[..., :-1]
        inputs = inputs._replace(**{name: narrow})
    else:
        given = state._replace(**{name: getattr(state, name).mT.contiguous()})
    with pytest.raises(ValueError, match=name):
        run(KDAKernelDispatcher(backend), inputs, weights, given, [0, 4], [1], [3])
    assert_untouched(state, before, range(3))
