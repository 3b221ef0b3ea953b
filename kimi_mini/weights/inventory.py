"""What a checkpoint of a config holds: every stored tensor with its shape and dtype, and counts.

Nothing is allocated, so it also answers for K3 itself: 497,220 tensors of 1,503,647,073,024
elements with MXFP4 experts and vision tower, the totals of the published files.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from math import prod
from typing import Any, NamedTuple

import torch

from kimi_mini.config import ConfigError, KimiConfig
from kimi_mini.weights import mxfp4
from kimi_mini.weights.names import K3_PREFIX, Kind, Shape, TensorEntry, model_tensors


class Experts(StrEnum):
    """How routed experts are stored; the values serve as well."""

    PLAIN = "plain"
    MXFP4 = "mxfp4"


class StoredTensor(NamedTuple):
    """A tensor as it stands in a file, prefix included."""

    name: str
    shape: Shape
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of its data."""
        return prod(self.shape) * self.dtype.itemsize


def stored_forms(
    entry: TensorEntry, config: KimiConfig, experts: Experts, dtype: torch.dtype
) -> tuple[StoredTensor, ...]:
    """The tensors that stand for an entry: itself, or packed bytes and scales.

    `dtype` is the model's; kinds that keep float32 are stored so. Raises ConfigError where MXFP4 is
    asked for and the width is not a multiple of 32.
    """
    name = (K3_PREFIX if config.is_k3 else "") + entry.name
    if entry.kind is not Kind.EXPERT or experts is Experts.PLAIN:
        return (StoredTensor(name, entry.shape, entry.dtype_in(dtype)),)
    if (shapes := mxfp4.packed_shapes(entry.shape)) is None:
        raise ConfigError(
            f"MXFP4 needs expert widths that are multiples of {mxfp4.GROUP}, {entry.name} is "
            f"{[*entry.shape]} (moe_intermediate_size, routed_expert_hidden_size or hidden_size)"
        )
    names = (name + "_packed", name + "_scale")
    return tuple(StoredTensor(n, s, torch.uint8) for n, s in zip(names, shapes, strict=True))


def stored_tensors(
    config: KimiConfig, experts: Experts = Experts.PLAIN, dtype: torch.dtype = torch.bfloat16
) -> Iterator[StoredTensor]:
    """Every tensor of a published checkpoint, the vision part included where the config has one."""
    for entry in model_tensors(config):
        yield from stored_forms(entry, config, experts, dtype)
    if config.vision_config:
        for name, shape in _vision_shapes(config.vision_config):
            yield StoredTensor(name + ".weight", shape, dtype)


def parameter_count(config: KimiConfig) -> int:
    """Parameters of the text model, as they are published (A_log with its padding)."""
    layers = sum(map(config.is_moe_layer, range(config.num_hidden_layers)))
    expert = 3 * (config.moe_intermediate_size or 0) * config.expert_width
    rest = sum(prod(entry.shape) for entry in model_tensors(config, routed_experts=False))
    return rest + layers * config.num_experts * expert


def _vision_shapes(vision: dict[str, Any]) -> Iterator[tuple[str, Shape]]:
    try:
        hidden, qkv = vision["vt_hidden_size"], vision["qkv_hidden_size"]
        inner, patch = vision["vt_intermediate_size"], vision["patch_size"]
        table = (vision["init_pos_emb_height"], vision["init_pos_emb_width"], hidden)
        merged = vision["mm_hidden_size"] * prod(vision["merge_kernel_size"])
        text, layers = vision["text_hidden_size"], vision["vt_num_hidden_layers"]
    except KeyError as error:
        raise ConfigError(f"missing field vision_config.{error.args[0]}") from error
    yield "vision_tower.patch_embed.proj", (hidden, 3, patch, patch)
    yield "vision_tower.patch_embed.pos_emb", table
    for i in range(layers):
        block = f"vision_tower.encoder.blocks.{i}."
        yield block + "wqkv", (3 * qkv, hidden)
        yield block + "wo", (hidden, qkv)
        yield block + "mlp.fc0", (inner, hidden)
        yield block + "mlp.fc1", (hidden, inner)
        yield block + "norm0", (hidden,)
        yield block + "norm1", (hidden,)
    yield "vision_tower.encoder.final_layernorm", (hidden,)
    yield "mm_projector.proj.0", (merged, merged)
    yield "mm_projector.proj.2", (text, merged)
    yield "mm_projector.post_norm", (text,)
