"""A small stage for tests, with room for three rows, and what its layers call."""

import torch

from kimi_mini import KimiForCausalLM, preset
from kimi_mini.batch import allocate_state
from kimi_mini.workbench.bench_parts import recorded
from kimi_mini.workbench.bench_stage import Stage


def small_stage(backend="torch", config=None):
    model = KimiForCausalLM.from_config(config or preset("nano"), seed=0, backend=backend)
    state = allocate_state(model.config, num_slots=3, num_pages=12, page=16)
    return Stage(model, state, torch.arange(1, 13))


def calls_of(stage, step):
    with torch.inference_mode(), recorded(stage.model.dispatcher) as calls:
        stage.model.forward_batch(step, stage.state)
    return calls
