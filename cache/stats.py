"""What a cache tells of itself: occupancy now, and counts since it was made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from cache.leases import Lower, WaitReason
from cache.pools.allocator import Ownership
from cache.pools.pool import Pool


class PoolStats(NamedTuple):
    """Indices of one pool by ownership; bytes are unit_bytes each, sinks not counted."""

    unit: str
    unit_bytes: int
    size: int
    free: int
    active: int
    tracked: int
    inflight: int
    cached: int

    @classmethod
    def of(cls, pool: Pool) -> PoolStats:
        """A pool as it is now."""
        states = (Ownership.ACTIVE, Ownership.TRACKED, Ownership.INFLIGHT, Ownership.CACHED)
        counts = (pool.allocator.count(state) for state in states)
        return cls(pool.unit, pool.unit_bytes, pool.size, pool.free_count, *counts)


class Evictions(NamedTuple):
    """Since the cache was made. tokens: whose latent rows went; states: checkpoints, with rows or
    alone; capped: those of the states that went because their path had too many."""

    tokens: int = 0
    states: int = 0
    capped: int = 0


@dataclass(frozen=True)
class Stats:
    """Occupancy now, and counts since the cache was made.

    leases: live ones. lookups, hit tokens and lower (why a joint boundary was not higher) count
    leases whose first piece has run, with what it resumed from. computed_tokens: tokens of
    committed plans. waits: answers of that kind, by reason. Between joint and token hits lies what
    had to be replayed although its rows were there.
    """

    pools: tuple[PoolStats, ...]
    leases: int
    steps: int
    lookups: int
    joint_hit_tokens: int
    token_hit_tokens: int
    computed_tokens: int
    finished: int
    aborted: int
    preempted: int
    waits: Mapping[WaitReason, int]
    lower: Mapping[Lower, int]
    evictions: Evictions

    @property
    def replayed_tokens(self) -> int:
        """Tokens whose rows were cached, computed again for want of a state."""
        return self.token_hit_tokens - self.joint_hit_tokens
