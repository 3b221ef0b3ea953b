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

from cache.boundaries import floored


@dataclass(frozen=True)
class CostModel:
    """Of one model: row_bytes and flops a token, attention_flops a token and position of context,
    checkpoint_bytes a boundary."""

    row_bytes: int
    checkpoint_bytes: int
    flops: int
    attention_flops: int

    @property
    def break_even(self) -> float:
        """Tokens whose latent rows weigh as much as one checkpoint; infinite without rows."""
        return self.checkpoint_bytes / self.row_bytes if self.row_bytes else math.inf

    def replay_flops(self, start: int, end: int) -> int:
        """FLOPs of computing tokens start .. end-1 again; position p attends to p+1 rows."""
        positions = (end * (end + 1) - start * (start + 1)) // 2
        return (end - start) * self.flops + positions * self.attention_flops

    def shortest_worthwhile(self, bandwidth: float, replay_rate: float) -> float:
        """Tokens from which on restoring a checkpoint at `bandwidth` bytes/s beats replaying at
        `replay_rate` tokens/s."""
        return self.checkpoint_bytes * replay_rate / bandwidth


def interval_cost(interval: int, *, path: int, grid: int, holding: float, replay: float) -> float:
    """J(K). holding: c_m M, a second; replay: lambda c_r, a token and second."""
    return holding * path / interval + replay * (interval - grid) / 2


def mean_replay(interval: int, grid: int) -> float:
    """Tokens replayed on average by a hit at a share point that is uniform on the grid."""
    return (interval - grid) / 2


def best_interval(*, path: int, grid: int, holding: float, replay: float) -> int:
    """The multiple of the grid with the least cost: one of the two beside K*, which is no longer
    than the path."""
    ideal = math.sqrt(2 * holding * path / replay) if replay > 0 else math.inf
    if ideal >= path:
        return floored(path, grid) or grid
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
