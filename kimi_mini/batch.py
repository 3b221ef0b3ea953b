"""ForwardBatch: the one description of a step, and the state it acts on.

State is always an explicit argument: plain tensors indexed by layer, then by slot or page. Pools
hand them out, the model reads and writes them, nobody else keeps a copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.dispatcher import KDAKernelDispatcher
from kernels.kda_metadata import KDAMetadata
from kernels.paging import (
    AttentionMetadata,
    Destinations,
    build_attention_metadata,
    build_destinations,
)
from kimi_mini.config import KimiConfig


class ModelState(NamedTuple):
    """The three kinds of state of all layers. Slot 0 and page 0 are padding sinks.

    recurrent [KDA layers, slots+1, H, V, K]   float32 (float64 for a float64 model)
    conv      [KDA layers, slots+1, W-1, 3*H*D] activation dtype, order q, k, v
    latent    [MLA layers, pages, page, L+R]   activation dtype
    Per-layer slices may have any slot or page stride.
    """

    recurrent: Tensor
    conv: Tensor
    latent: Tensor


@dataclass(frozen=True)
class ForwardBatch:
    """One engine step over B rows, prefill pieces and decode rows mixed; all tensors integer.

    token_ids   [N]     the tokens of all rows, packed
    query_start [B+1]   row r owns tokens query_start[r] .. query_start[r+1]; may own none
    context_len [B]     tokens already in the row's state and pages; 0: the row starts from zeros
    slots       [B]     state slot; 1..num_slots distinct, 0 padding sink, -1 the row does not run
    page_table  [B, P]  pages of the row in order, -1 where unused
    out_rows    [N]     flat latent row (page * page_size + place) of each token: the place that the
                        page table gives it, or -1 (its row is there already, or it is padding)
    exports     [C, 3]  (row, offset, destination slot): also keep the state after `offset` tokens
    logits_at   [M]     tokens whose logits are wanted; None: the last token of each row
    """

    token_ids: Tensor
    query_start: Tensor
    context_len: Tensor
    slots: Tensor
    page_table: Tensor
    out_rows: Tensor
    exports: Tensor | None = None
    logits_at: Tensor | None = None


class Step(NamedTuple):
    """A checked step as the layers use it. Token-wise layers need none of it."""

    dispatcher: KDAKernelDispatcher
    kda: KDAMetadata
    attention: AttentionMetadata
    destinations: Destinations | None  # None: stateless, the batch's latent rows are the pool


def stateless_step(rows: int, length: int, dispatcher: KDAKernelDispatcher) -> Step:
    """`rows` sequences of `length` tokens each, from zeros, keeping nothing.

    The latent pool of such a step is the batch itself: pages of one row, token t in page t.
    """
    query_start = [r * length for r in range(rows + 1)]
    nothing = [0] * rows
    table = torch.arange(rows * length).view(rows, length)
    return Step(
        dispatcher,
        dispatcher.plan(query_start, nothing, nothing, num_slots=0, extend_only=True),
        build_attention_metadata(query_start, nothing, table, page=1, pages=rows * length),
        None,
    )


def prepare_step(
    batch: ForwardBatch,
    state: ModelState,
    config: KimiConfig,
    dtype: torch.dtype,
    dispatcher: KDAKernelDispatcher,
) -> Step:
    """Check a batch against the state it names, and the state against the model of activation dtype
    `dtype`; ValueError says what does not fit, before any memory is touched."""
    check_state(state, config, dtype)
    N = batch.token_ids.shape[0]
    _check_range("token_ids", batch.token_ids, 0, config.vocab_size)
    pages, page = state.latent.shape[1:3]
    if batch.out_rows.shape != (N,):
        raise ValueError(f"out_rows must be [{N}], one a token; got {[*batch.out_rows.shape]}")
    _check_range("out_rows", batch.out_rows, -1, pages * page)
    if batch.logits_at is not None:
        _check_range("logits_at", batch.logits_at, 0, N)
    kda = dispatcher.plan(
        batch.query_start,
        batch.slots,
        batch.context_len,
        batch.exports,
        num_slots=state.recurrent.shape[1] - 1,
        num_tokens=N,
    )
    attention = build_attention_metadata(
        batch.query_start,
        batch.context_len,
        batch.page_table,
        page=page,
        pages=pages,
        skipped=(batch.slots == -1).tolist(),
    )
    destinations = build_destinations(batch.out_rows.long(), attention, page)
    return Step(dispatcher, kda, attention, destinations)


def check_state(state: ModelState, config: KimiConfig, dtype: torch.dtype) -> None:
    """ValueError unless the tensors are those of a model of this config and activation dtype.

    A recurrent state in half precision is refused here: it would stall (bf16 rounds S + 0.002 (1-S)
    back to S from 0.5 on).
    """
    kda, slots = config.linear_attn_config, state.recurrent.shape[1]
    H, D = kda.num_heads, kda.head_dim
    layers, latent = len(config.kda_layer_ids), state.latent
    recurrent_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    expected = {
        "recurrent": (state.recurrent, (layers, slots, H, D, D), recurrent_dtype),
        "conv": (state.conv, (layers, slots, kda.short_conv_kernel_size - 1, 3 * H * D), dtype),
        "latent": (
            latent,
            (len(config.mla_layer_ids), *latent.shape[1:3], config.latent_width),
            dtype,
        ),
    }
    for name, (tensor, shape, wanted) in expected.items():
        if tuple(tensor.shape) != shape or tensor.dtype != wanted:
            raise ValueError(
                f"state.{name} must be {wanted} {[*shape]} for this model, got {tensor.dtype} "
                f"{[*tensor.shape]}"
            )


def _check_range(name: str, values: Tensor, low: int, high: int) -> None:
    if values.dim() != 1 or values.dtype.is_floating_point:
        raise ValueError(
            f"{name} must be integers along one axis, got {values.dtype} {[*values.shape]}"
        )
    if values.numel() and not (low <= int(values.min()) and int(values.max()) < high):
        raise ValueError(
            f"{name} must lie in {low}..{high - 1}, got {int(values.min())}..{int(values.max())}"
        )


def allocate_state(
    config: KimiConfig,
    *,
    num_slots: int,
    num_pages: int,
    page: int = 16,
    dtype: torch.dtype = torch.float32,
) -> ModelState:
    """Zeroed state tensors for num_slots slots and num_pages pages, sinks added on top.

    dtype: the model's activation dtype.
    """
    kda = config.linear_attn_config
    H, D = kda.num_heads, kda.head_dim
    layers, slots = len(config.kda_layer_ids), num_slots + 1
    recurrent_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    with torch.inference_mode(False):  # tensors that may be written in any mode later
        return ModelState(
            torch.zeros(layers, slots, H, D, D, dtype=recurrent_dtype),
            torch.zeros(layers, slots, kda.short_conv_kernel_size - 1, 3 * H * D, dtype=dtype),
            torch.zeros(
                len(config.mla_layer_ids), num_pages + 1, page, config.latent_width, dtype=dtype
            ),
        )
