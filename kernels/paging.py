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

from kernels.packing import check_integers, integers, row_lengths


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


class Destinations(NamedTuple):
    """Where the latent rows of a step are written."""

    kept: Tensor | None  # [N] bool: which tokens' rows are written; None: all
    index: RowIndex  # [kept] each


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


def write_rows(pool: Tensor, rows: Tensor, where: Destinations) -> None:
    """Put the rows [N, L+R] of a step into the pool, in place."""
    rows = rows if where.kept is None else rows[where.kept]
    with torch.no_grad():
        pool[where.index.page, where.index.place] = rows.to(pool.dtype)


def build_attention_metadata(
    query_start: Tensor | Sequence[int],
    context_len: Tensor | Sequence[int],
    page_table: Tensor,
    *,
    page: int,
    pages: int,
    slots: Sequence[int] | None = None,
) -> AttentionMetadata:
    """Check page tables and share the rows of a step out.

    query_start [B+1], context_len [B], page_table [B, P]; `page` latent rows a page, `pages` pages
    in the pool; slots [B] of the rows: -1 does not run, and its table is not looked at; 0 is
    padding and may use the sink page 0, which real rows may not. None: page 0 is like any other.
    Raises ValueError for a table that is too short for its row or names a page out of range.
    """
    starts = integers("query_start", query_start)
    context = integers("context_len", context_len)
    begins, lengths = row_lengths(starts, starts[-1] if starts else 0)
    if len(context) != len(lengths) or any(length < 0 for length in context):
        raise ValueError(
            f"context_len must be {len(lengths)} lengths, none negative; got {context}"
        )
    lowest = [0] * len(lengths)  # page that each row may name
    if slots is not None:
        lengths = [0 if slot == -1 else n for slot, n in zip(slots, lengths, strict=True)]
        lowest = [int(slot > 0) for slot in slots]
    totals = [c + n if n else 0 for c, n in zip(context, lengths, strict=True)]
    table = _checked_table(page_table, totals, page, lowest, pages)
    extend, single = [], []
    for r, length in enumerate(lengths):
        if length == 1:
            single.append(r)
        elif length:
            index = row_index(table[r : r + 1], torch.tensor([totals[r]]), page)
            own = RowIndex(index.page[0], index.place[0])
            extend.append(ExtendRow(slice(begins[r], begins[r] + length), own, context[r]))
    if not single:
        return AttentionMetadata(tuple(extend), None)
    counts = torch.tensor([totals[r] for r in single])
    whole = len(single) == starts[-1]
    tokens = slice(0, len(single)) if whole else torch.tensor([begins[r] for r in single])
    decode = DecodeRows(tokens, row_index(table[single], counts, page), counts)
    return AttentionMetadata(tuple(extend), decode)


def _checked_table(
    page_table: Tensor, totals: Sequence[int], page: int, lowest: Sequence[int], pages: int
) -> Tensor:
    """The page table as int64, if the pages that a row of totals[r] latent rows needs are all in
    lowest[r] .. pages-1."""
    check_integers("page_table", page_table, axes=2)
    if page_table.shape[0] != len(totals):
        raise ValueError(
            f"page_table must be [{len(totals)}, P], one line a row; got {[*page_table.shape]}"
        )
    table, room = page_table.long(), page_table.shape[1]
    needed = [-(-total // page) for total in totals]
    for r, count in enumerate(needed):
        if count > room:
            raise ValueError(
                f"row {r} has {totals[r]} latent rows and needs {count} pages of {page}, but its "
                f"page table has room for {room}"
            )
    used = torch.arange(room) < torch.tensor(needed, dtype=torch.long).unsqueeze(1)
    wrong = used & ((table < torch.tensor(lowest).view(-1, 1)) | (table >= pages))
    if bool(wrong.any()):
        r = int(wrong.any(1).nonzero()[0])
        raise ValueError(
            f"row {r} needs {needed[r]} pages; its page table names "
            f"{table[r, : needed[r]].tolist()}, allowed: {lowest[r]}..{pages - 1}"
        )
    return table


def build_destinations(out_rows: Tensor, step: AttentionMetadata, page: int) -> Destinations:
    """Where the latent rows of a step go: out_rows [N] flat row numbers (page * page_size + place).

    A token may be written to the place that its row's page table gives it, or, with -1, nowhere
    (its row is there already: tokens replayed for the recurrent state alone). Tokens of no running
    row may name the sink page or -1, and are dropped. Raises ValueError for any other place, and
    for a place outside the sink that two tokens would be written to.
    """
    own = torch.full_like(out_rows, -1)
    for row in step.extend:
        flat = row.index.page * page + row.index.place
        own[row.tokens] = flat[row.context_len :]
    if step.decode is not None:
        tokens, index, lengths = step.decode
        last = (lengths - 1).unsqueeze(1)
        flat = index.page.gather(1, last) * page + index.place.gather(1, last)
        own[tokens] = flat.squeeze(1)
    written = (out_rows >= 0) & (own >= 0)
    wrong = torch.where(own >= 0, written & (out_rows != own), out_rows >= page)
    if bool(wrong.any()):
        t = int(wrong.nonzero()[0])
        raise ValueError(
            f"out_rows sends token {t} to latent row {int(out_rows[t])}; "
            + (
                f"its page table gives it row {int(own[t])} (or -1: nowhere)"
                if own[t] >= 0
                else f"it belongs to no running row (allowed: -1, or the sink's 0..{page - 1})"
            )
        )
    real, counts = out_rows[written & (out_rows >= page)].unique(return_counts=True)
    if bool((counts > 1).any()):
        raise ValueError(f"out_rows sends several tokens to latent row {int(real[counts > 1][0])}")
    kept = None if bool(written.all()) else written
    places = out_rows if kept is None else out_rows[kept]
    return Destinations(kept, RowIndex(places // page, places % page))
