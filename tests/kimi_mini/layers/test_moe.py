"""Router and experts. A wrong reading of the bias, the groups or the norm must fail here."""

import dataclasses

import pytest
import torch

from kernels import experts as sharing
from kernels.experts import mix_experts
from kernels.glu import situ_glu
from kernels.routing import Routing, route, select_experts
from kimi_mini import preset
from kimi_mini.layers.mlp import glu_form
from kimi_mini.layers.moe import Experts, Router, SparseMoE


def config(**changes):
    return dataclasses.replace(preset("nano"), **changes)


def filled(module, seed=0, scale=0.3):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return module


def tokens(n, width, seed=1):
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed))


# --- choosing -------------------------------------------------------------------------------------


def test_experts_outside_the_chosen_groups_are_masked_with_minus_infinity_not_zero():
    """BR-57: all scores negative, so a mask of 0 would win."""
    biased = torch.tensor([[-0.9, -0.8, -0.2, -0.1]])
    assert select_experts(biased, 2, groups=2, kept_groups=1).tolist() == [[3, 2]]


def test_a_group_scores_the_sum_of_its_two_best():
    """Best single expert in group 0, best pair in group 1."""
    biased = torch.tensor([[0.9, 0.0, 0.1, 0.6, 0.5, 0.0]])
    assert select_experts(biased, 2, groups=2, kept_groups=1).tolist() == [[3, 4]]


@pytest.mark.parametrize("experts", [8, 64])
@pytest.mark.parametrize("threads", [1, 2])
def test_ties_go_to_the_lowest_expert(experts, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        chosen = select_experts(torch.zeros(500, experts), 3)
    finally:
        torch.set_num_threads(before)
    assert (chosen == torch.tensor([0, 1, 2])).all()


def test_no_expert_is_chosen_twice_and_too_few_is_an_error():
    """BR-57: bias of -inf for 6 of 8 experts with k = 4."""
    biased = torch.full((3, 8), float("-inf"))
    biased[:, 2], biased[:, 5] = 0.5, 0.7
    assert select_experts(biased, 2).tolist() == [[5, 2]] * 3
    with pytest.raises(ValueError, match="fewer than 4 experts"):
        select_experts(biased, 4)


# --- weighing -------------------------------------------------------------------------------------


def test_the_bias_decides_who_and_never_how_much():
    router = filled(Router(config(num_experts=6, num_experts_per_token=2), torch.float64))
    x = tokens(40, 64).double()
    scores = torch.sigmoid(x @ router.proj.weight.T)
    with torch.no_grad():
        router.e_score_correction_bias.copy_(torch.tensor([9.0, 0, 0, 0, 0, 8.0]))
    routing = router(x)
    assert (routing.experts.sort().values == torch.tensor([0, 5])).all()
    assert not torch.equal(scores.topk(2).indices.sort().values, routing.experts.sort().values)
    expected = scores.gather(1, routing.experts)
    expected = expected / expected.sum(-1, keepdim=True)
    assert (routing.weights - expected).abs().max() < 1e-15


@pytest.mark.parametrize("renormalise", [True, False])
def test_weights_sum_to_the_factor_only_when_renormalised(renormalise):
    """BR-74."""
    changed = config(moe_renormalize=renormalise, routed_scaling_factor=2.5)
    router = filled(Router(changed, torch.float32))
    x = tokens(20, 64)
    sums = router(x).weights.sum(-1)
    scores = torch.sigmoid(x @ router.proj.weight.T).gather(1, router(x).experts).sum(-1)
    expected = torch.full_like(sums, 2.5) if renormalise else 2.5 * scores
    torch.testing.assert_close(sums, expected)


def test_scores_that_all_underflow_give_finite_weights_and_nan_stays_in_its_row():
    """BR-74: sigmoid(-120) is 0 in float32, so renormalising is 0/0 without the 1e-20."""
    router = Router(config(), torch.float32)
    with torch.no_grad():
        router.proj.weight.fill_(-120.0 / 64)
        router.e_score_correction_bias.zero_()
    assert torch.isfinite(router(torch.ones(3, 64)).weights).all()
    x = tokens(4, 64)
    clean = router(x).weights.clone()
    x[2] = float("nan")
    poisoned = router(x)
    assert torch.equal(poisoned.weights[[0, 1, 3]], clean[[0, 1, 3]])
    assert poisoned.weights[2].isnan().all()


def test_the_router_bias_stays_float32_through_casting_to_bf16():
    """BR-56: 256 biases in [6.817, 7.063] become 9 values in bf16."""
    changed = config(num_experts=256, num_experts_per_token=8)
    router = filled(Router(changed, torch.float32), scale=0.02)
    with torch.no_grad():
        router.proj.weight.copy_(router.proj.weight.bfloat16())
        router.e_score_correction_bias.copy_(torch.linspace(6.817, 7.063, 256))
    x = tokens(64, 64).bfloat16().float()
    before = router(x).experts
    router.bfloat16()
    assert router.e_score_correction_bias.dtype == torch.float32
    assert router.proj.weight.dtype == torch.bfloat16
    assert torch.equal(router(x).experts, before)
    with torch.no_grad():
        rounded = router.e_score_correction_bias.bfloat16().float()
        router.e_score_correction_bias.copy_(rounded)
    assert len(rounded.unique()) == 9
    changed_sets = (router(x).experts.sort().values != before.sort().values).any(-1).sum()
    assert changed_sets > 10  # so that the test can tell


def test_given_choices_are_taken_and_weighed_by_the_own_scores():
    router = filled(Router(config(), torch.float32))
    x = tokens(5, 64)
    forced = torch.tensor([[7, 1]] * 5)
    weights = (router.proj.weight, router.e_score_correction_bias)
    routing = route(x, *weights, router.rule, forced)
    assert torch.equal(routing.experts, forced)
    scores = torch.sigmoid(x @ router.proj.weight.T).gather(1, forced)
    torch.testing.assert_close(routing.weights, scores / scores.sum(-1, keepdim=True))


# --- the experts ----------------------------------------------------------------------------------


def expert_loop(experts, x, routing, betas):
    """One token, one choice at a time."""
    out = torch.zeros_like(x)
    for n in range(len(x)):
        for e, w in zip(routing.experts[n], routing.weights[n], strict=True):
            a, b = (experts.w13[e] @ x[n]).chunk(2)
            out[n] += w * (experts.w2[e] @ situ_glu(a, b, *betas))
    return out


@pytest.mark.parametrize("n", [0, 1, 2, 8, 9, 100, 128, 129, 300])
@pytest.mark.parametrize("imbalanced", [False, True])
def test_every_way_of_sharing_tokens_out_gives_the_loop_over_choices(n, imbalanced):
    """1..8 tokens take a product per choice, 9..128 are padded, more take one per expert."""
    shape = config()
    experts = filled(Experts(shape, 32, torch.float64))
    generator = torch.Generator().manual_seed(n)
    scores = torch.rand(n, 8, generator=generator)
    if imbalanced:
        scores[:, 3] += 1
    routing = Routing(scores.argsort(1)[:, -2:], torch.rand(n, 2, generator=generator).double())
    x = tokens(n, 32).double()
    betas = (shape.activation_situ_beta, shape.activation_situ_linear_beta)
    got = mix_experts(x, routing, experts.w13, experts.w2, glu_form(shape))
    assert got.shape == (n, 32)
    torch.testing.assert_close(got, expert_loop(experts, x, routing, betas), rtol=0, atol=1e-12)


def test_decode_sized_batches_run_no_loop_over_experts(monkeypatch):
    def refuse(*_):
        raise AssertionError("looped over experts")

    monkeypatch.setattr(sharing, "_one_by_one", refuse)
    shape = preset("mini")
    experts = filled(Experts(shape, 128, torch.float32))
    for n in (*range(1, 33), 64, 128):
        chosen = torch.rand(n, 32).argsort(1)[:, :4]
        routing = Routing(chosen, torch.rand(n, 4))
        mix_experts(tokens(n, 128), routing, experts.w13, experts.w2, glu_form(shape))


def test_norm_follows_the_weighted_sum_and_shared_experts_see_full_width():
    """y = up RMSNorm(sum_e w_e expert_e(down x)) + shared(x): norm on the aggregate, shared
    unweighted, router fed the full-width x."""
    shape = config()
    moe = filled(SparseMoE(shape, torch.float64))
    x = tokens(6, 64).double()
    betas = (shape.activation_situ_beta, shape.activation_situ_linear_beta)
    latent, gate, up = (x @ moe.in_proj.weight.T).split([32, 128, 128], -1)
    routing = moe.gate(x)
    a = expert_loop(moe.experts, latent, routing, betas)
    a = a / (a.square().mean(-1, keepdim=True) + 1e-5).sqrt() * moe.routed_expert_norm.weight
    shared = situ_glu(gate, up, *betas) @ moe.shared_down_proj.weight.T
    expected = a @ moe.routed_expert_up_proj.weight.T + shared
    torch.testing.assert_close(moe(x), expected, rtol=0, atol=1e-12)
