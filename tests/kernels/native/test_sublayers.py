"""The operators of whole sublayers: near their torch twins in every form that a config has."""

import dataclasses

import pytest
import torch

from kernels.layer_functions import TORCH
from kernels.native.layers import NATIVE
from kernels.native.library import operators
from kernels.sublayers import KDAProjections, MLAProjections
from kimi_mini import preset
from kimi_mini.dtypes import at_least_float32
from kimi_mini.layers.mlp import MLP, glu_form
from kimi_mini.layers.moe import SparseMoE

pytestmark = pytest.mark.needs_native

HIDDEN, HEADS, WIDTH, RANK = 40, 2, 24, 9
EPS = 1e-5
DTYPES = [torch.float32, torch.bfloat16, torch.float64]
ROWS = [0, 1, 3, 8, 9, 50]  # one pass over the matrices, and torch's products
NEAR = {torch.float32: 2e-6, torch.bfloat16: 0.03, torch.float64: 1e-13}

MOE_FORMS = {
    "K3": {},
    "no latent": {"routed_expert_hidden_size": None, "latent_moe_use_norm": False},
    "no norm": {"latent_moe_use_norm": False},
    "nothing shared": {"num_shared_experts": 0},
    "Kimi-Linear": {
        "routed_expert_hidden_size": None, "latent_moe_use_norm": False, "num_shared_experts": 0,
        "hidden_act": "silu", "activation_situ_beta": None, "activation_situ_linear_beta": None,
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def the_same_numbers_every_time():
    torch.manual_seed(0)


def drawn(*shape, dtype):
    return (torch.randn(*shape) / shape[-1] ** 0.5).to(dtype)


def assert_near(got, expected, dtype):
    assert got.dtype == expected.dtype and got.shape == expected.shape
    if expected.numel():
        error = (got.double() - expected.double()).abs().max()
        assert error <= NEAR[dtype] * expected.double().abs().max()


@pytest.mark.parametrize("low_rank", [False, True], ids=["full gate", "low-rank gate"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("N", ROWS)
def test_kda_inputs_and_output(N, dtype, low_rank):
    channels = HEADS * WIDTH
    widths = [3 * channels, RANK, HEADS, RANK if low_rank else channels]
    weights = KDAProjections(
        drawn(sum(widths), HIDDEN, dtype=dtype),
        widths,
        drawn(channels, RANK, dtype=dtype),
        drawn(channels, RANK, dtype=dtype) if low_rank else None,
    )
    x = torch.randn(N, HIDDEN).to(dtype)
    with torch.no_grad():
        inputs, gate = NATIVE.kda_inputs(x, weights, HEADS)
        expected, expected_gate = TORCH.kda_inputs(x, weights, HEADS)
        for got, wanted in zip((*inputs, gate), (*expected, expected_gate), strict=True):
            assert_near(got, wanted, dtype)
        o = torch.randn(N, HEADS, WIDTH, dtype=at_least_float32(dtype))
        rest = (expected_gate, torch.rand(WIDTH), EPS, drawn(HIDDEN, channels, dtype=dtype))
        assert_near(NATIVE.kda_output(o, *rest), TORCH.kda_output(o, *rest), dtype)


@pytest.mark.parametrize("gated", [True, False], ids=["gate", "no gate"])
@pytest.mark.parametrize("lora", [True, False], ids=["q-LoRA", "no q-LoRA"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("N", ROWS)
def test_mla_inputs_and_output(N, dtype, lora, gated):
    latent, shared, values = 16, 8, HEADS * WIDTH
    widths = [RANK if lora else HEADS * 20, latent, shared, values if gated else 0]
    weights = MLAProjections(
        drawn(sum(widths), HIDDEN, dtype=dtype),
        widths,
        torch.rand(RANK).to(dtype) if lora else None,
        drawn(HEADS * 20, RANK, dtype=dtype) if lora else None,
        torch.rand(latent).to(dtype),
        EPS,
    )
    x = torch.randn(N, HIDDEN).to(dtype)
    with torch.no_grad():
        expected = TORCH.mla_inputs(x, weights, HEADS)
        for got, wanted in zip(NATIVE.mla_inputs(x, weights, HEADS), expected, strict=True):
            assert_near(got, wanted, dtype)
        o = torch.randn(N, HEADS, WIDTH, dtype=at_least_float32(dtype))
        rest = (expected[2], drawn(HIDDEN, values, dtype=dtype))
        assert_near(NATIVE.mla_output(o, *rest), TORCH.mla_output(o, *rest), dtype)


def filled(module, dtype):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(drawn(*parameter.shape, dtype=torch.float32))
    return module


@pytest.mark.parametrize("form", MOE_FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("N", ROWS)
def test_a_mixture_of_experts(N, dtype, form):
    """With the same choices, for scores that are nearly equal may fall either way."""
    config = dataclasses.replace(preset("nano"), **MOE_FORMS[form])
    module = filled(SparseMoE(config, dtype), dtype)
    x = torch.randn(N, config.hidden_size).to(dtype)
    with torch.no_grad():
        chosen = module.gate(x).experts
        assert_near(module(x, NATIVE, chosen), module(x, TORCH, chosen), dtype)
        if dtype == torch.float64:
            assert_near(module(x, NATIVE), module(x, TORCH), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("N", ROWS)
def test_a_dense_mlp(N, dtype):
    config = preset("nano")
    module = filled(MLP(config, 48, dtype), dtype)
    x = torch.randn(N, config.hidden_size).to(dtype)
    with torch.no_grad():
        assert_near(module(x, NATIVE), module(x, TORCH), dtype)


def test_where_gradients_are_asked_for_torch_runs():
    config = preset("nano")
    x = torch.randn(3, config.hidden_size, requires_grad=True)
    for module in (SparseMoE(config, torch.float32), MLP(config, 48, torch.float32)):
        out = filled(module, torch.float32)(x, NATIVE)
        assert out.requires_grad and torch.equal(out, module(x, TORCH))


def parts_of(name):
    """A function of NATIVE and what it is given: sublayers whose every weight is there."""
    form = glu_form(preset("nano"))
    if name == "moe":
        module = filled(SparseMoE(preset("nano"), torch.float32), torch.float32)
        rest = (module.gate.rule, form)
        return module._weights(), rest, preset("nano").hidden_size
    if name == "kda_inputs":
        wide = drawn(3 * HEADS * WIDTH + 2 * RANK + HEADS, HIDDEN, dtype=torch.float32)
        low = drawn(HEADS * WIDTH, RANK, dtype=torch.float32)
        widths = [3 * HEADS * WIDTH, RANK, HEADS, RANK]
        return KDAProjections(wide, widths, low, low.clone()), (HEADS,), HIDDEN
    widths = [RANK, 16, 8, HEADS * WIDTH]
    wide, queries = (
        drawn(sum(widths), HIDDEN, dtype=torch.float32),
        drawn(40, RANK, dtype=torch.float32),
    )
    return (
        MLAProjections(wide, widths, torch.rand(RANK), queries, torch.rand(16), EPS),
        (HEADS,),
        HIDDEN,
    )


def tensors(result):
    return [result] if isinstance(result, torch.Tensor) else [y for x in result for y in tensors(x)]


@pytest.mark.parametrize("N", [3, 30])
@pytest.mark.parametrize("name", ["kda_inputs", "mla_inputs", "moe"])
def test_a_weight_that_alone_is_trained_gets_its_gradient(name, N):
    """The others frozen, and an input that asks for nothing: a first layer that is fine-tuned."""
    weights, rest, hidden = parts_of(name)
    x = torch.randn(N, hidden)
    for field, trained in weights._asdict().items():
        if not isinstance(trained, torch.Tensor) or field == "bias":  # it only chooses
            continue
        gradients = []
        for functions in (NATIVE, TORCH):
            own = trained.detach().clone().requires_grad_()
            frozen = (w.detach() if isinstance(w, torch.Tensor) else w for w in weights)
            given = type(weights)(*frozen)._replace(**{field: own})
            out = tensors(getattr(functions, name)(x, given, *rest))
            sum(y.square().sum() for y in out).backward()
            gradients.append(own.grad)
        assert gradients[0] is not None and torch.equal(*gradients), field


def test_what_does_not_fit_is_refused():
    kda_inputs, mla_inputs = operators().kda_inputs, operators().mla_inputs
    x, matrix = torch.zeros(2, 4), torch.zeros(10, 4)
    with pytest.raises(ValueError, match="x must be .tokens, hidden."):
        kda_inputs(x[0], matrix, [6, 2, 1, 1], torch.zeros(6, 2), None, 1)
    for widths in ([6, 2, 1], [6, 2, 1, 2], [6, 2, 1, 0], [9, -1, 1, 1]):
        with pytest.raises(ValueError, match="widths must"):
            kda_inputs(x, matrix, widths, torch.zeros(6, 2), None, 1)
    with pytest.raises(ValueError, match="6 channels are not 4 equal heads"):
        kda_inputs(x, matrix, [6, 2, 1, 1], torch.zeros(6, 2), None, 4)
    with pytest.raises(ValueError, match="go together"):
        mla_inputs(x, matrix, [6, 2, 1, 1], torch.zeros(6), None, torch.zeros(2), EPS, 1)
    with pytest.raises(ValueError, match="x has rows of 4 numbers, weight of 3"):
        operators().mlp(x, torch.zeros(4, 3), torch.zeros(4, 2), True, 4.0, None)
    experts = (torch.zeros(2, 4, 4), torch.zeros(2, 4, 2), None, 0.0, None, torch.zeros(4, 2))
    with pytest.raises(ValueError, match="shared experts need an in_proj"):
        operators().moe(
            x, torch.zeros(2, 4), torch.zeros(2), None, [0, 0], *experts,
            1, 1, 1, True, 1.0, True, 4.0, None, None,
        )  # fmt: skip


def test_fake_tensors_get_the_shapes_of_real_ones():
    config = preset("nano")
    module = filled(SparseMoE(config, torch.float32), torch.float32)
    x = torch.randn(5, config.hidden_size)
    weights, form = module._weights(), glu_form(config)
    with torch.inference_mode():
        torch.library.opcheck(
            operators().moe.default,
            (x, *weights, *module.gate.rule, form.situ, form.beta, form.linear_beta, None),
            test_utils=["test_schema", "test_faketensor"],
        )
