"""Latent rows in pages: from page tables and lengths to what attention reads, once per step.

A pool holds latent rows as [pages, page, L+R]; request b's row number t lies in page
page_table[b, t // page] at place t % page. Page 0 is the padding sink. Whole pages are read, but
nothing beyond a request's length leaves this file: it is cut off, or made zero where a longer
neighbour is read beside it. So page numbers of -1 and NaN beyond it are harmless.

Requests of one query are read together, [B, S, L+R], in groups of similar length: a long one would
otherwise make every short one as dear as itself.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.packing import check_integers, integers, row_lengths

# Up to so many latent rows are read in less time than a group of its own would take.
_SHORT = 64


class RowIndex(NamedTuple):
    """Addresses of latent rows: page numbers and places within the page, same shape, int64."""

    page: Tensor
    place: Tensor


class ExtendRow(NamedTuple):
    """One row of several queries: its tokens in the batch, and the pages [P] of its latent rows."""

    tokens: slice
    pages: Tensor
    context_len: int

    @property
    def total(self) -> int:
        """Its latent rows, context + T."""
        return self.context_len + self.tokens.stop - self.tokens.start


class DecodeRows(NamedTuple):
    """Rows of one query and of similar length: their tokens [B] and what is read for them.

    pages [B, P]   a row's last page repeated beyond its own
    lengths [B]    latent rows of each; longest: the greatest
    beyond         places, flat in [B * P * page], that are read up to `longest` and are no
                   row's; None where all are equally long
    """

    tokens: Tensor | slice
    pages: Tensor
    lengths: Tensor
    longest: int
    beyond: Tensor | None


@dataclass(frozen=True)
class Destinations:
    """Where the latent rows of a step are written: out_rows [N], as row numbers that count through
    all pages of `page` rows, -1 for nowhere."""

    out_rows: Tensor
    page: int

    @functools.cached_property
    def kept(self) -> Tensor | None:
        """[N] bool: which tokens' rows are written; None: all."""
        written = self.out_rows >= 0
        return None if bool(written.all()) else written

    @functools.cached_property
    def index(self) -> RowIndex:
        """The addresses of the rows that are written."""
        places = self.out_rows if self.kept is None else self.out_rows[self.kept]
        return RowIndex(places // self.page, places % self.page)


class Span(NamedTuple):
    """A row of a step: its first token in the batch, its tokens, its latent rows (context and
    tokens)."""

    first: int
    count: int
    total: int

    @property
    def context_len(self) -> int:
        """Its latent rows before the step."""
        return self.total - self.count


class PagedRows(NamedTuple):
    """All rows that own tokens, in their order, for a kernel that reads pages where they lie.

    spans [B, 3] int64, as Span; pages [B, P] int64, whatever beyond what a row needs
    """

    spans: Tensor
    pages: Tensor


@dataclass(frozen=True)
class AttentionMetadata:
    """The rows of one step as latent attention sees them; a row without tokens is not among them.

    rows are for a kernel that reads pages where they lie; `extend` and `decode` share the same rows
    out for one that gathers them.
    """

    spans: Sequence[Span]
    rows: PagedRows
    page: int
    num_tokens: int

    @functools.cached_property
    def extend(self) -> tuple[ExtendRow, ...]:
        """The rows of several tokens."""
        return tuple(
            ExtendRow(slice(first, first + count), pages[: -(-total // self.page)], total - count)
            for (first, count, total), pages in zip(self.spans, self.rows.pages, strict=True)
            if count > 1
        )

    @functools.cached_property
    def decode(self) -> tuple[DecodeRows, ...]:
        """The rows of one token, in groups of similar length."""
        single = [r for r, span in enumerate(self.spans) if span.count == 1]
        groups = []
        for group in similar([self.spans[r].total for r in single]):
            rows = [single[i] for i in group]
            whole = len(rows) == self.num_tokens
            first = [self.spans[r].first for r in rows]
            tokens = slice(0, len(rows)) if whole else torch.tensor(first)
            totals = [self.spans[r].total for r in rows]
            groups.append(_decode_rows(tokens, self.rows.pages[rows], totals, self.page))
        return tuple(groups)

    def places(self, num_tokens: int) -> list[int]:
        """[num_tokens] the latent row, counted through all pages, that the page table gives each
        token; -1 for tokens of no row."""
        page, places = self.page, [-1] * num_tokens
        for (first, count, total), pages in zip(self.spans, self.rows.pages.numpy(), strict=True):
            before = (total - count) // page
            own = pages[before : -(-total // page)].tolist()
            places[first : first + count] = [
                own[t // page - before] * page + t % page for t in range(total - count, total)
            ]
        return places


def read_rows(pool: Tensor, pages: Tensor, count: int, beyond: Tensor | None = None) -> Tensor:
    """The first `count` latent rows in pages [..., P], copied: [..., count, L+R]; any page stride.

    By whole pages: one copy of page * (L+R) numbers instead of as many as it has rows. beyond: see
    DecodeRows; zeros are read there, for a NaN would outlive a weight of 0.
    """
    read = pool.index_select(0, pages.flatten()).flatten(0, 1)
    if beyond is not None:
        read.index_fill_(0, beyond, 0)
    return read.view(*pages.shape[:-1], -1, pool.shape[-1])[..., :count, :]


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
    occupied = [r for r, length in enumerate(lengths) if length]
    spans = [Span(begins[r], lengths[r], totals[r]) for r in occupied]
    rows = PagedRows(
        torch.tensor(spans, dtype=torch.long).view(-1, 3),
        table if len(occupied) == len(lengths) else table[occupied],
    )
    return AttentionMetadata(spans, rows, page, starts[-1])


def similar(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of lengths in groups, each in ascending order: within one, none is longer than twice
    the shortest (or than _SHORT), so that reading all as far as the longest reads at most twice
    what is there."""
    groups: list[list[int]] = []
    limit = -1
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if lengths[i] > limit:
            groups.append([])
            limit = max(2 * lengths[i], _SHORT)
        groups[-1].append(i)
    return [sorted(group) for group in groups]


def _decode_rows(
    tokens: Tensor | slice, table: Tensor, totals: Sequence[int], page: int
) -> DecodeRows:
    """table [B, P or more], of which a row of totals[b] latent rows uses what it needs."""
    lengths, longest = torch.tensor(totals), max(totals)
    last = (lengths - 1) // page
    pages = table.gather(1, torch.arange(-(-longest // page)).minimum(last[:, None]))
    if min(totals) == longest:
        return DecodeRows(tokens, pages, lengths, longest, None)
    width = pages.shape[1] * page
    beyond = [torch.arange(b * width + n, b * width + longest) for b, n in enumerate(totals)]
    return DecodeRows(tokens, pages, lengths, longest, torch.cat(beyond))


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
    numbers = table.numpy()
    used = np.arange(room) < np.array(needed, dtype=np.int64)[:, None]
    allowed = (numbers >= np.array(lowest, dtype=np.int64)[:, None]) & (numbers < pages)
    wrong = used & ~allowed
    if wrong.any():
        r = int(wrong.any(1).argmax())
        raise ValueError(
            f"row {r} needs {needed[r]} pages; its page table names "
            f"{numbers[r, : needed[r]].tolist()}, allowed: {lowest[r]}..{pages - 1}"
        )
    return table


def build_destinations(out_rows: Tensor | Sequence[int], step: AttentionMetadata) -> Destinations:
    """Where the latent rows of a step go: out_rows [N] flat row numbers (page * page_size + place).

    A token may be written to the place that its row's page table gives it, or, with -1, nowhere
    (its row is there already: tokens replayed for the recurrent state alone). Tokens of no running
    row may name the sink page or -1, and are dropped. Raises ValueError for any other place, and
    for a place outside the sink that two tokens would be written to.
    """
    wanted, page = integers("out_rows", out_rows), step.page
    own = step.places(len(wanted))
    if wanted != own:
        wanted = [_place(t, *two, page) for t, two in enumerate(zip(wanted, own, strict=True))]
    real = [place for place in wanted if place >= page]
    if len(set(real)) < len(real):
        twice, _ = collections.Counter(real).most_common(1)[0]
        raise ValueError(f"out_rows sends several tokens to latent row {twice}")
    return Destinations(torch.tensor(wanted, dtype=torch.long), page)


def _place(token: int, wanted: int, own: int, page: int) -> int:
    """Where a token is written that asks for `wanted` and may have `own`; -1: nowhere."""
    if own < 0 and wanted < page:
        return -1
    if wanted not in (own, -1):
        allowed = (
            f"its page table gives it row {own} (or -1: nowhere)"
            if own >= 0
            else f"it belongs to no running row (allowed: -1, or the sink's 0..{page - 1})"
        )
        raise ValueError(f"out_rows sends token {token} to latent row {wanted}; {allowed}")
    return wanted
