"""The one rule of what may be resumed (I-01, I-02, I-03).

A boundary n is legal if n = 0, or if every kind of state is there for exactly n tokens: latent rows
[0, n), which a longer run of rows contains, and, at n itself, a checkpoint of every state group.
The answer is the largest of the INTERSECTION, never the smallest of the kinds' own best: rows to
4096 and states at 3968 and 4480 give 3968.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable


def joint_boundary(reaches: Iterable[int], states: Iterable[Collection[int]], cap: int) -> int:
    """The largest legal boundary of at most `cap` tokens (N-1 for a prompt of N).

    reaches: how far the rows of each attention group go, unbroken from the start. states: the
    boundaries of each state group's checkpoints.
    """
    limit = min((cap, *reaches))
    groups = [set(group) for group in states]
    if not groups:
        return max(limit, 0)
    return max((n for n in set.intersection(*groups) if 0 < n <= limit), default=0)
