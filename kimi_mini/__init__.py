"""Kimi K3 in miniature: the hybrid KDA + MLA model and the machinery that serves it, on a CPU.

from kimi_mini import Engine, KimiForCausalLM, SamplingParams, preset
model = KimiForCausalLM.from_config(preset("mini"), seed=0)
logits = model(input_ids)                  # [B, T] → [B, T, vocab]
outputs = Engine(model).generate(["a prompt"], SamplingParams(temperature=0, max_tokens=32))
"""

from kimi_mini import ground_floor

ground_floor.check()

from kimi_mini.batch import ForwardBatch, ModelState, allocate_state  # noqa: E402
from kimi_mini.config import ConfigError, KimiConfig, preset  # noqa: E402
from kimi_mini.model import KimiForCausalLM  # noqa: E402
from kimi_mini.serving.engine import Engine  # noqa: E402
from kimi_mini.serving.outputs import CompletionOutput, Delta, RequestOutput  # noqa: E402
from kimi_mini.serving.sampling_params import SamplingParams  # noqa: E402

__all__ = [
    "CompletionOutput",
    "ConfigError",
    "Delta",
    "Engine",
    "ForwardBatch",
    "KimiConfig",
    "KimiForCausalLM",
    "ModelState",
    "RequestOutput",
    "SamplingParams",
    "allocate_state",
    "preset",
]
