"""What counts as products is every matrix that a step meets, itself, in its order, nothing else."""

from dataclasses import replace

import pytest
import torch

from kimi_mini import preset
from kimi_mini.workbench.bench_cells import Cell, Work
from kimi_mini.workbench.bench_products import products_of
from tests.kimi_mini.workbench.stages import calls_of, small_stage

NANO = preset("nano")
KDA = NANO.linear_attn_config
LOW_RANK_GATE = replace(NANO, linear_attn_config=replace(KDA, use_full_rank_gate=False))


def matrices(model):
    """The name of each matrix that every token meets, by its place in memory; but for those of
    attention's latents."""
    return {
        p.data_ptr(): name
        for name, p in model.named_parameters()
        if name.endswith(("_proj.weight", ".proj.weight", "lm_head.weight")) and "kv_b" not in name
    }


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("config", [NANO, LOW_RANK_GATE], ids=["full gate", "low-rank gate"])
def test_a_decode_step_meets_the_matrices_of_the_model_in_its_order(config, backend):
    stage = small_stage(backend, config)
    (step,) = stage.decode_steps(Cell(Work.DECODE, 20, 1, 1), 1)
    products = [p for call in calls_of(stage, step) for p in products_of(call.name, call.args)]
    everywhere = matrices(stage.model)
    met = [everywhere.get(p.weight.data_ptr(), "expert") for p in products]
    assert [name for name in met if name != "expert"] == [*everywhere.values()]
    layers = sum(config.is_moe_layer(i) for i in range(config.num_hidden_layers))
    assert met.count("expert") == 2 * layers * config.num_experts_per_token
    assert met[-1] == "lm_head.weight" and any("f_b_proj" in name for name in met)
    assert any("g_b_proj" in name for name in met) == (config is LOW_RANK_GATE)
    assert all(p.x.shape == (1, p.weight.shape[1]) for p in products)


def test_the_experts_are_those_that_the_router_chose():
    """Each with as many rows as chose it: its own two matrices."""
    stage = small_stage()
    (step,) = stage.decode_steps(Cell(Work.DECODE, 5, 3, 1), 1)
    calls = [call for call in calls_of(stage, step) if call.name == "moe"]
    for call in calls:
        x, weights, rule, *_ = call.args
        with torch.inference_mode():
            chosen = stage.model.dispatcher.functions.route(x, weights.router, weights.bias, rule)
        _, _, *experts, _, _ = products_of(call.name, call.args)
        rows = {p.weight.data_ptr(): len(p.x) for p in experts}
        for stack in (weights.w13, weights.w2):
            for e in range(len(stack)):
                assert rows.get(stack[e].data_ptr(), 0) == int((chosen.experts == e).sum())


def test_experts_of_many_tokens_get_as_many_rows_as_choices():
    stage = small_stage()
    (step,) = stage.prefill_steps(Cell(Work.PREFILL, 0, 2, 20), 40)
    (call, *_) = [c for c in calls_of(stage, step) if c.name == "moe"]
    products = products_of(call.name, call.args)
    router, projections, *experts, up, down = (len(p.x) for p in products)
    assert router == projections == up == down == 40
    assert sum(experts) == 2 * 40 * NANO.num_experts_per_token
    assert all(p.x.shape[1] == p.weight.shape[1] for p in products)
