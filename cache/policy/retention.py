"""Retention: which of the states that exist get a key (serving 4.6).

    None       every one (dense)
    N > 0      those at multiples of N tokens
    0          nothing periodic
    and, unless None, those at reachable boundaries: where a resend or an extension of the prompt
    would resume, and the junction

A state exists only where a piece has ended or exported one, so an interval that no piece meets
keeps less than it says. Retention changes what is hit, never a result (I-39).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from cache.boundaries import floored, resend_boundary


@dataclass(frozen=True)
class Retention:
    """interval: in tokens, counted from the start of the sequence, whatever blocks a group has."""

    interval: int | None = 0

    @classmethod
    def checked(cls, interval: int | None, *, scheduler_block: int, stateful: bool) -> Retention:
        """scheduler_block: lcm of all groups' blocks, so that every group meets every multiple.
        stateful: there is a state group. ValueError for an interval that retains nothing."""
        if interval is None or interval == 0:
            return cls(interval)
        if not stateful:
            raise ValueError(
                "a retention interval is of states, and there is no state group: it must be None "
                f"or 0, got {interval}"
            )
        if interval < 0 or interval % scheduler_block:
            raise ValueError(
                "a retention interval must be None, 0 or a positive multiple of the scheduler "
                f"block {scheduler_block}, got {interval}"
            )
        return cls(interval)

    def keeps(self, boundary: int, reachable: Collection[int]) -> bool:
        """Whether the state after so many tokens gets a key."""
        if self.interval is None or boundary in reachable:
            return True
        return self.interval > 0 and boundary % self.interval == 0

    def mask(self, columns: Sequence[int], block: int, reachable: Collection[int]) -> list[bool]:
        """For columns of a row with `block` tokens each: whether their states get a key."""
        return [self.keeps((column + 1) * block, reachable) for column in columns]


def replay_boundaries(prompt: int, unit: int, *, eagle: bool = False) -> tuple[int, ...]:
    """How far a prompt of so many tokens may be looked up again, ascending: all but the token that
    must run; with EAGLE, which drops the last unit, where a resend and where an extension resume.
    """
    if not eagle:
        return (prompt - 1,)
    ends = {resend_boundary(tokens, unit, eagle=True) for tokens in (prompt - 1, prompt)}
    return tuple(sorted(ends))


def reachable_boundaries(named: Iterable[int], *, alignment: int, block: int) -> frozenset[int]:
    """Where states serve look-ups that are cut to the named boundaries: there, floored to what hits
    are aligned to, and at the end of the last whole block before, where those resume that part from
    it inside the block."""
    aligned = {floored(boundary, alignment) for boundary in named}
    return frozenset(aligned | {floored(boundary, block) for boundary in aligned}) - {0}
