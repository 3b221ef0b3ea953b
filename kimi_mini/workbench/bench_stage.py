"""Rows at a depth, without running the prompt that leads there.

A hybrid model's state at depth d is a slot of each KDA layer and d latent rows of each MLA layer,
so a row "at depth d" is made by filling both with random numbers: a step's time depends on how many
rows it reads, not on what they say. One pool of slots and pages serves all cells in turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cache.leases import CacheRequest, Hit, Lease, StepPlan
from kimi_mini.batch import ForwardBatch, ModelState, allocate_state, state_form
from kimi_mini.machine import refuse_oversize
from kimi_mini.model import KimiForCausalLM
from kimi_mini.serving.executor import pack
from kimi_mini.workbench.bench_cells import Cell

PAGE = 16
# standard deviations, near those of the bench preset after a real prompt
RECURRENT, CONV, LATENT = 0.06, 0.5, 0.9


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
        """The pieces of a prompt, each row's share of about `chunk` tokens a step; logits of each
        row's last token alone."""
        table = self.page_table(cell.batch, cell.depth + cell.length)
        size = min(max(1, chunk // cell.batch), cell.length)
        pieces = self.random_ids(cell.batch, cell.length).split(size, 1)
        ends = torch.tensor([piece.shape[1] for piece in pieces]).cumsum(0).tolist()
        return [
            self.step(table, piece, cell.depth + end - piece.shape[1], end == cell.length)
            for piece, end in zip(pieces, ends, strict=True)
        ]

    def decode_steps(self, cell: Cell, count: int) -> list[ForwardBatch]:
        """`count` steps of different tokens, all at the cell's depths: the new latent row is
        written to the same place again, the recurrent state moves on."""
        table = self.page_table(cell.batch, cell.depth + 1)
        columns = self.random_ids(cell.batch, count).split(1, 1)
        return [self.step(table, ids, cell.row_depths) for ids in columns]

    def packing(self, cell: Cell) -> Callable[[], ForwardBatch]:
        """What packs a decode step of the cell, from the plans that a cache would have made."""
        table = self.page_table(cell.batch, cell.depth + 1).tolist()
        plans = []
        for r, (pages, depth) in enumerate(zip(table, cell.row_depths, strict=True)):
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
    model.hold_weights()  # as an engine does
    return Stage(model, state, 1 + torch.randperm(pages, generator=generator))
