"""A real engine with a prefix cache under calls that hypothesis chooses.

Requests with shared beginnings, salts and every control, sampled or greedy, whole or as streams;
cancellations, evictions between steps, steps that fail anywhere, pools that hold barely one of
them. After each step the audit and the witness; for each request that has ended, recomputation: the
stateless model gives the same tokens, logprobs and logits (float64). At the end all comes back.
"""

import math
import random
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kimi_mini import Engine, KimiForCausalLM, SamplingParams
from kimi_mini.serving.control import CacheControl
from kimi_mini.serving.outputs import FinishReason
from kimi_mini.serving.request import Request
from tests.kimi_mini.serving.alone import (
    alone,
    assert_logprobs,
    assert_same,
    oracle_engine,
    prefix_hash,
    scored_prompt,
    small_config,
    stateless,
)
from tests.kimi_mini.serving.mixes import (
    LENGTHS,
    arrivals,
    assert_as_alone,
    assert_told,
    drive,
    tight_options,
)
from tests.kimi_mini.serving.mixes import LONGEST as LONGEST_MIX
from tests.kimi_mini.serving.reuse import (
    EXACT,
    RULES,
    Rules,
    Truth,
    Witness,
    assert_all_comes_back,
    distance,
    greedy,
    reusing,
)

LONGEST_PROMPT, MOST_TOKENS = 44, 12
LONGEST = LONGEST_PROMPT + MOST_TOKENS - 1
TEXTS = ([7, 8, 9, 10] * 7, [7, 8, 9, 10] * 4 + [11, 7] * 14, [12, 7, 8])
EOS = [2, *range(40, 50)]  # so many that some end by themselves
PLACES = ("before", "within", "after", "copy")  # of failures: the model, and what copies run
few = st.integers(0, 5)
seeds = st.integers(0, 1 << 32)  # what hypothesis would choose by itself is too tame


def tiny_model() -> KimiForCausalLM:
    """Kernel chunks of 4, so that boundaries are dense; nothing is forgotten."""
    model = KimiForCausalLM.from_config(
        small_config(64, EOS), seed=1, dtype=torch.float64, kernel_chunk=4
    )
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        attention.A_log.zero_()
        attention.dt_bias.fill_(-6.0)
    return model


TRUTH = Truth(tiny_model())


class Tight(NamedTuple):
    """An engine whose pools hold barely the longest request; own: of the cache's options."""

    rules: Rules
    page: int
    own: dict[str, object]
    slots: int
    more_pages: int
    budget: int
    piece: int

    def engine(self) -> Engine:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some keep nothing of prompts
            return reusing(
                TRUTH.model, self.rules, page=self.page, state_slots=self.slots,
                kv_pages=-(-LONGEST // self.page) + self.more_pages,
                max_batch_tokens=self.budget, prefill_chunk=self.piece, **self.own,
            )  # fmt: skip


def least_slots(rules: Rules) -> int:
    """By the engines' own rules, of one request. One list of blocks needs more for other reasons:
    see `spare_pages`."""
    names = {"extra_buffer": 3, "extra_buffer_lazy": 2}
    return names.get(rules.name, 1) if rules.compat else 1


def spare_pages(rules: Rules) -> int:
    """Of vLLM's one list, beside a request's rows: states that are read and written, and copies."""
    return 7 if rules.compat == "vllm" else 0


def cache_options(
    rng: random.Random, rules: Rules, page: int, spacings: Sequence[int]
) -> dict[str, object]:
    """spacings: of a tree's states, or tokens of a state block."""
    spacing = rng.choice(spacings)
    if not rules.blocks:
        return dict(
            state_chunk=spacing,
            track_interval=rng.choice([None, 1, 6]),
            max_states_per_path=rng.choice([None, None, None, 1, 2]),
        )
    largest = math.gcd(page, spacing)
    units = [unit for unit in range(1, largest + 1) if largest % unit == 0]
    return dict(
        state_block=spacing,
        hash_unit=rng.choice([None, *units]),
        retention=rng.choice([0, "none", math.lcm(page, spacing)]),
    )


def tight(rng: random.Random, rules: Rules) -> Tight:
    # the engines' own rules keep nothing of small pieces
    large = rules.compat is not None and rng.random() < 0.8
    page = 1 if rules.name == "no_buffer" else rng.choice([1, 3, 4, 16])
    return Tight(
        rules,
        page=page,
        own=cache_options(rng, rules, page, (1, 3, 4, 6, 8, 12) if rules.blocks else (4, 8, 12)),
        slots=max(rng.choice([12, 8, 6, 4, 3, 2, 1]), least_slots(rules)),
        more_pages=rng.choice([0, 2, 40, 80]) + spare_pages(rules),
        budget=rng.choice([60] if large else [60, 20, 7]),
        piece=rng.choice([60, 60, 16] if large else [60, 16, 7, 5, 3, 1]),
    )


def random_control(rng: random.Random, rules: Rules) -> CacheControl:
    """An engine's own rules know no boundaries that a caller names."""
    salt, skip_read = rng.choice([None] * 12 + ["", "a"]), rng.random() < 0.06
    named = rng.sample(range(1, LONGEST), rng.choice([0, 0, 1, 2]))
    return CacheControl(salt, skip_read, () if rules.compat else named)


class Wish(NamedTuple):
    """text: what somebody has said or one of TEXTS, by number; without the last `missing` tokens,
    `own` in their place."""

    text: int
    missing: int
    own: list[int]
    params: SamplingParams
    control: CacheControl
    streamed: bool


def wish(rng: random.Random, rules: Rules) -> Wish:
    params = SamplingParams(
        max_tokens=rng.choice([0, 1, 5, 5, MOST_TOKENS, MOST_TOKENS]),
        temperature=rng.choice([0.0, 1.0]),
        seed=rng.randrange(3),
        ignore_eos=rng.random() < 0.5,
        n=rng.choice([1, 1, 1, 1, 2]),
        logprobs=rng.choice([0, 2]),
        prompt_logprobs=rng.choice([None] * 15 + [0]),
    )
    own = rng.choice([[], [], [12], [7, 7, 7]])
    missing = rng.choice([0, 0, 0, 1, 2, 5, 9, 22])
    return Wish(
        rng.randrange(6), missing, own, params, random_control(rng, rules), rng.random() < 0.25
    )


class Failure(MemoryError):
    """Not one of torch's."""


class PrefixMachine(RuleBasedStateMachine):
    """By `engine_rules`; `happened` counts over all runs of a class."""

    happened: Counter[str]

    engine_rules: Rules

    @initialize(seed=seeds)
    def make(self, seed: int) -> None:
        self.rng = random.Random(seed)
        shape = tight(self.rng, self.engine_rules)
        self.fails_now_and_then = self.rng.choice([0.0, 0.0, 0.05])
        note(shape)
        self.shape = shape
        self.engine = shape.engine()
        self.witness = Witness(self.engine, truth=TRUTH)
        self.requests: list[Request] = []
        self.unchecked: list[Request] = []
        self.streams: list[tuple] = []  # (iterator, its request)
        self.told: list = []
        self.said: list[list[int]] = []
        self.cancelled: set[str] = set()
        self.calls = self.steps = 0
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
        last = TRUTH.model.model.layers[-1]
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
        text, missing, own, params, control, streamed = wish(random.Random(seed), self.engine_rules)
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

    @precondition(lambda self: self.streams and self.rarely)
    @rule(i=few)
    def close(self, i: int) -> None:
        stream, request = self.streams.pop(i % len(self.streams))
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
            assert not self.engine.cache.in_step
            assert not self.engine.cache.live_leases
            self.engine.cache.audit()
        self._settle()

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
            oracle = stateless(TRUTH.model, known)
            expected = alone(oracle, TRUTH.model, prompt, params, own.index)
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
            oracle = stateless(TRUTH.model, prompt)
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


def counts_of(rules: Rules, max_examples: int, steps: int) -> Counter[str]:
    """Run the machine under these rules; what happened in all."""

    class Machine(PrefixMachine):
        pass

    Machine.engine_rules, Machine.happened = rules, Counter()
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    return Machine.happened


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_calls_in_any_order_give_each_request_what_it_gets_alone(rules):
    happened = counts_of(rules, 2, 24)
    assert happened["finished"] >= 5, happened


@pytest.mark.slow
@pytest.mark.parametrize("rules", RULES, ids=str)
def test_thousands_of_steps(rules):
    happened = counts_of(rules, 60, 80)
    assert happened["steps"] >= 3000 and happened["hit"] >= 100, happened
    assert min(happened[f"failed {place}"] for place in PLACES) >= 3, happened
    assert min(happened[what] for what in ("preempted", "states evicted", "closed")) >= 10, happened


# --- without a model ------------------------------------------------------------------------------


def mix_of_an_oracle(seed: int, count: int) -> tuple[int, int]:
    """Random requests through an executor that knows what every slot and row stands for; how many
    were resumed, and how many gave way."""
    rng = random.Random(seed)
    rules = RULES[seed % len(RULES)]
    options = tight_options(rng)
    if rules.name == "no_buffer":
        options |= dict(page=1, kv_pages=LONGEST_MIX + rng.choice([0, 5, 200]))
    options["state_slots"] = max(rng.choice([1, 2, 3, 4, 8, 20]), least_slots(rules))
    options["kv_pages"] += spare_pages(rules)
    spacings = (4, 12, 16, 48) if rules.blocks else (16, 48)
    options |= cache_options(rng, rules, options["page"], spacings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = oracle_engine(eos=tuple(EOS), audit=True, **rules.engine(**options))
    coming = arrivals(rng, count)
    text = [rng.randrange(320) for _ in range(LONGEST_MIX)]
    for arrival in coming:
        if rng.random() < 0.8:  # most begin alike
            shared = rng.choice([5, 16, 17, 32, 33])
            arrival.prompt = [*text[:shared], *arrival.prompt][: max(LENGTHS)]
    add = engine.add_request
    engine.add_request = lambda *args: add(*args, control=random_control(rng, rules))
    requests = drive(engine, coming)
    assert_as_alone(engine, requests, lambda known: prefix_hash, assert_all_comes_back)
    stats = engine.cache.stats()
    return stats.joint_hit_tokens, stats.preempted


def test_book_keeping_of_any_mix_without_a_model():
    hits, preempted = zip(*(mix_of_an_oracle(seed, 10) for seed in range(16)), strict=True)
    assert sum(hit > 0 for hit in hits) >= 6 and sum(preempted) >= 6


@pytest.mark.slow
def test_book_keeping_of_thousands_of_requests():
    hits, preempted = zip(*(mix_of_an_oracle(seed, 30) for seed in range(100, 700)), strict=True)
    assert sum(hit > 0 for hit in hits) >= 300 and sum(preempted) >= 200
