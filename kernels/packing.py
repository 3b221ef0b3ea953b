"""Packed rows: how query_start, exports and operands are read and refused, once for all kernels.

A batch is N tokens in one tensor; row r owns tokens query_start[r] .. query_start[r+1], and may
own none. An export asks for the state of a row after `offset` of its tokens, 1 <= offset <= T.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Export(NamedTuple):
    """Ask for the state of `row` after its first `offset` tokens of this call."""

    row: int
    offset: int


def check_integers(name: str, values: Tensor, axes: int = 1) -> None:
    """ValueError unless `values` is an integer tensor, or an empty one, with so many axes."""
    if not isinstance(values, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(values).__name__}")
    other = values.dtype.is_floating_point or values.dtype == torch.bool
    if values.dim() != axes or (other and values.numel()):
        raise ValueError(
            f"{name} must be integers along {axes} {'axis' if axes == 1 else 'axes'}, got "
            f"{values.dtype} {[*values.shape]}"
        )


def integers(name: str, values: Tensor | Sequence[int]) -> list[int]:
    """The entries of a one-axis integer tensor or sequence; ValueError if they are not."""
    if isinstance(values, Tensor):
        check_integers(name, values)
        return values.tolist()
    try:
        return [operator.index(value) for value in values]
    except TypeError:
        raise ValueError(f"{name} must be integers along one axis, got {values!r}") from None


def row_lengths(
    query_start: Tensor | Sequence[int], num_tokens: int
) -> tuple[list[int], list[int]]:
    """Row starts and row lengths (each [B]) of a packed batch of num_tokens tokens.

    query_start: [B+1] integers, starting at 0, never falling, ending at num_tokens.
    Raises ValueError naming the offending entry.
    """
    starts = integers("query_start", query_start)
    if not starts or starts[0] != 0:
        raise ValueError(f"query_start must begin with 0, got {starts[:1] or 'no entries'}")
    lengths = [end - start for start, end in itertools.pairwise(starts)]
    if any(length < 0 for length in lengths):
        row = next(r for r, length in enumerate(lengths) if length < 0)
        raise ValueError(f"query_start falls from {starts[row]} to {starts[row + 1]} at row {row}")
    if starts[-1] != num_tokens:
        raise ValueError(f"query_start ends at {starts[-1]}, but there are {num_tokens} tokens")
    return starts[:-1], lengths


def check_exports(exports: Sequence[Export], lengths: Sequence[int], alignment: int) -> None:
    """Refuse an export that the kernel cannot serve without changing its partition.

    offset counts from the row's start in this call and must be a multiple of `alignment` or the
    row's end. Raises ValueError.
    """
    for row, offset in exports:
        if not 0 <= row < len(lengths):
            raise ValueError(
                f"export names row {row}, but the batch has rows 0..{len(lengths) - 1}"
            )
        if not 1 <= offset <= lengths[row]:
            raise ValueError(
                f"export of row {row} after {offset} tokens: offset must be 1..{lengths[row]}"
            )
        if offset % alignment and offset != lengths[row]:
            raise ValueError(
                f"export of row {row} after {offset} tokens: offset must be a multiple of "
                f"{alignment} (export_alignment) or the row's end {lengths[row]}"
            )


def check_scan_shapes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    S0: Tensor,
    query_start: Tensor | Sequence[int],
) -> None:
    """Refuse operands of a scan whose shapes do not agree; the message names the first one."""
    if q.dim() != 3 or v.dim() != 3:
        raise ValueError(f"q and v must be [N, H, K] and [N, H, V], got {[*q.shape]}, {[*v.shape]}")
    N, H, K = q.shape
    rows, V = len(query_start) - 1, v.shape[-1]
    expected = {
        "k": (k, (N, H, K)),
        "v": (v, (N, H, V)),
        "g": (g, (N, H, K)),
        "beta": (beta, (N, H)),
        "S0": (S0, (rows, H, V, K)),
    }
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name} must have shape {[*shape]} (q is {[N, H, K]}, {rows} rows, "
                f"states value-first), got {[*tensor.shape]}"
            )
