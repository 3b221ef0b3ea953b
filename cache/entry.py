"""CacheEntry: all that must be known of one object before it may be joined with others.

Within a process the managers' own structures say the same with less (decision 27); records are made
where objects leave it, and by `audit`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from cache.identity import Identity
from cache.joint import joint_boundary
from cache.pools.allocator import Handle


class StateKind(StrEnum):
    """A kind of state; the last two always go together."""

    MLA_KV = "mla_kv"  # valid for an interval of tokens
    RECURRENT = "kda_recurrent"  # valid at a point
    CONV = "kda_conv"  # the same


POINTS = (StateKind.RECURRENT, StateKind.CONV)


class Tier(StrEnum):
    """Where an object is; any may be resumed from, the nearest at once."""

    DEVICE = "device"
    HOST = "host"
    STORE = "store"


class Shard(NamedTuple):
    """Part `index` of `parts` along an axis, taken inside each of `groups` equal sections of it
    (conv: q, k and v)."""

    axis: str
    groups: int
    parts: int
    index: int


@dataclass(frozen=True)
class Form:
    """How one layer's part of an object is stored: equal or rejected.

    dtype   None where bytes are only accounted
    layout  names of the axes; shape: their sizes. Of rows, those of one row
    shard   None for the whole, which for rows means a replica on every rank
    """

    dtype: str | None
    layout: str
    shape: tuple[int, ...]
    shard: Shard | None = None


class Required(NamedTuple):
    """What a model needs of one kind before it can resume: all these layers, in this form."""

    layers: tuple[int, ...]
    form: Form


@dataclass(frozen=True)
class CacheEntry:
    """One object (serving.md 1.3).

    identity, salt     whose; equal or rejected
    prefix_hash        of the prefix up to the end boundary
    start, end         rows held by MLA_KV; for point kinds both are the boundary
    layers             ids of those that it covers: a boundary needs all of the model's
    form               equal or rejected
    pool, where, tier  index with its generation, in which pool, and where that is
    writable           false once shared
    parent             prefix hash of the nearest shallower checkpoint, None if there is none
    refs, last_access  locks, and the tick of its maker's clock, when the record was made
    """

    kind: StateKind
    identity: Identity
    salt: str | None
    prefix_hash: bytes
    start: int
    end: int
    layers: tuple[int, ...]
    form: Form
    pool: str
    where: tuple[Handle, ...]
    tier: Tier = Tier.DEVICE
    writable: bool = False
    parent: bytes | None = None
    refs: int = field(default=0, compare=False)
    last_access: int = field(default=0, compare=False)

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
    required: Mapping[StateKind, Required],
) -> int:
    """The largest boundary of at most `cap` tokens at which these objects allow a resume of a
    prompt. hashes: the chained hashes of its prefixes, by boundary. required: for each kind that
    the model has layers of. What is of another producer, key space, prefix or form does not count,
    whatever else it has in common; what covers some layers counts for those (I-01)."""
    own = [
        e
        for e in entries
        if (e.identity, e.salt) == (identity, salt) and hashes.get(e.end) == e.prefix_hash
    ]
    reaches: list[int] = []
    states: list[set[int]] = []
    for kind, (layers, form) in required.items():
        fitting = [e for e in own if e.kind is kind and e.form == form]
        for layer in layers:
            covering = [e for e in fitting if layer in e.layers]
            if kind is StateKind.MLA_KV:
                reaches.append(_reach(covering))
            else:
                states.append({e.end for e in covering})
    return joint_boundary(reaches, states, cap)


def _reach(rows: Iterable[CacheEntry]) -> int:
    """How far rows go, unbroken from the start."""
    reach = 0
    for start, end in sorted((e.start, e.end) for e in rows):
        if start > reach:
            break
        reach = max(reach, end)
    return reach


def completes(
    entries: Iterable[CacheEntry],
    identity: Identity,
    salt: str | None,
    hashes: Mapping[int, bytes],
    boundary: int,
    required: Mapping[StateKind, Required],
) -> bool:
    """Whether these objects allow a resume at this very boundary (I-01). Arguments: `joint_of`."""
    return joint_of(entries, identity, salt, hashes, boundary, required) == boundary
