"""One request from prompt to last token: prefill in pieces, then decode, in its own slot and pages.

The smallest loop that uses the model as an engine does: state tensors outside, one ForwardBatch a
step. The KDA layers carry slot 1 from piece to piece; latent rows go to pages 1, 2, 3 ... in order.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from kernels.packing import integers
from kimi_mini.batch import ForwardBatch, ModelState, allocate_state
from kimi_mini.machine import refuse_oversize
from kimi_mini.model import KimiForCausalLM
from kimi_mini.serving.sampling import check_temperature, sample

PAGE = 16


class FinishReason(StrEnum):
    """Why a run ended: an end-of-sequence token, or as many tokens as asked for or possible."""

    STOP = "stop"
    LENGTH = "length"


@dataclass
class Run:
    """One request, and what became of it.

    sample_below: ids from here on are never sampled (None: all may be). prefill_chunk: prompt
    tokens of one step. Raises ValueError for an empty prompt, ids outside the model's vocabulary, a
    negative max_tokens, a bad temperature, a prompt beyond the model's context, or more latent rows
    than this machine can hold.
    """

    model: KimiForCausalLM
    prompt_ids: Sequence[int]
    max_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    sample_below: int | None = None
    prefill_chunk: int = 512
    output_ids: list[int] = field(default_factory=list, init=False)
    computed: int = field(default=0, init=False)  # tokens that are in the state
    room: int = field(init=False)  # tokens that may be sampled
    state: ModelState = field(init=False, repr=False)
    finish_reason: FinishReason | None = field(default=None, init=False)
    prefill_seconds: float = field(default=0.0, init=False)
    decode_seconds: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        config = self.model.config
        if not self.prompt_ids:
            raise ValueError("the prompt is empty: give at least one token")
        self.prompt_ids = integers("prompt_ids", self.prompt_ids)
        wrong = [i for i in self.prompt_ids if not 0 <= i < config.vocab_size]
        if wrong:
            raise ValueError(
                f"token id {wrong[0]} is not in this model's vocabulary, 0..{config.vocab_size - 1}"
            )
        if self.max_tokens < 0:
            raise ValueError(f"max_tokens must not be negative, got {self.max_tokens}")
        if self.prefill_chunk < 1:
            raise ValueError(f"prefill_chunk must be at least 1, got {self.prefill_chunk}")
        check_temperature(self.temperature)
        if len(self.prompt_ids) > config.max_position_embeddings:
            raise ValueError(
                f"the prompt has {len(self.prompt_ids)} tokens; this model's context is "
                f"{config.max_position_embeddings} (max_position_embeddings)"
            )
        left = config.max_position_embeddings - len(self.prompt_ids)
        self.room = min(self.max_tokens, left)
        self.state = self._allocate(-(-(len(self.prompt_ids) + self.room) // PAGE))

    def _allocate(self, pages: int) -> ModelState:
        config, dtype = self.model.config, self.model.dtype
        row = len(config.mla_layer_ids) * config.latent_width * dtype.itemsize
        refuse_oversize(f"room for {pages * PAGE:,} latent rows", pages * PAGE * row)
        return allocate_state(config, num_slots=1, num_pages=pages, page=PAGE, dtype=dtype)

    def tokens(self) -> Iterator[int]:
        """Run, yielding each sampled token as it comes; an end-of-sequence token ends the run and
        is kept in output_ids but not yielded. Prompt and output together stay within the context.
        """
        if self.computed or self.finish_reason is not None:
            raise ValueError("a run runs once: make a new one")
        generator = torch.Generator().manual_seed(self.seed)
        if self.room == 0:
            self.finish_reason = FinishReason.LENGTH
            return
        started = time.perf_counter()
        known = list(self.prompt_ids)
        while True:
            piece = known[self.computed : self.computed + self.prefill_chunk]
            logits = self._step(piece, self.computed, self.computed + len(piece) == len(known))
            self.computed += len(piece)
            if self.computed < len(known):
                continue
            token = sample(self._masked(logits[0]), self.temperature, generator)
            now = time.perf_counter()
            if not self.output_ids:
                self.prefill_seconds = now - started
            else:
                self.decode_seconds += now - started
            started = now
            self.output_ids.append(token)
            known.append(token)
            if token in self.model.config.eos_token_ids:
                self.finish_reason = FinishReason.STOP
                return
            yield token
            started = time.perf_counter()  # the consumer's time is not ours
            if len(self.output_ids) == self.room:
                self.finish_reason = FinishReason.LENGTH
                return

    def _step(self, piece: list[int], context: int, wanted: bool) -> Tensor:
        places = torch.arange(context, context + len(piece))
        pages = 1 + torch.arange(self.state.latent.shape[1] - 1)
        batch = ForwardBatch(
            token_ids=torch.tensor(piece),
            query_start=torch.tensor([0, len(piece)]),
            context_len=torch.tensor([context]),
            slots=torch.tensor([1]),
            page_table=pages[None],
            out_rows=PAGE + places,
            logits_at=None if wanted else places[:0],
        )
        return self.model.forward_batch(batch, self.state)

    def _masked(self, logits: Tensor) -> Tensor:
        if self.sample_below is None:
            return logits
        beyond = torch.arange(len(logits)) >= self.sample_below
        return logits.masked_fill(beyond, float("-inf"))

    @property
    def prefilled(self) -> int:
        """Prompt tokens that are in the state."""
        return min(self.computed, len(self.prompt_ids))

    @property
    def decoded(self) -> int:
        """Tokens sampled after the first, which comes from prefill."""
        return max(0, len(self.output_ids) - 1)

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens a second, the first sampled token included in the time."""
        return _rate(self.prefilled, self.prefill_seconds)

    @property
    def decode_rate(self) -> float:
        """Tokens after the first, a second."""
        return _rate(self.decoded, self.decode_seconds)

    def report(self) -> dict[str, Any]:
        """All there is to say of the run, as plain values."""
        return {
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "backend": self.model.dispatcher.backend.name,
            "prompt_ids": list(self.prompt_ids),
            "output_ids": self.output_ids,
            "finish_reason": self.finish_reason,
            "prefill_seconds": self.prefill_seconds,
            "prefill_tokens_per_second": self.prefill_rate,
            "decode_seconds": self.decode_seconds,
            "decode_tokens_per_second": self.decode_rate,
            "state_bytes": self.state_bytes(),
        }

    def state_bytes(self) -> dict[str, int]:
        """Bytes held for this request by kind: recurrent, conv, and latent rows filled so far."""
        latent = self.state.latent
        row_bytes = latent.shape[0] * latent.shape[-1] * latent.itemsize
        return {
            "recurrent": self.state.recurrent[:, 1].nbytes,
            "conv": self.state.conv[:, 1].nbytes,
            "latent": self.computed * row_bytes,
            "latent_per_token": row_bytes,
        }


def _rate(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds else 0.0
