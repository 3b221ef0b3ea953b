"""What a lease of the radix manager holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from cache.leases import Copy, Lease
from cache.radix.node import Node, Receipt
from cache.radix.strategy import Tracker
from cache.visit import Visit


@dataclass(eq=False, kw_only=True)
class RadixLease(Lease):
    """visit: its questions to the admission policy; recurring: the grid boundary of the prompt that
    the policy wants. held: the boundary whose state the plan in flight keeps for the finish.
    tracker: snapshots of decode. receipt: the lock on what is shared, whose pages are the first
    `published` tokens of the row. copies: what initialises the slot, until a plan carries it.
    exported: boundaries and slots that the plan in flight keeps. passing: nodes that it has
    published on the grid alone, deepest last. stale: waited with its first plan, and the next one
    looks up again.
    """

    tracker: Tracker
    visit: Visit = field(init=False)
    recurring: int | None = None
    held: int | None = None
    receipt: Receipt | None = None
    published: int = 0
    copies: tuple[Copy, ...] = ()
    exported: tuple[tuple[int, int], ...] = ()
    passing: list[Node] = field(default_factory=list)
    stale: bool = False

    @property
    def decodes(self) -> bool:
        """All tokens that it came with are in the state."""
        return self.computed >= len(self.request.ids)
