"""BlockCache: hashed blocks and a joint look-up over groups, behind the contract.

A hit is held, not copied: rows are shared by reference, and the first piece copies the state, and
the part of a block that a hit ends inside of, into blocks of its own. Storage is taken by `plan`,
all of it or none. What is found by a hash is registered in `plan`, too, and may be used by others
once the step has ended (I-41); several blocks may hold the same, and the oldest serves. What is
registered is said in `Publication`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from cache.blocks.audit import audit_blocks
from cache.blocks.coordinator import Alike, Coordinator, Found, Member, alike
from cache.blocks.groups import Group, RowGroup, StateGroup
from cache.blocks.keys import HashChain
from cache.blocks.lease import BlockLease, Pair, RowTable, StateTable
from cache.blocks.pool import BlockPool
from cache.blocks.publication import Publication
from cache.blocks.sizes import block_sizes
from cache.blocks.victims import Victims
from cache.boundaries import floored
from cache.leases import (
    COLD,
    CacheRequest,
    Copy,
    Hit,
    Lower,
    Phase,
    StepPlan,
    Wait,
    WaitReason,
)
from cache.policy.admission import Admission
from cache.policy.eviction import Eviction
from cache.policy.retention import Retention
from cache.pools.storage import Storage
from cache.stats import Evictions
from cache.visit import Visit, served


class BlockCache(Publication):
    """Any number of attention and state groups, of unequal blocks, or of one kind alone.

    state_block  tokens a state block, one for all state groups or one each; an attention group's
                 block is its page
    hash_unit    tokens a hash, None for the largest that divides every block
    retention    None, 0, or tokens between milestones: see `Retention`
    admission    which states are kept, None for all that are at hand
    eviction     which states are reused first, None for the order of the queue
    reuse        False: nothing is kept
    Raises ValueError for sizes, a retention or policies that do not go together.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        state_block: int | Sequence[int] = 64,
        hash_unit: int | None = None,
        retention: int | None = 0,
        admission: Admission | None = None,
        eviction: Eviction | None = None,
        reuse: bool = True,
        **arguments,
    ) -> None:
        super().__init__(storage, **arguments)
        count = len(storage.states)
        states = (state_block,) * count if isinstance(state_block, int) else tuple(state_block)
        if len(states) != count:
            raise ValueError(
                f"there are {count} state groups, and state blocks for {len(states)}: {states}"
            )
        self.sizes = block_sizes(storage.page_tokens, states, hash_unit)
        self.retention = Retention.checked(
            retention, scheduler_block=self.sizes.scheduler, stateful=bool(states)
        )
        self.admission, self.eviction, self.reuse = admission, eviction, reuse
        self._make_groups()
        self._set_choices()

    def _make_groups(self) -> None:
        numbers, attention = self._numbers(), self.sizes.attention
        pools = self._block_pools(numbers)
        self.block_pools = tuple(dict.fromkeys(pools))
        groups = [*zip(numbers, (*attention, *self.sizes.states), pools, strict=True)]
        rows, states = enumerate(groups[: len(attention)]), enumerate(groups[len(attention) :])
        self._rows = tuple(self._row_group(n, i, block, pool) for i, (n, block, pool) in rows)
        self._states = tuple(self._state_group(n, i, block, pool) for i, (n, block, pool) in states)
        self.groups: tuple[Group, ...] = tuple(
            sorted((*self._rows, *self._states), key=lambda group: group.number)
        )
        rows_alike, states_alike = map(self._alike, (self._rows, self._states))
        self.coordinator = Coordinator(self.sizes, rows_alike, states_alike)

    def _set_choices(self) -> None:
        """Let the policy choose among the states of each group."""
        for group in self._states if self.eviction is not None else ():
            group.pool.choice = Victims(group.pool, self.eviction)

    def _numbers(self) -> Sequence[int]:
        """The number of each group, attention groups first, then state groups."""
        return range(len([*self.storage]))

    def _block_pools(self, numbers: Sequence[int]) -> list[BlockPool]:
        """The block pool of each group: each has its own (decision 30)."""
        return [BlockPool({n: pool}) for n, pool in zip(numbers, self.storage, strict=True)]

    def _alike(self, groups: Sequence[Group]) -> tuple[Alike, ...]:
        return alike((self._kind(g.number), g.block, Member(g.number, g.pool)) for g in groups)

    def _kind(self, number: int) -> str:
        """Groups that agree in this and in their block are found together or not at all."""
        return str(number)

    def _row_group(self, number: int, index: int, block: int, pool: BlockPool) -> RowGroup:
        return RowGroup(number, index, block, pool)

    def _state_group(self, number: int, index: int, block: int, pool: BlockPool) -> StateGroup:
        return StateGroup(number, index, block, pool, block // self.sizes.unit)

    # look-up

    def _lookup(self, request: CacheRequest) -> Hit:
        chain = self.chain_of(request.ids, request.salt)
        return self._hit(self._found(request, chain), request, chain)

    def find(self, request: CacheRequest) -> Found:
        """What this request would find if admitted now, block by block. Changes nothing."""
        return self._found(request, self.chain_of(request.ids, request.salt))

    def _found(self, request: CacheRequest, chain: HashChain) -> Found:
        return self.coordinator.find(chain, self._limit(request))

    def chain_of(self, tokens: Sequence[int], salt: str | None = None) -> HashChain:
        """The hashes of a sequence in this cache."""
        return HashChain(self.identity.origin(salt), tokens, self.sizes.unit)

    def _limit(self, request: CacheRequest) -> int:
        """Tokens that may be read here."""
        return request.readable if self.reuse else 0

    def _hit(self, found: Found, request: CacheRequest, chain: HashChain) -> Hit:
        """What that means for a request."""
        junction = found.longest if found.longest > found.joint else None
        why = self._why(found, chain, self._limit(request))
        return Hit(found.joint, found.reach, junction, why)

    def _why(self, found: Found, chain: HashChain, limit: int) -> Lower:
        """Why the joint boundary is not higher (decision 32)."""
        if not limit:
            return Lower.NO_REUSE
        unit = self.sizes.hits
        if found.reach > found.joint:
            above = range(found.joint + unit, found.reach + 1, unit)
            lost = any(g.pool.was_lost(chain.key(n, g.number)) for g in self._states for n in above)
            return Lower.EVICTED if lost else Lower.NO_CHECKPOINT
        if found.joint == limit:
            return Lower.CAP
        return Lower.GRID if found.joint == floored(limit, unit) else Lower.UNKNOWN

    def _admit(self, request: CacheRequest) -> BlockLease:
        lease = BlockLease(
            request,
            Hit(),
            tuple([] for _ in self._rows),
            [0] * len(self._states),
            rows=[RowTable() for _ in self._rows],
            states=[StateTable(group.capacity) for group in self._states],
        )
        lease.chain = self.chain_of(lease.tokens, request.salt)
        lease.visit = Visit(self.admission, request.name, lease.chain.at)
        lease.recurring = self._recurring(lease)
        self._restore(lease)
        return lease

    def _restore(self, lease: BlockLease) -> None:
        """Look up, and hold what is found unless it is being written in this very step."""
        found = self._found(lease.request, lease.chain)
        lease.hit, lease.computed = self._hit(found, lease.request, lease.chain), found.joint
        lease.named = self._named(lease)
        lease.stale = found.joint > 0 and self._is_fresh(found, lease.chain)
        if found.joint and not lease.stale:
            for group in self.groups:
                group.adopt(lease, found.columns[group.number], found.joint)

    def _is_fresh(self, found: Found, chain: HashChain) -> bool:
        """Whether something of it is written in this step (I-41)."""
        return any(
            self._is_written_now(group, found, column)
            for group in self.groups
            for column in range(len(found.columns[group.number]))
        )

    @staticmethod
    def _is_written_now(group: Group, found: Found, column: int) -> bool:
        block = found.columns[group.number][column]
        needed = min((column + 1) * group.block, found.joint)
        return block is not None and not group.has(block, needed)

    # one piece

    def _plan(self, lease: BlockLease, want: int, max_chunk: int | None) -> StepPlan | Wait:
        first = lease.phase is Phase.ADMITTED
        if first and lease.stale:
            self._restore(lease)
        end = self.end_of_piece(lease, min(want, lease.remaining), max_chunk)
        if end == lease.computed:
            return self._give_up(lease, Wait(WaitReason.CHUNK, self.sizes.state, want))
        if lease.stale:
            return self._give_up(lease, Wait(WaitReason.SAME_STEP))
        wait = self._shortage(lease, end, first)
        if wait is not None and first and lease.computed and self._alone(lease):
            self._forget(lease)
            lease.hit, lease.named, lease.stale = COLD, self._named(lease), False
            return self._plan(lease, want, max_chunk)
        if wait is not None:
            return self._give_up(lease, wait)
        piece = lease.piece = lease.new_piece()
        for group in self.groups:
            group.take(lease, end, piece)
        self._keep_inside(lease, end, piece)
        if self.reuse:
            self._register(lease, end, piece)
        slots, copies = tuple(lease.slots), tuple(piece.copies)
        exports = self._exports(lease, piece)
        return StepPlan(lease, lease.computed, end, lease.pages, slots, copies, exports)

    def _shortage(self, lease: BlockLease, end: int, first: bool) -> Wait | None:
        """What a pool lacks for this piece, before anything is taken."""
        whole = len(lease.tokens) if first and lease.request.must_fit else end
        for last in dict.fromkeys((whole, end)):
            needs: Counter[BlockPool] = Counter()
            for group in self.groups:
                needs[group.pool] += group.needs(lease, last)
            for group in self.groups:
                needed, free = needs[group.pool], group.pool.free_count
                if needed > free and group.needs(lease, last):
                    return Wait(group.lacks, needed, free)
        return None

    def _alone(self, lease: BlockLease) -> bool:
        """Nobody else holds anything."""
        return not any(other.holds for other in self._leases if other is not lease)

    def _give_up(self, lease: BlockLease, wait: Wait) -> Wait:
        if lease.phase is Phase.ADMITTED:
            self._forget(lease)
        return wait

    def _forget(self, lease: BlockLease) -> None:
        """A lease that has not run: let go of what was found, and look up again."""
        for group in self.groups:
            group.unadopt(lease)
        lease.hit, lease.computed, lease.stale = Hit(), 0, True

    def _cancel(self, plan: StepPlan) -> None:
        lease: BlockLease = plan.lease
        piece, lease.piece = lease.piece, None
        self._unregister(piece, above=0)
        for group in self.groups:
            group.undo(lease, piece)
        self._let_go(piece.pairs)

    def _commit(self, lease: BlockLease, plan: StepPlan, last: bool) -> tuple[Copy, ...]:
        piece, lease.piece = lease.piece, None
        self._unregister(piece, above=lease.computed)
        for group in self.groups:
            group.settle(lease)
        self._copied(piece.pairs)
        self._supersede(lease, piece)
        lease.named = self._still_named(lease, plan.start)
        return ()

    def _copied(self, pairs: list[Pair]) -> None:
        """These copies have run."""
        self._let_go(pairs)

    def _let_go(self, pairs: list[Pair]) -> None:
        """Neither end is needed by a copy any more."""
        for pool in self.block_pools:
            own = [pair for pair in pairs if self.groups[pair.group].pool is pool]
            pool.release(block for pair in own for block in (pair.source, pair.destination))

    def _release(self, lease: BlockLease, publish: bool) -> None:
        for group in self.groups:
            (group.give_back if lease.phase is Phase.HOLDING else group.unadopt)(lease)
        if publish and lease.ran and self.eviction is not None:
            self.eviction.saw(served(lease))

    def _end_step(self) -> None:
        for pool in self.block_pools:
            pool.end_step()

    def _abandon(self) -> None:
        """What was registered in steps that have ended stays."""
        for blocks in self.block_pools:
            for pool, survivors in blocks.rebuild().items():
                pool.reclaim(survivors)

    def _clear(self) -> None:
        for pool in self.block_pools:
            pool.reset()
        super()._clear()

    # books

    def _evictions(self) -> Evictions:
        reused = {g: g.pool.reused[g.pool.pools[g.number]] for g in self.groups}
        tokens = sum(reused[group] * group.block for group in self._rows)
        return Evictions(tokens, sum(reused[group] for group in self._states))

    def _audit(self) -> list[str]:
        return audit_blocks(self.groups, self._leases, self._pairs(), self.in_step)

    def _pairs(self) -> list[Pair]:
        """Copies that have not run, as far as is known."""
        return [pair for lease in self._leases if lease.piece for pair in lease.piece.pairs]
