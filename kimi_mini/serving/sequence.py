"""A sequence: one sample of a request, from its prompt to its last token.

It knows its tokens, samples from logits, turns tokens into text, and decides when it ends. It knows
nothing of slots and pages: `lease` is the scheduler's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor

from cache.leases import CacheRequest, Hit, Lease
from kimi_mini.serving.control import CacheControl
from kimi_mini.serving.logprobs import TokenLogprobs, prompt_logprobs
from kimi_mini.serving.outputs import CompletionOutput, Delta, FinishReason, Timings
from kimi_mini.serving.sampling import Sampled, TokenSampler
from kimi_mini.serving.sampling_params import SamplingParams
from kimi_mini.serving.text.stop import StopStrings
from kimi_mini.serving.text.tokenizer import Tokenizer


class Sequence:
    """params are those of this one sample; room: tokens that may be sampled; end_ids: the model's
    end-of-sequence ids, which params may ignore."""

    def __init__(
        self,
        request_id: str,
        index: int,
        prompt_ids: list[int],
        params: SamplingParams,
        sampler: TokenSampler,
        *,
        room: int,
        end_ids: Iterable[int] = (),
        tokenizer: Tokenizer | None = None,
        control: CacheControl | None = None,
        arrival: float = 0.0,
    ) -> None:
        self.request_id, self.index = request_id, index
        self.prompt_tokens = len(prompt_ids)
        self.tokens = list(prompt_ids)  # all that are known
        self.params, self.sampler, self.room = params, sampler, room
        self.end_ids = params.heeded(end_ids)
        self.control = control or CacheControl()
        self.hit: Hit | None = None  # what its first admission found in the cache
        self.checkpoint_at: dict[int, int | None] = {}  # named boundaries, and where they are kept
        self.arrival = arrival
        self.computed = 0  # tokens in the state, after the last step it was in
        self.lease: Lease | None = None
        self.torn = False  # within `receive`, and afterwards if that was cut short
        self.timings = Timings()
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.error: str | None = None
        self.text: list[str] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs | None] = [None]
        self._stream = tokenizer.stream(params.skip_special_tokens) if tokenizer else None
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output)

    @property
    def name(self) -> str:
        return f"{self.request_id}.{self.index}"

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]

    @property
    def prefilled(self) -> int:
        """Prompt tokens that are in the state now."""
        return min(self.computed, self.prompt_tokens)

    @property
    def scores_prompt(self) -> bool:
        """Prompt logprobs are wanted and not yet all there."""
        wanted = self.params.prompt_logprobs is not None
        return wanted and len(self.prompt_logprobs) < self.prompt_tokens

    def storage_request(self) -> CacheRequest:
        """What to ask the cache for, now that these tokens are known."""
        return CacheRequest(
            self.name,
            self.tokens,
            salt=self.control.cache_salt,
            skip_read=self.control.skip_read,
            must_fit=True,
            checkpoint_at=self.control.checkpoint_at,
            key_cap=0 if self.scores_prompt else None,
            prompt=self.prompt_tokens,
        )

    def entered(self, lease: Lease) -> None:
        """Its first admission counts for what was found."""
        if self.hit is None:
            self.hit = lease.hit
        self.keeps(lease)

    def keeps(self, lease: Lease) -> None:
        """What is kept for others of what it named, as far as is known now."""
        self.checkpoint_at = dict(zip(self.control.checkpoint_at, lease.named, strict=False))

    def logits_wanted(self, start: int, end: int) -> range:
        """Positions among start .. end-1 whose logits this sequence needs: the last known token's,
        and, for prompt logprobs, all of the prompt's."""
        if self.scores_prompt:
            return range(start, end)
        return range(end - 1, end) if end == len(self.tokens) else range(0)

    def receive(self, logits: Tensor, positions: range, computed: int) -> Delta:
        """Logits [len(positions), vocab] of a step in which these positions were wanted and after
        which `computed` tokens are in the state.

        Scores the prompt, samples if the last known token has run, and ends the sequence when it is
        time. Logits that cannot be sampled from end it with an error, which others do not feel.
        """
        self.computed = computed
        try:
            if self.scores_prompt:
                self._score_prompt(logits, positions)
            if computed < len(self.tokens):
                return self._delta("")
            if self.room == 0:  # only its prompt was to be scored
                return self.end(FinishReason.LENGTH)
            sampled = self.sampler.sample(logits[-1])
        except ValueError as error:
            self.error = str(error)
            return self.end(FinishReason.ERROR)
        return self._accept(sampled)

    def end(self, reason: FinishReason, token: Sampled | None = None, text: str = "") -> Delta:
        """Ends here, for this reason; what was held back of the text is let go."""
        if self._stream is not None:
            text += self._stops.push(self._stream.finish(), self._watched) + self._stops.finish()
            if reason is FinishReason.LENGTH and self._stops.matched is not None:
                reason, self.stop_reason = FinishReason.STOP, self._stops.matched
        self.finish_reason = reason
        return self._delta(text, token)

    def output(self) -> CompletionOutput:
        """All of it so far."""
        return CompletionOutput(
            self.index,
            "".join(self.text),
            tuple(self.output_ids),
            self.finish_reason,
            self.stop_reason,
            None if self.params.logprobs is None else tuple(self.logprobs),
            replace(self.timings),
            self.error,
            self.hit,
            self.checkpoint_at,
        )

    def _score_prompt(self, logits: Tensor, positions: range) -> None:
        """Logits at position p score token p+1; after a preemption some have been scored before."""
        first = len(self.prompt_logprobs) - 1
        last = min(positions.stop, self.prompt_tokens - 1)
        if first < last:
            self.prompt_logprobs += prompt_logprobs(
                logits[first - positions.start : last - positions.start],
                self.tokens[first + 1 : last + 1],
                self.params.prompt_logprobs,
            )

    def _accept(self, sampled: Sampled) -> Delta:
        token = sampled.token
        self.tokens.append(token)
        if sampled.logprobs is not None:
            self.logprobs.append(sampled.logprobs)
        count = len(self.tokens) - self.prompt_tokens
        early = count < self.params.min_tokens
        if not early and (token in self.end_ids or token in self.params.stop_token_ids):
            self.stop_reason = None if token in self.end_ids else token
            shown = self._push(token) if self.params.include_stop_str_in_output else ""
            return self.end(FinishReason.STOP, sampled, shown)
        text = self._push(token)
        if self._stops.matched is not None:
            self.stop_reason = self._stops.matched
            return self.end(FinishReason.STOP, sampled, text)
        if count >= self.room:
            return self.end(FinishReason.LENGTH, sampled, text)
        return self._delta(text, sampled)

    def _push(self, token: int) -> str:
        """Text that became certain."""
        if self._stream is None:
            return ""
        return self._stops.push(self._stream.push(token), self._watched)

    @property
    def _watched(self) -> bool:
        """A stop string may end with the last token: there are more than min_tokens."""
        return len(self.tokens) - self.prompt_tokens > self.params.min_tokens

    def _delta(self, text: str, sampled: Sampled | None = None) -> Delta:
        if text:
            self.text.append(text)
        return Delta(
            self.request_id,
            self.index,
            text,
            () if sampled is None else (sampled.token,),
            self.prefilled,
            self.prompt_tokens,
            (sampled.logprobs,) if sampled is not None and sampled.logprobs is not None else None,
            self.finish_reason,
            self.stop_reason,
            self.error,
        )
