"""The layer functions of the native backend: near their torch twins, and nothing but the token."""

import pytest
import torch

from kernels.attn_res import inverse_rms
from kernels.glu import GLUForm
from kernels.layer_functions import TORCH
from kernels.native.layers import NATIVE
from kernels.native.library import operators

pytestmark = pytest.mark.needs_native

EPS = 1e-5
DTYPES = [torch.float32, torch.bfloat16, torch.float64]
# below a vector, no multiple of one, whole vectors
WIDTHS = [1, 7, 40, 96]
FORMS = {
    "SiTU": GLUForm(True, 4.0, 25.0),
    "SiTU, plain up": GLUForm(True, None, None),
    "SwiGLU": GLUForm(False),
}


def wide(dtype):
    return torch.promote_types(dtype, torch.float32)


def weights(*shape, dtype):
    return (torch.rand(*shape) + 0.5).to(dtype)


def arguments(name, N, width, dtype):
    """What a function is called with in a model of this dtype; token-wise ones first, and how many
    these are. Rows are parts of wider ones, as in a fused projection."""
    part = torch.randn(N, 2 * width + 3).to(dtype)[:, 2 : 2 + 2 * width]
    values = torch.randn(N, width, dtype=wide(dtype))
    if name == "rms_norm":
        return (part[:, :width], weights(width, dtype=dtype), EPS), 1
    if name == "rms_norm of the stream":
        return (values, weights(width, dtype=dtype), EPS), 1
    if name == "gated_norm":
        heads = torch.randn(N, 2, width, dtype=wide(dtype))
        return (heads, part, weights(width, dtype=wide(dtype)), EPS), 2
    if name == "gated":
        return (values, part[:, :width]), 2
    if name in FORMS:
        return (3 * part, FORMS[name]), 1
    m = {"mix_norm": 3, "mix_norm of one": 1, "mix_norm of none": 0}[name]
    bank = torch.randn(N, 5, width, dtype=wide(dtype))[:, :m]
    learned = weights(width, dtype=dtype), torch.randn(width).to(dtype)
    return (values, bank, inverse_rms(bank, EPS), *learned, weights(width, dtype=dtype), EPS), 3


def function(name):
    return "glu" if name in FORMS else name.split()[0]


NAMES = [
    "rms_norm", "rms_norm of the stream", "gated_norm", "gated", *FORMS, "mix_norm",
    "mix_norm of one", "mix_norm of none",
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", NAMES)
def test_it_is_its_twin_in_float64_rounded_once(name, width, dtype):
    given, _ = arguments(name, 9, width, dtype)
    doubled = [x.double() if isinstance(x, torch.Tensor) else x for x in given]
    with torch.no_grad():
        got = getattr(NATIVE, function(name))(*given)
        true = getattr(TORCH, function(name))(*doubled)
    assert got.dtype == dtype and got.shape == true.shape
    near = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float64: 1e-14}[dtype]
    assert ((got.double() - true).abs() <= near * true.abs().amax(-1, keepdim=True)).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_neighbours_and_threads_change_no_bit_of_a_token(name, dtype, threads):
    given, tokenwise = arguments(name, 700, 96, dtype)
    together = getattr(NATIVE, function(name))(*given)
    for count in (2, 5):
        threads(count)
        assert torch.equal(getattr(NATIVE, function(name))(*given), together)
        for at in (0, 333, 699):
            one = [x[at : at + 1] for x in given[:tokenwise]]
            alone = getattr(NATIVE, function(name))(*one, *given[tokenwise:])
            assert torch.equal(alone[0], together[at])


@pytest.mark.parametrize("name", NAMES)
def test_no_tokens_are_no_work(name):
    given, _ = arguments(name, 0, 16, torch.float32)
    got = getattr(NATIVE, function(name))(*given)
    assert got.shape == getattr(TORCH, function(name))(*given).shape


@pytest.mark.parametrize("name", NAMES)
def test_gradients_and_float16_are_the_twins(name):
    given, _ = arguments(name, 5, 16, torch.float32)
    first = given[0].clone().requires_grad_()
    out = getattr(NATIVE, function(name))(first, *given[1:])
    assert torch.equal(out, getattr(TORCH, function(name))(first, *given[1:]))
    out.sum().backward()
    assert first.grad.isfinite().all()
    halves = [x.half() if isinstance(x, torch.Tensor) else x for x in given]
    got = getattr(NATIVE, function(name))(*halves)
    assert torch.equal(got, getattr(TORCH, function(name))(*halves))


def test_norms_and_gates_take_any_number_of_axes():
    x, weight = torch.randn(2, 3, 16), weights(16, dtype=torch.float32)
    torch.testing.assert_close(NATIVE.rms_norm(x, weight, EPS), TORCH.rms_norm(x, weight, EPS))
    torch.testing.assert_close(NATIVE.gated(x, x.flip(0)), TORCH.gated(x, x.flip(0)))
    y, form = x[:, :2].mT, FORMS["SiTU"]
    torch.testing.assert_close(NATIVE.glu(y, form), TORCH.glu(y, form), rtol=1e-5, atol=1e-6)


def test_a_small_gate_keeps_its_digits():
    """tanh by way of e^x must not lose what is near 0."""
    gate_up = torch.cat([torch.logspace(-30, 2, 999), torch.logspace(-30, 2, 999)]).unsqueeze(0)
    for signs in (1, -1):
        got = NATIVE.glu(signs * gate_up, FORMS["SiTU"])
        true = TORCH.glu(signs * gate_up.double(), FORMS["SiTU"])
        assert ((got - true).abs() <= 1e-6 * true.abs() + 1e-35).all()


@pytest.mark.parametrize("name", ["rms_norm", "gated", "SiTU", "mix_norm"])
def test_what_is_not_a_number_stays_in_its_token(name):
    given, tokenwise = arguments(name, 6, 40, torch.bfloat16)
    clean = getattr(NATIVE, function(name))(*given)
    for x in given[:tokenwise]:
        x[4] = float("nan")
    got = getattr(NATIVE, function(name))(*given)
    assert got[4].isnan().all()
    assert torch.equal(got[[0, 1, 2, 3, 5]], clean[[0, 1, 2, 3, 5]])


N, WIDTH = 4, 8
FITS = {
    "rms_norm": dict(x=torch.ones(N, WIDTH), weight=torch.ones(WIDTH), eps=EPS),
    "gated_norm": dict(
        o=torch.ones(N, 2, WIDTH), gate=torch.ones(N, 2 * WIDTH), weight=torch.ones(WIDTH), eps=EPS
    ),
    "gated": dict(o=torch.ones(N, WIDTH), gate=torch.ones(N, WIDTH)),
    "glu": dict(gate_up=torch.ones(N, WIDTH), situ=True, beta=4.0, linear_beta=None),
    "mix_norm": dict(
        prefix=torch.ones(N, WIDTH), bank=torch.ones(N, 2, WIDTH), bank_rms=torch.ones(N, 2),
        norm=torch.ones(WIDTH), proj=torch.ones(WIDTH), weight=torch.ones(WIDTH), eps=EPS,
    ),
}  # fmt: skip
REFUSED = [
    ("rms_norm", dict(weight=torch.ones(WIDTH + 1)), "weight must be [8], got [9]"),
    ("rms_norm", dict(weight=torch.ones(WIDTH).double()), "must both be Double or neither"),
    ("rms_norm", dict(x=torch.ones(N, WIDTH).half()), "x must be Float, Double or BFloat16"),
    ("rms_norm", dict(x=torch.tensor(1.0)), "x must have an axis"),
    ("gated_norm", dict(o=torch.ones(N, WIDTH)), "o must have three axes"),
    ("gated_norm", dict(o=torch.ones(N, 2, WIDTH).bfloat16()), "o must be Float"),
    ("gated_norm", dict(gate=torch.ones(N, WIDTH)), "gate must be [4, 16]"),
    ("gated_norm", dict(weight=torch.ones(2 * WIDTH)), "weight must be [8]"),
    ("gated", dict(gate=torch.ones(N, 1)), "gate must be [4, 8]"),
    ("gated", dict(gate=torch.ones(N, WIDTH).double()), "o must be Double"),
    ("glu", dict(gate_up=torch.ones(N, 7)), "gate_up must have an even last axis"),
    ("glu", dict(gate_up=torch.ones(N, 8).long()), "gate_up must be Float, Double or BFloat16"),
    ("mix_norm", dict(bank=torch.ones(N, 2, 9)), "bank must be [4, 2, 8]"),
    ("mix_norm", dict(bank_rms=torch.ones(N, 3)), "bank_rms must be [4, 2]"),
    ("mix_norm", dict(bank=torch.ones(N, WIDTH, 2).mT), "sources that are contiguous"),
    ("mix_norm", dict(bank=torch.ones(N, 2, WIDTH).double()), "bank must be Float"),
    ("mix_norm", dict(prefix=torch.ones(N, WIDTH).bfloat16()), "prefix must be Float or Double"),
    ("mix_norm", dict(proj=torch.ones(1)), "proj must be [8]"),
    ("mix_norm", dict(weight=torch.ones(WIDTH).double()), "must both be Double or neither"),
]


@pytest.mark.parametrize(("name", "change", "message"), REFUSED)
def test_what_does_not_fit_is_refused(name, change, message):
    with pytest.raises(ValueError) as refused:
        getattr(operators(), name)(**FITS[name] | change)
    assert message in str(refused.value)


@pytest.mark.parametrize("name", FITS)
def test_fake_tensors_have_the_shapes_and_dtypes_of_real_ones(name):
    operator = getattr(operators(), name).default
    utilities = ("test_schema", "test_faketensor")
    torch.library.opcheck(operator, tuple(FITS[name].values()), test_utils=utilities)
