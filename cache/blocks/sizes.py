"""The block sizes of one cache, and what they allow (serving 4.1).

    group block B_g    tokens a block of group g: rows of a page, or the span of a state block
    scheduler block    lcm of all B_g
    hash unit h        gcd of all B_g, or as configured; divides every B_g; one group alone: its B
    hits end on        multiples of h if they may end inside a block, else of the scheduler block

They may end inside a block if some state block is larger than h: then the state of a boundary in
between has a hash to be found by, and rows can be shared up to there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BlockSizes:
    """In tokens. attention, states: one block size a group. unit: of the hash chain."""

    attention: tuple[int, ...]
    states: tuple[int, ...]
    unit: int

    @property
    def scheduler(self) -> int:
        """The block that is whole in every group."""
        return math.lcm(*self.attention, *self.states)

    @property
    def state(self) -> int:
        """The block that is whole in every state group; 1 without any."""
        return math.lcm(*self.states)

    @property
    def partial_hits(self) -> bool:
        """Whether a hit may end inside a block."""
        return any(block > self.unit for block in self.states)

    @property
    def hits(self) -> int:
        """What hits are multiples of."""
        return self.unit if self.partial_hits else self.scheduler


def block_sizes(
    attention: Sequence[int], states: Sequence[int], hash_unit: int | None = None
) -> BlockSizes:
    """The sizes of a cache with such groups. hash_unit: None for the largest that will do.

    ValueError for a block below one token, no group at all, or a unit that does not divide every
    block; with a single group the unit must be its block.
    """
    blocks = (*attention, *states)
    if not blocks or min(blocks) < 1:
        raise ValueError(f"each group needs a block of at least one token, got {[*blocks]}")
    unit = math.gcd(*blocks) if hash_unit is None else hash_unit
    if unit < 1 or any(block % unit for block in blocks):
        raise ValueError(
            f"the hash unit must divide every block, got {unit} for blocks of {[*blocks]}"
        )
    if len(blocks) == 1 and unit != blocks[0]:
        raise ValueError(
            f"with one group hits end on its blocks: the hash unit must be {blocks[0]}, got {unit}"
        )
    return BlockSizes(tuple(attention), tuple(states), unit)
