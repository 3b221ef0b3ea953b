"""CacheEntry: all that must be known of one object before it may be joined with others.

Within a process the managers' own structures say the same with less (decision 27); records are made
where objects leave it, and by `audit`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from cache.identity import Identity
from cache.pools.allocator import Handle


class StateKind(StrEnum):
    """A kind of state; the last two always go together."""

    MLA_KV = "mla_kv"  # valid for an interval of tokens
    RECURRENT = "kda_recurrent"  # valid at a point
    CONV = "kda_conv"


REQUIRED = frozenset(StateKind)


@dataclass(frozen=True)
class CacheEntry:
    """One object (serving.md 1.3).

    identity, salt  whose; equal or rejected
    prefix_hash     of the prefix up to the end boundary
    start, end      rows held by MLA_KV; for point kinds both are the boundary
    where           pool and index with its generation
    writable        false once shared
    parent          prefix hash of the nearest shallower checkpoint, None if there is none
    """

    kind: StateKind
    identity: Identity
    salt: str | None
    prefix_hash: bytes
    start: int
    end: int
    pool: str
    where: tuple[Handle, ...]
    writable: bool = False
    parent: bytes | None = None

    def __post_init__(self) -> None:
        point = self.kind is not StateKind.MLA_KV
        if not 0 <= self.start <= self.end or (point and self.start != self.end):
            raise ValueError(
                f"{self.kind} cannot be at {self.start}..{self.end}: rows need an interval, points "
                "one boundary"
            )


def completes(entries: Iterable[CacheEntry], boundary: int) -> bool:
    """Whether these entries allow a resume at `boundary`: every kind of one producer, one key space
    and one prefix, rows without a gap (I-01)."""
    entries = list(entries)
    points = [e for e in entries if e.kind is not StateKind.MLA_KV]
    rows = sorted((e.start, e.end) for e in entries if e.kind is StateKind.MLA_KV)
    reach = 0
    for start, end in rows:
        if start > reach:
            return False
        reach = max(reach, end)
    kinds = {e.kind for e in points}
    producers = {(e.identity, e.salt) for e in entries}
    prefixes = {e.prefix_hash for e in points}
    return (
        kinds == REQUIRED - {StateKind.MLA_KV}
        and {e.end for e in points} == {boundary}
        and reach >= boundary
        and len(producers) == len(prefixes) == 1
    )
