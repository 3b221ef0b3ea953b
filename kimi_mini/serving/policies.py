"""Which states are worth storing, and which go first: policies by name (serving 4.11).

admission  all         what there is
           second-hit  of a prefix that has been met before
           marconi     where others part from a prompt, and its newest
eviction   lru         the least recently used
           flop-aware  also by what a byte saves, weighed by alpha
           auto        the same, with an alpha that is learnt from the first requests
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from cache.blocks.manager import BlockCache
from cache.policy.admission import Admission, Marconi, SecondHit
from cache.policy.alpha import LearntAlpha
from cache.policy.cost_model import PrefixFlops
from cache.policy.eviction import Eviction, FlopAware
from cache.pools.storage import Storage
from cache.radix.manager import RadixCache
from cache.rehearsal import Rehearsal, without_memory

ADMISSIONS: dict[str, Callable[[], Admission | None]] = {
    "all": lambda: None,
    "second-hit": SecondHit,
    "marconi": Marconi,
}
EVICTIONS = ("lru", "flop-aware", "auto")
REHEARSED = 64  # requests, the latest: each is served again for every alpha


@dataclass(frozen=True)
class Policies:
    """By name; alpha: weight of FLOPs against recency, of "flop-aware" alone; None for 1.
    ValueError for names that are unknown, or an alpha that is out of range or of no use."""

    admission: str = "all"
    eviction: str = "lru"
    alpha: float | None = None

    def __post_init__(self) -> None:
        for option, names in (("admission", ADMISSIONS), ("eviction", EVICTIONS)):
            given = getattr(self, option)
            if given not in (*names,):
                raise ValueError(f"{option} must be one of {', '.join(names)}; got {given!r}")
        if self.alpha is None:
            return
        if type(self.alpha) not in (int, float) or not 0 <= self.alpha < math.inf:
            raise ValueError(f"eviction_alpha must be a number from 0 on, got {self.alpha!r}")
        if self.eviction != "flop-aware":
            raise ValueError(
                f"eviction_alpha is for eviction 'flop-aware', got {self.alpha} for "
                f"{self.eviction!r}"
            )

    def cache(
        self,
        kind: Callable[..., RadixCache | BlockCache],
        storage: Storage,
        flops: PrefixFlops | None,
    ) -> RadixCache | BlockCache:
        """A cache that has them. kind: with all of its other arguments. flops: of a prefix of the
        model whose states are in `storage`; ValueError for None if eviction weighs them."""
        if self.eviction == "lru":
            return kind(storage, admission=ADMISSIONS[self.admission]())
        if flops is None:
            raise ValueError(
                f"eviction {self.eviction!r} weighs the FLOPs of a prefix, and they were not given"
            )
        pages = zip(storage.pages, storage.page_tokens, strict=True)
        policy: Eviction = FlopAware(
            flops,
            state_bytes=sum(pool.unit_bytes for pool in storage.states),
            row_bytes=sum(pool.unit_bytes // page for pool, page in pages),
            alpha=self._first_alpha(),
        )
        if self.eviction == "auto":
            policy = LearntAlpha(policy, self._rehearsal(kind, storage), most=REHEARSED)
        return kind(storage, admission=ADMISSIONS[self.admission](), eviction=policy)

    def _first_alpha(self) -> float:
        if self.eviction == "auto":
            return 0.0
        return 1.0 if self.alpha is None else self.alpha

    def _rehearsal(self, kind: Callable, storage: Storage) -> Callable:
        def again(policy: Eviction | None) -> RadixCache | BlockCache:
            admission = ADMISSIONS[self.admission]()
            return kind(without_memory(storage), admission=admission, eviction=policy)

        return Rehearsal(again, again(None).decode_grid).saved_flops
