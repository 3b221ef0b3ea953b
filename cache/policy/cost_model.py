"""What a checkpoint costs and what it saves (serving.md 8.3), as plain numbers.

A path of L tokens with a checkpoint of M bytes every K tokens, share points uniform on a grid g,
c_m the price of holding a byte for a second, lambda hits a second, c_r the price of a replayed
token:

    J(K) = c_m M L / K  +  lambda c_r (K - g) / 2        storage falls with K, replay grows
    K*   = sqrt(2 c_m M L / (lambda c_r))                the minimum of the two
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from cache.boundaries import floored


@dataclass(frozen=True)
class CostModel:
    """Of one model: row_bytes and flops a token, attention_flops a token and position of context,
    checkpoint_bytes a boundary."""

    row_bytes: int
    checkpoint_bytes: int
    flops: int
    attention_flops: int


def break_even(checkpoint_bytes: int, row_bytes: int) -> float:
    """Tokens whose latent rows weigh as much as one checkpoint; infinite without rows."""
    return checkpoint_bytes / row_bytes if row_bytes else math.inf


class PrefixFlops(NamedTuple):
    """FLOP(L) = linear L + quadratic L^2: of computing a prefix of L tokens from nothing."""

    linear: int
    quadratic: int

    def of(self, tokens: int) -> int:
        """FLOP(tokens)."""
        return self.linear * tokens + self.quadratic * tokens**2


def mamba_flops(*, mamba: int, attention: int, mlp: int, width: int, state: int) -> PrefixFlops:
    """Of a hybrid with so many layers of each kind, width D and state size N (Marconi):

    attention 8 L D^2 + 4 L^2 D     MLP 16 L D^2     Mamba1 12 L D^2 + 16 L D N + 10 L D
    """
    a_mamba = 12 * width**2 + 16 * width * state + 10 * width
    linear = mamba * a_mamba + (8 * attention + 16 * mlp) * width**2
    return PrefixFlops(linear, 4 * attention * width)


def interval_cost(interval: int, *, path: int, grid: int, holding: float, replay: float) -> float:
    """J(K). holding: c_m M, a second; replay: lambda c_r, a token and second."""
    return holding * path / interval + replay * (interval - grid) / 2


def mean_replay(interval: int, grid: int) -> float:
    """Tokens replayed on average by a hit at a share point that is uniform on the grid."""
    return (interval - grid) / 2


def best_interval(*, path: int, grid: int, holding: float, replay: float) -> int:
    """The multiple of the grid with the least cost that is no longer than the path: one of the two
    beside K*. ValueError for a path that is shorter than the grid."""
    last = floored(path, grid)
    if not last:
        raise ValueError(f"a path of {path} tokens has no boundary on a grid of {grid}")
    ideal = math.sqrt(2 * holding * path / replay) if replay > 0 else math.inf
    if ideal >= last:
        return last
    below = max(grid, floored(int(ideal), grid))
    return min(
        (below, below + grid),
        key=lambda k: interval_cost(k, path=path, grid=grid, holding=holding, replay=replay),
    )


def interval_for_budget(checkpoint_bytes: int, path: int, budget: int) -> int:
    """K >= M L / budget: the smallest interval at which a path's checkpoints weigh `budget` bytes,
    parts of one counted as such. ValueError for a budget that does not hold a single one."""
    if budget < checkpoint_bytes:
        raise ValueError(f"{budget:,} bytes do not hold one checkpoint of {checkpoint_bytes:,}")
    return -(-checkpoint_bytes * path // budget)
