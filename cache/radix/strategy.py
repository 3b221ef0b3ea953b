"""Where a running request keeps snapshots of its state: SGLang's three strategies (serving 3.1).

no_buffer          none but the state it runs on; publishing copies it
extra_buffer       two tracked slots, written in turn, the newest of which is published
extra_buffer_lazy  one tracked slot, and a second one only while a boundary is passed
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from cache.leases import Copy, CopyKind
from cache.pools.pool import Pool


class Strategy(StrEnum):
    """By the engine's names."""

    NO_BUFFER = "no_buffer"
    EXTRA_BUFFER = "extra_buffer"
    LAZY = "extra_buffer_lazy"


# slots for longer than a step
TRACKED = {Strategy.NO_BUFFER: 0, Strategy.EXTRA_BUFFER: 2, Strategy.LAZY: 1}


@dataclass
class Tracker:
    """The tracked slots of one request (serving 3.3).

    limit: slots it may have for longer than a step, 0 for none. next: where the next snapshot goes,
    keep: where the last one is. last, prev: boundaries of the last two snapshots that are not
    published. pending: the boundary that the plan in flight keeps. borrowed: that plan took a slot.
    """

    limit: int
    lazy: bool
    slots: list[int] = field(default_factory=list)
    next: int = 0
    keep: int = 0
    last: int | None = None
    prev: int | None = None
    pending: int | None = None
    borrowed: bool = False

    @property
    def target(self) -> int:
        """Slot of the next snapshot."""
        return self.slots[self.next]

    def before_decode(self, end: int, grid: int, acquire: Callable[[], int | None]) -> None:
        """A step of decode that ends at a multiple of `grid` keeps its state: in a slot of its own
        if one may be had, else over the one that is kept, else not at all."""
        self.pending = end if self.limit and end % grid == 0 else None
        if self.pending is None or (len(self.slots) == self.limit and not self.lazy):
            return
        spare = acquire()
        if spare is not None:
            self.slots.append(spare)
            self.next, self.borrowed = len(self.slots) - 1, True
        elif not self.slots:
            self.pending = None

    def after_decode(self, boundary: int, active: int, pool: Pool) -> tuple[Copy, ...]:
        """The copy that keeps the state the step has reached, if it is to be kept."""
        self.borrowed = False
        if self.pending is None or self.pending != boundary:
            return ()
        copies = (Copy(CopyKind.STATE, 0, active, self.target),)
        if self.lazy and len(self.slots) > self.limit:
            pool.free([self.slots.pop(0)])
            self.next = 0
        if not self.lazy:
            self.prev = self.last
        self.keep_at(boundary)
        return copies

    def keep_at(self, boundary: int) -> None:
        """The snapshot in `target` is that of this boundary."""
        self.last, self.keep, self.pending = boundary, self.next, None
        if len(self.slots) == 2:
            self.next = 1 - self.next

    def hold(self, boundary: int, slot: int) -> None:
        """Keep a state from prefill as the newest snapshot."""
        self.slots.append(slot)
        self.next = len(self.slots) - 1
        self.keep_at(boundary)

    def lose_target(self) -> None:
        """`target` was written with a state that is not to be kept, over the one that it had."""
        if self.next == self.keep:
            self.last = None
        else:
            self.prev = None

    def undo(self, pool: Pool) -> None:
        """The plan in flight does not run."""
        self.pending = None
        if self.borrowed:
            pool.free([self.slots.pop()])
            self.next, self.borrowed = 0, False

    def swap(self, spare: int) -> int:
        """Give the slot of the last snapshot, with `spare` in its place."""
        given, self.slots[self.keep] = self.slots[self.keep], spare
        return given

    def forget(self) -> None:
        """What was kept is published."""
        self.last = self.prev = None

    def to_publish(self, length: int) -> tuple[int, int]:
        """Boundary and slot of the newest snapshot of at most `length` tokens; (0, 0) if none."""
        if self.last is not None and self.last <= length:
            return self.last, self.slots[self.keep]
        if self.prev is not None and self.prev <= length and len(self.slots) == 2:
            return self.prev, self.slots[1 - self.keep]
        return 0, 0
