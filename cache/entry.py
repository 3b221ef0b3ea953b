"""CacheEntry: all that must be known of one object before it may be joined with others.

Within a process the managers' own structures say the same with less (decision 27); records are made
where objects leave it, and by `audit`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from cache.identity import Identity
from cache.joint import joint_boundary
from cache.pools.allocator import Handle


class StateKind(StrEnum):
    """A kind of state; the last two always go together."""

    MLA_KV = "mla_kv"  # valid for an interval of tokens
    RECURRENT = "kda_recurrent"  # valid at a point
    CONV = "kda_conv"  # the same


POINTS = (StateKind.RECURRENT, StateKind.CONV)


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


def joint_of(
    entries: Iterable[CacheEntry],
    identity: Identity,
    salt: str | None,
    hashes: Mapping[int, bytes],
    cap: int,
) -> int:
    """The largest boundary of at most `cap` tokens at which these objects allow a resume of a
    prompt. hashes: the chained hashes of its prefixes, by boundary. What is of another producer,
    key space or prefix does not count, whatever else it has in common."""
    own = [
        e
        for e in entries
        if (e.identity, e.salt) == (identity, salt) and hashes.get(e.end) == e.prefix_hash
    ]
    reach = 0
    for start, end in sorted((e.start, e.end) for e in own if e.kind is StateKind.MLA_KV):
        if start > reach:
            break
        reach = max(reach, end)
    points = [{e.end for e in own if e.kind is kind} for kind in POINTS]
    return joint_boundary([reach], points, cap)


def completes(
    entries: Iterable[CacheEntry],
    identity: Identity,
    salt: str | None,
    hashes: Mapping[int, bytes],
    boundary: int,
) -> bool:
    """Whether these objects allow a resume at this very boundary (I-01). Arguments: `joint_of`."""
    return joint_of(entries, identity, salt, hashes, boundary) == boundary
