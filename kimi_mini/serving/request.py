"""A request: a prompt, its parameters, and n sequences of it. Checked here, at the door."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Series
from dataclasses import dataclass, field, replace

from kimi_mini.serving.checks import check_ids
from kimi_mini.serving.control import CacheControl
from kimi_mini.serving.open_model import OpenModel
from kimi_mini.serving.outputs import Delta, RequestOutput
from kimi_mini.serving.sampling import TokenSampler
from kimi_mini.serving.sampling_params import SamplingParams
from kimi_mini.serving.sequence import Sequence

Prompt = str | Series[int]  # text, or token ids


@dataclass(eq=False)
class Inbox:
    """Of one call of `run`: what the sequences of its requests brought, in order, and the requests
    that will bring more."""

    deltas: deque[Delta] = field(default_factory=deque)
    unfinished: set[Request] = field(default_factory=set)


@dataclass(eq=False)
class Request:
    """room: tokens that each sequence may sample. inbox: where its sequences tell what they
    brought; None: the engine's own."""

    request_id: str
    prompt: str | None  # None: given as ids
    prompt_ids: list[int]
    params: SamplingParams
    room: int
    sequences: list[Sequence] = field(default_factory=list)
    inbox: Inbox | None = None

    @property
    def finished(self) -> bool:
        return all(sequence.finish_reason for sequence in self.sequences)

    @property
    def longest(self) -> int:
        """Tokens that a sequence computes at most: the last one it samples never runs."""
        if self.room == 0:
            return len(self.prompt_ids) if self.sequences[0].scores_prompt else 0
        return len(self.prompt_ids) + self.room - 1

    def output(self) -> RequestOutput:
        """All of it so far."""
        scored = None
        if self.params.prompt_logprobs is not None:
            scored = tuple(self.sequences[0].prompt_logprobs)
        return RequestOutput(
            self.request_id,
            self.prompt,
            tuple(self.prompt_ids),
            tuple(sequence.output() for sequence in self.sequences),
            scored,
        )


def make_request(
    request_id: str,
    prompt: Prompt,
    params: SamplingParams,
    opened: OpenModel,
    control: CacheControl | None = None,
) -> Request:
    """A request with its sequences, nothing of it queued.

    Prompt and output together stay within the model's context: max_tokens is cut to what the prompt
    leaves. Raises ValueError for text without a tokenizer, an empty prompt, ids outside the
    vocabulary, stop token ids outside of it, or a prompt beyond the context.
    """
    config = opened.model.config
    text = prompt if isinstance(prompt, str) else None
    given = prompt if text is None else opened.encode(text)
    ids = check_ids("prompt token id", given, config.vocab_size)
    if not ids or text == "":
        raise ValueError("the prompt is empty: give at least one token")
    left = config.max_position_embeddings - len(ids)
    if left < 0:
        raise ValueError(
            f"the prompt has {len(ids):,} tokens; this model's context is "
            f"{config.max_position_embeddings:,} (max_position_embeddings)"
        )
    room = left if params.max_tokens is None else min(params.max_tokens, left)
    if opened.tokenizer is None and params.stop:
        raise ValueError(f"stop strings need a tokenizer, which is not there: {opened.no_text}")
    request = Request(request_id, text, ids, params, room)
    for index in range(params.n):
        own = params.child(index)
        if index:  # the prompt is the same for all: one scores it, the others may read its states
            own = replace(own, prompt_logprobs=None)
        sampler = TokenSampler(
            own,
            ids,
            vocab_size=config.vocab_size,
            end_ids=opened.end_ids,
            sample_below=opened.sample_below,
        )
        request.sequences.append(
            Sequence(
                request_id,
                index,
                ids,
                own,
                sampler,
                room=room,
                end_ids=opened.end_ids,
                tokenizer=opened.tokenizer,
                control=control or CacheControl(),
            )
        )
    return request
