"""Which states of a request are kept in blocks, and how they come to be found.

On multiples of what hits are aligned to (decision 22, serving 4.6):

    prefill   where a resend resumes (tail) and the last whole block before it, the junction where
              others part from the prompt, boundaries that the caller names (decision 31)
    always    the milestones of the retention interval

They are exported from inside a piece where the backend can, and end the piece where it cannot. A
checkpoint is never worth waiting for: without a free block it is left out.

An admission policy is asked about all but the caller's own. It may want whole blocks of the prompt
that nobody has a state of, where no rows of others show a junction; and it is asked for the newest
state too, that of the tail and then of decode, which is there at once (not only when the request
has finished) and takes the place of the one before, unless somebody has resumed from that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from cache.blocks.groups import RowGroup, StateGroup
from cache.blocks.lease import NOTHING, BlockLease, Piece, Wanted
from cache.blocks.sizes import BlockSizes
from cache.boundaries import floored, resend_boundary
from cache.leases import ExportTo
from cache.policy.admission import Admission, Occasion
from cache.policy.retention import Retention
from cache.state_cache import StateCache


class Publication(StateCache):
    """The part of a block manager that registers; the manager sets what is declared here."""

    sizes: BlockSizes
    retention: Retention
    admission: Admission | None
    reuse: bool
    _rows: tuple[RowGroup, ...]
    _states: tuple[StateGroup, ...]

    # what is kept

    def _named(self, lease: BlockLease) -> tuple[int | None, ...]:
        """Where states that the caller named are kept: of what is computed, or of what is read if
        somebody has kept them there."""
        last = len(lease.request.ids) if self.reuse and self._states else 0
        computed = range(lease.computed + 1, last + 1)
        floors = (floored(n, self.sizes.hits) for n in lease.request.checkpoint_at)
        return tuple(n if n in computed or self._has_state(lease, n) else None for n in floors)

    def _still_named(self, lease: BlockLease, start: int) -> tuple[int | None, ...]:
        """The same after a piece from `start` on, which may have had no block for one of them."""
        ran = range(start + 1, lease.computed + 1)
        return tuple(None if n in ran and not self._has_state(lease, n) else n for n in lease.named)

    def _has_state(self, lease: BlockLease, boundary: int) -> bool:
        """Whether every state group has one of the lease's prefix at a boundary."""
        within = 0 < boundary <= lease.chain.reach
        return within and all(
            g.pool.find(lease.chain.key(boundary, g.number)) for g in self._states
        )

    def _wanted(self, lease: BlockLease, end: int) -> Wanted:
        """Boundaries of the piece up to `end`, which included, whose states are to be kept."""
        if not self.reuse or not self._states:
            return NOTHING
        start = lease.computed
        stay = {n for n in lease.named if n is not None and start < n <= end}
        for boundary, why in self._at_hand(lease, end):
            if start < boundary <= end and lease.visit.admits(boundary, why):
                stay.add(boundary)
        newest = self._newest(lease, end)
        if newest is None or newest in stay:
            return Wanted(tuple(sorted(stay)))
        return Wanted(tuple(sorted({*stay, newest})), newest)

    def _at_hand(self, lease: BlockLease, end: int) -> Iterator[tuple[int, Occasion]]:
        """States that the policy is asked about, and why they are at hand."""
        if lease.hit.junction is not None:
            yield lease.hit.junction, Occasion.JUNCTION
        elif lease.recurring is not None:
            yield lease.recurring, Occasion.PERIODIC
        for known in dict.fromkeys((lease.prompt, len(lease.request.ids))):
            for unit in (self.sizes.hits, self._whole_block):
                yield resend_boundary(known, unit), Occasion.RESEND
        interval = self.retention.interval
        interval = self._whole_block if interval is None else interval
        if interval:
            for milestone in range(floored(lease.computed, interval), end + 1, interval):
                yield milestone, Occasion.PERIODIC

    @property
    def decode_grid(self) -> int:
        """Where decode may keep a state, in tokens."""
        return self.sizes.hits

    @property
    def _whole_block(self) -> int:
        """The least boundary that ends a block of every state group and may be hit."""
        return math.lcm(self.sizes.state, self.sizes.hits)

    def _recurring(self, lease: BlockLease) -> int | None:
        """The last whole block of the prompt that the policy wants because it comes again."""
        if not self.reuse or not self._states:
            return None
        block = self._whole_block
        return lease.visit.recurring(range(block, lease.prompt, block))

    def _newest(self, lease: BlockLease, end: int) -> int | None:
        """The boundary of the piece that is worth keeping until the request has a newer one; none
        without a policy: what is at hand is then kept for good."""
        unit = self.sizes.hits
        tail = resend_boundary(lease.prompt, unit)
        boundary = floored(end, unit) if lease.decodes else tail
        if self.admission is None or not lease.computed < boundary <= end:
            return None
        return boundary if lease.visit.admits(boundary, Occasion.LAST) else None

    def end_of_piece(self, lease: BlockLease, want: int, max_chunk: int | None) -> int:
        """Where a piece that would like `want` tokens ends, `lease.computed` if there is none now.

        A cut falls on what hits are aligned to, where the backend can export, if it can; and a
        piece ends at a boundary that is to be kept but cannot be exported from inside of it.
        """
        start, known = lease.computed, len(lease.tokens)
        end = min(start + min(want, max_chunk or want), known)
        units = (math.lcm(self.sizes.hits, self.export_alignment), self.sizes.hits)
        if end < known:
            end = next((e for unit in units if (e := floored(end, unit)) > start), end)
        inside = self._wanted(lease, end).boundaries
        return next((n for n in inside if n < end and (n - start) % self.export_alignment), end)

    # how it is kept

    def _keep_inside(self, lease: BlockLease, end: int, piece: Piece) -> None:
        """Blocks for states from inside the piece, the most wanted first to get one."""
        piece.wanted, start = self._wanted(lease, end), lease.computed
        inside = (n for n in reversed(piece.wanted.boundaries) if n < end)
        for boundary in (n for n in inside if (n - start) % self.export_alignment == 0):
            if all(group.pool.free_count for group in self._states):
                piece.kept[boundary] = {g.index: g.keep(lease, boundary) for g in self._states}

    def _exports(self, lease: BlockLease, piece: Piece) -> tuple[ExportTo, ...]:
        groups = range(len(self._states))
        return tuple(
            ExportTo(
                boundary - lease.computed, tuple(kept[g].id if g in kept else -1 for g in groups)
            )
            for boundary, kept in sorted(piece.kept.items())
        )

    def _register(self, lease: BlockLease, end: int, piece: Piece) -> None:
        for group in self._rows:
            group.register(lease, end, piece)
        kept = dict(piece.kept)
        if end in piece.wanted.boundaries:
            kept[end] = {group.index: group.table(lease).running for group in self._states}
        for boundary, blocks in kept.items():
            for group in self._states:
                group.key(lease, blocks[group.index], boundary, piece)
            for group in self._rows:
                group.register_inside(lease, boundary, piece)

    def _unregister(self, piece: Piece, above: int) -> None:
        """What the piece has registered above a boundary is not there."""
        for pool, block, key, boundary in piece.registered:
            if boundary > above and key in block.keys:
                pool.unregister(block, key)

    def _supersede(self, lease: BlockLease, piece: Piece) -> None:
        """The newest state, once it is there, takes the place of the one before."""
        boundary, pools = piece.wanted.newest, {group.pool for group in self._states}
        if boundary is None or boundary > lease.computed:
            return
        newest = [
            new for new in piece.registered if (new.boundary, new.pool in pools) == (boundary, True)
        ]
        if newest:
            for pool, block, key, _ in lease.newest:
                if key in block.keys and not block.resumed:
                    pool.discard(block)
            lease.newest = newest
