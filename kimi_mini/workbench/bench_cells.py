"""The grid that a whole model is timed on: which rows, how deep, how long.

prefill   `prompt` tokens in all, shared out evenly to the rows, from depth d on, in steps of
          about `prefill_chunk` tokens over all rows
decode    one token a row over d + 1 latent rows. One cell more than the grid is mixed: of the
          largest batch, only the last row is deep
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from kimi_mini.config import KimiConfig

SHALLOW = 16  # tokens before the short rows of a mixed batch


class Work(StrEnum):
    """What a cell times."""

    PREFILL = "prefill"
    DECODE = "decode"


class Cell(NamedTuple):
    """One figure: `batch` rows, each `depth` tokens deep, each adding `length`; with `shallow`,
    only the last row is at `depth`, the others at `shallow`."""

    work: Work
    depth: int
    batch: int
    length: int
    shallow: int | None = None

    @property
    def name(self) -> str:
        return f"{self.work}, depth {self.depths}, batch {self.batch}"

    @property
    def depths(self) -> str:
        """The depths of the rows, in words."""
        if self.shallow is None:
            return f"{self.depth:,}"
        return f"{self.shallow:,} and one {self.depth:,}"

    @property
    def row_depths(self) -> list[int]:
        """Depth of each row."""
        short = self.depth if self.shallow is None else self.shallow
        return [short] * (self.batch - 1) + [self.depth]


class Skipped(NamedTuple):
    """A cell that cannot be timed, and why."""

    work: Work
    depth: int
    batch: int
    reason: str


@dataclass(frozen=True)
class Plan:
    """The grid. prompt, prefill_chunk: tokens over all rows of a batch; steps of one timing."""

    depths: Sequence[int]
    batches: Sequence[int]
    prompt: int
    prefill_chunk: int
    decode_steps: int

    def cells(self, config: KimiConfig) -> tuple[list[Cell], list[Skipped]]:
        """Every depth and batch once, by kind of work, and the mixed one; what does not fit the
        model is skipped."""
        cells, skipped = [], []
        for work in Work:
            for depth in dict.fromkeys(self.depths):
                for batch in dict.fromkeys(self.batches):
                    length = self.prompt // batch if work is Work.PREFILL else 1
                    cell = Cell(work, depth, batch, length)
                    if reason := self._misfit(cell, config.max_position_embeddings):
                        skipped.append(Skipped(work, depth, batch, reason))
                    else:
                        cells.append(cell)
        return cells + self._mixed(cells), skipped

    def _mixed(self, cells: Sequence[Cell]) -> list[Cell]:
        """The deepest decode cell of the largest batch, all rows but one short."""
        several = [cell for cell in cells if cell.work is Work.DECODE and cell.batch > 1]
        if not several:
            return []
        deepest = max(several, key=lambda cell: (cell.batch, cell.depth))
        return [deepest._replace(shallow=SHALLOW)] if deepest.depth > SHALLOW else []

    def _misfit(self, cell: Cell, context: int) -> str | None:
        if cell.length == 0:
            return f"{self.prompt} tokens of prompt are not one for each row"
        if cell.depth + cell.length > context:
            return (
                f"{cell.depth} + {cell.length} tokens a row are beyond the context of {context} "
                "(max_position_embeddings)"
            )
        return None
