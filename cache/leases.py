"""What passes between the engine and a cache: requests, leases, plans, waits.

Boundaries are absolute counts of consumed tokens. A list per group stands for attention groups in
`pages` and for state groups in `slots`; the real model has one of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


@dataclass(frozen=True)
class CacheRequest:
    """One sequence that wants storage; `n` samples of a prompt are n of these.

    name           for messages, and for policies: whose it is, also after a preemption
    ids            the known tokens: the prompt; after a preemption, what was sampled too. A copy is
                   kept, so that a caller's growing list is not an identity that changes
    salt           separates key spaces (tenants); part of the identity
    skip_read      compute everything, publish as usual
    must_fit       first storage only if all known tokens would fit at once
    checkpoint_at  boundaries that the caller will want to resume from
    key_cap        look up at most so many tokens (prompt logprobs need the rest computed)
    prompt         tokens of `ids` that are the prompt, None for all: what is sampled before a
                   preemption is known, but nobody sends it again
    """

    name: str
    ids: Sequence[int]
    salt: str | None = None
    skip_read: bool = False
    must_fit: bool = False
    checkpoint_at: tuple[int, ...] = ()
    key_cap: int | None = None
    prompt: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", tuple(self.ids))

    @property
    def readable(self) -> int:
        """Tokens that may be read: one must run to give logits (I-03)."""
        if self.skip_read:
            return 0
        last = len(self.ids) - 1
        return last if self.key_cap is None else max(0, min(last, self.key_cap))


class Lower(StrEnum):
    """Why the joint boundary of a hit is not higher (decision 32)."""

    NO_REUSE = "no reuse"  # this cache keeps nothing, the request may not read, or has no room to
    UNKNOWN = "unknown prefix"
    CAP = "cap"  # at N-1: one token must run to give logits
    GRID = "grid"
    NO_CHECKPOINT = "no checkpoint"
    EVICTED = "evicted"


class Hit(NamedTuple):
    """What a look-up found: `joint`, where every kind of state exists; `token_hit`, how far latent
    rows alone reach; `junction`, a boundary worth a checkpoint; why it is not more."""

    joint: int = 0
    token_hit: int = 0
    junction: int | None = None
    lower: Lower = Lower.UNKNOWN


COLD = Hit(lower=Lower.NO_REUSE)  # of a request that has no room to resume in


class CopyKind(StrEnum):
    """What a copy moves, and how it initialises its destination (I-07). Starting from zeros is no
    copy: a row at boundary 0 starts from zeros whatever its slot contains."""

    STATE = "state"  # slot → slot: copy-on-write of a checkpoint, a move of the running state
    PAGE = "page"  # page → page: copy-on-write of a shared tail


class Copy(NamedTuple):
    """One index to another in the pool of a group, all layers."""

    kind: CopyKind
    group: int
    source: int
    destination: int


class ExportTo(NamedTuple):
    """Also keep the state after `offset` tokens of the plan, in these slots: one a state group, -1
    for a group whose state is not wanted there."""

    offset: int
    slots: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class StepPlan:
    """What one lease does in this step: consume tokens[start:end].

    copies run first, in order. pages[g] and slots[g] are where the row lives during this step;
    pages is the lease's own list, to be read before the commit. start is the boundary of the state
    in the slots: 0 means start from zeros (I-06).
    """

    lease: Lease
    start: int
    end: int
    pages: tuple[Sequence[int], ...]
    slots: tuple[int, ...]
    copies: tuple[Copy, ...] = ()
    exports: tuple[ExportTo, ...] = ()

    @property
    def tokens(self) -> Sequence[int]:
        """The ids to run, [end - start]."""
        return self.lease.tokens[self.start : self.end]


class Phase(StrEnum):
    ADMITTED = "admitted"  # looked up; holds no storage of its own, at most pins
    HOLDING = "holding"
    ENDED = "ended"


@dataclass(eq=False)
class Lease:
    """A request's hold on storage. The cache changes it, the engine reads it.

    tokens are the known ids, the first `computed` of which are in the state and in the pages.
    plan is the one in flight, between `plan` and `commit` or `cancel`. ran: one has been committed.
    named: for each boundary of `request.checkpoint_at`, where it is kept (decision 31), None for
    one that this cache cannot keep.
    """

    request: CacheRequest
    hit: Hit
    pages: tuple[list[int], ...]
    slots: list[int]  # 0: none held
    computed: int = 0
    phase: Phase = Phase.ADMITTED
    plan: StepPlan | None = None
    ran: bool = False
    named: tuple[int | None, ...] = ()
    tokens: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = list(self.request.ids)

    @property
    def prompt(self) -> int:
        """Tokens of its prompt; what it came with beyond that was sampled before a preemption."""
        ids = len(self.request.ids)
        return ids if self.request.prompt is None else self.request.prompt

    @property
    def remaining(self) -> int:
        """Known tokens that are not yet in the state."""
        return len(self.tokens) - self.computed


class WaitReason(StrEnum):
    PAGES = "pages"
    SLOTS = "slots"
    SAME_STEP = "same step"  # what was hit is being written in this very step
    LOADING = "loading"  # what was hit is on its way from a slower tier
    CHUNK = "chunk"  # the piece was clipped to nothing; a larger budget would do


class Wait(NamedTuple):
    """Not now, and what would end it (decision 29): `needed` units, of which `free` are there."""

    reason: WaitReason
    needed: int = 0
    free: int = 0
