"""How much FLOPs should weigh in eviction, learnt from the requests themselves (serving 4.11).

Until something is evicted alpha does not matter and is 0. From the first eviction on, several times
as many requests as came before it are recorded; then all are rehearsed on empty books for alpha =
0, 0.1 .. 2, one alpha with each request that follows, so that none of them waits for all; and the
alpha that would have saved most FLOPs is used from there on.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

from cache.policy.eviction import Evictable, FlopAware, Served

ALPHAS = tuple(tenths / 10 for tenths in range(21))
WINDOWS = (5, 15)  # as many times the requests before the first eviction


class LearntAlpha:
    """An eviction policy: `policy` with an alpha that it learns once.

    rehearse  FLOPs that hits of these requests, in order, would have saved with a policy. Runs once
              within each call of `saw` from the one that completes the record, until all are tried
    window    requests to record after the first eviction, in multiples of those before it
    most      requests to record at all, the latest
    ValueError for a window outside of 5 .. 15, or for no record.
    """

    def __init__(
        self,
        policy: FlopAware,
        rehearse: Callable[[FlopAware, Sequence[Served]], float],
        *,
        window: float = WINDOWS[0],
        most: int = 4096,
    ) -> None:
        if not WINDOWS[0] <= window <= WINDOWS[1]:
            raise ValueError(f"the window must be {WINDOWS[0]} to {WINDOWS[1]}, got {window}")
        if most < 1:
            raise ValueError(f"requests to record must be at least 1, got {most}")
        self._policy, self._rehearse, self._window = policy, rehearse, window
        self._record: deque[Served] = deque(maxlen=most)
        self._seen = 0
        self._enough: int | None = None  # requests that complete the record; from an eviction on
        self._saved: list[float] = []  # by alpha, as far as they have been tried
        self.learnt = False

    @property
    def alpha(self) -> float:
        """As it is now."""
        return self._policy.alpha

    def victim(self, candidates: Sequence[Evictable], now: float) -> int:
        """As `FlopAware.victim`."""
        if self._enough is None:
            self._enough = self._seen + math.ceil(self._window * max(1, self._seen))
        return self._policy.victim(candidates, now)

    def saw(self, request: Served) -> None:
        """A request has been served."""
        if self.learnt:
            return
        if self._enough is None or self._seen < self._enough:
            self._record.append(request)
            self._seen += 1
        if self._enough is not None and self._seen >= self._enough:
            self._try_next()

    def _try_next(self) -> None:
        alpha = ALPHAS[len(self._saved)]
        self._saved.append(self._rehearse(self._with(alpha), [*self._record]))
        if len(self._saved) == len(ALPHAS):
            # of equally good ones the smallest
            self._policy.alpha = ALPHAS[self._saved.index(max(self._saved))]
            self._record.clear()
            self.learnt = True

    def _with(self, alpha: float) -> FlopAware:
        policy = self._policy
        return FlopAware(policy.flops, policy.state_bytes, policy.row_bytes, alpha)
