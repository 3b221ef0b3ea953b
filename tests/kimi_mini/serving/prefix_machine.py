"""A real engine with a prefix cache under calls that hypothesis chooses.

Requests with shared beginnings, salts and every control, sampled or greedy, whole or as streams;
cancellations, evictions between steps, steps that fail anywhere, pools that hold barely one of
them. After each step the audit and the witness; for each request that has ended, recomputation: the
stateless model gives the same tokens, logprobs and logits (float64). At the end all comes back.
"""

import random
from collections import Counter

from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kimi_mini import SamplingParams
from kimi_mini.serving.control import CacheControl
from kimi_mini.serving.outputs import FinishReason
from kimi_mini.serving.request import Request
from tests.kimi_mini.serving.alone import (
    alone,
    assert_logprobs,
    assert_same,
    scored_prompt,
    stateless,
)
from tests.kimi_mini.serving.mixes import assert_told
from tests.kimi_mini.serving.prefix_wishes import LONGEST_PROMPT, TEXTS, tight, tiny, wish
from tests.kimi_mini.serving.reuse import Rules, assert_all_comes_back, greedy
from tests.kimi_mini.serving.witness import EXACT, Witness, distance

PLACES = ("before", "within", "after", "copy")  # of failures: the model, and what copies run
few = st.integers(0, 5)
seeds = st.integers(0, 1 << 32)  # what hypothesis would choose by itself is too tame


class Failure(MemoryError):
    """Not one of torch's."""


class PrefixMachine(RuleBasedStateMachine):
    """By `engine_rules`, on `backend`; `happened` counts over all runs of a class."""

    happened: Counter[str]

    engine_rules: Rules
    backend: str

    @initialize(seed=seeds)
    def make(self, seed: int) -> None:
        self.rng = random.Random(seed)
        shape = tight(self.rng, self.engine_rules)
        self.fails_now_and_then = self.rng.choice([0.0, 0.0, 0.05])
        note(shape)
        self.shape, self.truth = shape, tiny(self.backend)
        self.engine = shape.engine(self.truth.model)
        self.witness = Witness(self.engine, truth=self.truth)
        self.requests: list[Request] = []
        self.unchecked: list[Request] = []
        self.streams: list[tuple] = []  # (iterator, its request)
        self.told: list = []
        self.said: list[list[int]] = []
        self.cancelled: set[str] = set()
        self.calls = self.asked = self.steps = 0
        self.fails_at, self.ending = None, False
        self._fail_somewhere()

    def _fail_somewhere(self) -> None:
        """Failures before, within and after the model, and in the copies of plans and commits."""
        executor = self.engine.executor
        run, copy = executor.run, executor.copy

        def failing_run(plans, wanted):
            self._at("before")
            logits = run(plans, wanted)
            self._at("after")
            return logits

        def failing_copy(copies):
            copies = list(copies)
            if copies:
                self._at("copy")
            copy(copies)

        executor.run, executor.copy = failing_run, failing_copy
        last = self.truth.model.model.layers[-1]
        self.hook = last.register_forward_pre_hook(lambda *_: self._at("within"))

    def _at(self, place: str) -> None:
        if self.fails_at == place:
            self.fails_at = None
            self.happened[f"failed {place}"] += 1
            raise Failure

    @property
    def rarely(self) -> bool:
        """For calls that undo: were they as likely as others, nothing would ever get far."""
        return self.calls % 4 == 3

    # calls

    @rule(seed=seeds, then=st.sampled_from([30, 6, 1, 0]))
    def ask(self, seed: int, then: int) -> None:
        self.calls += 1
        self.asked += 1  # no two are alike, not even in the plainest run of all, the first
        rng = random.Random(f"{self.asked} {seed}")
        text, missing, own, params, control, streamed = wish(rng, self.engine_rules)
        texts = (*self.said[:-4:-1], *TEXTS)
        text = texts[text % len(texts)]
        ids = [*text[: max(1, min(len(text), LONGEST_PROMPT - len(own)) - missing)], *own]
        note((ids, params, control, streamed))
        if streamed:
            (request,) = self.engine.prepare([ids], params, control)
            self.streams.append((self.engine.run([request]), request))
            self.requests.append(request)
        else:
            self._add(ids, params, control)
        self.step(then)

    def _add(
        self, ids: list[int], params: SamplingParams, control: CacheControl | None = None
    ) -> None:
        request = self.engine.add_request(ids, params, control=control)
        self.requests.append(request)
        self.unchecked.append(request)
        self._settle()

    @precondition(lambda self: self.engine.has_unfinished)
    @rule(times=st.sampled_from([50, 1, 5, 12]))
    def step(self, times: int) -> None:
        self.calls += 1
        for _ in range(times):
            if self.engine.has_unfinished:
                self._step()

    @precondition(lambda self: self.engine.has_unfinished and self.rarely)
    @rule(seed=seeds)
    def fail(self, seed: int) -> None:
        """In one of the next steps: not each has copies to run, but who comes again may."""
        self.calls += 1
        place = random.Random(seed).choice(PLACES)
        if place == "copy" and self.said:
            self._add(self.said[-1][:LONGEST_PROMPT], greedy(1))
        self.fails_at = place
        for _ in range(8):
            if self.fails_at and self.engine.has_unfinished:
                self._step()
        self.fails_at = None

    @precondition(lambda self: self.unchecked and self.rarely)
    @rule(i=few)
    def abort(self, i: int) -> None:
        request = self.unchecked[i % len(self.unchecked)]
        self.engine.abort(request.request_id)
        self.cancelled.add(request.request_id)
        self._settle()

    @precondition(lambda self: self.streams)
    @rule(i=few, times=st.integers(1, 6))
    def advance(self, i: int, times: int) -> None:
        for _ in range(times):
            if self.streams:
                self._advance(i % len(self.streams))

    @precondition(lambda self: self.streams)
    @rule(i=few, times=st.sampled_from([1, 0, 3]))
    def close(self, i: int, times: int) -> None:
        """After some of it, unless that was all."""
        i %= len(self.streams)
        stream, request = self.streams[i]
        for _ in range(times):
            if (stream, request) in self.streams:
                self._advance(i)
        if (stream, request) not in self.streams:
            return
        self.streams.remove((stream, request))
        stream.close()
        self.cancelled.add(request.request_id)
        if not request.finished:  # it was never started
            self.requests.remove(request)
            return
        self.unchecked.append(request)
        self.happened["closed"] += 1
        self._settle()

    @precondition(lambda self: self.rarely)
    @rule(count=st.integers(1, 3))
    def evict_states(self, count: int) -> None:
        self.happened["states evicted"] += self.witness.holdings.evict_states(count)
        self.engine.cache.audit()

    @precondition(lambda self: self.rarely)
    @rule(tokens=st.integers(1, 20))
    def evict_kv(self, tokens: int) -> None:
        self.happened["tokens evicted"] += self.witness.holdings.evict_kv(tokens)
        self.engine.cache.audit()

    @precondition(lambda self: not self.engine.cache.live_leases and self.rarely)
    @rule()
    def clear(self) -> None:
        self.engine.cache.clear()
        self.engine.cache.audit()
        assert all(pool.free_count == pool.size for pool in self.engine.cache.storage)

    # what is looked at

    def _step(self) -> None:
        self.steps += 1
        assert self.steps < 5000, "it does not end"
        self._perhaps_fail()
        try:
            self.told += self.engine.step()
        except Failure:
            self._healed()
        self._settle()

    def _healed(self) -> None:
        """What a failed step has left; the witness sees it, too."""
        assert not self.engine.cache.in_step
        assert not self.engine.cache.live_leases
        self.engine.cache.audit()

    def _perhaps_fail(self) -> None:
        if not self.ending and self.rng.random() < self.fails_now_and_then:
            self.fails_at = self.rng.choice(PLACES)

    def _advance(self, i: int) -> None:
        """A failure of a step ends the stream that has asked for it, and its request."""
        stream, request = self.streams[i]
        self._perhaps_fail()
        try:
            self.told.append(next(stream))
        except (StopIteration, Failure) as end:
            self.streams.pop(i)
            self.unchecked.append(request)
            if isinstance(end, Failure):
                self.cancelled.add(request.request_id)
                self._healed()
        self._settle()

    def _settle(self) -> None:
        """Everything about requests that have ended. The oracle runs the same model, and is not to
        fail in the engine's place."""
        pending, self.fails_at = self.fails_at, None
        for request in [r for r in self.unchecked if r.finished]:
            self.unchecked.remove(request)
            self._check(request)
        self.fails_at = pending

    def _check(self, request: Request) -> None:
        output, prompt, params = request.output(), request.prompt_ids, request.params
        for own, sequence in zip(output.outputs, request.sequences, strict=True):
            known = [*prompt, *own.token_ids]
            self.said.append(known)
            oracle = stateless(self.truth.model, known)
            expected = alone(oracle, self.truth.model, prompt, params, own.index)
            if own.finish_reason is FinishReason.ABORT:
                assert request.request_id in self.cancelled
                assert own.token_ids == expected.token_ids[: len(own.token_ids)]
            else:
                assert_same(own, expected)
                self.happened["finished"] += 1
            for position, row in self.witness.logits.pop(sequence.name, {}).items():
                far = distance(row, oracle(known[: position + 1]))
                assert far < EXACT, (sequence.name, position, far)
            assert own.cached_tokens < len(prompt)
            assert not (sequence.control.skip_read and own.cached_tokens)
            self.happened["hit"] += own.cached_tokens > 0
            self.happened["preempted"] += own.timings.preemptions > 0
        if params.prompt_logprobs is not None and request.request_id not in self.cancelled:
            oracle = stateless(self.truth.model, prompt)
            scored = scored_prompt(oracle, prompt, params.prompt_logprobs)
            for one, other in zip(output.prompt_logprobs, scored, strict=True):
                assert_logprobs(one, other)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        try:
            self.fails_at, self.ending = None, True
            while self.streams:
                self._advance(len(self.streams) - 1)
            while self.engine.has_unfinished:
                self._step()
            assert not self.unchecked
            for request in self.requests:
                told = [d for d in self.told if d.request_id == request.request_id]
                if request.inbox is None:
                    assert_told(request.output(), told)
            self.happened["restored"] += len(self.witness.restored)
            self.happened["published"] += self.witness.published
            self.happened["steps"] += self.steps
            assert_all_comes_back(self.engine)
        finally:
            self.hook.remove()
