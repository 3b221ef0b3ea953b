"""What is timed alone must be what the step does: every product once, every state, nothing else."""

import pytest
import torch

from kimi_mini import KimiForCausalLM, preset
from kimi_mini.batch import allocate_state
from kimi_mini.workbench import bench_shares
from kimi_mini.workbench.bench_model import Cell, Stage, Work
from kimi_mini.workbench.bench_shares import (
    CORE,
    measure_shares,
    products_of,
    recorded,
    states_of,
)


def stage(backend="torch"):
    model = KimiForCausalLM.from_config(preset("nano"), seed=0, backend=backend)
    state = allocate_state(model.config, num_slots=3, num_pages=12, page=16)
    return Stage(model, state, torch.arange(1, 13))


def calls_of(here, step):
    with torch.inference_mode(), recorded(here.model.dispatcher) as calls:
        here.model.forward_batch(step, here.state)
    return calls


def matrices(config):
    """Numbers of the matrices that one token meets, those of the attention's latents left out."""
    net = KimiForCausalLM(config)
    experts = {n for n, _ in net.named_parameters() if n.endswith((".w13", ".w2"))}
    everywhere = sum(
        p.numel()
        for n, p in net.named_parameters()
        if p.dim() == 2 and n not in experts and "kv_b" not in n and "embed" not in n
        and "conv" not in n and "dt_bias" not in n
    )  # fmt: skip
    chosen = sum(net.get_parameter(n).numel() for n in experts)
    return everywhere + chosen * config.num_experts_per_token // config.num_experts


def test_the_products_of_a_decode_step_are_all_its_matrices_once():
    here = stage()
    (step,) = here.decode_steps(Cell(Work.DECODE, 20, 1, 1), 1)
    products = [p for call in calls_of(here, step) for p in products_of(call)]
    assert sum(p.weight.numel() for p in products) == matrices(here.model.config)
    assert all(p.x.shape == (1, p.weight.shape[1]) for p in products)


def test_experts_of_many_tokens_get_as_many_products_as_choices():
    here, config = stage(), preset("nano")
    steps = here.prefill_steps(Cell(Work.PREFILL, 0, 2, 20), 40)
    (call, *_) = [c for c in calls_of(here, steps[0]) if c.name == "moe"]
    products = products_of(call)
    router, projections, *experts, up, down = (len(p.x) for p in products)
    assert router == projections == up == down == 40
    assert sum(experts) == 2 * 40 * config.num_experts_per_token
    assert all(p.x.shape[1] == p.weight.shape[1] for p in products)


def test_calls_are_written_down_while_the_block_runs_and_change_nothing():
    here = stage()
    (step,) = here.decode_steps(Cell(Work.DECODE, 5, 2, 1), 1)
    before = [x.clone() for x in here.state]
    backend = here.model.dispatcher.backend
    plain = here.model.forward_batch(step, here.state)
    for x, kept in zip(here.state, before, strict=True):
        x.copy_(kept)
    with recorded(here.model.dispatcher) as calls:
        assert torch.equal(here.model.forward_batch(step, here.state), plain)
    count = len(calls)
    kda, mla = len(here.model.config.kda_layer_ids), len(here.model.config.mla_layer_ids)
    assert [c.name for c in calls].count(CORE) == kda
    assert [c.name for c in calls].count("attend") == mla
    assert here.model.dispatcher.backend is backend
    here.model.forward_batch(step, here.state)
    assert len(calls) == count


def test_states_are_where_they_lie():
    here = stage()
    here.state.recurrent.fill_(2.0)
    states = states_of(here.state, torch.tensor([1, 3]))
    layers = len(here.model.config.kda_layer_ids)
    assert len(states) == 2 * 2 * layers
    for x in states:
        x.zero_()
    assert not here.state.recurrent[:, [1, 3]].any() and (here.state.recurrent[:, 2] == 2).all()


@pytest.mark.parametrize("decode", [True, False])
def test_overhead_is_what_the_parts_leave_of_the_step(decode, monkeypatch):
    here = stage()
    if decode:
        (step,) = here.decode_steps(Cell(Work.DECODE, 5, 1, 1), 1)
    else:
        (step,) = here.prefill_steps(Cell(Work.PREFILL, 0, 1, 30), 30)
    taken = {"step": 10e-3, "products": 4e-3, "attention": 1e-3, "recurrence": 3e-3,
             "states": 2e-3, "sgemm": 1e-3, "copy": 1e-3}  # fmt: skip
    monkeypatch.setattr(bench_shares, "medians", lambda functions, repeats: taken)
    shares = measure_shares(here.model, here.state, step, what="it", repeats=1)
    assert shares.decode is decode
    assert shares.overhead_ms == pytest.approx(3 if decode else 2)
    assert shares.overhead == pytest.approx(shares.overhead_ms / 10)
    assert shares.as_json()["overhead_ms"] == shares.overhead_ms
    assert shares.matrix_bytes > 0 and shares.product_flops >= shares.matrix_bytes / 2
