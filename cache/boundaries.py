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


# where a prefill of state blocks stops, and what it exports from inside (serving 4.7, 4.8)


class ChunkRule(NamedTuple):
    """What decides where pieces of prefill end when states live in blocks, in tokens.

    block             B, a state block: the state after a piece is kept at its multiples
    unit              h, the hash unit
    hits              what hits are aligned to: h if they may end inside a block, else the
                      scheduler block
    limit             Q, the configured largest piece (not what is left of a step); None: no limit
    export_alignment  of states from inside a piece, counted from its start; None: none are exported
    lookahead         tokens that drafting needs beyond a hit
    eagle             a hit gives up its last unit
    exact_junction    a junction is a stop itself, not floored to blocks from the piece's start
    """

    block: int
    unit: int
    hits: int
    limit: int | None = None
    export_alignment: int | None = None
    lookahead: int = 0
    eagle: bool = False
    exact_junction: bool = False

    def resend_boundary(self, tokens: int, unit: int) -> int:
        """P(tokens; unit) under this rule."""
        return resend_boundary(tokens, unit, lookahead=self.lookahead, eagle=self.eagle)


def resend_boundary(tokens: int, unit: int, *, lookahead: int = 0, eagle: bool = False) -> int:
    """P(n; u): the highest multiple of `unit` at which a resend of the same n tokens can resume.

        max(0, floor((n - max(1, lookahead)) / u) u)      with EAGLE  max(0, floor(n / u) u - u)

    One token must run (I-03), or as many as drafting looks ahead; EAGLE drops the last unit of what
    it finds, so the state has to wait one unit lower.
    """
    if eagle:
        return max(0, floored(tokens, unit) - unit)
    return max(0, floored(tokens - max(1, lookahead), unit))


def chunk_end(
    rule: ChunkRule, start: int, want: int, *, prompt: int, tokens: int, junction: int | None = None
) -> int:
    """End of the piece that starts at `start` and would like `want` tokens (serving 4.7).

    prompt: length of the prompt; tokens: with what was sampled before a preemption. `start` itself:
    no piece, because the budget is below a block and a larger one would do. Decode is not clipped.
    """
    end, prefill_end = start + want, max(prompt, tokens - 1)
    if start >= prefill_end:
        return end
    if end < prefill_end:
        aligned = floored(end, rule.block)
        if aligned > start or rule.limit is None or rule.block <= rule.limit:
            end = max(start, aligned)
    stops = []
    resend = rule.resend_boundary(prefill_end, rule.hits)
    if end < prefill_end or not can_export(rule, start, end, resend):
        next_block = -(-start // rule.block) * rule.block
        last = rule.resend_boundary(tokens, rule.block)
        tail = rule.resend_boundary(prompt, rule.hits)
        stops = [next_block, last, *((tail,) if tail > last else ())]
    if junction is not None and junction < end:
        into = junction - start
        stops.append(start + (into if rule.exact_junction else floored(into, rule.block)))
    return min((stop for stop in stops if start < stop < end), default=end)


class InnerCheckpoint(NamedTuple):
    """A state exported from inside a piece: its boundary, tokens after the piece's start, and the
    column of the state row whose block receives it."""

    boundary: int
    offset: int
    column: int


def inner_checkpoint(rule: ChunkRule, start: int, end: int) -> InnerCheckpoint | None:
    """The one state that the piece [start, end) exports; None if it cannot (serving 4.8).

    It goes to the column before the last, wherever the boundary itself lies.
    """
    boundary = rule.resend_boundary(end, rule.hits)
    if not can_export(rule, start, end, boundary):
        return None
    return InnerCheckpoint(boundary, boundary - start, -(-end // rule.block) - 2)


def can_export(rule: ChunkRule, start: int, end: int, boundary: int) -> bool:
    """Whether [start, end) has a column of its own for a state at `boundary`, and the backend can
    read it there."""
    alignment = rule.export_alignment
    return (
        alignment is not None
        and start % rule.unit == 0
        and -(-end // rule.block) - 2 > (start - 1) // rule.block  # a column the piece adds
        and start + rule.unit <= boundary < end
        and (boundary - start) % alignment == 0
    )
