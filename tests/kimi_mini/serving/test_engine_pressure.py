"""Too little memory for all: who gives way, who waits, and that neither shows in what they say."""

from typing import NamedTuple

import pytest

from cache.leases import WaitReason
from kimi_mini import Engine, SamplingParams
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


def watch_preemptions(engine):
    """(request, tokens in the state, tokens known, whether a plan was withdrawn) of each."""
    seen, cancelled = [], []
    preempt, cancel = engine.cache.preempt, engine.cache.cancel

    def spy(lease):
        name = lease.request.name.split(".")[0]
        seen.append((name, lease.computed, len(lease.tokens), lease in cancelled))
        preempt(lease)

    engine.cache.preempt = spy
    engine.cache.cancel = lambda plan: cancelled.append(plan.lease) or cancel(plan)
    return seen


class GivesWay(NamedTuple):
    """B is older than A; pages of one token."""

    b_prompt: int
    a_prompt: int
    kv_pages: int
    chunk: int
    computed: int  # of A, when it gives way
    known: int
    withdrawn: bool  # it had a plan in that step already


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(GivesWay(3, 50, 76, 99, 60, 61, False), id="decode, for itself"),
        pytest.param(GivesWay(3, 50, 75, 99, 60, 61, False), id="decode, for B"),
        pytest.param(GivesWay(3, 50, 56, 20, 40, 50, False), id="prefill, third piece"),
        pytest.param(GivesWay(60, 6, 64, 4, 14, 15, True), id="decode, planned already"),
    ],
)
def test_br39_who_gave_way_computes_all_anew_and_says_the_same(case):
    model = small_model(eos=None)
    engine = Engine(
        model, page=1, kv_pages=case.kv_pages, state_slots=2, prefill_chunk=case.chunk,
        poison=True, audit=True,
    )  # fmt: skip
    seen = watch_preemptions(engine)
    older = SamplingParams(temperature=0, max_tokens=5 if case.b_prompt > 9 else 30, logprobs=0)
    b = engine.add_request([9] * case.b_prompt, older, "B")
    for _ in range(2):
        engine.step()
    room = min(16, case.kv_pages + 1 - case.a_prompt)
    params = SamplingParams(temperature=1.0, seed=4, max_tokens=room, logprobs=2, prompt_logprobs=1)
    a = engine.add_request([8, 7] * (case.a_prompt // 2), params, "A")
    while engine.has_unfinished:
        engine.step()
    assert seen == [("A", case.computed, case.known, case.withdrawn)]
    timings = a.output().outputs[0].timings
    assert timings.preemptions == 1 and timings.prefill_tokens > case.a_prompt
    for request in (a, b):
        (own,) = request.output().outputs
        oracle = stateless(model, [*request.prompt_ids, *own.token_ids])
        assert_same(own, alone(oracle, model, request.prompt_ids, request.params))
    expected = scored_prompt(stateless(model, a.prompt_ids), a.prompt_ids, 1)
    for one, other in zip(a.output().prompt_logprobs, expected, strict=True):
        assert_logprobs(one, other)
    assert_all_free(engine)


def test_a_stop_string_across_the_preemption_is_found():
    """Half of it was said before its sequence gave way."""
    free = alone(prefix_hash, small_model(), [8] * 10, SamplingParams(temperature=0, max_tokens=20))
    place = next(i for i in range(8, 18) if free.text[i : i + 3].isascii())
    params = SamplingParams(temperature=0, max_tokens=20, stop=free.text[place : place + 3])
    expected = alone(prefix_hash, small_model(), [8] * 10, params)
    found = 0
    for kv_pages in range(29, 50):
        engine = oracle_engine(page=1, kv_pages=kv_pages, state_slots=2, audit=True)
        seen = watch_preemptions(engine)
        engine.add_request([9] * 3, SamplingParams(temperature=0, max_tokens=26, ignore_eos=True))
        a = engine.add_request([8] * 10, params, "A")
        while engine.has_unfinished:
            engine.step()
        assert_same(a.output().outputs[0], expected)
        found += any(10 < entry[2] < 10 + len(expected.token_ids) for entry in seen)
    assert found >= 3


def test_br45_a_third_request_waits_for_a_slot_and_then_runs():
    engine = Engine(small_model(), state_slots=2, kv_pages=60, page=4, poison=True, audit=True)
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=1, ignore_eos=True)
    prompts = [[5] * 9, [6], [7] * 17]
    requests = [engine.add_request(prompt, params) for prompt in prompts]
    engine.step()
    assert len(engine.scheduler.running) == 2 and len(engine.scheduler.waiting) == 1
    assert engine.cache.stats().waits[WaitReason.SLOTS] == 1
    while engine.has_unfinished:
        engine.step()
    for prompt, request in zip(prompts, requests, strict=True):
        (own,) = request.output().outputs
        oracle = stateless(small_model(), [*prompt, *own.token_ids])
        assert_same(own, alone(oracle, small_model(), prompt, params))
    assert engine.cache.stats().preempted == 0
    assert_all_free(engine)


def test_br12_requests_that_never_got_in_leave_nothing_behind():
    """Fifty rounds: one runs, one waits for pages and is cancelled while it does."""
    engine = oracle_engine(state_slots=3, page=16, kv_pages=8, audit=True)
    for _ in range(50):
        running = engine.add_request([5] * 60, SamplingParams(max_tokens=3, ignore_eos=True))
        waiting = engine.add_request([6] * 100, SamplingParams(max_tokens=3))
        engine.step()
        assert waiting.sequences[0].lease is not None and running.sequences[0].lease is not None
        engine.abort(waiting.request_id)
        small = engine.add_request([7], SamplingParams(max_tokens=2, ignore_eos=True))
        while engine.has_unfinished:
            engine.step()
        assert len(small.output().outputs[0].token_ids) == 2
        assert_all_free(engine)


def test_br40_a_thousand_requests_shorter_than_a_page_finish_or_go_unseen():
    engine = oracle_engine(state_slots=2, page=16, kv_pages=2)
    for i in range(500):
        engine.add_request([5] * (1 + 14 * (i % 2)), SamplingParams(max_tokens=1))
        early = engine.add_request([6] * 15, SamplingParams(max_tokens=1))
        engine.abort(early.request_id)
        while engine.has_unfinished:
            engine.step()
    stats = engine.cache.stats()
    assert stats.finished == 500 and stats.aborted == 0
    assert_all_free(engine)


@pytest.mark.parametrize("budget", [1, 2, 15, 16, 17])
def test_br76_a_budget_below_a_page_and_pools_of_exactly_the_request_make_progress(budget):
    engine = oracle_engine(
        page=16, kv_pages=3, state_slots=1, max_batch_tokens=budget, prefill_chunk=64, audit=True
    )
    params = SamplingParams(max_tokens=9, ignore_eos=True, temperature=0)
    outputs = engine.generate([[5] * 40, [6] * 40], params)
    for prompt, output in zip([[5] * 40, [6] * 40], outputs, strict=True):
        assert_same(output.outputs[0], alone(prefix_hash, engine.opened, prompt, params))
    assert engine.totals.steps == 2 * (-(-40 // budget) + 8)
