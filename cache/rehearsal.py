"""What a cache would have saved if its states were evicted by another policy: the requests that it
has served, again, one after the other, on books without memory (serving 4.11)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from cache.boundaries import floored
from cache.leases import CacheRequest, StepPlan
from cache.policy.eviction import Eviction, FlopAware, Served
from cache.pools.pool import Pool
from cache.pools.storage import Storage
from cache.state_cache import StateCache


class Rehearsal(NamedTuple):
    """make: a new cache that evicts by a policy, of the same rules as the one that has served and
    over as much room, without memory. grid: where decode keeps a state, in tokens."""

    make: Callable[[Eviction], StateCache]
    grid: int = 1

    def saved_flops(self, policy: FlopAware, requests: Sequence[Served]) -> int:
        """FLOPs that hits save. A request that does not fit is left out. Deterministic, if `make`
        is."""
        cache = self.make(policy)
        fitting = (request for request in requests if not cache.refusal(len(request.tokens)))
        hits = (self._serve(cache, f"rehearsed-{n}", request) for n, request in enumerate(fitting))
        return sum(policy.flops.of(hit) for hit in hits)

    def _serve(self, cache: StateCache, name: str, request: Served) -> int:
        """The tokens that hit. What followed the prompt is known at once, and runs up to where its
        last state is kept, and on."""
        prompt, rest = request.tokens[: request.prompt], request.tokens[request.prompt :]
        cache.begin_step()
        lease = cache.admit(CacheRequest(name, prompt, request.salt))
        while lease.remaining:
            last = floored(len(lease.tokens), self.grid) - lease.computed
            want = last if lease.computed >= len(prompt) and last > 0 else lease.remaining
            plan = cache.plan(lease, want)
            if not isinstance(plan, StepPlan):
                break
            cache.commit(lease, plan.end, rest if plan.end == len(prompt) else ())
            cache.end_step()
            cache.begin_step()
        cache.finish(lease)
        cache.end_step()
        return lease.hit.joint if lease.ran else 0


def without_memory(storage: Storage) -> Storage:
    """Pools of the same sizes, for books alone."""
    pages, states = (
        tuple(Pool(pool.size, pool.unit, pool.unit_bytes) for pool in pools)
        for pools in (storage.pages, storage.states)
    )
    return Storage(pages, storage.page_tokens, states)
