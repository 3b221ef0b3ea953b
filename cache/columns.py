"""Where states sit in a request's row of state blocks, and how the running one moves (serving 4.9).

A row is indexed by position: column p is for the state after (p+1) B tokens, B the state block, and
until that boundary is reached for the state on the way there (I-34). Drafts that are verified take
one column more each: after token t of a step, t = 1 .. 1 + drafts, the state is in column
c + t - 1, c the column of the running state. The conv row, W - 1 + drafts time steps long, stays in
column c, and the window after token t begins at its offset t - 1. So nothing is moved when drafts
are accepted: the next step reads column c + a - 1 and offset a - 1, a the accept count. States are
moved only

    before a step that ends in another column, to that column;
    after a step that has passed a boundary, to the boundary's column.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cache.boundaries import floored


def column_of(boundary: int, block: int) -> int:
    """floor((n - 1) / B): where the state after n tokens is; -1 if there is none, at boundary 0.

    Also of a hit that is admitted: B is the block of the STATE, whatever the other groups use.
    """
    return (boundary - 1) // block


class Running(NamedTuple):
    """Where the running state is: its column c, -1 before the first step, and the accept count a of
    the last step, 1 after an ordinary one."""

    column: int = -1
    accepted: int = 1


class Move(NamedTuple):
    """Copy to `destination` the recurrent state of column + bias and the conv row of `column`, its
    first `bias` time steps left out."""

    column: int
    bias: int
    destination: int


@dataclass(frozen=True)
class StateRow:
    """block: B; None for a row that is not indexed by position (mode none) and keeps no boundary.
    drafts: most that a step verifies. ValueError if a step could pass two boundaries, of which only
    one would be kept."""

    block: int | None
    drafts: int = 0

    def __post_init__(self) -> None:
        if self.block is not None and self.block < 1 + self.drafts:
            raise ValueError(
                f"a state block must hold the {1 + self.drafts} tokens of a step that verifies "
                f"{self.drafts} drafts, got {self.block}"
            )

    def columns(self, seq_len: int) -> range:
        """Columns that a step uses which ends at seq_len tokens, drafts included."""
        first = max(self._column(seq_len), 0)
        return range(first, first + 1 + self.drafts)

    def before_step(self, running: Running, end: int) -> tuple[Running, Move | None]:
        """Where the running state has to be for a step that ends at `end`, drafts included."""
        column = self._column(end)
        if running.column == column:
            return running, None
        if running.column < 0:
            return Running(column), None
        return Running(column), Move(running.column, running.accepted - 1, column)

    def after_step(
        self, running: Running, end: int, drafts: int, accepted: int
    ) -> tuple[Running, Move | None]:
        """A step that ended at `end`, `drafts` of its tokens included, has `accepted` of 1 + drafts
        tokens: keep the state at the boundary that it passed, if it passed one."""
        running = Running(running.column, accepted)
        if self.block is None:
            return running, None
        first = end - drafts  # the boundary of the state in the running column
        boundary = floored(first + accepted - 1, self.block)
        if boundary < first:
            return running, None
        move = Move(running.column, boundary - first, column_of(boundary, self.block))
        if move.destination != running.column:
            return running, move
        return Running(running.column), move if move.bias else None

    def _column(self, boundary: int) -> int:
        return 0 if self.block is None else column_of(boundary, self.block)
