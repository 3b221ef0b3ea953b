"""One request's questions to an admission policy: an occasion, a boundary, and the hash of the
prefix up to there, which is a chain over the grid and one link more for the rest."""

from __future__ import annotations

from collections.abc import Sequence

from cache.boundaries import floored
from cache.identity import extended
from cache.policy.admission import Admission, Candidate, Occasion


class Visit:
    """policy: None admits what there is. origin: hash of the empty prefix. tokens: the request's,
    which may grow. grid: where states recur."""

    def __init__(
        self, policy: Admission | None, origin: bytes, tokens: Sequence[int], grid: int
    ) -> None:
        self._policy, self._tokens, self._grid = policy, tokens, grid
        self._hashes = [origin]  # of the prefixes on the grid
        self._visitor = object()

    def admits(self, boundary: int | None, occasion: Occasion) -> bool:
        """Whether the state at this boundary, if there is one, is worth storing."""
        if not boundary or self._policy is None:
            return bool(boundary)
        candidate = Candidate(boundary, occasion, self._prefix(boundary), self._visitor)
        return self._policy.worth_keeping(candidate)

    def recurring(self, end: int) -> int | None:
        """The deepest boundary on the grid up to `end` at which the policy wants a state, although
        no rows of others may be there to show a junction."""
        if self._policy is None:
            return None
        grid = range(self._grid, end + 1, self._grid)
        # each is asked about, so that each is remembered
        wanted = [boundary for boundary in grid if self.admits(boundary, Occasion.PERIODIC)]
        return wanted[-1] if wanted else None

    def _prefix(self, boundary: int) -> bytes:
        below = floored(boundary, self._grid)
        while (start := (len(self._hashes) - 1) * self._grid) < below:
            tokens = self._tokens[start : start + self._grid]
            self._hashes.append(extended(self._hashes[-1], tokens))
        return extended(self._hashes[below // self._grid], self._tokens[below:boundary])
