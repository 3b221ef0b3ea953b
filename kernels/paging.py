"""Latent rows in pages: from page tables and lengths to row addresses, once per step.

A pool holds latent rows as [pages, page, L+R]; request b's row number t lies in page
page_table[b, t // page] at place t % page. Page 0 is the padding sink. Only rows below a request's
length are ever read, so page numbers of -1 and NaN beyond it are harmless.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.packing import row_lengths


class RowIndex(NamedTuple):
    """Addresses of latent rows: page numbers and places within the page, same shape, int64."""

    page: Tensor
    place: Tensor


class ExtendRow(NamedTuple):
    """One row of several queries: its tokens in the batch, and its context + T latent rows."""

    tokens: slice
    index: RowIndex  # [context + T] each
    context_len: int


class DecodeRows(NamedTuple):
    """All rows of one query: their tokens [B], latent rows [B, max length] and lengths [B]."""

    tokens: Tensor | slice
    index: RowIndex
    lengths: Tensor


@dataclass(frozen=True)
class AttentionMetadata:
    """The rows of one step as latent attention sees them; empty rows are in neither group."""

    extend: tuple[ExtendRow, ...]
    decode: DecodeRows | None


def row_index(page_table: Tensor, lengths: Tensor, page: int) -> RowIndex:
    """Addresses of the first lengths[b] latent rows of B requests, [B, max(lengths)] each.

    page_table [B, P] page numbers, -1 where unused; lengths [B] >= 1. Beyond a request's length
    its last row is repeated: always valid data of its own, for the caller to mask.
    """
    places = torch.arange(int(lengths.max())).minimum(lengths[:, None] - 1)
    return RowIndex(page_table.long().gather(1, places // page), places % page)


def read_rows(pool: Tensor, index: RowIndex) -> Tensor:
    """Copies of the addressed rows, [*index shape, L+R]; any page stride."""
    return pool[index.page, index.place]


def write_rows(pool: Tensor, rows: Tensor, out_rows: Tensor) -> None:
    """Put rows [N, L+R] at flat row numbers out_rows [N] (page * page_size + place), in place.

    -1 means no destination: that row is dropped.
    """
    page = pool.shape[1]
    if bool((out_rows < 0).any()):
        kept = out_rows >= 0
        out_rows, rows = out_rows[kept], rows[kept]
    with torch.no_grad():
        pool[out_rows // page, out_rows % page] = rows.to(pool.dtype)


def build_attention_metadata(
    query_start: Tensor | Sequence[int],
    context_len: Tensor | Sequence[int],
    page_table: Tensor,
    *,
    page: int,
    pages: int,
) -> AttentionMetadata:
    """Check page tables and share the rows of a step out.

    query_start [B+1], context_len [B], page_table [B, P]; page rows per page, `pages` pages in the
    pool. Raises ValueError for a table that is too short for its row or names a page out of range.
    """
    starts = query_start.tolist() if isinstance(query_start, Tensor) else list(query_start)
    context = context_len.tolist() if isinstance(context_len, Tensor) else list(context_len)
    begins, lengths = row_lengths(starts, starts[-1] if starts else 0)
    if len(context) != len(lengths) or any(length < 0 for length in context):
        raise ValueError(
            f"context_len must be {len(lengths)} lengths, none negative; got {context}"
        )
    if page_table.dim() != 2 or page_table.shape[0] != len(lengths):
        raise ValueError(
            f"page_table must be [{len(lengths)}, P], one line a row; got {[*page_table.shape]}"
        )
    table = page_table.long()
    extend, single = [], []
    for r, (begin, length) in enumerate(zip(begins, lengths, strict=True)):
        if not length:
            continue
        total = context[r] + length
        needed = -(-total // page)
        if needed > table.shape[1]:
            raise ValueError(
                f"row {r} has {total} latent rows and needs {needed} pages of {page}, but its page "
                f"table has room for {table.shape[1]}"
            )
        named = table[r, :needed]
        if int(named.min()) < 0 or int(named.max()) >= pages:
            raise ValueError(
                f"row {r} needs {needed} pages; its page table names {named.tolist()}, the pool "
                f"has pages 0..{pages - 1}"
            )
        if length == 1:
            single.append(r)
        else:
            index = row_index(table[r : r + 1], torch.tensor([total]), page)
            extend.append(
                ExtendRow(
                    slice(begin, begin + length),
                    RowIndex(index.page[0], index.place[0]),
                    context[r],
                )
            )
    if not single:
        return AttentionMetadata(tuple(extend), None)
    totals = torch.tensor([context[r] + 1 for r in single])
    tokens = torch.tensor([begins[r] for r in single])
    whole = len(single) == starts[-1]
    decode = DecodeRows(
        slice(0, len(single)) if whole else tokens, row_index(table[single], totals, page), totals
    )
    return AttentionMetadata(tuple(extend), decode)
