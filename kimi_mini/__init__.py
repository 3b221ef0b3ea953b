"""Kimi K3 in miniature: the hybrid KDA + MLA model and the machinery that serves it, on a CPU.

from kimi_mini import KimiForCausalLM, preset
model = KimiForCausalLM.from_config(preset("mini"), seed=0)
logits = model(input_ids)                  # [B, T] → [B, T, vocab]
"""

from kimi_mini import ground_floor

ground_floor.check()

from kimi_mini.batch import ForwardBatch, ModelState, allocate_state  # noqa: E402
from kimi_mini.config import ConfigError, KimiConfig, preset  # noqa: E402
from kimi_mini.model import KimiForCausalLM  # noqa: E402

__all__ = [
    "ConfigError",
    "ForwardBatch",
    "KimiConfig",
    "KimiForCausalLM",
    "ModelState",
    "allocate_state",
    "preset",
]
