"""Ctrl-C within the storage itself, and a second one while the first is being repaired.

The null executor knows what every slot and row stands for: whoever resumed from a state that was
given back, or that was never filled, would be found out. So would a wrong token, by the oracle.
"""

import random
from collections import defaultdict

import pytest

from cache import plain, state_cache
from cache.blocks import coordinator, free_queue, groups, lease, vllm
from cache.blocks import manager as block_manager
from cache.blocks import pool as block_pool
from cache.pools import allocator, pool
from cache.radix import manager, recency, strategy, tree
from kimi_mini import SamplingParams
from kimi_mini.serving import engine as engine_module
from kimi_mini.serving import scheduler, sequence
from kimi_mini.serving.caches import CacheOptions
from kimi_mini.serving.outputs import FinishReason
from tests.kimi_mini.serving.alone import alone, assert_same, oracle_engine, prefix_hash
from tests.kimi_mini.serving.interrupts import Interrupt

STORAGE = [state_cache, allocator, pool]
RADIX = [manager, tree, recency, strategy]
BLOCKS = [block_manager, block_pool, coordinator, free_queue, groups, lease]
ENGINE = [engine_module, scheduler, sequence]
CACHES = {
    "plain": ([*STORAGE, plain], dict(page=3, kv_pages=8, state_slots=3)),
    "radix": (
        [*STORAGE, *RADIX],
        dict(page=2, kv_pages=16, state_slots=6, prefix_cache="radix",
             cache_options=CacheOptions(state_chunk=2, max_states_per_path=2)),
    ),
    "no_buffer": (
        [*STORAGE, *RADIX],
        dict(page=1, kv_pages=32, state_slots=5, prefix_cache="radix",
             cache_options=CacheOptions(state_chunk=2, strategy="no_buffer")),
    ),
    "blocks": (
        [*STORAGE, *BLOCKS],
        dict(page=2, kv_pages=16, state_slots=6, prefix_cache="blocks",
             cache_options=CacheOptions(state_block=4, hash_unit=1, retention="none")),
    ),
    "vllm": (
        [*STORAGE, *BLOCKS, vllm],
        dict(page=4, kv_pages=18, state_slots=18, prefix_cache="blocks",
             cache_options=CacheOptions(compat="vllm", state_block=2, retention=4)),
    ),
}  # fmt: skip

PROMPTS = [[1] * 5, [1] * 5 + [2] * 4, [3], [1] * 7, [1] * 5 + [2] * 3]
PARAMS = [
    SamplingParams(max_tokens=6, temperature=1.0, seed=1),
    SamplingParams(max_tokens=5, temperature=1.0, seed=2, logprobs=1),
    SamplingParams(max_tokens=4, n=2, temperature=1.0, seed=3, prompt_logprobs=0),
    SamplingParams(max_tokens=8, temperature=1.0, seed=4),  # cancelled
    SamplingParams(max_tokens=3, temperature=1.0, seed=5),
]
CANCELLED, AT = 3, 3


def interrupted(at, watched, options, gap=None):
    """All requests stepped through, the Ctrl-Cs on the way. Then all is right; the lines that ran,
    in order."""
    engine = oracle_engine(
        context=32, eos=None, prefill_chunk=4, max_batch_tokens=9, poison=True, **options
    )
    interrupt = Interrupt(at, watched, gap)
    requests = [engine.add_request(*pair) for pair in zip(PROMPTS[:-1], PARAMS[:-1], strict=True)]
    steps = failed = 0
    cancel = late = True
    with interrupt.watching():
        while True:
            steps += 1
            try:
                if not late and not engine.has_unfinished:
                    break
                if cancel and steps >= AT:
                    cancel = False
                    engine.abort(requests[CANCELLED].request_id)
                if late and steps >= 6:
                    late = False
                    requests.append(engine.add_request(PROMPTS[-1], PARAMS[-1]))
                engine.step()
            except KeyboardInterrupt:
                failed += 1
                if gap is None:
                    assert not engine.cache.in_step, interrupt.place
                    engine.cache.audit()
            assert steps < 400, f"it does not end: {interrupt.place}"
    assert failed <= (1 if gap is None else 2)
    torn = 0
    for prompt, params, request in zip(PROMPTS, PARAMS, requests, strict=False):
        for own in request.output().outputs:
            expected = alone(prefix_hash, engine.opened, prompt, params, own.index)
            cancelled = request is requests[CANCELLED]
            if own.finish_reason is FinishReason.ERROR or cancelled:
                torn += not cancelled
                assert own.token_ids == expected.token_ids[: len(own.token_ids)], interrupt.place
            else:
                assert_same(own, expected)
    assert torn <= failed
    assert_sound(engine)
    # what is still cached is what it says it is
    for prompt, params, output in zip(
        PROMPTS, PARAMS, engine.generate(PROMPTS, PARAMS), strict=True
    ):
        for own in output.outputs:
            assert_same(own, alone(prefix_hash, engine.opened, prompt, params, own.index))
    assert_sound(engine)
    engine.cache.clear()
    assert all(one.free == one.size for one in engine.cache.stats().pools), interrupt.place
    return interrupt.ran


def moments(watched, options, rng):
    """For each line of source that runs: the first time, the last, and one between."""
    times = defaultdict(list)
    for at, line in enumerate(interrupted(-1, watched, options), 1):
        times[line].append(at)
    assert len(times) > 100
    return [
        moment
        for own in times.values()
        for moment in dict.fromkeys((own[0], rng.choice(own), own[-1]))
    ]


def assert_sound(engine):
    """Nobody is there and nobody holds anything; only what is cached is not free."""
    assert not engine.has_unfinished and not engine.cache.in_step
    assert not engine.scheduler.running and not engine.scheduler.waiting
    stats = engine.cache.stats()
    assert stats.leases == 0
    assert all(one.free + one.cached == one.size for one in stats.pools), stats
    engine.cache.audit()


@pytest.mark.parametrize("name", CACHES)
def test_ctrl_c_at_any_line_of_the_storage_costs_time_and_nothing_else(name):
    rng = random.Random(name)
    watched, options = CACHES[name]
    for at in rng.sample(moments(watched, options, rng), 16):
        interrupted(at, watched, options)


@pytest.mark.slow
@pytest.mark.parametrize("name", CACHES)
def test_ctrl_c_at_every_line_of_the_storage(name):
    watched, options = CACHES[name]
    for at in moments(watched, options, random.Random(name)):
        interrupted(at, watched, options)


@pytest.mark.parametrize("name", CACHES)
def test_a_second_ctrl_c_while_the_first_is_repaired_is_healed_by_the_next_step(name):
    rng = random.Random(name)
    watched, options = CACHES[name]
    watched = [*watched, *ENGINE]
    for at in rng.sample(moments(watched, options, rng), 16):
        interrupted(at, watched, options, gap=rng.choice([1, 2, 3, 5, 8, 13, 20, 40, 80]))


@pytest.mark.slow
@pytest.mark.parametrize("name", CACHES)
def test_a_second_ctrl_c_at_every_line_of_a_repair(name):
    rng = random.Random(name)
    watched, options = CACHES[name]
    watched = [*watched, *ENGINE]
    for at in rng.sample(moments(watched, options, rng), 8):
        for gap in range(1, 150):
            interrupted(at, watched, options, gap=gap)


def test_ctrl_c_while_requests_are_queued_leaves_none_behind():
    """At every line of a first step of a call, and of add_request."""
    for at in range(1, 130):
        engine = oracle_engine(state_slots=2, kv_pages=8)
        interrupt = Interrupt(at, [engine_module, scheduler])
        try:
            with interrupt.watching():
                engine.add_request([5], SamplingParams(max_tokens=0, n=2), "kept")
                next(engine.stream([[5], [6]], SamplingParams(max_tokens=2, n=2)))
        except KeyboardInterrupt:
            pass
        for _ in range(20):
            engine.step()
        assert_sound(engine)


def test_a_stream_that_ends_while_its_repair_is_cut_short_is_cancelled_by_whoever_comes_next():
    """Its requests are to be cancelled while the step is still open: no loop waits for that."""
    engine = oracle_engine(state_slots=2, kv_pages=8)
    params = SamplingParams(max_tokens=9, temperature=1.0, seed=1, ignore_eos=True)
    other = engine.add_request([7], params)
    stream = engine.stream([[5], [6]], params)
    next(stream)
    abandon, run = engine.cache.abandon, engine.executor.run

    def interrupt():
        raise KeyboardInterrupt

    def fail(*_):
        raise MemoryError

    engine.cache.abandon, engine.executor.run = interrupt, fail
    with pytest.raises(KeyboardInterrupt):
        list(stream)
    assert engine.cache.in_step and engine.has_unfinished
    engine.cache.abandon, engine.executor.run = abandon, run
    while engine.has_unfinished:
        engine.step()
    expected = alone(prefix_hash, engine.opened, [7], params)
    assert_same(other.output().outputs[0], expected)
    assert_sound(engine)
