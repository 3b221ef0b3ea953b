"""The one mapping between published tensors and the parameters of this model.

A published tensor is a region of one parameter: a run of rows of a fused projection, one expert of
a stack, or the whole. `model_tensors` lists every region of a config; reading, writing, random
weights and the inventory all go through it, and the regions cover every parameter exactly once.

Names here carry the prefix `model.` (and `lm_head.`), as Kimi-Linear stores them; K3 puts
`language_model.` in front. `canonical_name` undoes the three published prefixes.
Source: the published tensor table of Kimi K3 and Kimi-Linear.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from kimi_mini.config import KimiConfig
from kimi_mini.dtypes import at_least_float32

Shape = tuple[int, ...]
Index = tuple[int | slice, ...]

K3_PREFIX = "language_model."
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
VISION_PREFIXES = ("vision_tower.", "mm_projector.")


class Kind(Enum):
    """What a tensor is for: decides its stored form, its dtype and its random law."""

    VOCABULARY = "embedding and head"
    MATRIX = "projection"
    EXPERT = "projection of a routed expert"
    NORM = "norm weight"
    MIX = "AttnRes score vector"
    HEAD_NORM = "norm weight of the KDA output"
    CONV = "convolution weight"
    A_LOG = "log decay rate per head"
    DT_BIAS = "decay bias per channel"
    ROUTER_BIAS = "expert choice bias"


# float32 in the published files and in a bf16 model: rounding them moves decays and expert choices
FLOAT32_KINDS = frozenset(
    {Kind.HEAD_NORM, Kind.CONV, Kind.A_LOG, Kind.DT_BIAS, Kind.ROUTER_BIAS},
)


class TensorEntry(NamedTuple):
    """One published tensor: its name and shape in a file, and the region it fills.

    `index` bounds every dimension of parameter `param` explicitly (a slice with start and stop, or
    an int), so that `parameter[entry.index]` is the region.
    """

    name: str
    shape: Shape
    kind: Kind
    param: str
    index: Index

    @property
    def region(self) -> Shape:
        """Shape of the region within the parameter."""
        return tuple(i.stop - i.start for i in self.index if isinstance(i, slice))

    @property
    def keeps_float32(self) -> bool:
        """Whether it stays float32 where the rest of the model is narrower."""
        return self.kind in FLOAT32_KINDS

    def dtype_in(self, model_dtype: torch.dtype) -> torch.dtype:
        """Its dtype in a model of `model_dtype`: at least float32 for the kinds that keep it."""
        if self.keeps_float32:
            return at_least_float32(model_dtype)
        return model_dtype

    def accepts(self, shape: Shape) -> bool:
        """Whether a stored plain tensor of this shape fills the region.

        A_log may have any number of entries >= the number of heads, along one dimension (published:
        [head_dim], zero beyond the heads, or [1, 1, n, 1]); a convolution may lack its middle 1.
        """
        if self.kind is Kind.A_LOG:
            return prod(shape) == max(shape, default=0) >= self.region[0]
        if self.kind is Kind.CONV:
            return shape in (self.shape, self.region)
        return shape == self.shape

    def to_region(self, stored: Tensor) -> Tensor:
        """A stored tensor of an accepted shape, seen in the shape of the region."""
        if self.kind is Kind.A_LOG:
            return stored.flatten()[: self.region[0]]
        return stored.reshape(self.region)

    def to_stored(self, region: Tensor) -> Tensor:
        """A region in the shape that is written; A_log is padded with zeros."""
        if self.kind is Kind.A_LOG:
            return torch.nn.functional.pad(region, (0, self.shape[0] - self.region[0]))
        return region.reshape(self.shape)


class ParameterSpec(NamedTuple):
    """Shape of a parameter, and whether it stays float32 where the model is narrower."""

    shape: Shape
    keeps_float32: bool


def canonical_name(stored: str) -> str | None:
    """The name used here for a stored one, or None if it has none of the published prefixes.

    >>> canonical_name("language_model.layers.0.mlp_res_norm.weight")
    'model.layers.0.mlp_res_norm.weight'
    """
    name = stored.removeprefix(K3_PREFIX)
    if name == HEAD or name.startswith("model."):
        return name
    return f"model.{name}" if name != stored else None


def is_vision(stored: str) -> bool:
    """Whether a stored name belongs to the vision tower or its projector."""
    return stored.startswith(VISION_PREFIXES)


def parameter_specs(config: KimiConfig) -> dict[str, ParameterSpec]:
    """Every parameter of the model, by its name in `state_dict()`; a tied head is not listed."""
    specs: dict[str, ParameterSpec] = {}
    for entry in model_tensors(config):
        extent = tuple(i.stop if isinstance(i, slice) else i + 1 for i in entry.index)
        known = specs.get(entry.param, ParameterSpec(extent, entry.keeps_float32))
        shape = tuple(max(a, b) for a, b in zip(extent, known.shape, strict=True))
        specs[entry.param] = ParameterSpec(shape, entry.keeps_float32)
    return specs


def check_parameters(parameters: Mapping[str, Tensor], config: KimiConfig) -> None:
    """Raises ValueError unless these are the parameters of a model of this config.

    With tied embeddings `lm_head.weight` may be listed too, as the same memory as the embedding.
    """
    specs = parameter_specs(config)
    wrong = [f"no {name}" for name in specs if name not in parameters]
    for name, parameter in parameters.items():
        spec, shape = specs.get(name), tuple(parameter.shape)
        if name == HEAD and config.tie_word_embeddings:
            tied = EMBEDDING in parameters and parameters[EMBEDDING].data_ptr()
            wrong += [] if parameter.data_ptr() == tied else [f"{HEAD} is not tied"]
        elif spec is None:
            wrong.append(f"{name} is unknown")
        elif shape != spec.shape:
            wrong.append(f"{name} is {[*shape]}, allowed: {[*spec.shape]}")
        elif parameter.is_meta:
            wrong.append(f"{name} has no memory (device meta)")
    if wrong:
        raise ValueError(f"not the parameters of this config: {', '.join(wrong[:10])}")


def model_tensors(config: KimiConfig, routed_experts: bool = True) -> Iterator[TensorEntry]:
    """Every text tensor of the config, plain experts, in layer order; a tied head is not listed.

    routed_experts=False leaves those out, which are nearly all there are.
    """
    hidden, vocab = config.hidden_size, config.vocab_size
    yield _whole(EMBEDDING, (vocab, hidden), Kind.VOCABULARY)
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}."
        yield _whole(layer + "input_layernorm.weight", (hidden,), Kind.NORM)
        yield _whole(layer + "post_attention_layernorm.weight", (hidden,), Kind.NORM)
        if config.attn_res_block_size:
            yield from _attn_res(layer + "self_attention_res", hidden)
            yield from _attn_res(layer + "mlp_res", hidden)
        attention = _kda if config.is_kda_layer(i) else _mla
        yield from attention(config, layer + "self_attn.")
        if config.is_moe_layer(i):
            yield from _moe(config, layer + "block_sparse_moe.")
            if routed_experts:
                yield from _experts(config, layer + "block_sparse_moe.experts.")
        else:
            yield from _mlp(layer + "mlp.", hidden, config.intermediate_size)
    yield _whole("model.norm.weight", (hidden,), Kind.NORM)
    if config.attn_res_block_size:
        yield from _attn_res("model.output_attn_res", hidden)
    if not config.tie_word_embeddings:
        yield _whole(HEAD, (vocab, hidden), Kind.VOCABULARY)


def _whole(
    name: str, shape: Shape, kind: Kind, param: str = "", param_shape: Shape = ()
) -> TensorEntry:
    """A tensor that is a whole parameter, of the same name and shape unless given."""
    index = tuple(slice(0, size) for size in param_shape or shape)
    return TensorEntry(name, shape, kind, param or name, index)


def _stacked(at: str, param: str, width: int, *parts: tuple[str, int]) -> Iterator[TensorEntry]:
    """Matrices (name, rows) that stand one below the other in one parameter."""
    start = 0
    for name, rows in parts:
        index = (slice(start, start + rows), slice(0, width))
        yield TensorEntry(f"{at}{name}.weight", (rows, width), Kind.MATRIX, at + param, index)
        start += rows


def _attn_res(name: str, hidden: int) -> Iterator[TensorEntry]:
    yield _whole(name + "_norm.weight", (hidden,), Kind.NORM, name + ".norm")
    yield _whole(name + "_proj.weight", (1, hidden), Kind.MIX, name + ".proj", (hidden,))


def _kda(config: KimiConfig, at: str) -> Iterator[TensorEntry]:
    kda, hidden, width = config.linear_attn_config, config.hidden_size, config.kda_width
    heads, dim, window = kda.num_heads, kda.head_dim, kda.short_conv_kernel_size
    gate = ("g_proj", width) if kda.use_full_rank_gate else ("g_a_proj", dim)
    projections = [(f"{x}_proj", width) for x in "qkv"]
    yield from _stacked(
        at, "in_proj.weight", hidden, *projections, ("f_a_proj", dim), ("b_proj", heads), gate
    )
    for j, x in enumerate("qkv"):
        index = (slice(j * width, (j + 1) * width), slice(0, window))
        shape = (width, 1, window)
        yield TensorEntry(f"{at}{x}_conv1d.weight", shape, Kind.CONV, at + "conv_weight", index)
    yield _whole(at + "f_b_proj.weight", (width, dim), Kind.MATRIX)
    if not kda.use_full_rank_gate:
        yield _whole(at + "g_b_proj.weight", (width, dim), Kind.MATRIX)
    # K3 stores head_dim entries for its heads, zero beyond them; the low-rank form stores the heads
    stored = max(heads, dim) if kda.use_full_rank_gate else heads
    yield _whole(at + "A_log", (stored,), Kind.A_LOG, param_shape=(heads,))
    yield _whole(at + "dt_bias", (width,), Kind.DT_BIAS, param_shape=(heads, dim))
    yield _whole(at + "o_norm.weight", (dim,), Kind.HEAD_NORM)
    yield _whole(at + "o_proj.weight", (hidden, width), Kind.MATRIX)


def _mla(config: KimiConfig, at: str) -> Iterator[TensorEntry]:
    heads, hidden, latent = config.num_attention_heads, config.hidden_size, config.kv_lora_rank
    q_rows, v_rows = heads * config.qk_head_dim, heads * config.v_head_dim
    rank = config.q_lora_rank
    parts = [
        ("q_a_proj", rank) if rank else ("q_proj", q_rows),
        ("kv_a_proj_with_mqa", config.latent_width),
    ]
    if config.mla_use_output_gate:
        parts.append(("g_proj", v_rows))
    yield from _stacked(at, "in_proj.weight", hidden, *parts)
    if rank:
        yield _whole(at + "q_a_layernorm.weight", (rank,), Kind.NORM)
        yield _whole(at + "q_b_proj.weight", (q_rows, rank), Kind.MATRIX)
    kv_rows = heads * (config.qk_nope_head_dim + config.v_head_dim)
    yield _whole(at + "kv_a_layernorm.weight", (latent,), Kind.NORM)
    yield _whole(at + "kv_b_proj.weight", (kv_rows, latent), Kind.MATRIX)
    yield _whole(at + "o_proj.weight", (hidden, v_rows), Kind.MATRIX)


def _mlp(at: str, hidden: int, width: int) -> Iterator[TensorEntry]:
    gate_up = (("gate_proj", width), ("up_proj", width))
    yield from _stacked(at, "gate_up_proj.weight", hidden, *gate_up)
    yield _whole(at + "down_proj.weight", (hidden, width), Kind.MATRIX)


def _moe(config: KimiConfig, at: str) -> Iterator[TensorEntry]:
    hidden, latent = config.hidden_size, config.routed_expert_hidden_size
    scores = (config.num_experts, hidden)
    yield _whole(at + "gate.weight", scores, Kind.MATRIX, at + "gate.proj.weight")
    bias = at + "gate.e_score_correction_bias"
    yield _whole(bias, (config.num_experts,), Kind.ROUTER_BIAS)
    shared = config.num_shared_experts * config.moe_intermediate_size
    parts = [("routed_expert_down_proj", latent)] if latent else []
    if shared:
        parts += [(f"shared_experts.{x}_proj", shared) for x in ("gate", "up")]
    stacked = _stacked(at, "in_proj.weight", hidden, *parts)
    if latent:
        yield next(stacked)
        if config.latent_moe_use_norm:
            yield _whole(at + "routed_expert_norm.weight", (latent,), Kind.NORM)
        yield _whole(at + "routed_expert_up_proj.weight", (hidden, latent), Kind.MATRIX)
    if shared:
        yield from stacked
        down = "shared_experts.down_proj.weight"
        yield _whole(at + down, (hidden, shared), Kind.MATRIX, at + "shared_down_proj.weight")


def _experts(config: KimiConfig, at: str) -> Iterator[TensorEntry]:
    inner, width = config.moe_intermediate_size, config.expert_width
    forms = (
        (".w1.weight", (inner, width), at + "w13", (slice(0, inner), slice(0, width))),
        (".w3.weight", (inner, width), at + "w13", (slice(inner, 2 * inner), slice(0, width))),
        (".w2.weight", (width, inner), at + "w2", (slice(0, width), slice(0, inner))),
    )
    for e in range(config.num_experts):
        for name, shape, param, index in forms:
            yield TensorEntry(f"{at}{e}{name}", shape, Kind.EXPERT, param, (e, *index))
