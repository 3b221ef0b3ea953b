"""Pure arithmetic of boundaries: grids, where prefill and decode keep a state.

One place, so that scheduler, manager and metadata can never disagree (I-40). All boundaries are
counts of consumed tokens.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Grids(NamedTuple):
    """Spacings of checkpoints, in tokens (serving 3.1).

    state_chunk  what the kernel offers states at
    chunk        max(state_chunk, page): what a junction must be a multiple of, from the piece on
    checkpoint   lcm(chunk, page): where prefill may keep a state
    track        lcm(checkpoint, interval): where decode keeps one
    """

    state_chunk: int
    chunk: int
    checkpoint: int
    track: int


def grids(state_chunk: int, page: int, interval: int) -> Grids:
    """ValueError for sizes below 1."""
    for name, size in (("state_chunk", state_chunk), ("page", page), ("interval", interval)):
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    chunk = max(state_chunk, page)
    checkpoint = math.lcm(chunk, page)
    return Grids(state_chunk, chunk, checkpoint, math.lcm(checkpoint, interval))


def floored(boundary: int, unit: int) -> int:
    """The largest multiple of unit up to boundary."""
    return boundary // unit * unit


def junction_above(token_hit: int, joint: int, unit: int) -> int | None:
    """A boundary worth a checkpoint: latent rows match further than any state (serving 3.4)."""
    boundary = floored(token_hit, unit)
    return boundary if boundary > joint else None


def piece_checkpoint(start: int, end: int, grid: Grids, junction: int | None = None) -> int | None:
    """SGLang's one checkpoint of a prefill piece [start, end), counted from the piece's start: its
    last grid boundary, or, in its place, a junction inside (serving 3.8)."""
    length = end - start
    if length < grid.checkpoint:
        return None
    boundary = start + floored(length, grid.checkpoint)
    # a boundary that is not the last whole state chunk is read from the per-chunk states instead
    limit = end if start + floored(length, grid.state_chunk) == boundary else boundary + 1
    if junction is not None and start < junction < limit and (junction - start) % grid.chunk == 0:
        return junction
    return boundary
