"""Admission: which states are worth storing at all (serving 4.11, M06, M07).

A manager has a state at hand and asks a policy about it, with the occasion and the name of its
prefix. Policies know neither trees nor blocks. What they answer changes hit lengths only (I-39).

    second hit   a prefix that has been met before, by somebody else: the first visitor stores
                 nothing, the second stores, the third hits
    Marconi      where others part from the sequence, and its last token: two states a sequence

A caller's own boundaries are not asked about.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from enum import StrEnum
from typing import NamedTuple, Protocol


class Occasion(StrEnum):
    """Why a state is at hand."""

    JUNCTION = "junction"  # rows of others are cached up to here, and no state
    RESEND = "resend"  # the last boundary that a resend of the prompt can use
    PERIODIC = "periodic"  # on a grid, or where a piece has ended
    LAST = "last"  # the newest one of a request that finishes, or so far


class Candidate(NamedTuple):
    """A state at hand. boundary: in tokens. prefix: a name that equal prefixes share and others do
    not. visitor: whose it is; the same one may ask again."""

    boundary: int
    occasion: Occasion
    prefix: Hashable
    visitor: Hashable


class Admission(Protocol):
    def worth_keeping(self, state: Candidate) -> bool:
        """Whether to store it. Asked again by the same visitor, the answer is the same."""


class Marconi:
    """Of every sequence the branch point, found by looking its prompt up before it is computed, and
    the state after its last token."""

    def worth_keeping(self, state: Candidate) -> bool:
        return state.occasion in (Occasion.JUNCTION, Occasion.LAST)


class SecondHit:
    """Remembers the first visitor of each of the last `memory` prefixes; one that is met again is
    as new as ever. ValueError for no memory at all."""

    def __init__(self, memory: int = 1 << 16) -> None:
        if memory < 1:
            raise ValueError(f"prefixes to remember must be at least 1, got {memory}")
        self._memory = memory
        self._first: OrderedDict[Hashable, Hashable] = OrderedDict()  # prefix → visitor, None: any

    def __len__(self) -> int:
        """Prefixes remembered."""
        return len(self._first)

    def worth_keeping(self, state: Candidate) -> bool:
        # rows up to a junction are others', unless it is known whose
        met = None if state.occasion is Occasion.JUNCTION else state.visitor
        first = self._first.setdefault(state.prefix, met)
        self._first.move_to_end(state.prefix)
        if len(self._first) > self._memory:
            self._first.popitem(last=False)
        return first != state.visitor
