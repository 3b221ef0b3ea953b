"""The KDA and MLA layers as wholes: gates, resumption, casts."""

import dataclasses

import pytest
import torch

from kernels.dispatcher import KDAKernelDispatcher, KDAState
from kernels.norms import rms_norm
from kernels.paging import build_attention_metadata, build_destinations
from kimi_mini import preset
from kimi_mini.batch import Step, stateless_step
from kimi_mini.layers.kda import KimiDeltaAttention
from kimi_mini.layers.mla import LatentAttention


def filled(module, seed=0, scale=0.2):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
            if name == "dt_bias":
                parameter.sub_(4.5)  # slow gates: the state must persist to be tested
    return module


def variant(**kda):
    base = preset("nano")
    return dataclasses.replace(
        base, linear_attn_config=dataclasses.replace(base.linear_attn_config, **kda)
    )


def kda_layer(config=None, dtype=torch.float64):
    return filled(KimiDeltaAttention(config or preset("nano"), dtype))


def state(slots=4, dtype=torch.float64):
    full = dict(fill_value=float("nan"), dtype=dtype)
    return KDAState(
        torch.full((slots + 1, 3, 32, 32), **full), torch.full((slots + 1, 3, 288), **full)
    )


def through(layer, x, pool, slot, context, backend="auto"):
    dispatcher = KDAKernelDispatcher(backend)
    step = dispatcher.plan([0, len(x)], [slot], [context], num_slots=pool.conv.shape[0] - 1)
    return layer(x, Step(dispatcher, step, None, None), pool)


def tokens(n, seed=1, dtype=torch.float64):
    return torch.randn(n, 64, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("full_rank", [True, False])
@pytest.mark.parametrize("bound", [-5.0, -2.0, None])
@pytest.mark.parametrize("split", [1, 2, 16, 33, 69])
@pytest.mark.parametrize("backend", ["torch", "native"])
@torch.no_grad()
def test_a_kda_layer_resumes_from_its_slot(full_rank, bound, split, backend):
    layer = kda_layer(variant(use_full_rank_gate=full_rank, gate_lower_bound=bound))
    x, pool = tokens(70), state()
    whole = layer(x, stateless_step(1, 70, KDAKernelDispatcher("reference")), None)
    first = through(layer, x[:split], pool, 3, 0, backend)
    second = through(layer, x[split:], pool, 3, split, backend)
    torch.testing.assert_close(torch.cat([first, second]), whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["recurrent", "conv"])
@torch.no_grad()
def test_resuming_without_one_of_the_two_kda_states_is_wrong(kind):
    """Pitfall 18: this is what the test above must be able to see."""
    layer, x, pool = kda_layer(), tokens(70), state()
    whole = layer(x, stateless_step(1, 70, KDAKernelDispatcher()), None)
    through(layer, x[:40], pool, 2, 0)
    getattr(pool, kind)[2] = 0
    resumed = through(layer, x[40:], pool, 2, 40)
    error = (resumed - whole[40:]).abs().max() / whole.abs().max()
    assert error > 0.01


@pytest.mark.parametrize("gate", [2.0, -2.0])
def test_the_kda_output_gate_is_a_sigmoid_after_the_norm(gate):
    """BR-69: at 2 a sigmoid gives 0.8808, a SiLU 1.7616; at 1 both give 0.7311."""
    layer = kda_layer(variant(use_full_rank_gate=False))
    dispatcher, seen = KDAKernelDispatcher(), []
    core = dispatcher.mixed
    dispatcher.mixed = lambda *args: seen.append(core(*args)) or seen[-1]
    with torch.no_grad():
        layer.in_proj.weight[-32:] = 0
        layer.in_proj.weight[-32, 0] = 1.0
        layer.g_b_proj.weight.zero_()
        layer.g_b_proj.weight[:, 0] = gate
    x = tokens(5)
    x[:, 0] = 1.0
    got = layer(x, stateless_step(1, 5, dispatcher), None)
    normed = rms_norm(*seen, layer.o_norm.weight, layer.eps).flatten(1)
    gated = normed * (0.8807970779778823 if gate > 0 else 0.11920292202211755)
    torch.testing.assert_close(got, gated @ layer.o_proj.weight.T, rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", ["torch", "native"])
@torch.no_grad()
def test_two_requests_interleaved_layer_by_layer_do_not_see_each_other(backend):
    """BR-69, second part: no buffer inside the layer."""
    layer, pool = kda_layer(), state()
    a, b = tokens(20, 1), tokens(20, 2)
    alone = [layer(x, stateless_step(1, 20, KDAKernelDispatcher(backend)), None) for x in (a, b)]
    got = {1: [], 2: []}
    for t in range(0, 20, 4):
        for slot, x in ((1, a), (2, b)):
            got[slot].append(through(layer, x[t : t + 4], pool, slot, t, backend))
    torch.testing.assert_close(torch.cat(got[1]), alone[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.cat(got[2]), alone[1], rtol=0, atol=1e-12)


def test_gate_rates_conv_and_head_norm_stay_float32_in_a_bf16_layer():
    """Pitfall 25."""
    layer = kda_layer(dtype=torch.float32)
    kept = {n: p.clone() for n, p in layer.named_parameters() if "proj" not in n}
    layer.bfloat16()
    for name, parameter in layer.named_parameters():
        if name in kept:
            assert parameter.dtype == torch.float32 and torch.equal(parameter, kept[name]), name
        else:
            assert parameter.dtype == torch.bfloat16, name
    made = KimiDeltaAttention(preset("nano"), torch.bfloat16)
    assert {n for n, p in made.named_parameters() if p.dtype == torch.float32} == kept.keys()
    assert {p.dtype for p in layer.double().parameters()} == {torch.float64}


def mla(config=None, dtype=torch.float64):
    return filled(LatentAttention(config or preset("nano"), dtype), scale=0.4)


@pytest.mark.parametrize("lora", [24, None])
@pytest.mark.parametrize("gated", [True, False])
def test_mla_follows_the_formula(lora, gated):
    config = dataclasses.replace(preset("nano"), q_lora_rank=lora, mla_use_output_gate=gated)
    layer, x = mla(config), tokens(6)

    def norm(v, w):
        return v / (v.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w

    parts = (x @ layer.in_proj.weight.T).split(layer.widths, -1)
    q = parts[0] if lora is None else norm(parts[0], layer.q_a_layernorm.weight)
    q = (q if lora is None else q @ layer.q_b_proj.weight.T).view(6, 3, 48)
    c = norm(parts[1], layer.kv_a_layernorm.weight)
    k, v = (c @ layer.kv_b_proj.weight.T).view(6, 3, 64).split(32, -1)
    scores = torch.einsum("thd,shd->hts", q[..., :32], k)
    scores = (scores + torch.einsum("thd,sd->hts", q[..., 32:], parts[2])) * 48**-0.5
    scores = scores.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), float("-inf"))
    o = torch.einsum("hts,shd->thd", scores.softmax(-1), v).flatten(1)
    expected = (o * parts[3].sigmoid() if gated else o) @ layer.o_proj.weight.T
    got = layer(x, stateless_step(1, 6, KDAKernelDispatcher()), None)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def test_without_positions_the_order_of_earlier_tokens_does_not_matter():
    """BR-58: no rotation is applied to the shared columns."""
    layer, x = mla(), tokens(6)
    swapped = x[[1, 0, 3, 2, 4, 5]]
    step = stateless_step(1, 6, KDAKernelDispatcher())
    torch.testing.assert_close(layer(x, step, None)[-1], layer(swapped, step, None)[-1])


def test_mla_keeps_normalised_latents_and_raw_shared_columns_in_its_pages():
    layer, x = mla(), tokens(5)
    pool = torch.full((4, 3, 32), float("nan"), dtype=torch.float64)
    table = torch.tensor([[3, 1]])
    meta = build_attention_metadata([0, 5], [0], table, page=3, pages=4)
    out_rows = torch.tensor([9, 10, 11, 3, 4])
    where = build_destinations(out_rows, meta)
    got = layer(x, Step(KDAKernelDispatcher(), None, meta, where), pool)
    expected = layer(x, stateless_step(1, 5, KDAKernelDispatcher()), None)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    rows = pool.flatten(0, 1)[out_rows]
    _, c, r, _ = (x @ layer.in_proj.weight.T).split(layer.widths, -1)
    assert torch.equal(rows[:, 16:], r)
    torch.testing.assert_close(rows[:, :16], layer.kv_a_layernorm(c))
    assert pool.flatten(0, 1)[[0, 1, 2, 5, 6, 7, 8]].isnan().all()
