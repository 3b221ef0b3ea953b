"""RadixCache: a prefix tree of latent pages with sparse checkpoints, behind the contract.

A hit pins its node, takes a private slot and queues the one copy that initialises it (copy on
write); its latent pages are shared, and the request's own begin behind them. What it leaves behind,
and how that gets into the tree, is `Publication`.
"""

from __future__ import annotations

import math
from functools import partial

from cache.boundaries import floored, grids, junction_above
from cache.identity import Identity
from cache.leases import (
    COLD,
    CacheRequest,
    Copy,
    CopyKind,
    ExportTo,
    Hit,
    Lower,
    Phase,
    StepPlan,
    Wait,
    WaitReason,
)
from cache.policy.admission import Admission
from cache.policy.eviction import Eviction
from cache.pools.allocator import Ownership
from cache.pools.storage import Storage
from cache.radix.audit import audit_tree
from cache.radix.lease import RadixLease
from cache.radix.node import Node
from cache.radix.prefixes import PrefixNames
from cache.radix.publication import Publication
from cache.radix.strategy import Strategy
from cache.radix.tree import Match, RadixTree
from cache.stats import Evictions
from cache.visit import Visit, served


class RadixCache(Publication):
    """One attention group, one state group.

    strategy     whose tracked slots decode uses
    state_chunk  spacing of checkpoints in prefill; interval: in decode, None for as dense as pages
                 and kernel allow
    path_cap     states on one path, None for no cap
    admission    which states are stored, None for all
    eviction     which states go first, None for the least recently used
    reuse        False: nothing is kept
    Raises ValueError for a strategy that does not go with the page, or sizes out of range.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        export_alignment: int = 1,
        strategy: Strategy | str = Strategy.EXTRA_BUFFER,
        state_chunk: int = 64,
        interval: int | None = None,
        path_cap: int | None = None,
        admission: Admission | None = None,
        eviction: Eviction | None = None,
        reuse: bool = True,
        identity: Identity = Identity(),  # noqa: B008 (frozen)
    ) -> None:
        super().__init__(storage, export_alignment=export_alignment, identity=identity)
        if len(storage.pages) != 1 or len(storage.states) != 1:
            raise ValueError(
                "the radix manager has one attention and one state group, got "
                f"{len(storage.pages)} and {len(storage.states)}"
            )
        self._kv, self._slots = storage.pages[0], storage.states[0]
        self.page = storage.page_tokens[0]
        self.strategy, self.reuse = Strategy(strategy), reuse
        if self.strategy is Strategy.NO_BUFFER and self.page != 1:
            raise ValueError(
                f"strategy {self.strategy} publishes states at any boundary and needs pages of one "
                f"token, got {self.page}"
            )
        self.unit = math.lcm(self.page, export_alignment)  # where a piece can always export
        interval = self.unit if interval is None else interval
        self.grids = grids(state_chunk, self.page, interval)
        self.decode_grid = math.lcm(self.unit, interval)
        self.admission, self.eviction = admission, eviction
        self.tree = RadixTree(self._kv, self.page, self._slots, path_cap, eviction=eviction)
        self._unfilled = set()

    # look-up

    def _lookup(self, request: CacheRequest) -> Hit:
        limit = self._limit(request)
        match = self.tree.peek(request.ids[:limit], request.salt)
        return COLD if self._must_be_cold(match) else self.hit_of(match, limit)

    def _limit(self, request: CacheRequest) -> int:
        """Tokens that may be read here."""
        return request.readable if self.reuse else 0

    def hit_of(self, match: Match, limit: int) -> Hit:
        """What a match of a key of `limit` tokens means for a request."""
        junction = junction_above(match.kv_depth, match.depth, self._junction_unit)
        return Hit(match.depth, match.kv_depth, junction, self._why(match, limit))

    @property
    def _junction_unit(self) -> int:
        return self.unit

    def _why(self, match: Match, limit: int) -> Lower:
        """Why the joint boundary is not higher (decision 32)."""
        if not limit:
            return Lower.NO_REUSE
        if match.kv_depth > match.depth:
            return Lower.EVICTED if match.lost else Lower.NO_CHECKPOINT
        if match.depth == limit:
            return Lower.CAP
        return Lower.GRID if match.depth >= floored(limit, self._grid) else Lower.UNKNOWN

    @property
    def _grid(self) -> int:
        """No prompt's last checkpoint is further from its end than this, whatever is cached."""
        return self.unit

    def _admit(self, request: CacheRequest) -> RadixLease | Wait:
        lease = RadixLease(request, Hit(), ([],), [0], tracker=self._new_tracker())
        origin, grid = self.identity.origin(request.salt), self.grids.checkpoint
        names = PrefixNames(origin, lease.tokens, grid)
        lease.visit = Visit(self.admission, request.name, names)
        if self.reuse:
            recurs = range(grid, self._prompt_end(lease) + 1, grid)
            lease.recurring = lease.visit.recurring(recurs)
        wait = self._restore(lease)
        if wait is not None:
            return wait
        if lease.published:
            self.tree.evict_until(slots=1)
            self._take_slot(lease)
        return lease

    def _named(self, request: CacheRequest, found: Node) -> tuple[int | None, ...]:
        """Where states that the caller named are kept: on pages, of what is computed, or of what is
        read if somebody has kept them there."""
        there = found.checkpoints()
        computed = range(found.depth + 1, len(request.ids) + 1) if self.reuse else ()
        floors = (floored(boundary, self.page) for boundary in request.checkpoint_at)
        return tuple(n if n in there or n in computed else None for n in floors)

    def _must_be_cold(self, match: Match) -> bool:
        """Whether a request could wait for ever for the slot to resume in: the state that it would
        resume from has the last one, and nobody is there to give another back."""
        return match.depth > 0 and not self._slot_beside(match.node) and self._alone()

    def _slot_beside(self, node: Node) -> bool:
        """Whether a slot is free or can be evicted while this node's state stays (I-14)."""
        ledger = self.tree.ledger()
        return self._slots.free_count + ledger.state_evictable > (not node.state_locks)

    def _alone(self, besides: RadixLease | None = None) -> bool:
        """Nobody else holds a slot."""
        return not any(lease.slots[0] for lease in self._leases if lease is not besides)

    def _restore(self, lease: RadixLease) -> Wait | None:
        """Look up, and pin what was hit."""
        limit = self._limit(lease.request)
        match = self.tree.match(lease.request.ids[:limit], lease.request.salt)
        lease.hit, lease.stale = self.hit_of(match, limit), False
        lease.named = self._named(lease.request, match.node)
        if not match.depth:
            return None
        if self._must_be_cold(match):
            self._start_cold(lease)
            return None
        if not self._slot_beside(match.node):
            lease.hit, lease.stale = Hit(), True
            return Wait(WaitReason.SLOTS, 1, self._slots.free_count)
        lease.receipt = self.tree.lock(match.node)  # the source stays until the copy has run
        lease.pages[0][:] = match.pages
        lease.computed = lease.published = match.depth
        return None

    def _start_cold(self, lease: RadixLease) -> None:
        lease.hit, lease.stale = COLD, False
        lease.named = self._named(lease.request, self.tree.root)

    def _take_slot(self, lease: RadixLease) -> None:
        """The private slot, with its one initialiser after a hit (I-07). One is free."""
        lease.slots[0] = self._slots.alloc(1)[0]
        if lease.published:
            lease.copies = (Copy(CopyKind.STATE, 0, lease.receipt.node.state, lease.slots[0]),)

    # one piece

    def _plan(self, lease: RadixLease, want: int, max_chunk: int | None) -> StepPlan | Wait:
        first = lease.phase is Phase.ADMITTED
        if first and lease.stale and (wait := self._restore(lease)):
            return wait
        start = lease.computed
        end = self._end_of_piece(lease, min(want, max_chunk or want), max_chunk)
        if end == start:
            return self._give_up(lease, Wait(WaitReason.CHUNK, self.page, min(want, self.page)))
        wait = self._take_storage(lease, end, first)
        if wait is not None and first and lease.published and self._alone(lease):
            self._forget(lease)
            self._start_cold(lease)
            return self._plan(lease, want, max_chunk)
        if wait is not None:
            return self._give_up(lease, wait)
        if lease.decodes:
            evict = not lease.tracker.slots  # a second one only if it costs nobody anything
            acquire = partial(self._acquire, lease, evict=evict)
            lease.tracker.before_decode(end, self.decode_grid, acquire)
            exports: tuple[ExportTo, ...] = ()
        else:
            exports = self._exports(lease, start, end)
        copies, lease.copies = lease.copies, ()
        return StepPlan(lease, start, end, lease.pages, tuple(lease.slots), copies, exports)

    def _end_of_piece(self, lease: RadixLease, want: int, max_chunk: int | None) -> int:
        """A cut falls on a unit, or on a page, if it can; and a piece ends at a boundary that is to
        be kept but cannot be exported from inside of it."""
        start, known = lease.computed, len(lease.tokens)
        end = min(start + want, known)
        if end < known:
            end = next((e for u in (self.unit, self.page) if (e := floored(end, u)) > start), end)
        for boundary in self._wanted(lease):
            if start < boundary < end and (boundary - start) % self.export_alignment:
                return boundary
        return end

    def _take_storage(self, lease: RadixLease, end: int, first: bool) -> Wait | None:
        """Pages and, for a first piece, slots: all that it takes or nothing."""
        pages = max(0, -(-end // self.page) - len(lease.pages[0]))
        room = pages
        if first and lease.request.must_fit:
            room = max(pages, -(-len(lease.tokens) // self.page) - len(lease.pages[0]))
        active = int(not lease.slots[0])
        tracked = self._tracked_at_once if first else 0
        if not self.tree.has_room(pages=room):
            return Wait(WaitReason.PAGES, room, self._kv.free_count)
        if not self.tree.has_room(slots=active + tracked):
            return Wait(WaitReason.SLOTS, active + tracked, self._slots.free_count)
        self._evict_for(lease, end, pages, active + tracked)
        if active:
            self._take_slot(lease)
        if tracked:
            lease.tracker.slots = self._slots.alloc(tracked, Ownership.TRACKED)
        lease.pages[0].extend(self._kv.alloc(pages))
        return None

    def _evict_for(self, lease: RadixLease, end: int, pages: int, slots: int) -> None:
        """Free what a piece up to `end` takes; there is room for it."""
        self.tree.evict_until(pages, slots)

    @property
    def _slots_to_start(self) -> int:
        return 1 + self._tracked_at_once

    @property
    def _tracked_at_once(self) -> int:
        """Tracked slots that a request must have before it starts."""
        return 0

    def _give_up(self, lease: RadixLease, wait: Wait) -> Wait:
        if lease.phase is Phase.ADMITTED:
            self._forget(lease)
        return wait

    def _cancel(self, plan: StepPlan) -> None:
        lease: RadixLease = plan.lease
        lease.tracker.undo(self._slots)
        self._slots.free([slot for _, slot in lease.exported])
        lease.exported = ()
        if not lease.ran:  # as after admit: what was hit stays, the rest was the plan's
            self._slots.free(lease.tracker.slots)
            lease.tracker.slots.clear()
            lease.copies = plan.copies
            if not lease.copies:
                self._slots.free(lease.slots)
                lease.slots[0] = 0
        keep = -(-plan.start // self.page)
        self._kv.free(lease.pages[0][keep:])
        del lease.pages[0][keep:]

    def _commit(self, lease: RadixLease, plan: StepPlan, last: bool) -> tuple[Copy, ...]:
        if plan.start >= len(lease.request.ids):
            return lease.tracker.after_decode(lease.computed, lease.slots[0], self._slots)
        copies = self._publish_piece(lease, last)
        lease.named = self._still_named(lease, plan.start)
        return copies

    def _release(self, lease: RadixLease, publish: bool) -> None:
        given = self._publish_last(lease) if publish else None
        self._slots.free(
            slot for slot in (*lease.slots, *lease.tracker.slots) if slot and slot != given
        )
        self._kv.free(lease.pages[0][lease.published // self.page :])
        self._unlock(lease)
        lease.pages[0].clear()
        lease.slots[0], lease.copies = 0, ()
        lease.passing.clear()
        lease.tracker = self._new_tracker()
        if publish and lease.ran and self.eviction is not None:
            self.eviction.saw(served(lease))

    def _forget(self, lease: RadixLease) -> None:
        """A lease that has not run: give back all, and look up again with its next plan."""
        self._release(lease, publish=False)
        lease.stale, lease.hit = True, Hit()
        lease.computed = lease.published = 0

    def _end_step(self) -> None:
        self._unfilled.clear()

    def _abandon(self) -> None:
        """The tree stays, but for what hung below a split that was cut short and for states whose
        copy may not have run."""
        pages, slots = self.tree.rebuild(self._unfilled)
        self._kv.reclaim(pages)
        self._slots.reclaim(slots)
        self._unfilled.clear()

    def _clear(self) -> None:
        self.tree.reset()
        super()._clear()

    # books

    def _evictions(self) -> Evictions:
        return self.tree.evictions

    def _audit(self) -> list[str]:
        return audit_tree(self.tree, self._leases, self.identity)
