"""The native operators: bits that depend on nothing but the row, and refusals before any write."""

import itertools

import pytest
import torch

from kernels.dispatcher import KDAKernelDispatcher, KDAState
from kernels.kda import KDAInputs, KDAWeights
from kernels.native.library import operators
from kernels.native.operators import kda_scan
from kernels.native.operators import short_conv as native_conv
from kernels.packing import Export
from kernels.short_conv import short_conv
from kimi_mini.workbench.cases import scan_case
from tests.kernels.scans import assert_near, assert_same_bits, truth
from tests.kernels.steps import (
    assert_untouched,
    at,
    copied,
    make_inputs,
    make_state,
    make_weights,
    run,
)

pytestmark = pytest.mark.needs_native

# below a vector, no multiple of one, several slices, one of them short; more heads than go
# through a row together
SHAPES = [(1, 1, 1), (2, 5, 7), (3, 24, 16), (1, 16, 80), (2, 128, 112), (2, 64, 64), (20, 64, 112)]


@pytest.mark.parametrize(("H", "K", "V"), SHAPES[:-1])
@pytest.mark.parametrize("gates", ["mixed", "unbounded", "equal keys"])
def test_any_shape_is_near_float64_with_every_export(gates, H, K, V):
    lengths = [70, 0, 1, 33]
    case = scan_case(gates, lengths, H=H, K=K, V=V)
    exports = [Export(r, after) for r, n in enumerate(lengths) for after in range(n, 0, -11)]
    exports += [Export(0, 70), Export(0, 32)]  # twice, and out of order
    assert_near(kda_scan(*case, exports), truth(case, exports), gates)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize(("H", "K", "V"), SHAPES)
def test_threads_neighbours_and_exports_change_no_bit(H, K, V, dtype, threads):
    case = scan_case("mixed", [40, 100, 3], H=H, K=K, V=V, dtype=dtype)
    exports = [Export(1, after) for after in (1, 31, 32, 33, 64, 100)]
    one = kda_scan(*case, exports)
    for count in (2, 7):
        threads(count)
        assert_same_bits(kda_scan(*case, exports), one)
        alone = kda_scan(*case.row(1))
        assert torch.equal(alone.o, one.o[40:140]) and torch.equal(alone.S[0], one.S[1])


@pytest.mark.parametrize(("H", "K", "V"), SHAPES)
def test_every_token_is_a_boundary_that_resumes_with_the_same_bits(H, K, V):
    case = scan_case("slow", [75], H=H, K=K, V=V)
    every = [Export(0, t) for t in range(1, 76)]
    whole = kda_scan(*case, every)
    for cut in (1, 31, 32, 33, 64, 74):
        rest = kda_scan(*case.piece(cut, 75, whole.exported[cut - 1 : cut]))
        assert torch.equal(rest.o, whole.o[cut:]) and torch.equal(rest.S, whole.S)
    S = case.S0
    for t in range(75):  # decode
        o, S, _ = kda_scan(*case.piece(t, t + 1, S))
        assert torch.equal(o[0], whole.o[t]) and torch.equal(S[0], whole.exported[t])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("lower_bound", [-5.0, None], ids=["bounded", "softplus"])
def test_a_layer_gives_the_same_bits_in_any_pieces(lower_bound, dtype, threads):
    """Prefill in one, in pieces with neighbours on two threads, and token by token."""
    weights, prompt = make_weights(lower_bound), make_inputs(90, dtype)
    if dtype == torch.float64:
        weights = make_weights(lower_bound, dtype)
    state, dispatcher = make_state(8, dtype), KDAKernelDispatcher("native")
    whole = run(dispatcher, prompt, weights, state, [0, 90], [1], [0], [(0, 41, 2)])
    rest = run(dispatcher, at(prompt, (41, 90)), weights, state, [0, 49], [2], [41])
    assert torch.equal(rest, whole[41:])
    steps = [
        run(dispatcher, at(prompt, (t, t + 1)), weights, state, [0, 1], [3], [t]) for t in range(90)
    ]
    assert torch.equal(torch.cat(steps), whole)
    threads(2)
    outputs = []
    for first, last in itertools.pairwise((0, 1, 3, 50, 90)):
        beside = [make_inputs(n, dtype) for n in (17, 1)]
        batch = zip(beside[0], at(prompt, (first, last)), beside[1], strict=True)
        starts = [0, 17, 17 + last - first, 18 + last - first]
        got = run(
            dispatcher, KDAInputs(*map(torch.cat, batch)), weights, state, starts, [6, 4, 7],
            [9, first, 0],
        )  # fmt: skip
        outputs.append(got[17 : starts[2]])
    assert torch.equal(torch.cat(outputs), whole)
    for slot in (2, 3, 4):
        assert torch.equal(state.recurrent[slot], state.recurrent[1])
        assert torch.equal(state.conv[slot], state.conv[1])


@pytest.mark.parametrize("W", [1, 2, 6])
def test_a_convolution_of_any_width_is_the_torch_one(W):
    weights = make_weights()
    weights = weights._replace(conv=torch.randn(weights.conv.shape[0], W))
    inputs, state = make_inputs(12), make_state(3)
    state = state._replace(conv=torch.randn(4, W - 1, weights.conv.shape[0]))
    other = copied(state)
    rows = ([0, 3, 4, 12], [2, 1, 3], [5, 5, 0])
    got = run(KDAKernelDispatcher("native"), inputs, weights, state, *rows)
    expected = run(KDAKernelDispatcher("torch"), inputs, weights, other, *rows)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(state.conv, other.conv)


def test_several_rows_of_the_sink_leave_it_alone():
    weights, inputs, state = make_weights(), make_inputs(6), make_state(2)
    before = copied(state)
    o = run(KDAKernelDispatcher("native"), inputs, weights, state, [0, 1, 4, 6], [0, 0, 2], [3] * 3)
    assert_untouched(state, before, [0, 1])
    assert o.isfinite().all()


@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("poisoned", KDAInputs._fields)
def test_what_is_not_a_number_shows_in_the_first_token_of_a_fresh_row(poisoned, length):
    weights, inputs, state = make_weights(), make_inputs(length), make_state(1)
    getattr(inputs, poisoned)[0] = torch.nan
    o = run(KDAKernelDispatcher("native"), inputs, weights, state, [0, length], [1], [0])
    assert o[0].isnan().all() and state.recurrent[1].isnan().all()


@pytest.mark.parametrize("asked", [True, False], ids=["gradients", "no_grad"])
def test_gradients_are_torchs_business_and_exports_still_fall_anywhere(asked):
    weights, state = make_weights(), make_state(4)
    inputs = KDAInputs(*(x.requires_grad_() for x in make_inputs(20)))
    other = copied(state)
    with torch.set_grad_enabled(asked):
        rows = ([0, 20], [1], [0], [(0, 7, 2), (0, 20, 3)])
        o = run(KDAKernelDispatcher("native"), inputs, weights, state, *rows)
        expected = run(KDAKernelDispatcher("reference"), inputs, weights, other, *rows)
    assert o.requires_grad == asked
    torch.testing.assert_close(o, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state.recurrent, other.recurrent, rtol=1e-5, atol=1e-6)
    if asked:
        o.sum().backward()
        assert all(x.grad.isfinite().all() for x in inputs)


def test_float16_runs_on_the_torch_functions():
    weights, inputs = make_weights(), make_inputs(9, torch.float16)
    state = make_state(1, torch.float16)
    o = run(KDAKernelDispatcher("native"), inputs, weights, state, [0, 9], [1], [0], [])
    assert o.dtype == torch.float32 and state.conv.dtype == torch.float16


def layer_arguments() -> dict:
    """Arguments of kda_rows_ by name, for two rows and one export."""
    inputs, weights, state = make_inputs(5), make_weights(), make_state(4)
    return dict(
        qkv=inputs.qkv, gate=inputs.gate, beta=inputs.beta, conv_weight=weights.conv,
        A_log=weights.A_log, dt_bias=weights.dt_bias, lower_bound=-5.0,
        recurrent=state.recurrent, conv=state.conv, query_start=[0, 4, 5],
        slots=torch.tensor([2, 1]), resumed=[True, False], export_rows=[0], export_after=[2],
        export_slots=torch.tensor([3]),
    )  # fmt: skip


REFUSED = {
    "query_start must rise": dict(query_start=[0, 5, 4]),
    "to the 5 tokens": dict(query_start=[0, 4, 6]),
    "slots must be [2]": dict(slots=torch.tensor([1])),
    "slots must be Long": dict(slots=torch.tensor([1.0, 2.0])),
    "a row names slot 5 of 0..4": dict(slots=torch.tensor([5, 1])),
    "a row names slot -1": dict(slots=torch.tensor([2, -1])),
    "an export names slot 0": dict(export_slots=torch.tensor([0])),
    "slot 2 is named twice": dict(export_slots=torch.tensor([2])),
    "slot 1 is named twice": dict(slots=torch.tensor([1, 1])),
    "export of row 0 after 5 tokens": dict(export_after=[5]),
    "an export names row 2 of 2": dict(export_rows=[2]),
    "as many rows as offsets": dict(export_rows=[0, 1]),
    "resumed must name 2 rows": dict(resumed=[True]),
}
# a change of one argument as a function of what fits
CHANGED = {
    "gate must be": ("gate", lambda x: x[..., :-1]),
    "beta must be": ("beta", lambda x: x[:-1]),
    "qkv must have H (2K+V) channels": ("qkv", lambda x: x[:, :-1]),
    "conv_weight must be": ("conv_weight", lambda x: x[:-2]),
    "A_log must be": ("A_log", lambda x: x[:1]),
    "recurrent must be": ("recurrent", lambda x: x.mT.contiguous()),
    "contiguous inside, got strides": ("recurrent", lambda x: x.mT.contiguous().mT),
    "do not overlap": ("recurrent", lambda x: x[:1].expand(x.shape)),
    "conv must be": ("conv", lambda x: x[:, 1:]),
    "conv must have slots that are contiguous": ("conv", lambda x: x.mT.contiguous().mT),
    "recurrent has 5 slots, conv has 4": ("conv", lambda x: x[:4]),
    "recurrent must be Float": ("recurrent", lambda x: x.double()),
    "conv must be Float": ("conv", lambda x: x.bfloat16()),
    "gate must be Float": ("gate", lambda x: x.bfloat16()),
    "qkv must be Float, Double or BFloat16": ("qkv", lambda x: x.half()),
}


@pytest.mark.parametrize("message", REFUSED)
def test_numbers_that_do_not_fit_are_refused_before_anything_is_written(message):
    refuse(layer_arguments() | REFUSED[message], message)


@pytest.mark.parametrize("message", CHANGED)
def test_tensors_that_do_not_fit_are_refused_before_anything_is_written(message):
    arguments = layer_arguments()
    name, change = CHANGED[message]
    refuse(arguments | {name: change(arguments[name])}, message)


def refuse(arguments, message):
    state = KDAState(arguments["recurrent"], arguments["conv"])
    before = copied(state)
    with pytest.raises(ValueError) as refused:
        operators().kda_rows_(**arguments)
    assert message in str(refused.value)
    assert torch.equal(state.recurrent, before.recurrent) and torch.equal(state.conv, before.conv)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("k", lambda x: x[..., :-1], "k must have shape"),
        ("S0", lambda x: x[:1], "S0 must have shape"),
        ("query_start", lambda x: [0, 5, 3], "query_start falls"),
    ],
)
def test_a_scan_refuses_what_its_twins_refuse(name, change, message):
    case = scan_case("slow", [3, 2])
    with pytest.raises(ValueError, match=message):
        kda_scan(*case._replace(**{name: change(getattr(case, name))}))


def test_the_bare_scan_operator_checks_for_itself():
    case = scan_case("slow", [3, 2])
    more = [], [], 1.0
    for change, message in (
        (dict(k=case.k[..., :-1]), "k must be"),
        (dict(S0=case.S0[:1]), "S0 must be"),
        (dict(S0=case.S0.bfloat16()), "S0 must be Float or Double"),
        (dict(v=case.v.double()), "v must be Float"),
        (dict(q=case.q[0]), "q and v must have three axes"),
        (dict(query_start=[0, 6]), "query_start must rise"),
    ):
        with pytest.raises(ValueError) as refused:
            operators().kda_scan(*case._replace(**change), *more)
        assert message in str(refused.value)


def test_fake_tensors_have_the_shapes_and_dtypes_of_real_ones():
    utilities = ("test_schema", "test_faketensor")
    case = scan_case("slow", [3, 2], dtype=torch.float64)
    scan = operators().kda_scan.default
    torch.library.opcheck(scan, (*case, [1], [2], 0.5), test_utils=utilities)
    rows = operators().kda_rows_.default
    arguments = layer_arguments() | dict(resumed=[1, 0])
    torch.library.opcheck(rows, tuple(arguments.values()), test_utils=utilities)


def test_weights_of_a_bf16_model_may_be_in_any_float_type():
    weights, inputs, state = make_weights(), make_inputs(6, torch.bfloat16), make_state(1)
    state = state._replace(conv=state.conv.bfloat16())
    rounded = KDAWeights(*(x.bfloat16() for x in weights[:3]), -5.0)
    other = copied(state)
    rows = ([0, 6], [1], [3])
    got = run(KDAKernelDispatcher("native"), inputs, rounded, state, *rows)
    expected = run(KDAKernelDispatcher("torch"), inputs, rounded, other, *rows)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("D", "W"), [(1, 1), (5, 4), (48, 2), (300, 7)])
def test_the_convolution_is_its_twin_and_windows_are_copies(D, W, dtype, threads):
    lengths = [70, 0, 1, 33, 2]
    starts = [0, *itertools.accumulate(lengths)]
    x, conv0 = torch.randn(starts[-1], D + 3).to(dtype)[:, :D], torch.randn(5, W - 1, D).to(dtype)
    weight = torch.randn(D, W)
    exports = [Export(3, 33), Export(0, 1), Export(0, 32), Export(2, 1)]
    one, twin = (f(x, weight, conv0, starts, exports) for f in (native_conv, short_conv))
    assert one.y.dtype == twin.y.dtype
    torch.testing.assert_close(one.y, twin.y, rtol=2e-6, atol=2e-6)
    assert torch.equal(one.conv, twin.conv) and torch.equal(one.exported, twin.exported)
    threads(2)
    assert all(map(torch.equal, native_conv(x, weight, conv0, starts, exports), one))
    # cut anywhere and resumed, alone
    begin, rest = (native_conv(x[:32], weight, conv0[:1], [0, 32]), one.exported[2:3])
    again = native_conv(x[32:70], weight, rest, [0, 38])
    assert torch.equal(torch.cat([begin.y, again.y]), one.y[:70])
    assert torch.equal(again.conv, one.conv[:1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(3, 5, dtype=torch.int32)}, "conv0 must be Int|x must be Float"),
        ({"x": torch.zeros(3, 6)}, r"weight must be \[6, 4\]"),
        ({"weight": torch.zeros(5, 0)}, "with a tap"),
        ({"conv0": torch.zeros(2, 3, 5)}, r"conv0 must be \[1, 3, 5\]"),
        ({"query_start": [0, 4]}, "ends at 4"),
        ({"exports": [Export(0, 4)]}, r"offset must be 1..3"),
        ({"exports": [Export(1, 1)]}, "row 1"),
    ],
)
def test_a_convolution_that_does_not_fit_is_refused(changes, message):
    given = {"x": torch.zeros(3, 5), "weight": torch.zeros(5, 4), "conv0": torch.zeros(1, 3, 5),
             "query_start": [0, 3]}  # fmt: skip
    with pytest.raises(ValueError, match=message):
        native_conv(**(given | changes))
