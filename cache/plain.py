"""The contract without prefix reuse: every request computes all of its tokens in its own storage.

The simplest correct cache, and the cold run that every other one is held against.
"""

from __future__ import annotations

from cache.leases import CacheRequest, Copy, Hit, Lease, Lower, Phase, StepPlan, Wait, WaitReason
from cache.pools.allocator import Ownership
from cache.state_cache import StateCache


class PlainCache(StateCache):
    """One slot a request and state group, as many pages as its tokens fill; nothing is published.

    Every page and slot is active or free. `checkpoint_at`, `salt` and `skip_read` have no effect.
    """

    def _lookup(self, request: CacheRequest) -> Hit:
        return Hit(lower=Lower.NO_REUSE)

    def _admit(self, request: CacheRequest) -> Lease:
        pages = tuple([] for _ in self.storage.pages)
        return Lease(request, self._lookup(request), pages, [0] * len(self.storage.states))

    def _plan(self, lease: Lease, want: int, max_chunk: int | None) -> StepPlan | Wait:
        start = lease.computed
        end = start + min(want, max_chunk or want)
        first = lease.phase is Phase.ADMITTED
        wait = self._shortage(lease, end, first)
        if wait is not None:
            return wait
        if first:
            lease.slots[:] = [pool.alloc(1)[0] for pool in self.storage.states]
        for pool, table, pages in zip(
            self.storage.pages, lease.pages, self.storage.pages_for(end), strict=True
        ):
            # after a commit of less than its plan a row has more than it needs
            table += pool.alloc(max(0, pages - len(table)))
        return StepPlan(lease, start, end, lease.pages, tuple(lease.slots))

    def _shortage(self, lease: Lease, end: int, first: bool) -> Wait | None:
        """What the pools lack for this piece, before anything is taken."""
        if first:
            for pool in self.storage.states:
                if not pool.free_count:
                    return Wait(WaitReason.SLOTS, 1, 0)
        whole = len(lease.tokens) if first and lease.request.must_fit else end
        for pool, table, pages in zip(
            self.storage.pages, lease.pages, self.storage.pages_for(whole), strict=True
        ):
            needed = pages - len(table)
            if needed > pool.free_count:
                return Wait(WaitReason.PAGES, needed, pool.free_count)
        return None

    def _cancel(self, plan: StepPlan) -> None:
        lease = plan.lease
        if lease.computed == 0:
            self._release(lease, publish=False)
            return
        for pool, table, pages in zip(
            self.storage.pages, lease.pages, self.storage.pages_for(plan.start), strict=True
        ):
            pool.free(table[pages:])
            del table[pages:]

    def _commit(self, lease: Lease, plan: StepPlan, last: bool) -> tuple[Copy, ...]:
        return ()

    def _release(self, lease: Lease, publish: bool) -> None:
        for pool, table in zip(self.storage.pages, lease.pages, strict=True):
            pool.free(table)
            table.clear()
        for g, pool in enumerate(self.storage.states):
            if lease.slots[g]:
                pool.free([lease.slots[g]])
                lease.slots[g] = 0

    def _audit(self) -> list[str]:
        faults = []
        for pool in self.storage:
            own = pool.allocator.count(Ownership.FREE) + pool.allocator.count(Ownership.ACTIVE)
            if own != pool.size:
                faults.append(f"{pool.size - own} {pool.unit}s are neither active nor free")
        for lease in self._leases:
            if lease.phase is Phase.ADMITTED and (any(lease.slots) or any(lease.pages)):
                faults.append(f"{lease.request.name} holds storage before its first plan")
        return faults
