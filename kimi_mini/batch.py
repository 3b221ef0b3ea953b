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
from kernels.packing import check_integers, integers
from kernels.paging import (
    AttentionMetadata,
    Destinations,
    build_attention_metadata,
    build_destinations,
)
from kimi_mini import huge_pages
from kimi_mini.config import KimiConfig
from kimi_mini.dtypes import at_least_float32


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
    page_table  [B, P]  pages of the row in order, -1 where unused; a row of slot 0 uses page 0
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
    attention: AttentionMetadata | None  # None: for KDA layers alone
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
    check_range("token_ids", batch.token_ids, 0, config.vocab_size)
    N = batch.token_ids.shape[0]
    pages, page = state.latent.shape[1:3]
    check_integers("slots", batch.slots)
    slots = batch.slots.tolist()
    out_rows = check_range("out_rows", batch.out_rows, -1, pages * page)
    if len(out_rows) != N:
        raise ValueError(f"out_rows must be [{N}], one a token; got {[len(out_rows)]}")
    if batch.logits_at is not None:
        check_range("logits_at", batch.logits_at, 0, N)
    query_start = integers("query_start", batch.query_start)
    context_len = integers("context_len", batch.context_len)
    kda = dispatcher.plan(
        query_start,
        slots,
        context_len,
        batch.exports,
        num_slots=state.recurrent.shape[1] - 1,
        num_tokens=N,
    )
    attention = build_attention_metadata(
        query_start, context_len, batch.page_table, page=page, pages=pages, slots=slots
    )
    return Step(dispatcher, kda, attention, build_destinations(out_rows, attention))


def check_state(state: ModelState, config: KimiConfig, dtype: torch.dtype) -> None:
    """ValueError unless the tensors are those of a model of this config and activation dtype.

    A recurrent state in half precision is refused here: it would stall (bf16 rounds S + 0.002 (1-S)
    back to S from 0.5 on).
    """

    def size(tensor: Tensor, axis: int) -> int:
        return max(1, tensor.shape[axis]) if axis < tensor.dim() else 1

    slots, pages, page = size(state.recurrent, 1), size(state.latent, 1), size(state.latent, 2)
    expected = state_form(config, slots, pages, page, dtype)
    for name, tensor, (shape, wanted) in zip(state._fields, state, expected, strict=True):
        if tuple(tensor.shape) != shape or tensor.dtype != wanted or 0 in tensor.stride():
            raise ValueError(
                f"state.{name} must be {wanted} {[*shape]} (any number of slots and pages), each "
                f"number in a place of its own; got {tensor.dtype} {[*tensor.shape]}"
            )


def state_form(
    config: KimiConfig, slots: int, pages: int, page: int, dtype: torch.dtype
) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """Shape and dtype of recurrent, conv and latent; slots and pages with their sinks."""
    kda = config.linear_attn_config
    H, D = kda.num_heads, kda.head_dim
    layers, window = len(config.kda_layer_ids), kda.short_conv_kernel_size - 1
    return (
        ((layers, slots, H, D, D), at_least_float32(dtype)),
        ((layers, slots, window, 3 * H * D), dtype),
        ((len(config.mla_layer_ids), pages, page, config.latent_width), dtype),
    )


def check_range(name: str, values: Tensor, low: int, high: int) -> list[int]:
    """The entries of a one-axis integer tensor; ValueError unless all are within low .. high-1."""
    check_integers(name, values)
    entries = values.tolist()
    if entries and not (low <= min(entries) and max(entries) < high):
        raise ValueError(
            f"{name} must lie in {low}..{high - 1}, got {min(entries)}..{max(entries)}"
        )
    return entries


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
    form = state_form(config, num_slots + 1, num_pages + 1, page, dtype)
    with torch.inference_mode(False):  # tensors that may be written in any mode later
        return ModelState(*(huge_pages.zeros(shape, wanted) for shape, wanted in form))
