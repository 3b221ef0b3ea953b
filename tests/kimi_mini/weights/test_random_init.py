"""Random weights: reproducible, and such that state, routing and logits mean something."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from kimi_mini.config import preset
from kimi_mini.model import KimiForCausalLM
from kimi_mini.weights import random_parameters
from kimi_mini.weights.random_init import _Bits, initialise

KDA = "model.layers.0.self_attn."
MOE = "model.layers.1.block_sparse_moe."


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(nano, weights):
    again = random_parameters(nano, seed=7)
    assert all(torch.equal(again[name], weights[name]) for name in weights)
    other = random_parameters(nano, seed=8)
    alike = {name for name in weights if torch.equal(other[name], weights[name])}
    assert alike == {name for name in weights if "norm" in name.split(".")[-2] or ".norm" in name}


def test_values_depend_on_seed_and_name_alone_not_on_what_else_there_is(nano, weights):
    kda = dataclasses.replace(nano.linear_attn_config, full_attn_layers=(4,), kda_layers=(1, 2, 3))
    shorter = dataclasses.replace(nano, num_hidden_layers=4, linear_attn_config=kda)
    backwards = {n: torch.empty_like(weights[n]) for n in reversed(random_parameters(shorter, 0))}
    initialise(backwards, shorter, seed=7)
    for name, parameter in backwards.items():
        # what writes into the stream is scaled by the number of layers
        writes = name.endswith(("o_proj.weight", "down_proj.weight", "up_proj.weight"))
        scale = (4 / 5) ** 0.5 if writes and "gate_up" not in name else 1
        torch.testing.assert_close(parameter * scale, weights[name], rtol=1e-6, atol=0)


def test_the_first_values_are_these_on_every_machine(weights):
    # integers and one multiplication; a change here breaks every recorded random model
    bits = _Bits(7, "model.norm.weight")
    assert bits.normal(3).tolist() == [
        -0.023891814120857925,
        1.2426386242638252,
        -0.03348554036629092,
    ]
    assert bits.uniform(3).tolist() == [
        0.23524822069506746,
        0.43199143458417966,
        0.7536811105722073,
    ]
    assert weights["model.embed_tokens.weight"][0, :2].tolist() == [
        0.156254842877388,
        -0.1522640585899353,
    ]


def test_no_two_tensors_share_their_numbers(weights):
    firsts = [p.flatten()[:2].tolist() for n, p in weights.items() if "norm" not in n]
    firsts += [weights[MOE + "experts.w13"][e, r, :2].tolist() for e in (0, 1) for r in (1, 64)]
    assert len({tuple(pair) for pair in firsts}) == len(firsts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_another_dtype_holds_the_rounded_values_of_float32(nano, weights, dtype):
    parameters = random_parameters(nano, seed=7, dtype=dtype)
    for name, parameter in parameters.items():
        assert torch.equal(parameter, weights[name].to(parameter.dtype)), name
    assert parameters[KDA + "dt_bias"].dtype == torch.promote_types(dtype, torch.float32)


def test_every_parameter_is_filled(nano, unfilled):
    parameters = unfilled(nano)
    initialise(parameters, nano, seed=0)
    assert all(parameter.isfinite().all() for parameter in parameters.values())


def test_the_generator_is_uniform_and_nearly_normal():
    uniform, normal = _Bits(1, "u").uniform(200_000), _Bits(1, "n").normal(200_000)
    assert uniform.min() >= 0 and uniform.max() < 1
    counts, _ = np.histogram(uniform, bins=20, range=(0, 1))
    assert abs(counts / 10_000 - 1).max() < 0.05
    assert abs(normal.mean()) < 0.01 and abs(normal.std() - 1) < 0.01
    assert abs((np.abs(normal) < 1).mean() - 0.6827) < 0.02
    assert 3 < np.abs(normal).max() < 3.47
    assert abs(np.corrcoef(normal[1:], normal[:-1])[0, 1]) < 0.01


def test_each_kind_has_its_law(weights):
    experts = weights[MOE + "experts.w2"]
    assert experts.std() == pytest.approx(0.02, rel=0.05)
    assert weights[KDA + "in_proj.weight"].std() == pytest.approx(0.02, rel=0.05)
    for vocabulary in ("model.embed_tokens.weight", "lm_head.weight"):
        assert weights[vocabulary].std() == pytest.approx(2 / 8, rel=0.05)
    assert weights[KDA + "o_norm.weight"].eq(1).all() and weights["model.norm.weight"].eq(1).all()
    assert weights["model.output_attn_res.norm"].eq(1).all()
    conv = weights[KDA + "conv_weight"]
    assert conv.abs().max() <= 0.5 and conv.std() == pytest.approx(0.5 / math.sqrt(3), rel=0.1)
    rate = torch.cat([p for n, p in weights.items() if n.endswith("A_log")])
    assert rate.min() >= -0.5 and rate.max() < 1 and rate.unique().numel() == rate.numel()
    bias = weights[MOE + "gate.e_score_correction_bias"]
    assert bias.ne(0).all() and bias.abs().max() < 0.1
    mix = weights["model.layers.2.mlp_res.proj"]
    assert mix.ne(0).any() and mix.std() == pytest.approx(1 / 8, rel=0.4)
    for writer in (KDA + "o_proj.weight", MOE + "routed_expert_up_proj.weight"):
        assert weights[writer].std() == pytest.approx(0.04 / math.sqrt(5), rel=0.05)
    for writer in ("model.layers.0.mlp.", MOE + "shared_"):
        assert weights[writer + "down_proj.weight"].std() == pytest.approx(0.018, rel=0.05)
    for part in weights[MOE + "in_proj.weight"].split([32, 128, 128]):
        assert part.std() == pytest.approx(0.02, rel=0.05)


def kept_after(steps: int, rate: torch.Tensor, bias: torch.Tensor) -> float:
    """Share of the channels that keep more than 1 % of the state, for the bounded gate."""
    g = -5.0 * torch.sigmoid(rate.exp()[:, None] * bias)
    return (steps * g).exp().gt(0.01).float().mean().item()


def test_most_of_the_state_lives_through_64_tokens():
    parameters = random_parameters(preset("mini"), seed=0)
    layers = preset("mini").kda_layer_ids
    stem = "model.layers.{}.self_attn."
    rate = torch.cat([parameters[stem.format(i) + "A_log"] for i in layers])
    bias = torch.cat([parameters[stem.format(i) + "dt_bias"] for i in layers])
    dt = torch.nn.functional.softplus(bias)
    assert dt.min() > 0.0009 and dt.max() < 0.101
    assert 0.7 < kept_after(64, rate, bias) < 0.8
    assert 0.55 < kept_after(64, torch.zeros_like(rate), bias) < 0.61  # the document's 58 %
    assert kept_after(64, rate, torch.zeros_like(bias)) == 0  # what the law is there against


def test_logits_differ_clearly_between_tokens_and_positions():
    model = KimiForCausalLM.from_config(preset("nano"), seed=0)
    ids = torch.randint(3, 259, (1, 96), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(ids)[0]
        changed = model(torch.cat((ids[:, :1] ^ 1, ids[:, 1:]), 1))[0]
    assert 1.5 < logits.std() < 2.5
    best = logits.topk(2).values
    assert (best[:, 0] - best[:, 1]).median() > 0.2
    assert logits.argmax(-1).unique().numel() > 30
    # the first token is still felt by the last one, through the state
    assert (changed[-1] - logits[-1]).abs().max() > 0.05
