"""Steps that fail half way, requests that fail alone, cancellation at any time.

Afterwards everybody else has the tokens they get alone, and every pool is full again.
"""

import copy
import functools
import gc
import random

import pytest
import torch

from cache import state_cache
from cache.state_cache import ContractError
from kimi_mini import Engine, SamplingParams
from kimi_mini.serving import engine as engine_module
from kimi_mini.serving import sampling, scheduler, sequence
from kimi_mini.serving.outputs import FinishReason
from kimi_mini.serving.text import stop
from tests.kimi_mini.serving.alone import (
    alone,
    assert_all_free,
    assert_logprobs,
    assert_same,
    oracle_engine,
    prefix_hash,
    scored_prompt,
    small_model,
    stateless,
)
from tests.kimi_mini.serving.interrupts import Interrupt
from tests.kimi_mini.serving.mixes import arrivals, assert_as_alone, drive, tight_options

PROMPTS = [[5] * 9, [6], [7] * 17]
PARAMS = [
    SamplingParams(max_tokens=6, temperature=1.0, seed=1, logprobs=1, ignore_eos=True),
    SamplingParams(max_tokens=9, temperature=1.0, seed=2, logprobs=1, ignore_eos=True),
    SamplingParams(max_tokens=7, temperature=0.0, logprobs=1, n=2, prompt_logprobs=0),
]


def tight_engine(model=None):
    """Four sequences in three slots; pages for the longest and two more."""
    return Engine(
        model or small_model(), state_slots=3, page=4, kv_pages=8, prefill_chunk=6,
        max_batch_tokens=9, poison=True, audit=True,
    )  # fmt: skip


def step_through(engine, errors=(MemoryError, KeyboardInterrupt)):
    """Step to the end whatever is raised; how often it was."""
    failed = 0
    while True:
        try:
            while engine.has_unfinished:
                engine.step()
            return failed
        except errors:
            failed += 1
            assert failed < 100
            assert not engine.cache.in_step
            engine.cache.audit()


def assert_right(requests, model):
    for prompt, params, request in zip(PROMPTS, PARAMS, requests, strict=True):
        for own in request.output().outputs:
            oracle = stateless(model, [*prompt, *own.token_ids])
            assert_same(own, alone(oracle, model, prompt, params, own.index))
    scored = requests[2].output().prompt_logprobs
    expected = scored_prompt(stateless(model, PROMPTS[2]), PROMPTS[2], 0)
    for one, other in zip(scored, expected, strict=True):
        assert_logprobs(one, other)


def add_all(engine):
    return [engine.add_request(*pair) for pair in zip(PROMPTS, PARAMS, strict=True)]


class FailsInTheModel:
    """Within the last layer, after the first has changed its states, of the steps named."""

    def __init__(self, error, steps):
        self.error, self.steps, self.step = error, steps, -1

    def __call__(self, *_):
        self.step += 1
        if self.step in self.steps:
            raise self.error


# --- steps that fail ------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("steps", [[0], [1], [2, 3, 4], [7], [5, 9, 12, 15]], ids=str)
def test_a_step_that_fails_in_the_model_costs_time_and_nothing_else(steps, error):
    model = small_model()
    engine = tight_engine()
    requests = add_all(engine)
    hook = model.model.layers[-1].register_forward_pre_hook(FailsInTheModel(error, steps))
    try:
        assert step_through(engine) == len(steps)
    finally:
        hook.remove()
    assert_right(requests, model)
    assert_all_free(engine)


def test_any_mix_with_steps_that_fail_at_random_gives_each_request_what_it_gets_alone():
    """Before the model, within it, or after it; with arrivals, cancellations, memory pressure."""
    failed = 0
    for seed in range(12):
        rng = random.Random(seed)
        if seed < 3:
            engine = Engine(small_model(), poison=True, audit=True, **tight_options(rng))
        else:
            engine = oracle_engine(audit=True, **tight_options(rng))
        failing = Failing(engine, rng)
        requests = drive(engine, arrivals(rng, 4 if seed < 3 else 8))
        failing.hook.remove()
        failed += failing.count
        real = functools.partial(stateless, small_model())
        assert_as_alone(engine, requests, real if seed < 3 else lambda known: prefix_hash)
    assert failed > 36


class Failing:
    """Makes one step in eight fail, and goes on as a server would."""

    def __init__(self, engine, rng):
        self.rng, self.count, self.place = rng, 0, None
        self.step, self.run = engine.step, engine.executor.run
        engine.step, engine.executor.run = self.caught, self.failing
        last = engine.model.model.layers[-1]
        self.hook = last.register_forward_pre_hook(lambda *_: self.at("within"))

    def at(self, place):
        if self.place == place:
            raise MemoryError

    def failing(self, *args):
        self.at("before")
        logits = self.run(*args)
        self.at("after")
        return logits

    def caught(self):
        places = ["before", "within", "after"]
        self.place = self.rng.choice(places) if self.rng.random() < 1 / 8 else None
        try:
            return self.step()
        except MemoryError:
            self.count += 1
            return []


def test_after_a_failed_step_everybody_waits_in_the_order_in_which_they_ran():
    engine = oracle_engine(state_slots=3, kv_pages=8)
    requests = [engine.add_request([5] * 3, SamplingParams(max_tokens=4)) for _ in range(5)]
    engine.step()

    def fail(*_):
        raise MemoryError

    engine.executor.run = fail
    with pytest.raises(MemoryError):
        engine.step()
    order = [sequence.request_id for sequence in engine.scheduler.waiting]
    assert order == [request.request_id for request in requests]
    stats = engine.cache.stats()
    assert stats.leases == 0 and all(pool.free == pool.size for pool in stats.pools)


def test_what_a_step_brought_before_it_failed_is_told_by_the_next():
    """The second of three rows fails while its token is chosen: it alone ends, the others get all
    of their tokens, told once each."""
    engine = oracle_engine(state_slots=3, kv_pages=8, audit=True)
    params = SamplingParams(max_tokens=4, temperature=1.0, seed=3, ignore_eos=True)
    requests = [engine.add_request([5 + i], params) for i in range(3)]
    sampler = requests[1].sequences[0].sampler
    choose, count = sampler.sample, 0

    def fail_at_the_third(logits):
        nonlocal count
        count += 1
        if count == 3:
            raise MemoryError
        return choose(logits)

    sampler.sample = fail_at_the_third
    told, failed = [], 0
    while engine.has_unfinished:
        try:
            told += engine.step()
        except MemoryError:
            failed += 1
    assert failed == 1
    for i, request in enumerate(requests):
        (own,) = request.output().outputs
        expected = alone(prefix_hash, engine.opened, [5 + i], params)
        mine = [d for d in told if d.request_id == request.request_id]
        assert tuple(token for d in mine for token in d.token_ids) == own.token_ids
        assert [d.finish_reason for d in mine if d.finish_reason] == [own.finish_reason]
        if i == 1:
            assert own.finish_reason == "error" and own.token_ids == expected.token_ids[:2]
            assert own.error == "the step failed while its token was being chosen"
        else:
            assert_same(own, expected)
    assert_all_free(engine)


def test_a_sample_that_a_failure_has_ended_is_not_ended_again_by_the_next():
    engine = oracle_engine(state_slots=2, kv_pages=8)
    params = SamplingParams(n=2, max_tokens=6, temperature=1.0, seed=3, ignore_eos=True)
    request = engine.add_request([5], params)

    def fail(*_):
        raise MemoryError

    engine.step()
    request.sequences[0].sampler.sample = fail
    with pytest.raises(MemoryError):
        engine.step()
    run, engine.executor.run = engine.executor.run, fail
    with pytest.raises(MemoryError):
        engine.step()
    engine.executor.run = run
    told = [delta for _ in range(9) for delta in engine.step()]
    ends = [(delta.index, delta.finish_reason) for delta in told if delta.finish_reason]
    assert ends == [(0, "error"), (1, "length")]
    expected = alone(prefix_hash, engine.opened, [5], params, 1)
    assert_same(request.output().outputs[1], expected)
    assert_all_free(engine)


# Not a manager's hooks nor the allocator: a Ctrl-C within these may lose an index or two.
BOOKS = [engine_module, scheduler, state_cache]
TOKENS = [sequence, sampling, stop]


def interrupted(at, watched):
    """Four sequences stepped through, with Ctrl-C before the at-th line of our own code."""
    engine = oracle_engine(context=32, eos=None, state_slots=3, page=3, kv_pages=8, prefill_chunk=4)
    prompts = [[1] * 5, [2] * 9, [3]]
    params = [
        SamplingParams(max_tokens=6, temperature=1.0, seed=1),
        SamplingParams(max_tokens=8, temperature=1.0, seed=2, logprobs=1),
        SamplingParams(max_tokens=4, n=2, temperature=1.0, seed=3, prompt_logprobs=0, stop="\x1b"),
    ]
    interrupt = Interrupt(at, watched)
    requests = [engine.add_request(*pair) for pair in zip(prompts, params, strict=True)]
    with interrupt.watching():
        step_through(engine)
    torn = 0
    for prompt, own_params, request in zip(prompts, params, requests, strict=True):
        for own in request.output().outputs:
            expected = alone(prefix_hash, engine.opened, prompt, own_params, own.index)
            if own.finish_reason is FinishReason.ERROR:
                torn += 1
                assert own.token_ids == expected.token_ids[: len(own.token_ids)], interrupt.place
            else:
                assert_same(own, expected)
    assert torn <= (interrupt.place is not None)
    assert_all_free(engine)
    return interrupt.lines


@pytest.mark.parametrize("watched", [BOOKS, TOKENS], ids=["books", "tokens"])
def test_ctrl_c_at_any_line_ends_at_most_the_sequence_whose_token_was_being_chosen(watched):
    lines = interrupted(-1, watched)
    assert lines > 1000
    for at in range(1, lines, lines // 60):
        interrupted(at, watched)


@pytest.mark.slow
def test_ctrl_c_at_every_third_line():
    watched = BOOKS + TOKENS
    for at in range(1, interrupted(-1, watched) + 1, 3):
        interrupted(at, watched)


def test_ctrl_c_in_a_call_takes_its_own_requests_and_leaves_others_alone():
    for at in range(1, 700, 13):
        engine = oracle_engine(state_slots=3, page=3, kv_pages=12, prefill_chunk=4)
        params = SamplingParams(max_tokens=5, temperature=1.0, seed=1, ignore_eos=True)
        other = engine.add_request([9] * 7, params)
        interrupt = Interrupt(at, [engine_module])
        try:
            with interrupt.watching():
                engine.generate([[1] * 5, [2]], SamplingParams(max_tokens=5))
        except KeyboardInterrupt:
            pass
        unfinished = {sequence.request_id for sequence in engine.scheduler.waiting}
        unfinished |= {sequence.request_id for sequence in engine.scheduler.running}
        assert unfinished <= {other.request_id}, interrupt.place
        while engine.has_unfinished:
            engine.step()
        (own,) = other.output().outputs
        if own.finish_reason is not FinishReason.ERROR:
            assert_same(own, alone(prefix_hash, engine.opened, [9] * 7, params))
        assert_all_free(engine)


def test_ctrl_c_while_the_consumer_of_a_stream_holds_a_delta_cancels_the_stream():
    engine = tight_engine()
    others = add_all(engine)
    with pytest.raises(KeyboardInterrupt):
        for number, _ in enumerate(engine.stream([[9] * 9, [9]], PARAMS[0])):
            if number == 4:
                raise KeyboardInterrupt
    gc.collect()
    assert step_through(engine) == 0
    assert_right(others, small_model())
    assert_all_free(engine)


def test_misuse_of_the_cache_is_never_reached_by_a_failed_step():
    """A fault of ours within the step shows as itself."""
    engine = oracle_engine()
    engine.add_request([5], SamplingParams(max_tokens=2, ignore_eos=True))

    def out_of_order(*_):
        raise ContractError("ours")

    run, engine.executor.run = engine.executor.run, out_of_order
    with pytest.raises(ContractError, match="ours"):
        engine.step()
    engine.executor.run = run
    step_through(engine)
    assert_all_free(engine)


# --- requests that fail ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def damaged():
    """A model whose token 300 has no numbers. It is never sampled: it stands for no byte."""
    model = copy.deepcopy(small_model())
    with torch.no_grad():
        model.model.embed_tokens.weight[300] = float("nan")
    return model


@pytest.mark.parametrize("scored", [None, 0])
def test_a_request_without_usable_logits_ends_with_an_error_that_no_other_feels(damaged, scored):
    engine = tight_engine(damaged)
    requests = add_all(engine)
    params = SamplingParams(max_tokens=5, prompt_logprobs=scored)
    bad = engine.add_request([300, 8, 8, 8, 8, 8, 8], params)
    last = engine.add_request([8] * 7, PARAMS[0])
    assert step_through(engine) == 0
    (own,) = bad.output().outputs
    assert (own.finish_reason, own.token_ids, own.text) == ("error", (), "")
    assert "the logits are not finite" in own.error
    assert_right(requests, damaged)
    expected = alone(stateless(damaged), damaged, [8] * 7, PARAMS[0])
    assert_same(last.output().outputs[0], expected)
    assert_all_free(engine)


def test_one_bad_row_costs_nobody_else_its_result(damaged):
    """All outputs come back; the bad one has its error instead of tokens."""
    engine = tight_engine(damaged)
    prompts = [[5], [300], [6] * 9]
    params = [PARAMS[0]] * 3
    outputs = engine.generate(prompts, params)
    assert_all_free(engine)
    deltas = list(engine.stream(prompts, params))
    assert_all_free(engine)
    for place, output in enumerate(outputs):
        (own,) = output.outputs
        mine = [d for d in deltas if d.request_id == f"request-{3 + place}"]
        assert sum((d.token_ids for d in mine), ()) == own.token_ids
        assert [d.error for d in mine if d.finish_reason] == [own.error]
        if place == 1:
            assert (own.finish_reason, own.token_ids) == ("error", ())
            assert "the logits are not finite" in own.error
        else:
            expected = alone(stateless(damaged), damaged, prompts[place], PARAMS[0])
            assert_same(own, expected)


def test_a_refusal_at_the_door_still_comes_before_anything_runs(damaged):
    engine = tight_engine(damaged)
    with pytest.raises(ValueError, match="prompt is empty"):
        engine.generate([[5], []], PARAMS[:1] * 2)
    assert engine.totals.steps == 0 and not engine.has_unfinished


def test_an_error_publishes_nothing(damaged):
    """A cache that keeps states would hand the NaN to others."""
    engine = tight_engine(damaged)
    committed = []
    commit = engine.cache.commit
    engine.cache.commit = lambda lease, *args: committed.append(lease) or commit(lease, *args)
    engine.add_request([300], SamplingParams(max_tokens=5))
    engine.step()
    stats = engine.cache.stats()
    assert not committed and (stats.finished, stats.aborted) == (0, 1)


# --- cancellation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("when", [0, 1, 3, 6])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_request_is_cancelled_in_any_state_and_others_go_on(which, when):
    """Waiting, in prefill, in decode, as one of n of which some have ended."""
    engine = tight_engine()
    requests = add_all(engine)
    told = [delta for _ in range(when) for delta in engine.step()]
    before = [own.finish_reason for own in requests[which].output().outputs]
    held = sum(pool.active for pool in engine.cache.stats().pools)
    leases = [sequence.lease for sequence in requests[which].sequences]
    engine.abort(requests[which].request_id)
    engine.cache.audit()
    if any(lease is not None and lease.computed for lease in leases):
        assert sum(pool.active for pool in engine.cache.stats().pools) < held, "free at once"
    told += [delta for _ in range(99) for delta in engine.step()]
    for i, request in enumerate(requests):
        for own in request.output().outputs:
            oracle = stateless(small_model(), [*PROMPTS[i], *own.token_ids])
            expected = alone(oracle, small_model(), PROMPTS[i], PARAMS[i], own.index)
            if i == which and before[own.index] is None:
                assert own.finish_reason == "abort"
                assert own.token_ids == expected.token_ids[: len(own.token_ids)]
            else:
                assert_same(own, expected)
            mine = [d for d in told if (d.request_id, d.index) == (request.request_id, own.index)]
            assert [d.finish_reason for d in mine if d.finish_reason] == [own.finish_reason]
    assert_all_free(engine)


def test_cancelling_what_is_unknown_or_has_ended_is_no_error():
    engine = oracle_engine()
    engine.abort("nobody")
    request = engine.add_request([5], SamplingParams(max_tokens=1))
    while engine.has_unfinished:
        engine.step()
    engine.abort(request.request_id)
    engine.abort(request.request_id)
    assert request.output().outputs[0].finish_reason == "length"
    assert_all_free(engine)


def test_a_consumer_may_cancel_its_own_stream_by_name_and_another_one():
    engine = oracle_engine()
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    other = engine.add_request([6], params)
    reasons = []
    for number, delta in enumerate(engine.stream([[5], [7]], params)):
        if number == 5:
            engine.abort(delta.request_id)
            engine.abort(other.request_id)
        reasons.append((delta.request_id, delta.finish_reason))
    assert sorted(reason for _, reason in reasons if reason) == ["abort", "length"]
    assert other.output().outputs[0].finish_reason == "abort"
    assert engine.step()[-1].finish_reason == "abort"
    assert_all_free(engine)


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_an_iterator_that_is_closed_or_forgotten_cancels_its_requests(steps):
    for end in (lambda stream: stream.close(), lambda stream: None):
        engine = tight_engine()
        others = add_all(engine)
        stream = engine.stream([[9] * 9, [9]], PARAMS[0])
        for _ in range(steps):
            next(stream)
        end(stream)
        del stream
        gc.collect()
        alive = {s.request_id for s in (*engine.scheduler.running, *engine.scheduler.waiting)}
        assert alive <= {request.request_id for request in others}
        step_through(engine)
        assert_right(others, small_model())
        assert_all_free(engine)


def test_what_is_cancelled_within_a_step_ends_with_it():
    """The collector closes a forgotten iterator wherever it likes, so within the model too."""
    engine = tight_engine()
    streams = [engine.stream([[9] * 5], PARAMS[0])]
    next(streams[0])
    others = add_all(engine)

    def close_it(*_):
        while streams:
            streams.pop().close()
            engine.abort(others[1].request_id)

    hook = engine.model.model.layers[-1].register_forward_pre_hook(close_it)
    engine.step()
    hook.remove()
    assert others[1].output().outputs[0].finish_reason == "abort"
    alive = {s.request_id for s in (*engine.scheduler.running, *engine.scheduler.waiting)}
    assert alive == {others[0].request_id, others[2].request_id}
    engine.cache.audit()
    step_through(engine)
    for i in (0, 2):
        for own in others[i].output().outputs:
            oracle = stateless(small_model(), [*PROMPTS[i], *own.token_ids])
            assert_same(own, alone(oracle, small_model(), PROMPTS[i], PARAMS[i], own.index))
    assert_all_free(engine)


def test_a_step_within_a_step_is_refused_and_harms_nothing():
    engine = tight_engine()
    requests = add_all(engine)
    refused = []

    def step(*_):
        try:
            engine.step()
        except RuntimeError as error:
            refused.append(str(error))

    hook = engine.model.model.layers[-1].register_forward_pre_hook(step)
    assert step_through(engine) == 0
    hook.remove()
    assert set(refused) == {"a step was asked for from within a step"}
    assert engine.cache.stats().preempted < len(refused)
    assert_right(requests, small_model())
    assert_all_free(engine)
