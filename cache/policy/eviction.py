"""FLOP-aware eviction: what goes first is old and cheap to compute again (Marconi; serving 4.11).

    score(v) = norm( 1 / (now - last use of v) ) + alpha norm( eff(v) )        the smallest goes
    eff(v)   = ( FLOP(end) - FLOP(start) ) / ( state bytes + row bytes (end - start) )

start is the nearest shallower boundary that can be resumed, from which v would have to be computed
again; end - start is the edge whose rows go with it. norm is min-max over the candidates of this
round, 1 for all of them if they are equal. alpha = 0 is least recently used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from cache.policy.cost_model import PrefixFlops


class Evictable(NamedTuple):
    """A state that may go: boundaries in tokens, and its last use on the caller's clock."""

    start: int
    end: int
    last_used: float


class Served(NamedTuple):
    """A request that has finished: the tokens in its state, the first `prompt` of which it came
    with, and its key space."""

    tokens: Sequence[int]
    prompt: int
    salt: str | None = None


class Eviction(Protocol):
    def victim(self, candidates: Sequence[Evictable], now: float) -> int:
        """Index of the one to evict; candidates come oldest first, all used before `now`."""

    def saw(self, request: Served) -> None:
        """Told of every request that finishes."""


@dataclass
class FlopAware:
    """flops: of a prefix from its length. state_bytes: of one boundary; row_bytes: of one token.
    alpha: weight of what a byte saves against how recently it did."""

    flops: PrefixFlops
    state_bytes: int
    row_bytes: int
    alpha: float = 0.0

    def victim(self, candidates: Sequence[Evictable], now: float) -> int:
        """Of equal scores the least recently used, and of those the first, goes."""
        scores = self.scores(candidates, now)
        order = [(score, state.last_used) for score, state in zip(scores, candidates, strict=True)]
        return order.index(min(order))

    def saw(self, request: Served) -> None:
        """Nothing to learn: alpha is given."""

    def scores(self, candidates: Sequence[Evictable], now: float) -> list[float]:
        """One for each candidate. ValueError for one that is used at `now` or later."""
        if any(state.last_used >= now for state in candidates):
            raise ValueError(f"states must have been used before {now}, got {candidates}")
        recency = _normalised([1 / (now - state.last_used) for state in candidates])
        efficiency = _normalised([self.efficiency(state) for state in candidates])
        return [r + self.alpha * e for r, e in zip(recency, efficiency, strict=True)]

    def efficiency(self, state: Evictable) -> float:
        """FLOPs that a byte of it saves; 0 if it saves none, whatever it weighs."""
        saved = self.flops.of(state.end) - self.flops.of(state.start)
        size = self.state_bytes + self.row_bytes * (state.end - state.start)
        return saved / size if saved else 0.0


def _normalised(values: Sequence[float]) -> list[float]:
    low, high = min(values), max(values)
    return [(value - low) / (high - low) if high > low else 1.0 for value in values]
