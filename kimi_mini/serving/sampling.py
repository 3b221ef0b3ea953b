"""From logits to a token: masks, penalties, temperature, truncation, one draw.

The order is vLLM's (its documentation of vllm.v1.sample.sampler):

    vocabulary and min_tokens masks → repetition, frequency, presence penalty → greedy: the largest
    → temperature → min_p → top_k → top_p → draw

A masked id has the logit -inf, which no step raises again; so masks might as well come after the
penalties. Truncation never removes the largest logit; so greedy sampling has no use for it.

The apply_* functions are pure: float logits [vocab] in, logits [vocab] out, arithmetic in float64.
They want at least one finite logit and neither NaN nor +inf. Among equal logits the lower id always
comes first. A threshold counts as reached by what is as close to it as a float32's rounding of the
logits: otherwise [.5, .3, .2] at top_p = .5 would keep one id or two as rounding has it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kimi_mini.serving.checks import check_ids
from kimi_mini.serving.logprobs import TokenLogprobs, largest, token_logprobs, top_ids
from kimi_mini.serving.sampling_params import SamplingParams

NEVER = float("-inf")


def apply_repetition_penalty(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Where seen [vocab] (bool), positive logits are divided and negative multiplied by penalty."""
    logits = logits.double()
    bound = sys.float_info.max  # a tiny penalty must not make a logit infinite
    penalised = torch.where(logits > 0, logits / penalty, logits * penalty).clamp(-bound, bound)
    return torch.where(seen & logits.isfinite(), penalised, logits)


def apply_count_penalties(
    logits: Tensor, counts: Tensor, frequency: float, presence: float
) -> Tensor:
    """logit - frequency * count - presence * (count > 0), counts [vocab] being of output tokens."""
    return logits.double() - frequency * counts - presence * (counts > 0)


def apply_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Logits divided by a temperature above 0; moved to a largest of 0 if that would overflow."""
    logits = logits.double()
    scaled = logits / temperature
    if bool(scaled.max().isfinite()):
        return scaled
    return (logits - logits.max()) / temperature


def apply_min_p(logits: Tensor, min_p: float) -> Tensor:
    """Keep ids at least min_p times as likely as the likeliest; 0 is off."""
    if min_p == 0:
        return logits
    best = logits.max()
    ratio = (logits.double() - best).exp()
    return logits.masked_fill(ratio < min_p * (1 - _doubt(best)), NEVER)


def apply_top_k(logits: Tensor, k: int) -> Tensor:
    """Keep exactly k ids; 0, -1 or at least the vocabulary is off."""
    if k < 1 or k >= len(logits):
        return logits
    return _only(logits, top_ids(logits, k))


def apply_top_p(logits: Tensor, p: float) -> Tensor:
    """Keep an id while the mass before it is below p, and always the first; 1 is off."""
    if p >= 1:
        return logits
    ids = logits.isfinite().nonzero()[:, 0]
    order = ids[logits[ids].sort(descending=True, stable=True).indices]
    probs = logits[order].double().softmax(-1)
    before = probs.cumsum(-1) - probs
    # a mass m moves by m (1 - m) times what its logits move by
    kept = before < p - p * (1 - p) * _doubt(logits[order[0]])
    kept[0] = True
    return _only(logits, order[kept])


def draw(logits: Tensor, generator: torch.Generator) -> int:
    """One id with probability softmax(logits). Takes one number from the generator, always."""
    cumulated = (logits.double() - logits.max()).exp().cumsum(-1)
    # in (0, 1], so that the first sum to reach its share has a weight above 0
    share = 1 - torch.rand((), dtype=torch.float64, generator=generator)
    return int(torch.searchsorted(cumulated, share * cumulated[-1]))


class Sampled(NamedTuple):
    """A token, and what was asked to be told of it."""

    token: int
    logprobs: TokenLogprobs | None


class TokenSampler:
    """Chooses the tokens of one sample of a request, and remembers them.

    params: with n = 1 (`SamplingParams.child`). prompt_ids: the prompt, for the repetition penalty.
    end_ids: the model's end-of-sequence ids; with params they give `end_ids`, the ids that end this
    sample, which are not drawn before min_tokens others. sample_below: ids from here on are never
    drawn (None: all may be). `generator` is this sample's own, so that no neighbour changes what it
    draws; `num_sampled` counts its tokens. Raises ValueError for arguments that do not fit.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        *,
        vocab_size: int,
        end_ids: Iterable[int] = (),
        sample_below: int | None = None,
    ) -> None:
        if params.n != 1:
            raise ValueError(f"a sampler is for one sample: params.n must be 1, got {params.n}")
        if sample_below is not None and sample_below < 1:
            raise ValueError(f"sample_below must be None or at least 1, got {sample_below}")
        check_ids("stop token id", params.stop_token_ids, vocab_size)
        self.params = params
        self.vocab_size = vocab_size
        self.sample_below = min(vocab_size, vocab_size if sample_below is None else sample_below)
        self.end_ids = params.end_ids(end_ids)
        self.num_sampled = 0
        self.generator = torch.Generator()
        if params.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(params.seed)
        # of ids in prompt or output, and of how often in the output; only kept if they are needed,
        # and not while the sample waits for its first token
        self._seen: Tensor | None = None
        self._counts: Tensor | None = None
        self._prompt: list[int] = []
        if params.repetition_penalty != 1:
            self._prompt = check_ids("prompt token id", prompt_ids, vocab_size)

    def sample(self, logits: Tensor) -> Sampled:
        """The next token, from the model's logits [vocab], which are left as they are.

        Greedy sampling takes the largest after masks and penalties and never touches the generator;
        a draw advances it by one number. Raises ValueError, changing nothing, if a logit is NaN or
        +inf, none is finite, or masks leave none that is.
        """
        if logits.shape != (self.vocab_size,):
            raise ValueError(f"logits must be [{self.vocab_size}], got {[*logits.shape]}")
        best = largest(logits)
        scores = self.process(logits)
        if self.params.greedy:
            token = _first(scores, best if scores is logits else scores.max())
        else:
            token = draw(scores, self.generator)
        self.num_sampled += 1
        if self._seen is not None:
            self._seen[token] = True
        if self._counts is not None:
            self._counts[token] += 1
        count = self.params.logprobs
        return Sampled(token, None if count is None else token_logprobs(logits, token, count))

    def process(self, logits: Tensor) -> Tensor:
        """What the next token is chosen from: logits [vocab] → [sample_below], -inf for never.

        Changes nothing. If nothing is to be done, the result is `logits` itself. Raises ValueError
        if masks leave no finite logit.
        """
        params = self.params
        scores = self._penalised(self._masked(logits))
        if scores is not logits and bool(scores.max() == NEVER):
            raise ValueError(
                "no token can be sampled: every id with a finite logit is masked by sample_below "
                f"({self.sample_below}) or min_tokens ({params.min_tokens}, against the ids that "
                "end a sample)"
            )
        if params.greedy:
            return scores
        scores = apply_temperature(scores, params.temperature)
        scores = apply_min_p(scores, params.min_p)
        scores = apply_top_k(scores, params.top_k)
        return apply_top_p(scores, params.top_p)

    def _masked(self, logits: Tensor) -> Tensor:
        if self.sample_below < self.vocab_size:
            logits = logits[: self.sample_below]
        if self.num_sampled < self.params.min_tokens:
            ends = [i for i in self.end_ids if 0 <= i < self.sample_below]
            logits = logits.index_fill(0, torch.tensor(ends, dtype=torch.long), NEVER)
        return logits

    def _remember(self) -> None:
        """Make what penalties need, before the first token is chosen."""
        params, vocab = self.params, self.vocab_size
        if params.repetition_penalty != 1 and self._seen is None:
            self._seen = torch.zeros(vocab, dtype=torch.bool)
            self._seen[torch.tensor(self._prompt, dtype=torch.long)] = True
            self._prompt = []
        if (params.frequency_penalty or params.presence_penalty) and self._counts is None:
            self._counts = torch.zeros(vocab, dtype=torch.float64)

    def _penalised(self, logits: Tensor) -> Tensor:
        self._remember()
        params, below = self.params, self.sample_below
        if self._seen is not None:
            logits = apply_repetition_penalty(logits, self._seen[:below], params.repetition_penalty)
        if self._counts is not None:
            logits = apply_count_penalties(
                logits, self._counts[:below], params.frequency_penalty, params.presence_penalty
            )
        return logits


def _doubt(best: Tensor) -> float:
    """How far rounding may have moved a logit near the largest, generously: 2^-22 of its size."""
    return min(1e-3, 2**-22 * max(1.0, abs(float(best))))


def _first(logits: Tensor, value: Tensor) -> int:
    """The lowest id whose logit has this value."""
    return int((logits == value).nonzero()[0])


def _only(logits: Tensor, ids: Tensor) -> Tensor:
    """Logits [vocab] with all but `ids` at -inf."""
    return torch.full_like(logits, NEVER).index_copy_(0, ids, logits[ids])
