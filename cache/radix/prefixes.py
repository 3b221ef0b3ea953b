"""Names of a request's prefixes: a chain of hashes over the grid where states recur, and one link
more for the rest, so that a name costs no more than the tokens since the last one."""

from __future__ import annotations

from collections.abc import Sequence

from cache.boundaries import floored
from cache.identity import extended


class PrefixNames:
    """origin: hash of the empty prefix. tokens: may grow, but not change. grid: in tokens."""

    def __init__(self, origin: bytes, tokens: Sequence[int], grid: int) -> None:
        self._tokens, self._grid = tokens, grid
        self._hashes = [origin]  # of the prefixes on the grid

    def __call__(self, boundary: int) -> bytes:
        """The name of the first so many tokens, the same for all who share them."""
        below = floored(boundary, self._grid)
        while (start := (len(self._hashes) - 1) * self._grid) < below:
            tokens = self._tokens[start : start + self._grid]
            self._hashes.append(extended(self._hashes[-1], tokens))
        return extended(self._hashes[below // self._grid], self._tokens[below:boundary])
