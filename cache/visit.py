"""What a manager tells its policies about one request: the states it has at hand while it runs, and
what it was when it has finished."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

from cache.leases import Lease
from cache.policy.admission import Admission, Candidate, Occasion
from cache.policy.eviction import Served


class Visit:
    """One request's questions to an admission policy. policy: None admits what there is. visitor:
    the request's name, which it keeps when it comes back after a preemption. prefix: the name of
    its first so many tokens."""

    def __init__(
        self, policy: Admission | None, visitor: Hashable, prefix: Callable[[int], Hashable]
    ) -> None:
        self._policy, self._visitor, self._prefix = policy, visitor, prefix

    def admits(self, boundary: int | None, occasion: Occasion) -> bool:
        """Whether the state at this boundary, if there is one, is worth storing."""
        if not boundary or self._policy is None:
            return bool(boundary)
        candidate = Candidate(boundary, occasion, self._prefix(boundary), self._visitor)
        return self._policy.worth_keeping(candidate)

    def recurring(self, boundaries: Iterable[int]) -> int | None:
        """The last of these, ascending, at which the policy wants a state, although no rows of
        others may be there to show a junction."""
        if self._policy is None:
            return None
        # each is asked about, so that each is remembered
        wanted = [n for n in boundaries if self.admits(n, Occasion.PERIODIC)]
        return wanted[-1] if wanted else None


def served(lease: Lease) -> Served:
    """A request that finishes now."""
    tokens, request = tuple(lease.tokens[: lease.computed]), lease.request
    return Served(tokens, len(request.ids), request.salt)
