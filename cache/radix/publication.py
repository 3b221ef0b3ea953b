"""Which states a request leaves behind, in which slots, and how they get into the tree.

What is published goes into the tree by moving indices (donate), never bytes, and the row goes on
over the tree's pages (serving 3.9). Which boundaries are kept (decision 22), all absolute:

    prefill   the last grid boundary of each piece, the last one that a resend could use (prompt
              end), the junction where others part from the prompt, and those that the caller names
    decode    every `interval`, the newest of which is published when the request finishes

A checkpoint is never worth waiting for, and the grid's are worth nobody else's: without a free slot
they take that of an older one of the same request, or are left out. The others may evict (BR-47).

An admission policy is asked about all but the caller's own. It may want grid boundaries that nobody
has stored yet; and of a prompt end that it declines it may want the state for the time that the
request finishes, if no newer one has come by then.
"""

from __future__ import annotations

from cache.boundaries import Grids, floored
from cache.leases import Copy, CopyKind, ExportTo
from cache.policy.admission import Occasion
from cache.pools.allocator import Ownership
from cache.pools.pool import Pool
from cache.radix.lease import RadixLease
from cache.radix.strategy import TRACKED, Strategy, Tracker
from cache.radix.tree import Inserted, RadixTree
from cache.state_cache import StateCache


class Publication(StateCache):
    """The part of a radix manager that publishes; the manager sets what is declared here. unit:
    where a piece can always export."""

    tree: RadixTree
    grids: Grids
    strategy: Strategy
    reuse: bool
    unit: int
    _slots: Pool
    _unfilled: set[int]  # published in this step, with a copy yet to run

    # what is kept

    def _wanted(self, lease: RadixLease) -> list[int]:
        """Boundaries of the prompt that others will want to resume from, ascending."""
        if not self.reuse:
            return []
        asked = (
            (lease.hit.junction, Occasion.JUNCTION),
            (self._prompt_end(lease), Occasion.RESEND),
        )
        admitted = {boundary for boundary, why in asked if lease.visit.admits(boundary, why)}
        return sorted({*admitted, *lease.named, lease.recurring} - {None})

    def _prompt_end(self, lease: RadixLease) -> int:
        """The last boundary that a resend of the prompt can use."""
        return floored(lease.prompt - 1, self.unit)

    def _still_named(self, lease: RadixLease, start: int) -> tuple[int | None, ...]:
        """What the caller named, after a piece from `start` on, which may have had no slot for one
        of them."""
        ran = range(start + 1, lease.computed + 1)
        there = lease.receipt.node.checkpoints() if lease.named and lease.receipt else ()
        return tuple(None if n in ran and n not in there else n for n in lease.named)

    def _to_hold(self, lease: RadixLease, wanted: list[int]) -> int | None:
        """The prompt end, if its state is worth storing only as the request's last."""
        boundary = self._prompt_end(lease)
        if boundary in wanted or not lease.tracker.limit:
            return None
        return boundary if lease.visit.admits(boundary, Occasion.LAST) else None

    def _acquire(self, lease: RadixLease, *, evict: bool) -> int | None:
        """A slot for a checkpoint, if one may be had: see `_has_slot`."""
        if not self._has_slot(lease, evict=evict):
            return None
        return self._slots.alloc(1, Ownership.TRACKED)[0]

    def _has_slot(self, lease: RadixLease, *, evict: bool) -> bool:
        """A slot is free, if need be that of a passing checkpoint of the same request, or, with
        `evict`, of the one that has been used least recently."""
        while not self._slots.free_count and lease.passing:
            self.tree.thin(lease.passing.pop(0))
        return bool(self._slots.free_count) or (evict and self.tree.make_room(slots=1))

    def _exports(self, lease: RadixLease, start: int, end: int) -> tuple[ExportTo, ...]:
        """States to keep from inside the piece, the most wanted first to get a slot."""
        if not self.reuse:
            return ()
        wanted = self._wanted(lease)
        lease.held = self._to_hold(lease, wanted)
        tail = floored(end, self.grids.checkpoint)
        passing = tail if lease.visit.admits(tail, Occasion.PERIODIC) else None
        for boundary in dict.fromkeys((*wanted[::-1], lease.held, passing)):
            inside = boundary is not None and start < boundary <= end
            if not inside or ((boundary - start) % self.export_alignment and boundary != end):
                continue
            slot = self._acquire(lease, evict=boundary in (*wanted, lease.held))
            if slot is not None:
                lease.exported += ((boundary, slot),)
        lease.exported = tuple(sorted(lease.exported))
        return tuple(ExportTo(boundary - start, (slot,)) for boundary, slot in lease.exported)

    # how it is published

    def _publish_piece(self, lease: RadixLease, last: bool) -> tuple[Copy, ...]:
        """What a piece of prefill has exported; without a buffer also the state it ended with."""
        exported, lease.exported = lease.exported, ()
        for boundary, slot in exported:
            if boundary > lease.computed:  # the executor stopped before it
                self._slots.free([slot])
            elif boundary == lease.held:
                lease.tracker.hold(boundary, slot)
            else:
                self._publish(lease, boundary, slot)
        if self.strategy is Strategy.NO_BUFFER and not last:
            return self._publish_copy(lease)
        return ()

    def _publish_copy(self, lease: RadixLease) -> tuple[Copy, ...]:
        """A copy of the state that the request goes on with, at the boundary it is at."""
        if not self.reuse or lease.computed == lease.published:
            return ()
        if not lease.visit.admits(lease.computed, Occasion.PERIODIC):
            return ()
        if not self._has_slot(lease, evict=lease.decodes):
            return ()
        spare = self._slots.alloc(1)[0]
        self._unfilled.add(spare)
        if self._publish(lease, lease.computed, spare).refused:
            return ()
        return (Copy(CopyKind.STATE, 0, lease.slots[0], spare),)

    def _publish(self, lease: RadixLease, boundary: int, slot: int) -> Inserted:
        """Give pages and a state to the tree and go on over the tree's pages. A state that is there
        already stays, and ours is freed (I-16)."""
        done = self._insert(lease, boundary, slot)
        if done.refused:
            self._slots.free([slot])
        elif boundary not in self._wanted(lease):
            lease.passing.append(done.node)
        count = done.node.depth // self.page
        lease.pages[0][:count] = self.tree.pages_of(done.node)
        self._unlock(lease)
        lease.receipt = self.tree.lock(done.node)
        lease.published = done.node.depth
        return done

    def _insert(self, lease: RadixLease, boundary: int, slot: int) -> Inserted:
        return self.tree.insert(
            lease.tokens[:boundary],
            lease.pages[0],
            slot,
            owned=lease.published,
            salt=lease.request.salt,
        )

    def _to_publish(self, lease: RadixLease) -> tuple[int, int]:
        """Boundary and slot that a finished request leaves behind; boundary 0 for none."""
        if self.strategy is Strategy.NO_BUFFER:
            return lease.computed, lease.slots[0]
        return lease.tracker.to_publish(lease.computed)

    def _publish_last(self, lease: RadixLease) -> int | None:
        """What a request that finishes leaves behind: the slot that has become the tree's."""
        if not self.reuse or not lease.ran:
            return None
        boundary, slot = self._to_publish(lease)
        newer = boundary > lease.published or (boundary and self._publishes_again)
        if not newer or not lease.visit.admits(boundary, Occasion.LAST):
            return None
        done = self._insert(lease, boundary, slot)
        lease.published = max(lease.published, done.node.depth)
        return None if done.refused else slot

    _publishes_again = False  # whether finishing inserts what has been published before

    def _unlock(self, lease: RadixLease) -> None:
        if lease.receipt is not None:
            self.tree.unlock(lease.receipt)
            lease.receipt = None

    def _new_tracker(self) -> Tracker:
        limit = TRACKED[self.strategy] if self.reuse else 0
        return Tracker(limit, lazy=self.strategy is Strategy.LAZY)
