"""All pools of one cache, and how large they are.

A model has groups: layers that share a table. The real one has one attention group (latent rows in
pages) and one state group (recurrent and conv state in slots); more run without tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from cache.pools.pool import Pool

WEIGHTLESS = 4096  # indices of a kind that the model has no layers of: they cost nothing


class Sizes(NamedTuple):
    """What one index of each kind is worth."""

    page: int  # latent rows a page
    row_bytes: int  # one token's latent rows, all MLA layers
    slot_bytes: int  # one boundary's recurrent and conv state, all KDA layers

    @property
    def page_bytes(self) -> int:
        return self.page * self.row_bytes


@dataclass(frozen=True)
class Storage:
    """pages: one pool for each attention group, with page_tokens[g] rows a page; states: one for
    each state group."""

    pages: tuple[Pool, ...]
    page_tokens: tuple[int, ...]
    states: tuple[Pool, ...]

    def __post_init__(self) -> None:
        if len(self.pages) != len(self.page_tokens) or any(p < 1 for p in self.page_tokens):
            raise ValueError(
                f"each of the {len(self.pages)} attention groups needs a page of at least one "
                f"token, got {self.page_tokens}"
            )
        if len({*map(id, self)}) != len(self.pages) + len(self.states):
            raise ValueError("each group needs a pool of its own: one is named twice")

    def __iter__(self) -> Iterator[Pool]:
        return iter((*self.pages, *self.states))

    def pages_for(self, tokens: int) -> tuple[int, ...]:
        """Pages that hold the rows of so many tokens, for each attention group."""
        return tuple(-(-tokens // page) for page in self.page_tokens)


def one_of_each(
    sizes: Sizes,
    num_slots: int,
    num_pages: int,
    *,
    latent: Tensor | None = None,
    states: Sequence[Tensor] = (),
    poison: bool = False,
    newest_page_first: bool = False,
) -> Storage:
    """The storage of a model with one attention and one state group, on tensors or without."""
    rows = () if latent is None else (latent,)
    reuse = dict(poison=poison, newest_first=newest_page_first)
    return Storage(
        (Pool(num_pages, "page", sizes.page_bytes, rows, **reuse),),
        (sizes.page,),
        (Pool(num_slots, "slot", sizes.slot_bytes, states, poison=poison),),
    )


def counts_within(
    budget: int, sizes: Sizes, num_slots: int | None = None, num_pages: int | None = None
) -> tuple[int, int]:
    """(slots, pages) that take at most `budget` bytes, their sinks included.

    A number that is given stays; the other kind gets what is left. With neither, half of the bytes
    go to each kind that costs any, less to slots where no page would fit otherwise, and what slots
    cannot use goes to pages: at break-even (slot_bytes / row_bytes tokens a request) the two kinds
    fill up together. Raises ValueError if not one of each fits.
    """
    slot, page, asked = sizes.slot_bytes, sizes.page_bytes, (num_slots, num_pages)
    if num_slots is None and num_pages is None:
        share = budget // 2 if page else budget
        share = min(share, budget - 2 * page)  # one page and its sink must fit beside them
        num_slots = max(1, share // slot - 1) if slot else WEIGHTLESS
    if num_slots is None:
        num_slots = (budget - (num_pages + 1) * page) // slot - 1 if slot else WEIGHTLESS
    if num_pages is None:
        num_pages = (budget - (num_slots + 1) * slot) // page - 1 if page else WEIGHTLESS
    if num_slots < 1 or num_pages < 1 or (num_slots + 1) * slot + (num_pages + 1) * page > budget:
        slots_asked, pages_asked = asked
        least = ((slots_asked or 1) + 1) * slot + ((pages_asked or 1) + 1) * page
        raise ValueError(
            f"{budget:,} bytes of cache do not hold {slots_asked or 1:,} state slot(s) of {slot:,} "
            f"bytes and {pages_asked or 1:,} page(s) of {page:,} bytes with their sinks; the least "
            f"is {least:,}"
        )
    return num_slots, num_pages
