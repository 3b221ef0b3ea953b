"""Backends, dtypes and storages: other code, other memory, the same function of the tokens."""

import math
import pickle
import random

import pytest
import torch
from torch.autograd import gradcheck

from kernels.dispatcher import KDAKernelDispatcher
from kernels.kda import KDAInputs, KDAWeights
from kernels.native import library
from kimi_mini.workbench.cases import relative_error
from tests.kernels.steps import (
    BACKENDS,
    NAN,
    OUTPUTS,
    D,
    H,
    K,
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


def test_auto_takes_native_if_it_can_and_says_why_not_the_others():
    dispatcher, missing = KDAKernelDispatcher(), library.missing()
    assert dispatcher.backend.name == ("torch" if missing else "native")
    assert set(dispatcher.not_taken) == set(BACKENDS) - {dispatcher.backend.name}
    assert dispatcher.not_taken.get("native") == missing
    for name, reason in dispatcher.not_taken.items():
        assert f"{name}: {reason}" in dispatcher.describe()


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_asked_for_by_name_is_taken(name):
    assert KDAKernelDispatcher(name).backend.name == name
    assert name in KDAKernelDispatcher(name).describe()


def test_a_backend_that_is_not_there_says_why():
    with pytest.raises(ValueError, match="auto, native, torch, reference; got 'triton'"):
        KDAKernelDispatcher("triton")
    with pytest.raises(ValueError, match="kernel_chunk must be at least 1, got 0"):
        KDAKernelDispatcher("torch", 0)


def test_exports_are_aligned_to_the_kernel_chunk_or_fall_anywhere():
    assert KDAKernelDispatcher("torch", 48).export_alignment == 48
    assert KDAKernelDispatcher("reference", 48).export_alignment == 1


@pytest.mark.needs_native
def test_native_exports_fall_anywhere():
    assert KDAKernelDispatcher("native", 48).export_alignment == 1


@pytest.mark.parametrize("backend", ["torch", "reference", "native"])
def test_extend_and_decode_refuse_steps_of_the_other_kind(backend):
    """A backend with one kernel for both extends rows of one token too."""
    weights, inputs, state = make_weights(), make_inputs(3), make_state(2)
    before = copied(state)
    dispatcher = KDAKernelDispatcher(backend)
    step = dispatcher.plan([0, 2, 3], [1, 2], [0, 0], num_slots=2)
    if backend != "native":
        with pytest.raises(ValueError, match="decode rows; use mixed"):
            dispatcher.extend(inputs, weights, state, step)
    with pytest.raises(ValueError, match="more than one token; use mixed"):
        dispatcher.decode(inputs, weights, state, step)
    assert_untouched(state, before, range(3))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_dispatcher_can_be_pickled(backend):
    """A model is, by torch.save or on its way to another process, and has one."""
    weights, inputs, state = make_weights(), make_inputs(9), make_state(1)
    dispatcher, other = KDAKernelDispatcher(backend, 8), copied(state)
    twin = pickle.loads(pickle.dumps(dispatcher))
    rows = ([0, 9], [1], [0])
    assert twin.describe() == dispatcher.describe()
    assert torch.equal(
        run(twin, inputs, weights, other, *rows), run(dispatcher, inputs, weights, state, *rows)
    )


@pytest.mark.parametrize("lower_bound", [-5.0, None], ids=["bounded", "softplus"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("backend", ["torch", "native"])
def test_the_reference_backend_and_the_fast_ones_agree(backend, lower_bound, dtype):
    weights, inputs = make_weights(lower_bound, dtype), make_inputs(86, dtype)
    states, outputs = [make_state(6, dtype)], []
    states.append(copied(states[0]))
    for name, state in zip((backend, "reference"), states, strict=True):
        rows = ([0, 1, 70, 70, 85, 86], [3, 1, 2, 4, 5], [7, 0, 3, 12, 0])
        dispatcher = KDAKernelDispatcher(name)
        outputs.append(run(dispatcher, inputs, weights, state, *rows, [(1, 64, 6)]))
    tolerance = 2e-13 if dtype == torch.float64 else OUTPUTS
    assert outputs[0].dtype == states[0].recurrent.dtype == dtype
    assert relative_error(*outputs) <= tolerance
    assert relative_error(states[0].recurrent, states[1].recurrent) <= tolerance
    assert torch.equal(states[0].conv, states[1].conv)


def whole_pool(x):
    """All the memory that a view lies in, flat."""
    return x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("storage", ["layer-major", "slot-major"])
def test_state_views_of_any_slot_stride_work_like_tensors_of_their_own(backend, storage):
    """BR-44, decision 4: updates land in the pool, and the neighbours in memory keep every bit."""
    weights, inputs, state = make_weights(), make_inputs(24), make_state(5, storage=storage)
    own, kept = copied(state), [whole_pool(x).clone() for x in state]
    rows = ([0, 20, 21, 24], [4, 1, 3], [2, 9, 0])
    exports = [(0, 16, 5)]
    dispatcher = KDAKernelDispatcher(backend)
    o_own = run(dispatcher, inputs, weights, own, *rows, exports)
    o = run(dispatcher, inputs, weights, state, *rows, exports)
    assert torch.equal(o, o_own)
    assert torch.equal(state.recurrent, own.recurrent)
    assert torch.equal(state.conv, own.conv)
    for x in state:
        x.zero_()  # compared already; the rest of the pool is somebody else's
    for x, was in zip(state, kept, strict=True):
        rest = whole_pool(x)
        assert torch.equal(torch.where(rest == 0, 0, was), rest)
        assert (rest != 0).sum() > len(rest) / 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_may_be_slices_of_one_fused_projection_and_are_not_changed(backend):
    """BR-44, BR-34, I-42."""
    weights, plain, state = make_weights(), make_inputs(9), make_state(2)
    before = copied(state)
    fused = torch.cat([torch.full((9, 5), NAN), *(x.flatten(1) for x in plain)], 1)
    kept = fused.clone()
    _, qkv, gate, beta = fused.split([5, D, H * K, H], 1)
    sliced = KDAInputs(qkv, gate.unflatten(1, (H, K)), beta)
    rows = ([0, 8, 9], [2, 1], [3, 3])
    o = run(KDAKernelDispatcher(backend), sliced, weights, state, *rows)
    assert torch.equal(o, run(KDAKernelDispatcher(backend), plain, weights, before, *rows))
    assert torch.equal(fused[:, 5:], kept[:, 5:])
    assert torch.equal(state.recurrent, before.recurrent)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bf16_layer_keeps_windows_in_bf16_and_states_in_float32(backend):
    """Decision 8, BR-48: the state never sees the activations' rounding."""
    weights, inputs = make_weights(), make_inputs(40, torch.bfloat16)
    state, done = make_state(1, torch.bfloat16), 0
    dispatcher, outputs = KDAKernelDispatcher(backend), []
    for length in (20, 1, 18, 1):
        part = at(inputs, (done, done + length))
        outputs.append(run(dispatcher, part, weights, state, [0, length], [1], [done]))
        done += length
    true = run_alone(inputs, weights)  # float64 of the same bf16 numbers
    assert state.recurrent.dtype == outputs[0].dtype == torch.float32
    assert state.conv.dtype == torch.bfloat16
    assert relative_error(torch.cat(outputs), true.o) <= OUTPUTS
    assert_slot(state, 1, true)


def one_channel(lower_bound, dt_bias, A_log=0.0):
    """H = K = V = 1, no convolution to speak of: the gate and beta formulas, seen from outside."""
    conv = torch.zeros(3, 2)
    conv[:, -1] = 1.0
    return KDAWeights(conv, torch.tensor([A_log]), torch.tensor([[dt_bias]]), lower_bound)


@pytest.mark.parametrize("extend_only", [False, True], ids=["decode", "extend"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("lower_bound", "dt_bias", "kept"),
    [
        (None, math.log(math.e - 1), 0.36788),  # softplus 1: e^-1 (BR-89; base 2 would give 0.5)
        (None, 1.0, math.exp(-1.31326)),  # BR-49
        (-5.0, 1.0, math.exp(-3.65529)),
        (-5.0, 0.0, math.exp(-2.5)),
    ],
)
def test_prefill_and_decode_forget_alike(lower_bound, dt_bias, kept, backend, extend_only):
    inputs = KDAInputs(torch.zeros(1, 3), torch.zeros(1, 1, 1), torch.zeros(1, 1))
    state = make_state(1)._replace(recurrent=torch.ones(2, 1, 1, 1), conv=torch.zeros(2, 1, 3))
    weights = one_channel(lower_bound, dt_bias)
    dispatcher = KDAKernelDispatcher(backend)
    run(dispatcher, inputs, weights, state, [0, 1], [1], [1], extend_only=extend_only)
    assert float(state.recurrent[1]) == pytest.approx(kept, abs=5e-6)


@pytest.mark.parametrize("extend_only", [False, True], ids=["decode", "extend"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_write_strength_is_one_sigmoid_of_its_logit(backend, extend_only):
    """BR-49: 0.88080 for a logit of 2; applied twice 0.70699, doubled 1.76159."""
    inputs = KDAInputs(torch.full((1, 3), 50.0), torch.zeros(1, 1, 1), torch.full((1, 1), 2.0))
    state = make_state(1)._replace(recurrent=torch.zeros(2, 1, 1, 1), conv=torch.zeros(2, 1, 3))
    dispatcher, weights = KDAKernelDispatcher(backend), one_channel(-5.0, 0.0)
    run(dispatcher, inputs, weights, state, [0, 1], [1], [1], extend_only=extend_only)
    assert float(state.recurrent[1]) / 50 == pytest.approx(0.88080, abs=5e-6)


@pytest.mark.parametrize(("g", "steps"), [(-8e-5, 4096), (-1e-3, 1000), (-2e-3, 1000)])
@pytest.mark.parametrize("decode", [False, True], ids=["extend", "decode"])
@pytest.mark.parametrize("backend", ["torch", "native"])
def test_a_bf16_layer_still_forgets_slowly(g, steps, decode, backend):
    """BR-64: gates so weak that e^g rounds to 1 in bf16, from logits that are zero in any dtype."""
    steps = steps // 8 if decode else steps
    zero = torch.zeros(steps, 1, 1, dtype=torch.bfloat16)
    inputs = KDAInputs(torch.zeros(steps, 3).bfloat16(), zero, zero[..., 0])
    weights = one_channel(None, math.log(math.expm1(-g)))
    state = make_state(1)._replace(
        recurrent=torch.ones(2, 1, 1, 1), conv=torch.zeros(2, 1, 3).bfloat16()
    )
    dispatcher = KDAKernelDispatcher(backend)
    for t in range(0, steps, 1 if decode else steps):
        length = 1 if decode else steps
        part = at(inputs, (t, t + length))
        run(dispatcher, part, weights, state, [0, length], [1], [1 + t])
    assert float(state.recurrent[1]) == pytest.approx(math.exp(g * steps), abs=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_state_every_row_starts_from_zeros_and_nothing_is_kept(backend):
    weights, inputs = make_weights(), make_inputs(12)
    dispatcher = KDAKernelDispatcher(backend)
    step = dispatcher.plan([0, 8, 9, 12], [0, 0, 0], [0, 0, 0], num_slots=0)
    o = dispatcher.mixed(inputs, weights, None, step)
    spans = [(0, 8), (8, 9), (9, 12)]
    true = torch.cat([run_alone(at(inputs, span), weights).o for span in spans])
    assert relative_error(o, true) <= OUTPUTS


@pytest.mark.parametrize("backend, lower_bound", [("torch", -5.0), ("native", None)])
def test_without_state_the_whole_core_is_differentiable(backend, lower_bound):
    weights = make_weights(lower_bound, torch.float64)
    inputs = make_inputs(4, torch.float64)
    dispatcher = KDAKernelDispatcher(backend, kernel_chunk=2)
    step = dispatcher.plan([0, 3, 4], [0, 0], [0, 0], num_slots=0)
    directions = [torch.randn_like(x) for x in (*inputs, *weights[:3])]

    def along(scale):  # one direction through all operands: the Jacobian itself is large
        moved = [x + scale * d for x, d in zip((*inputs, *weights[:3]), directions, strict=True)]
        return dispatcher.mixed(
            KDAInputs(*moved[:3]), KDAWeights(*moved[3:], lower_bound), None, step
        )

    assert gradcheck(along, torch.zeros((), dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_states_are_written_without_a_graph(backend):
    weights, state = make_weights(), make_state(2)
    inputs = KDAInputs(*(x.requires_grad_() for x in make_inputs(5)))
    o = run(KDAKernelDispatcher(backend), inputs, weights, state, [0, 4, 5], [1, 2], [3, 3])
    assert o.requires_grad
    assert not any(x.requires_grad for x in state)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(3))
def test_any_schedule_of_steps_leaves_every_request_as_it_is_alone(backend, seed):
    """Random pieces, empty rows, skipped rows, exports and restarts over a small poisoned pool;
    after every step each slot is what its tokens say, or untouched to the bit."""
    draw = random.Random(seed)
    weights, dispatcher = make_weights(draw.choice([-5.0, None])), KDAKernelDispatcher(backend, 8)
    num_slots = 6
    state = make_state(num_slots, storage="slot-major")
    tokens = dict.fromkeys(range(1, num_slots + 1))  # what the slot's state has seen
    for _ in range(12):
        before = copied(state)
        slots = draw.sample(sorted(tokens), draw.randint(1, 4))
        free = [slot for slot in tokens if slot not in slots]
        lengths = [draw.choice([0, 1, 1, 2, 3, 8, 9, 16, 21]) for _ in slots]
        skip = [draw.random() < 0.1 for _ in slots]
        parts, context, exports, expected = [], [], [], {}
        for row, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
            fresh = tokens[slot] is None or draw.random() < 0.2
            if fresh and length and not skip[row]:
                state.recurrent[slot] = before.recurrent[slot] = NAN
                state.conv[slot] = before.conv[slot] = NAN
            context.append(0 if fresh else tokens[slot].qkv.shape[0])
            parts.append(make_inputs(length))
            if skip[row] or not length:
                continue
            past = [] if fresh else [tokens[slot]]
            seen = KDAInputs(*(torch.cat(x) for x in zip(*past, parts[-1], strict=True)))
            expected[slot] = seen
            offset = draw.choice([*range(8, length + 1, 8), length])
            if free and draw.random() < 0.5:
                destination = free.pop()
                exports.append((row, offset, destination))
                expected[destination] = at(seen, (0, context[-1] + offset))
        starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        batch = KDAInputs(*(torch.cat(x) for x in zip(*parts, strict=True)))
        named = [-1 if skipped else slot for slot, skipped in zip(slots, skip, strict=True)]
        run(dispatcher, batch, weights, state, starts, named, context, exports)
        assert_untouched(state, before, set(range(num_slots + 1)) - set(expected))
        for slot, seen in expected.items():
            assert_slot(state, slot, run_alone(seen, weights))
        tokens |= expected
