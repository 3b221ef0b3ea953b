"""Tokens/s of the whole model at a depth, without running the prompt that leads there.

A hybrid model's state at depth d is a slot of each KDA layer and d latent rows of each MLA layer,
so a row "at depth d" is made by filling both with random numbers: a step's time depends on how many
rows it reads, not on what they say. One pool of slots and pages serves all cells in turn.

    prefill   `prompt` tokens in all, shared out evenly to the rows, from depth d on, in steps of
              about `prefill_chunk` tokens over all rows; logits of each row's last token alone
    decode    one token a row over d + 1 latent rows, every step at the same depth: the new latent
              row is written to the same place again, the recurrent state moves on. One cell more
              than the grid is mixed: of the largest batch, only the last row is deep

What of a decode step depends on d is timed by itself right after it: the latent attention of all
MLA layers, and the preparing of a step (its checks, and the addresses of the rows it reads). The
rest is what KDA promises not to grow; `bench_shares` says where it goes. Beside the step, not in
it: packing the plans of a cache into a batch, as the engine's executor does. Not counted: sampling,
and the cache itself.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from cache.leases import CacheRequest, Hit, Lease, StepPlan
from kernels.latent_attention import attend
from kimi_mini.batch import ForwardBatch, ModelState, allocate_state, prepare_step, state_form
from kimi_mini.config import KimiConfig
from kimi_mini.machine import refuse_oversize
from kimi_mini.model import KimiForCausalLM
from kimi_mini.serving.executor import pack
from kimi_mini.workbench.bench import medians, using_threads
from kimi_mini.workbench.bench_shares import Shares, measure_shares

PAGE = 16
SHALLOW = 16  # tokens before the short rows of a mixed batch
PEER_DEEPEST = 2048  # a peer gets to a depth by prefill only, so not to any
WARM_UP = 2  # calls that `medians` makes before those that count
# standard deviations, near those of the bench preset after a real prompt
RECURRENT, CONV, LATENT = 0.06, 0.5, 0.9


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
        return f"{self.work}, depth {_depths(self)}, batch {self.batch}"


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

    def as_json(self) -> dict:
        return self._asdict() | {"tokens_per_second": self.rate}

    def as_row(self) -> dict[str, str]:
        return {
            "depth": f"{self.depth:,}",
            "batch": f"{self.batch}",
            "tokens a row": f"{self.row_tokens:,}",
            "steps": f"{self.steps}",
            "tokens/s": f"{self.rate:,.0f}",
        }


class DecodeFigure(NamedTuple):
    """One step of `batch` rows at `depth`, and the parts of it that read the depth; milliseconds.

    The parts are run once more, alone, with warmer caches than within the step; shallow: see Cell.
    """

    work = Work.DECODE

    depth: int
    batch: int
    step_ms: float
    attention_ms: float  # latent attention of all MLA layers, reading the rows included
    prepare_ms: float  # checks and row addresses
    rest_ms: float  # should be the same at any depth
    pack_ms: float  # from a cache's plans to the batch; not part of the step
    shallow: int | None = None

    @property
    def rate(self) -> float:
        """Tokens/s of the whole batch."""
        return self.batch / self.step_ms * 1e3

    def as_json(self) -> dict:
        return self._asdict() | {"tokens_per_second": self.rate}

    def as_row(self) -> dict[str, str]:
        return {
            "depth": _depths(self),
            "batch": f"{self.batch}",
            "tokens/s": f"{self.rate:,.1f}",
            "step": f"{self.step_ms:.2f}",
            "latent attention": f"{self.attention_ms:.2f}",
            "preparing": f"{self.prepare_ms:.2f}",
            "all the rest": f"{self.rest_ms:.2f}",
            "(packing)": f"{self.pack_ms:.2f}",
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

    def as_json(self) -> dict:
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
    decode: list[DecodeFigure]
    skipped: list[Skipped]
    compared: list[Comparison]
    shares: list[Shares]

    def as_json(self) -> dict:
        names = ("prefill", "decode", "compared", "shares")
        measured = {name: getattr(self, name) for name in names}
        lists = {name: [figure.as_json() for figure in part] for name, part in measured.items()}
        return lists | {"skipped": [entry._asdict() for entry in self.skipped]}


def _depths(of: Cell | DecodeFigure) -> str:
    """The depths of the rows, in words."""
    if of.shallow is None:
        return f"{of.depth:,}"
    return f"{of.shallow:,} and one {of.depth:,}"


def growth(figures: Sequence[DecodeFigure]) -> list[str]:
    """For each batch, what a step costs more at its greatest depth than at its least, in words."""
    lines = []
    figures = [figure for figure in figures if figure.shallow is None]
    for batch in dict.fromkeys(figure.batch for figure in figures):
        same = sorted(figure for figure in figures if figure.batch == batch)
        near, far = same[0], same[-1]
        if near.depth < far.depth:
            step, attention, preparing, rest = (
                getattr(far, part) - getattr(near, part)
                for part in ("step_ms", "attention_ms", "prepare_ms", "rest_ms")
            )
            lines.append(
                f"batch {batch}, from depth {near.depth:,} to {far.depth:,}: {step:+.2f} ms a "
                f"step, of it latent attention {attention:+.2f}, preparing {preparing:+.2f}, "
                f"all the rest {rest:+.2f}"
            )
    return lines


@dataclass(frozen=True)
class Stage:
    """A model and a state whose slots and pages are all filled; cells share both.

    pages: page numbers in random order, as a pool hands them out that has been in use.
    """

    model: KimiForCausalLM
    state: ModelState
    pages: Tensor

    def page_table(self, batch: int, tokens: int) -> Tensor:
        """Pages [batch, P] for `tokens` latent rows of each of `batch` rows."""
        each = -(-tokens // PAGE)
        return self.pages[: batch * each].view(batch, each)

    def step(
        self, table: Tensor, ids: Tensor, context: int | Sequence[int], logits: bool = True
    ) -> ForwardBatch:
        """ids [B, n] behind `context` tokens of each row; table [B, P]; row r has slot r + 1."""
        B, n = ids.shape
        contexts = torch.as_tensor(context).expand(B)
        places = contexts[:, None] + torch.arange(n)
        return ForwardBatch(
            token_ids=ids.flatten(),
            query_start=torch.arange(B + 1) * n,
            context_len=contexts,
            slots=torch.arange(1, B + 1),
            page_table=table,
            out_rows=(table.gather(1, places // PAGE) * PAGE + places % PAGE).flatten(),
            logits_at=None if logits else torch.arange(0),
        )

    def prefill_steps(self, cell: Cell, chunk: int) -> list[ForwardBatch]:
        """The pieces of a prompt, each row's share of about `chunk` tokens a step."""
        table = self.page_table(cell.batch, cell.depth + cell.length)
        size = min(max(1, chunk // cell.batch), cell.length)
        pieces = self.random_ids(cell.batch, cell.length).split(size, 1)
        ends = torch.tensor([piece.shape[1] for piece in pieces]).cumsum(0).tolist()
        return [
            self.step(table, piece, cell.depth + end - piece.shape[1], end == cell.length)
            for piece, end in zip(pieces, ends, strict=True)
        ]

    def decode_steps(self, cell: Cell, count: int) -> list[ForwardBatch]:
        """`count` steps of different tokens, all at the cell's depths."""
        table = self.page_table(cell.batch, cell.depth + 1)
        columns = self.random_ids(cell.batch, count).split(1, 1)
        return [self.step(table, ids, row_depths(cell)) for ids in columns]

    def packing(self, cell: Cell) -> Callable[[], ForwardBatch]:
        """What packs a decode step of the cell, from the plans that a cache would have made."""
        table, depths = self.page_table(cell.batch, cell.depth + 1).tolist(), row_depths(cell)
        plans = []
        for r, (pages, depth) in enumerate(zip(table, depths, strict=True)):
            own = (pages[: -(-(depth + 1) // PAGE)],)
            lease = Lease(CacheRequest(f"row {r}", range(depth + 1)), Hit(), own, [r + 1], depth)
            plans.append(StepPlan(lease, depth, depth + 1, own, (r + 1,)))
        wanted = [range(plan.start, plan.end) for plan in plans]
        return lambda: pack(plans, wanted, PAGE)

    def random_ids(self, batch: int, tokens: int) -> Tensor:
        """[batch, tokens] from the whole vocabulary, the same for the same shape."""
        generator = torch.Generator().manual_seed(tokens)
        return torch.randint(self.model.config.vocab_size, (batch, tokens), generator=generator)

    def run(self, steps: Iterable[ForwardBatch]) -> Tensor:
        """Run the steps; logits of the last."""
        for step in steps:
            logits = self.model.forward_batch(step, self.state)
        return logits

    def attention_alone(self, batch: ForwardBatch) -> Callable[[], None]:
        """The latent attention of a batch in all MLA layers, with random queries."""
        config, layers = self.model.config, self.model.model.layers
        prepared = self.prepare(batch)
        heads = (config.num_attention_heads, config.qk_head_dim)
        q = torch.randn(len(batch.token_ids), *heads).to(self.model.dtype)
        attentions = [layers[i].self_attn for i in config.mla_layer_ids]
        kv_b = [layer.kv_b_proj.weight.view(layer.expand) for layer in attentions]

        def attend_all() -> None:
            for pool, weight in zip(self.state.latent, kv_b, strict=True):
                attend(q, pool, weight, prepared.attention)

        return attend_all

    def prepare(self, batch: ForwardBatch) -> object:
        """The checks and addresses that come before the layers."""
        model = self.model
        return prepare_step(batch, self.state, model.config, model.dtype, model.dispatcher)


def row_depths(cell: Cell) -> list[int]:
    """Depth of each row of a cell."""
    short = cell.depth if cell.shallow is None else cell.shallow
    return [short] * (cell.batch - 1) + [cell.depth]


def set_stage(model: KimiForCausalLM, cells: Sequence[Cell]) -> Stage:
    """Slots and pages for the largest of the cells, all filled with random numbers.

    Raises ValueError if this machine cannot hold them.
    """
    slots = max(cell.batch for cell in cells)
    pages = max(cell.batch * -(-(cell.depth + cell.length) // PAGE) for cell in cells)
    form = state_form(model.config, slots + 1, pages + 1, PAGE, model.dtype)
    size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in form)
    refuse_oversize(f"a state of {slots} slots and {pages * PAGE:,} latent rows", size)
    state = allocate_state(
        model.config, num_slots=slots, num_pages=pages, page=PAGE, dtype=model.dtype
    )
    generator = torch.Generator().manual_seed(0)
    for tensor, spread in zip(state, (RECURRENT, CONV, LATENT), strict=True):
        tensor.normal_(0, spread, generator=generator)
    return Stage(model, state, 1 + torch.randperm(pages, generator=generator))


@dataclass
class DecodeTimer:
    """Times steps and, right after each, its parts alone, so that a slow moment falls on them all.

    One call runs all steps once and adds one sample: seconds a step of the step, of the latent
    attention, of the preparing and of the packing.
    """

    stage: Stage
    steps: Sequence[ForwardBatch]
    pack: Callable[[], object]
    samples: list[tuple[float, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.attend = self.stage.attention_alone(self.steps[0])

    def __call__(self) -> None:
        whole = attention = preparing = packing = 0.0
        for step in self.steps:
            began = time.perf_counter()
            self.stage.run([step])
            ran = time.perf_counter()
            self.attend()
            attended = time.perf_counter()
            self.stage.prepare(step)
            prepared = time.perf_counter()
            self.pack()
            packing += time.perf_counter() - prepared
            whole += ran - began
            attention += attended - ran
            preparing += prepared - attended
        parts = (whole, attention, preparing, packing)
        self.samples.append(tuple(part / len(self.steps) for part in parts))

    def figure(self, cell: Cell, warm_up: int) -> DecodeFigure:
        """Medians of all samples but the first `warm_up`; the rest is taken sample by sample."""
        samples = self.samples[warm_up:]
        columns = zip(*[(a, b, c, a - b - c, d) for a, b, c, d in samples], strict=True)
        parts = [statistics.median(column) * 1e3 for column in columns]
        return DecodeFigure(cell.depth, cell.batch, *parts, cell.shallow)


def measure(
    model: KimiForCausalLM, plan: Plan, *, threads: int, repeats: int, peer: Peer | None = None
) -> Report:
    """Time every cell and the peer in turn. ValueError if no cell fits the model."""
    cells, skipped = plan.cells(model.config)
    if not cells:
        raise ValueError(f"nothing can be measured: {skipped[-1].reason}")
    with using_threads(threads), torch.inference_mode():
        stage = set_stage(model, cells)
        functions = {cell.name: _function(stage, cell, plan) for cell in cells}
        matched = [cell for cell in cells if peer is not None and _peer_can(cell)]
        beside = {f"peer, {c.name}": _peer_function(peer, stage, c, plan) for c in matched}
        seconds = medians(functions | beside, repeats)
        shares = _shares(stage, cells, plan, repeats)
    prefill, decode = [], []
    for cell in cells:
        if cell.work is Work.PREFILL:
            prefill.append(_prefill_figure(cell, plan, seconds[cell.name]))
        else:
            decode.append(functions[cell.name].figure(cell, WARM_UP))
    rates = {(f.work, f.depth): f.rate for f in (*prefill, *decode) if f.batch == 1}
    compared = [
        _comparison(cell, plan, rates[cell.work, cell.depth], seconds[f"peer, {cell.name}"])
        for cell in matched
    ]
    return Report(prefill, decode, skipped, compared, shares)


def _function(stage: Stage, cell: Cell, plan: Plan) -> Callable[[], object]:
    if cell.work is Work.DECODE:
        return DecodeTimer(stage, stage.decode_steps(cell, plan.decode_steps), stage.packing(cell))
    steps = stage.prefill_steps(cell, plan.prefill_chunk)
    return lambda: stage.run(steps)


def _shares(stage: Stage, cells: Sequence[Cell], plan: Plan, repeats: int) -> list[Shares]:
    """Of the last piece of a prompt and of a decode step, at each depth of the smallest batch."""
    smallest = min(cell.batch for cell in cells)
    shares = []
    for cell in cells:
        if cell.batch == smallest:
            prefill = cell.work is Work.PREFILL
            steps = (
                stage.prefill_steps(cell, plan.prefill_chunk)
                if prefill
                else stage.decode_steps(cell, 1)
            )
            shares.append(
                measure_shares(stage.model, stage.state, steps[-1], what=cell.name, repeats=repeats)
            )
    return shares


def _peer_can(cell: Cell) -> bool:
    """Batch 1; a prompt from nothing, or steps after a prompt that is not too long."""
    deep = 0 < cell.depth <= PEER_DEEPEST
    return cell.batch == 1 and (deep if cell.work is Work.DECODE else cell.depth == 0)


def _peer_function(peer: Peer, stage: Stage, cell: Cell, plan: Plan) -> Callable[[], object]:
    if cell.work is Work.PREFILL:
        return peer.prefill(stage.random_ids(1, cell.length))
    return peer.decode(stage.random_ids(1, cell.depth), stage.random_ids(1, plan.decode_steps))


def _prefill_figure(cell: Cell, plan: Plan, seconds: float) -> PrefillFigure:
    steps = -(-cell.length // max(1, plan.prefill_chunk // cell.batch))
    return PrefillFigure(cell.depth, cell.batch, cell.length, steps, seconds)


def _comparison(cell: Cell, plan: Plan, ours: float, seconds: float) -> Comparison:
    tokens = cell.length if cell.work is Work.PREFILL else plan.decode_steps
    return Comparison(cell.work, cell.depth, tokens, ours, tokens / seconds)
