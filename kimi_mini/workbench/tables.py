"""Figures as text: rows of cells under their names, every column as wide as it needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def table(title: str, rows: Sequence[Mapping[str, str]]) -> str:
    """A titled table of rows {column: cell}, the same columns in each; or that there is none."""
    if not rows:
        return f"{title}: nothing was measured\n"
    lines = [tuple(rows[0]), *(tuple(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = (
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )
    return "\n".join((f"{title}\n", *aligned, ""))


def in_words(facts: Mapping[str, object]) -> str:
    """Named facts in a line."""
    return ", ".join(
        f"{name} {value:,}" if type(value) is int else f"{name} {value}"
        for name, value in facts.items()
    )
