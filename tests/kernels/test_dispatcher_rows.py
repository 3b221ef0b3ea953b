"""Rows over many steps: prompts in pieces, requests that join, leave and reuse slots."""

import itertools

import pytest
import torch

from kernels.dispatcher import KDAKernelDispatcher
from kernels.kda import KDAInputs
from kimi_mini.workbench.cases import relative_error
from tests.kernels.steps import (
    BACKENDS,
    NAN,
    OUTPUTS,
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
@pytest.mark.parametrize("pieces", [[64, 36], [99, 1], [1, 99], [33, 33, 34], [100]], ids=str)
def test_br09_a_prompt_in_pieces_is_the_prompt_in_one(backend, pieces):
    weights, inputs, state = make_weights(), make_inputs(100), make_state(1)
    dispatcher = KDAKernelDispatcher(backend)
    outputs, done = [], 0
    for length in pieces:
        part = at(inputs, (done, done + length))
        outputs.append(run(dispatcher, part, weights, state, [0, length], [1], [done]))
        done += length
    true = run_alone(inputs, weights)
    assert relative_error(torch.cat(outputs), true.o) <= OUTPUTS
    assert_slot(state, 1, true)


@pytest.mark.parametrize("extend_only", [False, True], ids=["decode", "extend"])
@pytest.mark.parametrize("length", [33, 65, 97])
@pytest.mark.parametrize("backend", BACKENDS)
def test_br35_a_last_piece_of_one_token_resumes_beside_decoding_rows(backend, length, extend_only):
    """A fourth row is a whole prompt of one token: it looks like decode and starts from zeros."""
    weights, inputs, state = make_weights(), make_inputs(length + 3), make_state(4)
    state.recurrent[4] = state.conv[4] = NAN
    before = copied(state)
    dispatcher = KDAKernelDispatcher(backend, kernel_chunk=32)
    for done in range(0, length - 1, 32):
        part = at(inputs, (done, done + 32))
        run(dispatcher, part, weights, state, [0, 32], [1], [done])
    rest = at(inputs, (length - 1, length + 3))
    slots, context = [1, 2, 3, 4], [length - 1, 5, 6, 0]
    o = run(dispatcher, rest, weights, state, range(5), slots, context, extend_only=extend_only)
    truths = [
        run_alone(at(inputs, (0, length)), weights),
        run_alone(at(inputs, (length, length + 1)), weights, before, 2),
        run_alone(at(inputs, (length + 1, length + 2)), weights, before, 3),
        run_alone(at(inputs, (length + 2, length + 3)), weights),
    ]
    for row, true in enumerate(truths):
        assert relative_error(o[row], true.o[-1]) <= OUTPUTS, row
        assert_slot(state, slots[row], true)


@pytest.mark.parametrize("backend", BACKENDS)
def test_br07_shorter_prompts_of_a_padded_batch_decode_like_alone(backend):
    """Lengths 3, 7, 16, 17 packed, padding behind them; padding must move no state or window."""
    lengths, steps = [3, 7, 16, 17], 8
    weights = make_weights()
    sequences = [make_inputs(length + steps) for length in lengths]
    state, dispatcher = make_state(4), KDAKernelDispatcher(backend)
    slots = [2, 4, 1, 3]
    padding = make_inputs(25)
    prompt = KDAInputs(
        *(
            torch.cat([*(x[:T] for x, T in zip(parts, lengths, strict=True)), pad])
            for *parts, pad in zip(*sequences, padding, strict=True)
        )
    )
    starts = [0, 3, 10, 26, 43]
    got = run(dispatcher, prompt, weights, state, starts, slots, [0] * 4, num_tokens=68)
    outputs = [[got[a:b]] for a, b in itertools.pairwise(starts)]
    for t in range(steps):
        tokens = [at(s, (T + t, T + t + 1)) for s, T in zip(sequences, lengths, strict=True)]
        batch = KDAInputs(*(torch.cat(parts) for parts in zip(*tokens, strict=True)))
        o = run(dispatcher, batch, weights, state, range(5), slots, [T + t for T in lengths])
        for row in range(4):
            outputs[row].append(o[row : row + 1])
    for row, sequence in enumerate(sequences):
        true = run_alone(sequence, weights)
        assert relative_error(torch.cat(outputs[row]), true.o) <= OUTPUTS, row
        assert_slot(state, slots[row], true)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("storage", ["own", "slot-major"])
def test_br63_rows_that_join_and_leave_stay_what_they_are_alone(backend, storage):
    """Rows of 3, 40 and 100 tokens in pieces of 32: the first ends in the first piece; its slot,
    poisoned, is taken by a newcomer; rows change their order from step to step."""
    weights, dispatcher = make_weights(), KDAKernelDispatcher(backend)
    sequences = {name: make_inputs(T) for name, T in zip("abcde", (3, 40, 100, 60, 2), strict=True)}
    state = make_state(4, storage=storage)
    done = dict.fromkeys(sequences, 0)
    slot_of = {"a": 2, "b": 4, "c": 1, "d": 2, "e": 3}
    steps = [
        {"a": 3, "b": 4},
        {"b": 32, "c": 32},
        {"c": 32, "d": 32, "b": 1},
        {"b": 1, "d": 1, "c": 31},
        {"e": 2, "c": 1, "d": 27, "b": 2},
        {"c": 4},
    ]
    for rows in steps:
        if "d" in rows and not done["d"]:
            state.recurrent[2] = NAN
            state.conv[2] = NAN
        before = copied(state)
        parts = [at(sequences[n], (done[n], done[n] + T)) for n, T in rows.items()]
        batch = KDAInputs(*(torch.cat(x) for x in zip(*parts, strict=True)))
        starts = [0, *torch.tensor(list(rows.values())).cumsum(0).tolist()]
        slots = [slot_of[n] for n in rows]
        o = run(dispatcher, batch, weights, state, starts, slots, [done[n] for n in rows])
        assert_untouched(state, before, set(range(5)) - set(slots))
        for i, (name, T) in enumerate(rows.items()):
            done[name] += T
            true = run_alone(at(sequences[name], (0, done[name])), weights)
            assert relative_error(o[starts[i] : starts[i + 1]], true.o[-T:]) <= OUTPUTS, name
            assert_slot(state, slot_of[name], true)


@pytest.mark.parametrize("rows", [1, 2, 7])
@pytest.mark.parametrize("cut", [16, 32, 64, 100, 128])
@pytest.mark.parametrize("backend", ["torch", "native"])
def test_br61_where_a_prompt_was_cut_and_who_ran_beside_it_is_rounding_at_most(backend, cut, rows):
    """200 tokens in two pieces. Alone and cut at the kernel's chunk, or anywhere where there is
    none, not even rounding differs."""
    weights, prompt, state = make_weights(), make_inputs(200), make_state(8)
    dispatcher = KDAKernelDispatcher(backend, kernel_chunk=16)
    whole = run(dispatcher, prompt, weights, copied(state), [0, 200], [3], [0])
    outputs = []
    for first, last in ((0, cut), (cut, 200)):
        beside = [make_inputs(20) for _ in range(rows - 1)]
        batch = zip(*beside, at(prompt, (first, last)), strict=True)
        starts = [*range(0, 20 * rows, 20), 20 * (rows - 1) + last - first]
        slots = [*[8, 7, 6, 5, 4, 2][: rows - 1], 3]
        context = [9] * (rows - 1) + [first]
        o = run(
            dispatcher, KDAInputs(*map(torch.cat, batch)), weights, state, starts, slots, context
        )
        outputs.append(o[starts[-2] :])
    got = torch.cat(outputs)
    assert relative_error(got, whole) <= 1e-6  # the recipe allows 1e-5
    if rows == 1 and cut % dispatcher.export_alignment == 0:
        assert torch.equal(got, whole)
