"""RadixCache: a prefix tree of latent pages with sparse checkpoints, behind the contract.

A hit pins its node, takes a private slot and queues the one copy that initialises it (copy on
write); its latent pages are shared, and the request's own begin behind them. What is published goes
into the tree by moving indices (donate), never bytes, and the row goes on over the tree's pages.

Which boundaries are kept (decision 22), all absolute:

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

import math
from dataclasses import dataclass, field
from functools import partial

from cache.boundaries import Grids, floored, grids, junction_above
from cache.identity import Identity
from cache.leases import (
    CacheRequest,
    Copy,
    CopyKind,
    ExportTo,
    Hit,
    Lease,
    Lower,
    Phase,
    StepPlan,
    Wait,
    WaitReason,
)
from cache.policy.admission import Admission, Occasion
from cache.policy.eviction import Eviction, Served
from cache.pools.allocator import Ownership
from cache.pools.storage import Storage
from cache.radix.audit import audit_tree
from cache.radix.node import Node, Receipt
from cache.radix.strategy import TRACKED, Strategy, Tracker
from cache.radix.tree import Inserted, Match, RadixTree
from cache.radix.visit import Visit
from cache.state_cache import StateCache
from cache.stats import Evictions

COLD = Hit(lower=Lower.NO_REUSE)  # of a request that has no room to resume in


@dataclass(eq=False, kw_only=True)
class RadixLease(Lease):
    """visit: its questions to the admission policy; recurring: the grid boundary of the prompt that
    the policy wants. held: the boundary whose state the plan in flight keeps for the finish.
    tracker: snapshots of decode. receipt: the lock on what is shared, whose pages are the first
    `published` tokens of the row. copies: what initialises the slot, until a plan carries it.
    exported: boundaries and slots that the plan in flight keeps. passing: nodes that it has
    published on the grid alone, deepest last.
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
    stale: bool = False  # waited with its first plan: the next one looks up again

    @property
    def decodes(self) -> bool:
        """All tokens that it came with are in the state."""
        return self.computed >= len(self.request.ids)


class RadixCache(StateCache):
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
        self.grids: Grids = grids(state_chunk, self.page, interval)
        self.decode_grid = math.lcm(self.unit, interval)
        self.admission, self.eviction = admission, eviction
        self.tree = RadixTree(self._kv, self.page, self._slots, path_cap, eviction=eviction)
        self._unfilled: set[int] = set()  # published in this step, with a copy yet to run

    # look-up

    def _lookup(self, request: CacheRequest) -> Hit:
        limit = self._limit(request)
        match = self.tree.peek(request.ids[:limit], request.salt)
        return COLD if self._must_be_cold(match) else self.hit_of(match, limit)

    def _limit(self, request: CacheRequest) -> int:
        """Tokens that may be read: one must run to give logits (I-03)."""
        if request.skip_read or not self.reuse:
            return 0
        last = len(request.ids) - 1
        return last if request.key_cap is None else max(0, min(last, request.key_cap))

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
        origin = self.identity.origin(request.salt)
        lease.visit = Visit(self.admission, origin, lease.tokens, self.grids.checkpoint)
        if self.reuse:
            lease.recurring = lease.visit.recurring(self._prompt_end(lease))
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
        there = {node.depth for node in found.path() if node.state is not None}
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
        return floored(len(lease.request.ids) - 1, self.unit)

    def _to_hold(self, lease: RadixLease, wanted: list[int]) -> int | None:
        """The prompt end, if its state is worth storing only as the request's last."""
        boundary = self._prompt_end(lease)
        if boundary in wanted or not lease.tracker.limit:
            return None
        return boundary if lease.visit.admits(boundary, Occasion.LAST) else None

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
        return self._publish_piece(lease, last)

    # publication (serving 3.9)

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

    def _release(self, lease: RadixLease, publish: bool) -> None:
        given = None
        if publish and self.reuse and lease.ran:
            boundary, slot = self._to_publish(lease)
            newer = boundary > lease.published or (boundary and self._publishes_again)
            if newer and lease.visit.admits(boundary, Occasion.LAST):
                done = self._insert(lease, boundary, slot)
                lease.published = max(lease.published, done.node.depth)
                given = None if done.refused else slot
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
            tokens, request = tuple(lease.tokens[: lease.computed]), lease.request
            self.eviction.saw(Served(tokens, len(request.ids), request.salt))

    _publishes_again = False  # whether finishing inserts what has been published before

    def _forget(self, lease: RadixLease) -> None:
        """A lease that has not run: give back all, and look up again with its next plan."""
        self._release(lease, publish=False)
        lease.stale, lease.hit = True, Hit()
        lease.computed = lease.published = 0

    def _unlock(self, lease: RadixLease) -> None:
        if lease.receipt is not None:
            self.tree.unlock(lease.receipt)
            lease.receipt = None

    def _new_tracker(self) -> Tracker:
        limit = TRACKED[self.strategy] if self.reuse else 0
        return Tracker(limit, lazy=self.strategy is Strategy.LAZY)

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
