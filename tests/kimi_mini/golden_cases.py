"""The golden checkpoints, and how tests drive a model over slots and pages."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from kimi_mini import ForwardBatch, KimiForCausalLM, ModelState, allocate_state

FOLDER = Path(__file__).resolve().parent.parent / "golden" / "model"
NAMES = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())
PROMPTS = (1, 3, 17, 64, 65, 130)


@functools.cache
def goldens(name: str) -> dict[str, Tensor]:
    return load_file(FOLDER / name / "goldens.safetensors")


@functools.cache
def golden_model(name: str, dtype: torch.dtype, backend: str) -> KimiForCausalLM:
    return KimiForCausalLM.from_pretrained(FOLDER / name, dtype=dtype, backend=backend)


def poisoned_state(model: KimiForCausalLM, *, slots: int, pages: int, page: int) -> ModelState:
    """State memory full of NaN: whatever is read before it was written shows."""
    state = allocate_state(
        model.config, num_slots=slots, num_pages=pages, page=page, dtype=model.dtype
    )
    for part in state:
        part.fill_(float("nan"))
    return state


class Sequence:
    """One sequence in its own slot and shuffled pages, run piece by piece."""

    def __init__(self, model: KimiForCausalLM, state: ModelState, slot: int, pages: Tensor) -> None:
        self.model, self.state, self.slot, self.pages = model, state, slot, pages
        self.length = 0

    def rows(self, count: int) -> Tensor:
        """Flat latent rows of the first `count` tokens."""
        page = self.state.latent.shape[2]
        places = torch.arange(count)
        return self.pages[places // page] * page + places % page

    def run(self, ids: Tensor) -> Tensor:
        """Feed ids; logits [vocab] after the last of them."""
        return run_step([(self, ids)])[0]

    def layer_latent(self, layer: int) -> Tensor:
        return self.state.latent[layer].flatten(0, 1)[self.rows(self.length)]


def run_step(work: list[tuple[Sequence, Tensor]]) -> Tensor:
    """One step of several sequences over the same state; logits [B, vocab]."""
    first = work[0][0]
    lengths = [len(ids) for _, ids in work]
    table = torch.full((len(work), max(len(s.pages) for s, _ in work)), -1)
    for r, (sequence, _) in enumerate(work):
        table[r, : len(sequence.pages)] = sequence.pages
    batch = ForwardBatch(
        token_ids=torch.cat([ids for _, ids in work]),
        query_start=torch.tensor([0, *lengths]).cumsum(0),
        context_len=torch.tensor([s.length for s, _ in work]),
        slots=torch.tensor([s.slot for s, _ in work]),
        page_table=table,
        out_rows=torch.cat([s.rows(s.length + len(ids))[s.length :] for s, ids in work]),
    )
    logits = first.model.forward_batch(batch, first.state)
    for (sequence, _), length in zip(work, lengths, strict=True):
        sequence.length += length
    return logits
