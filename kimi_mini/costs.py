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

from cache.policy.cost_model import (
    CostModel,
    PrefixFlops,
    best_interval,
    break_even,
    interval_for_budget,
    mean_replay,
)
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


def prefix_flops(config: KimiConfig) -> PrefixFlops:
    """FLOPs of a prefix, as eviction weighs them (serving 4.11): parameters; 8 a number of the
    state (decay, read, write, output); scores and values of latent attention."""
    kda, model = config.linear_attn_config, cost_model(config)
    state = len(config.kda_layer_ids) * kda.num_heads * kda.head_dim**2
    return PrefixFlops(model.flops + 8 * state, model.attention_flops // 2)


def checkpoint_forms(config: KimiConfig, dtype: torch.dtype) -> dict[str, int]:
    """Bytes of one checkpoint by the numbers that its recurrent state is kept in."""
    kept = checkpoint_bytes(config, dtype)
    running = "float64" if dtype == torch.float64 else "float32"
    return {
        running: kept.full,
        "bfloat16": kept.half,
        "int8": kept.int8,
        "int8, bfloat16 scales": kept.int8_half_scale,
    }


def break_even_tokens(config: KimiConfig, dtype: torch.dtype) -> dict[str, float] | None:
    """For each form the tokens whose latent rows weigh as much; None for a model without rows."""
    row, forms = cost_model(config, dtype).row_bytes, checkpoint_forms(config, dtype)
    return {form: break_even(size, row) for form, size in forms.items()} if row else None


class Density(NamedTuple):
    """Checkpoints of one path at one interval: bytes as they run, bytes at rest in int8, and how
    many times the path's latent rows the former weigh; None for a model without rows."""

    checkpoints: int
    bytes: int
    int8_bytes: int
    of_rows: float | None


def density(config: KimiConfig, dtype: torch.dtype, path: int, interval: int) -> Density:
    """Checkpoints at all multiples of `interval` on a path (the second table of serving 8.1)."""
    kept, rows = checkpoint_bytes(config, dtype), path * cost_model(config, dtype).row_bytes
    count = path // interval
    full = count * kept.full
    return Density(count, full, count * kept.int8, full / rows if rows else None)


class Interval(NamedTuple):
    """Where checkpoints on one path should be (serving 8.3), in tokens. best: None for a path that
    no boundary of the grid is on, and so mean_replay, what a hit replays on average. within_rows:
    the smallest at which they weigh no more than the path's rows; None if not even one does."""

    best: int | None
    mean_replay: float | None
    within_rows: int | None


def interval(
    config: KimiConfig, dtype: torch.dtype, path: int, grid: int, *, hits: float, price: float
) -> Interval:
    """hits: of the path, an hour. price: FLOPs that a byte kept for an hour is worth."""
    kept, model = checkpoint_bytes(config, dtype).full, cost_model(config, dtype)
    rows = path * model.row_bytes
    within_rows = interval_for_budget(kept, path, rows) if rows >= kept else None
    if path < grid:
        return Interval(None, None, within_rows)
    best = best_interval(path=path, grid=grid, holding=price * kept, replay=hits * model.flops)
    return Interval(best, mean_replay(best, grid), within_rows)
