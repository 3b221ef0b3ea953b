"""Tokens/s of the whole model at several depths and batches, where its steps go, and a peer beside.

Prompts and decode steps (`bench_cells`) run on rows that are deep from the start (`bench_stage`).
Of every decode step, and of the last piece of a prompt at each depth of the smallest batch, the
parts are timed alone right after it (`bench_shares`). What of a decode step depends on its depth is
the latent attention and the preparing (the addresses of the rows it reads); the rest is what KDA
promises not to grow. Beside the step, not in it: packing the plans of a cache into a batch, as the
engine's executor does. Not counted: sampling, and the cache itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from kimi_mini.config import KimiConfig, preset
from kimi_mini.model import KimiForCausalLM
from kimi_mini.workbench.bench import Limits, limit_probes, limits_from, medians, using_threads
from kimi_mini.workbench.bench_cells import Cell, Plan, Skipped, Work
from kimi_mini.workbench.bench_shares import Shares, StepTimer
from kimi_mini.workbench.bench_stage import Stage, set_stage

PEER_DEEPEST = 2048  # a peer gets to a depth by prefill only, so not to any
WARM_UP = 2  # calls that `medians` makes before those that count
OVERHEAD_TARGETS = {"mini": 0.25}  # of a decode step, one thread


class Peer(Protocol):
    """Another implementation, batch 1."""

    def prefill(self, ids: Tensor) -> Callable[[], object]:
        """What runs ids [1, T] from nothing, keeping a cache, to the last token's logits."""

    def decode(self, context: Tensor, ids: Tensor) -> Callable[[], object]:
        """What runs ids [1, n] one by one after context [1, T]."""


class PrefillFigure(NamedTuple):
    """`batch` rows of `row_tokens` tokens each, from `depth` on, in so many steps."""

    work = Work.PREFILL

    depth: int
    batch: int
    row_tokens: int
    steps: int
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens/s of the whole batch."""
        return self.batch * self.row_tokens / self.seconds

    def as_json(self) -> dict[str, Any]:
        return self._asdict() | {"tokens_per_second": self.rate}

    def as_row(self) -> dict[str, str]:
        return {
            "depth": f"{self.depth:,}",
            "batch": f"{self.batch}",
            "tokens a row": f"{self.row_tokens:,}",
            "steps": f"{self.steps}",
            "tokens/s": f"{self.rate:,.0f}",
        }


class StepFigure(NamedTuple):
    """One step of a cell, a piece of a prompt or a token for each row, and where it goes.

    pack_ms: from a cache's plans to the batch of a decode step; not part of the step.
    """

    cell: Cell
    tokens: int
    shares: Shares
    pack_ms: float | None = None

    @property
    def work(self) -> Work:
        return self.cell.work

    @property
    def depth(self) -> int:
        return self.cell.depth

    @property
    def batch(self) -> int:
        return self.cell.batch

    @property
    def rate(self) -> float:
        """Tokens/s of the whole batch."""
        return self.tokens / self.shares.step_ms * 1e3

    @property
    def rest_ms(self) -> float:
        """What of a decode step should be the same at any depth."""
        return self.shares.step_ms - self.shares.attention_ms - self.shares.preparing_ms

    def as_json(self) -> dict[str, Any]:
        cell = {name: getattr(self.cell, name) for name in ("depth", "batch", "shallow")}
        rates = {"tokens": self.tokens, "tokens_per_second": self.rate, "pack_ms": self.pack_ms}
        return cell | rates | self.shares.as_json()

    def as_row(self) -> dict[str, str]:
        packing = {} if self.pack_ms is None else {"(packing)": f"{self.pack_ms:.2f}"}
        return {
            "depth": self.cell.depths,
            "batch": f"{self.batch}",
            "tokens/s": f"{self.rate:,.1f}",
            **self.shares.as_row(),
            **packing,
        }


class Comparison(NamedTuple):
    """Tokens/s of ours and of the peer, batch 1, timed in turn."""

    work: Work
    depth: int
    tokens: int
    ours: float
    peer: float

    @property
    def ratio(self) -> float:
        return self.ours / self.peer

    def as_json(self) -> dict[str, Any]:
        return self._asdict() | {"ratio": self.ratio}

    def as_row(self) -> dict[str, str]:
        prefill = self.work is Work.PREFILL
        what = f"of {self.tokens:,} tokens" if prefill else f"at depth {self.depth:,}"
        return {
            "work": f"{self.work} {what}",
            "ours": f"{self.ours:,.1f}",
            "peer": f"{self.peer:,.1f}",
            "ours / peer": f"{self.ratio:.2f}",
        }


class Report(NamedTuple):
    """All figures of one run."""

    prefill: list[PrefillFigure]
    pieces: list[StepFigure]
    decode: list[StepFigure]
    skipped: list[Skipped]
    compared: list[Comparison]

    def as_json(self) -> dict[str, Any]:
        names = ("prefill", "pieces", "decode", "compared")
        measured = {name: getattr(self, name) for name in names}
        lists = {name: [figure.as_json() for figure in part] for name, part in measured.items()}
        return lists | {"skipped": [entry._asdict() for entry in self.skipped]}


def growth(figures: Sequence[StepFigure]) -> list[str]:
    """For each batch, what a step costs more at its greatest depth than at its least, in words."""
    lines = []
    figures = [figure for figure in figures if figure.cell.shallow is None]
    for batch in dict.fromkeys(figure.batch for figure in figures):
        same = [figure for figure in figures if figure.batch == batch]
        near = min(same, key=lambda figure: figure.depth)
        far = max(same, key=lambda figure: figure.depth)
        if near.depth < far.depth:
            step, attention, preparing = (
                getattr(far.shares, part) - getattr(near.shares, part)
                for part in ("step_ms", "attention_ms", "preparing_ms")
            )
            lines.append(
                f"batch {batch}, from depth {near.depth:,} to {far.depth:,}: {step:+.2f} ms a "
                f"step, of it latent attention {attention:+.2f}, preparing {preparing:+.2f}, "
                f"all the rest {far.rest_ms - near.rest_ms:+.2f}"
            )
    return lines


def measure(
    model: KimiForCausalLM, plan: Plan, *, threads: int, repeats: int, peer: Peer | None = None
) -> Report:
    """Time every cell and the peer in turn. ValueError if no cell fits the model."""
    cells, skipped = plan.cells(model.config)
    if not cells:
        raise ValueError(f"nothing can be measured: {skipped[-1].reason}")
    prefill, decode = ([cell for cell in cells if cell.work is work] for work in Work)
    matched = [cell for cell in cells if peer is not None and _peer_can(cell)]
    smallest = min(cell.batch for cell in cells)
    with using_threads(threads), torch.inference_mode():
        stage = set_stage(model, cells)
        prompts = {cell: stage.prefill_steps(cell, plan.prefill_chunk) for cell in prefill}
        steps = {cell: prompts[cell][-1:] for cell in prefill if cell.batch == smallest}
        steps |= {cell: stage.decode_steps(cell, plan.decode_steps) for cell in decode}
        timers = {cell: StepTimer(model, stage.state, some) for cell, some in steps.items()}
        timed = {
            "prompt": {cell: partial(stage.run, pieces) for cell, pieces in prompts.items()},
            "step": timers,
            "packing": {cell: stage.packing(cell) for cell in decode},
            "peer": {cell: _peer_function(peer, stage, cell, plan) for cell in matched},
        }
        seconds, limits = _in_turn(cells, timed, repeats)
    target = overhead_target(model.config) if threads == 1 else None
    whole = [
        PrefillFigure(cell.depth, cell.batch, cell.length, len(pieces), seconds["prompt", cell])
        for cell, pieces in prompts.items()
    ]
    pieces = [
        StepFigure(cell, len(steps[cell][0].token_ids), timers[cell].shares(limits, WARM_UP))
        for cell in steps
        if cell.work is Work.PREFILL
    ]
    decoded = [
        StepFigure(
            cell,
            cell.batch,
            timers[cell].shares(limits, WARM_UP, target),
            seconds["packing", cell] * 1e3,
        )
        for cell in decode
    ]
    rates = {(f.work, f.depth): f.rate for f in (*whole, *decoded) if f.batch == 1}
    compared = [
        _comparison(cell, plan, rates[cell.work, cell.depth], seconds["peer", cell])
        for cell in matched
    ]
    return Report(whole, pieces, decoded, skipped, compared)


def overhead_target(config: KimiConfig) -> float | None:
    """The most of a decode step of this model that should be overhead; None: nothing was set."""
    return next((most for name, most in OVERHEAD_TARGETS.items() if preset(name) == config), None)


def _in_turn(
    cells: Sequence[Cell],
    timed: Mapping[str, Mapping[Cell, Callable[[], object]]],
    repeats: int,
) -> tuple[dict[tuple[str, Cell], float], Limits]:
    """Seconds by kind and cell, what is of one cell one after the other; the machine's limits."""
    functions = {
        (kind, cell): of_kind[cell]
        for cell in cells
        for kind, of_kind in timed.items()
        if cell in of_kind
    }
    seconds = medians(functions | limit_probes(), repeats)
    return seconds, limits_from(seconds)


def _peer_can(cell: Cell) -> bool:
    """Batch 1; a prompt from nothing, or steps after a prompt that is not too long."""
    deep = 0 < cell.depth <= PEER_DEEPEST
    return cell.batch == 1 and (deep if cell.work is Work.DECODE else cell.depth == 0)


def _peer_function(peer: Peer, stage: Stage, cell: Cell, plan: Plan) -> Callable[[], object]:
    if cell.work is Work.PREFILL:
        return peer.prefill(stage.random_ids(1, cell.length))
    return peer.decode(stage.random_ids(1, cell.depth), stage.random_ids(1, plan.decode_steps))


def _comparison(cell: Cell, plan: Plan, ours: float, seconds: float) -> Comparison:
    tokens = cell.length if cell.work is Work.PREFILL else plan.decode_steps
    return Comparison(cell.work, cell.depth, tokens, ours, tokens / seconds)
