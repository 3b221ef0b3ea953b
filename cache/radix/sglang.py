"""SGLang's own rules for the radix manager, to the letter (compat="sglang").

Against ours: a request takes its tracked slots before it starts; a piece keeps one state, on a grid
counted from the piece's own start, and a junction takes its place instead of joining it; that state
goes through a tracked slot, which is given away for a fresh one; cuts fall on pages, or wait.
"""

from __future__ import annotations

from cache.boundaries import floored, piece_checkpoint
from cache.leases import CacheRequest, Copy, ExportTo
from cache.pools.allocator import Ownership
from cache.pools.storage import Storage
from cache.radix.lease import RadixLease
from cache.radix.manager import RadixCache
from cache.radix.node import Node
from cache.radix.strategy import TRACKED, Strategy, Tracker

INTERVAL = 256  # the engine's default spacing of snapshots in decode


class SGLangCache(RadixCache):
    """two_tracks: False for the engine without overlap scheduling. Other arguments, errors: as
    `RadixCache`; ValueError, too, for a grid that the backend cannot export, and for an admission
    policy, which these rules do not ask."""

    _publishes_again = True

    def __init__(
        self,
        storage: Storage,
        *,
        interval: int | None = None,
        two_tracks: bool = True,
        **arguments,
    ) -> None:
        self._two_tracks = two_tracks
        super().__init__(storage, interval=INTERVAL if interval is None else interval, **arguments)
        if self.admission is not None:
            raise ValueError(
                "SGLang's own rules store every state that they come to: no admission policy, got "
                f"{type(self.admission).__name__}"
            )
        self.decode_grid = self.grids.track
        if self.tracks_pieces and self.grids.chunk % self.export_alignment:
            raise ValueError(
                f"state_chunk {self.grids.state_chunk} with pages of {self.page} puts checkpoints "
                f"on multiples of {self.grids.chunk} tokens, which the backend cannot export "
                f"(export_alignment {self.export_alignment})"
            )

    @property
    def _junction_unit(self) -> int:
        return self.grids.checkpoint

    @property
    def _grid(self) -> int:
        return self.grids.checkpoint if self.tracks_pieces else self.page

    def clear(self) -> None:
        """As `StateCache.clear`, but live leases are no reason to refuse: they are aborted."""
        if not self.in_step:
            for lease in self.live_leases:
                self.abort(lease)
        super().clear()

    @property
    def tracks_pieces(self) -> bool:
        """Whether checkpoints of prefill need a piece as long as the grid."""
        return self._tracked_at_once > 0

    @property
    def _tracked_at_once(self) -> int:
        return self._new_tracker().limit

    def _new_tracker(self) -> Tracker:
        tracker = Tracker(TRACKED[self.strategy], lazy=self.strategy is Strategy.LAZY)
        tracker.limit = min(tracker.limit, 2 if self._two_tracks else 1)
        return tracker

    def _evict_for(self, lease: RadixLease, end: int, pages: int, slots: int) -> None:
        """Slots first; then, with pages of several tokens, as far as it goes, what the piece would
        need if it began a page: a row of decode always sees a free one."""
        self.tree.evict_until(slots=slots)
        if self.page > 1:
            pages = 1 if lease.decodes else -(-(end - lease.computed) // self.page) + 1
        self.tree.evict_until(pages=pages)

    def _end_of_piece(self, lease: RadixLease, want: int, max_chunk: int | None) -> int:
        start, known = lease.computed, len(lease.tokens)
        end = min(start + want, known)
        if end == known or (max_chunk is not None and max_chunk < self.page):
            return end
        return max(start, floored(end, self.page))

    def _acquire(self, lease: RadixLease, *, evict: bool) -> int | None:
        """Never at the cost of what is cached."""
        spare = self._slots.alloc(1, Ownership.TRACKED)
        return spare and spare[0]

    def _has_slot(self, lease: RadixLease, *, evict: bool) -> bool:
        return self.tree.make_room(slots=1)

    def _named(self, request: CacheRequest, found: Node) -> tuple[int | None, ...]:
        """The engine knows no boundaries that a caller names."""
        return ()

    def _exports(self, lease: RadixLease, start: int, end: int) -> tuple[ExportTo, ...]:
        tracker = lease.tracker
        if not tracker.limit:
            return ()
        boundary = piece_checkpoint(start, end, self.grids, lease.hit.junction)
        # a key is floored to pages and its state is not, so they must not differ (I-23)
        tracker.pending = boundary if boundary and boundary % self.page == 0 else None
        if tracker.pending is None:
            return ()
        return (ExportTo(tracker.pending - start, (tracker.target,)),)

    def _publish_piece(self, lease: RadixLease, last: bool) -> tuple[Copy, ...]:
        tracker = lease.tracker
        if self.strategy is Strategy.NO_BUFFER:
            return () if last else self._publish_copy(lease)
        kept, tracker.pending = tracker.pending, None
        if kept is not None and kept <= lease.computed:
            tracker.keep_at(kept)
        elif kept is not None:  # the executor stopped before it
            tracker.lose_target()
        if last or tracker.last is None or not self.reuse or not self._has_replacement(lease):
            return ()
        spare = self._slots.alloc(1, Ownership.TRACKED)[0]
        self._publish(lease, tracker.last, tracker.swap(spare))
        tracker.forget()
        return ()

    def _has_replacement(self, lease: RadixLease) -> bool:
        """Whether a slot is free to take the place of the one that is given (I-15); without one
        nothing is published. A lazy row would rather lose the state it came from, which it has
        copied."""
        lazy = self.strategy is Strategy.LAZY
        if lazy and not self._slots.free_count and lease.receipt is not None:
            self.tree.unlock_state(lease.receipt)
        return self.tree.make_room(slots=1)
