"""What a caller gets: vLLM's RequestOutput and CompletionOutput, and what one step brought."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from cache.leases import Hit
from kimi_mini.serving.logprobs import TokenLogprobs


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # an end token, a stop token or a stop string
    LENGTH = "length"  # as many tokens as asked for, or as the context holds
    ABORT = "abort"  # cancelled
    ERROR = "error"  # the model gave no usable logits, or storage never came


@dataclass
class Timings:
    """Seconds of one sequence. Prefill and decode count the steps it took part in, whoever else was
    in them; the consumer's own time between steps is in neither.

    queue and first_token run on the clock, from the request's arrival to its first step and to its
    first token; None if it got there never. prefill_tokens counts what preemptions made to run
    again too.
    """

    queue: float | None = None
    first_token: float | None = None
    prefill: float = 0.0
    decode: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    preemptions: int = 0


@dataclass(frozen=True)
class CompletionOutput:
    """One sample. token_ids holds an end token or stop token that ended it; text does not, and ends
    before the stop string that ended it (`include_stop_str_in_output` keeps both).

    stop_reason: the stop string or stop token id; None for an end-of-sequence token and otherwise.
    hit: what the prefix cache had of the prompt, and why not more; None if it was never looked up.
    checkpoint_at: for each boundary that the caller named, where its state is kept (floored,
    decision 31), None for one that cannot be (below the cache's unit, beyond the prompt).
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    timings: Timings = field(default_factory=Timings)
    error: str | None = None
    hit: Hit | None = None
    checkpoint_at: Mapping[int, int | None] = field(default_factory=dict)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return self.hit.joint if self.hit else 0


@dataclass(frozen=True)
class RequestOutput:
    """A request and its n samples. prompt is None if it was given as ids; prompt_logprobs[0] is
    None, since nothing predicts the first token. The first sample alone scores the prompt: what
    ends it early cuts them short."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None

    @property
    def finished(self) -> bool:
        return all(output.finish_reason for output in self.outputs)


@dataclass(frozen=True)
class Delta:
    """What one step brought to one sample: perhaps only progress of a long prefill.

    text is complete characters only, and never part of a stop string. prefilled of prompt_tokens
    prompt tokens are in the state.
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    prefilled: int
    prompt_tokens: int
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None


def rate(tokens: int, seconds: float) -> float:
    """Tokens a second; 0 where no time was spent."""
    return tokens / seconds if seconds else 0.0
