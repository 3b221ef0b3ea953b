"""What state costs, from a config: bytes a token, bytes a boundary, FLOPs of a replay (serving 8).

latent row        = MLA layers · (L + R) · itemsize            one a token
recurrent state   = KDA layers · H · D² · itemsize             one a boundary, at least float32
conv state        = KDA layers · (W-1) · 3HD · itemsize        with it, always
int8 checkpoint   = KDA layers · (H·D² + H·D · sizeof(scale)) + conv
FLOPs a token     = 2 · parameters it uses + MLA layers · heads · (qk + v) · 2 · position
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from cache.policy.cost_model import CostModel
from cache.pools.storage import Sizes
from kimi_mini.batch import state_form
from kimi_mini.config import KimiConfig
from kimi_mini.weights.names import model_tensors


def state_sizes(config: KimiConfig, dtype: torch.dtype, page: int) -> Sizes:
    """Bytes of one token's latent rows and of one boundary's states, for activations of `dtype`."""
    recurrent, conv, latent = (
        math.prod(shape) * wanted.itemsize for shape, wanted in state_form(config, 1, 1, 1, dtype)
    )
    return Sizes(page, row_bytes=latent, slot_bytes=recurrent + conv)


class Checkpoint(NamedTuple):
    """Bytes of one boundary's state: as it runs, and as it could be kept."""

    recurrent: int  # float32, float64 for a float64 model
    conv: int
    half: int  # recurrent in bfloat16, with conv
    int8: int  # recurrent in int8 with a float32 scale a key channel, with conv
    int8_half_scale: int  # the same with bfloat16 scales

    @property
    def full(self) -> int:
        return self.recurrent + self.conv


def checkpoint_bytes(config: KimiConfig, dtype: torch.dtype = torch.bfloat16) -> Checkpoint:
    """For activations (and so conv rows) of `dtype`."""
    (state, running), (window, _), _ = state_form(config, 1, 1, 1, dtype)
    numbers, conv = math.prod(state), math.prod(window) * dtype.itemsize
    scales = numbers // state[-2] if state[-2] else 0  # one for each key channel of a head
    return Checkpoint(
        running.itemsize * numbers,
        conv,
        2 * numbers + conv,
        numbers + 4 * scales + conv,
        numbers + 2 * scales + conv,
    )


def used_parameters(config: KimiConfig) -> int:
    """Parameters that one token is multiplied with: all but unused experts and the embedding."""
    rest = sum(math.prod(entry.shape) for entry in model_tensors(config, routed_experts=False))
    layers = sum(map(config.is_moe_layer, range(config.num_hidden_layers)))
    expert = 3 * (config.moe_intermediate_size or 0) * config.expert_width
    table = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    return rest + layers * (config.num_experts_per_token or 0) * expert - table


def cost_model(config: KimiConfig, dtype: torch.dtype = torch.bfloat16) -> CostModel:
    """The plain numbers that policies are given."""
    head = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    return CostModel(
        row_bytes=state_sizes(config, dtype, 1).row_bytes,
        checkpoint_bytes=checkpoint_bytes(config, dtype).full,
        flops=2 * used_parameters(config),
        attention_flops=len(config.mla_layer_ids) * config.num_attention_heads * head * 2,
    )
