"""Faults that users of hashed block caches have met (bug_reports.md), as recipes against the real
model: life cycles of pools (class LIF), by our rules and by the engine's own.

By the latter one list counts pages and slots, and a request may need seven blocks beside its rows.
"""

import pytest

from cache.leases import CacheRequest, WaitReason
from kimi_mini import SamplingParams
from tests.kimi_mini.serving.alone import oracle_engine
from tests.kimi_mini.serving.reuse import (
    BLOCKS,
    Rules,
    a_few,
    assert_all_comes_back,
    assert_idle,
    checkpoints,
    run,
)
from tests.kimi_mini.serving.toy import P, Served, fresh

OURS, VLLM = BLOCKS
by_both_rules = pytest.mark.parametrize("rules", BLOCKS, ids=str)


def spare(rules: Rules) -> int:
    return 7 if rules is VLLM else 0


@by_both_rules
@pytest.mark.parametrize("aborted", [False, True])
def test_br08_the_next_owner_of_the_only_slot_starts_from_zeros(rules, aborted):
    served = Served(rules, state_slots=1, kv_pages=4 + spare(rules), state_block=16)
    served.witness.running = True
    first = served.add(fresh(1, 50), 8)
    while len(first.sequences[0].output_ids) < 3:
        served.engine.step()
    if aborted:
        served.engine.abort(first.request_id)
    run(served.engine)
    for prompt in ([5, 6], fresh(2, 20), fresh(1, 50), [5, 6]):
        served.reuse(prompt, 8)
    assert_all_comes_back(served.engine)


@by_both_rules
@pytest.mark.parametrize("slots", [3, 6])
def test_br12_who_finds_a_prefix_and_never_gets_in_leaves_nothing_behind(rules, slots):
    """Fifty times: one fills the pages, one that has found P waits for some and is cancelled."""
    options = dict(state_slots=slots, kv_pages=9 + spare(rules))
    engine = oracle_engine(audit=True, **rules.engine(**options))
    few = SamplingParams(max_tokens=2, ignore_eos=True)
    engine.generate([P], few)
    for _ in range(50):
        engine.add_request(fresh(2, 70), few)
        engine.step()
        late = engine.add_request([*P, *fresh(3, 75)], few)
        engine.step()
        assert not (lease := late.sequences[0].lease) or not any(lease.slots)
        engine.abort(late.request_id)
        assert len(engine.generate([[7]], few)[0].outputs[0].token_ids) == 2
        run(engine)
        assert_idle(engine)
    assert sum(engine.cache.stats().waits.values()) >= 50
    assert_all_comes_back(engine)


@by_both_rules
@pytest.mark.parametrize(
    "b_prompt, a_prompt, pages, chunk",
    [
        pytest.param(3, 50, 76, 99, id="decode"),
        pytest.param(3, 50, 56, 20, id="third piece"),
        pytest.param(60, 6, 64, 4, id="planned already"),
    ],
)
def test_br39_who_gave_way_comes_back_as_if_nothing_had_been(
    rules, b_prompt, a_prompt, pages, chunk
):
    """B is older; pages of one token."""
    served = Served(
        rules, page=1, kv_pages=pages + spare(rules), state_slots=6, prefill_chunk=chunk,
        state_block=16,
    )  # fmt: skip
    served.witness.running = True
    b = served.add([9] * b_prompt, 5 if b_prompt > 9 else 30)
    for _ in range(2):
        served.engine.step()
    a = served.add(fresh(4, a_prompt), min(16, pages + 1 - a_prompt))
    served.run(a, b)
    assert a.output().outputs[0].timings.preemptions >= 1
    assert_all_comes_back(served.engine)


@by_both_rules
def test_br40_requests_shorter_than_a_hash_leave_no_trace(rules):
    engine = oracle_engine(**rules.engine(state_slots=2, kv_pages=2 + spare(rules)))
    for i in range(500):
        engine.add_request([5] * (1 + 14 * (i % 2)), SamplingParams(max_tokens=1))
        early = engine.add_request([6] * 15, SamplingParams(max_tokens=1))
        engine.abort(early.request_id)
        run(engine)
    for i in range(1000):
        assert engine.cache.lookup(CacheRequest("unknown", [i] * 40)).token_hit == 0
    assert not [entry for pool in engine.cache.block_pools for entry in pool.entries()]
    assert all(pool.free == pool.size for pool in engine.cache.stats().pools)
    assert_all_comes_back(engine)


@by_both_rules
def test_br45_the_third_waits_and_checkpoints_are_left_out(rules):
    """10 tokens and 20 more pass a boundary while all is taken."""
    served = Served(rules, state_slots=2, kv_pages=9, state_block=16, retention="none")
    requests = [served.add(fresh(seed, 10), 20) for seed in (1, 2, 3)]
    for _ in range(10):
        served.engine.step()
    assert len(served.engine.scheduler.running) == 2
    served.run(*requests)
    waits = served.cache.stats().waits
    assert waits[WaitReason.SLOTS if rules is OURS else WaitReason.PAGES] >= 1
    assert_all_comes_back(served.engine)


def test_br46_pools_that_are_apart_make_room_for_their_own():
    """Pages for pages, just as many; a token that fits the open page takes none."""
    served = Served(OURS, kv_pages=12, state_block=16)
    for seed in range(3):
        served.reuse(fresh(seed, 49), 1)
    assert served.cache.stats().pools[0].cached == 9
    request = served.add(fresh(9, 75), 10)  # five pages, then a sixth
    evicted = []
    while not request.finished:
        served.engine.step()
        evicted.append(served.cache.stats().evictions[:2])
    assert evicted[:-1] == [(32, 0)] * 6 + [(48, 0)] * 3
    assert_all_comes_back(served.engine)


def test_br46_one_list_gives_up_whatever_is_the_oldest():
    """Five prompts leave two pages and a state each, and nine blocks are bare. 200 tokens take 13
    pages, a state that runs and one to keep; then 33 tokens three pages and two states, and two
    blocks are bare."""
    served = Served(VLLM, kv_pages=24, state_slots=24, state_block=16, retention="none")
    for seed in range(5):
        served.reuse(fresh(seed, 33), 1)
    assert served.cache.stats().evictions[:2] == (0, 0)
    served.reuse(fresh(5, 200), 1)
    assert served.cache.stats().evictions[:2] == (4 * 16, 2)
    served.reuse(fresh(6, 33), 1)
    assert served.cache.stats().evictions[:2] == (6 * 16, 3)
    assert_all_comes_back(served.engine)


@by_both_rules
@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("budget", a_few([32, 5], 2))
def test_br76_a_pool_of_exactly_the_request_with_its_own_prefix_in_it(rules, slots, budget):
    """Budget 32 below a state block of 64."""
    served = Served(
        rules, state_slots=slots, kv_pages=7 + spare(rules), max_batch_tokens=budget,
        prefill_chunk=64,
    )  # fmt: skip
    prompt = fresh(1, 100)
    for _ in range(3):
        served.ask(prompt, 13)
    assert served.engine.totals.steps <= 3 * (100 // min(budget, 16) + 7 + 13)
    assert_all_comes_back(served.engine)


@by_both_rules
def test_br92_a_lost_inner_state_is_made_up_for_by_the_one_before_it(rules):
    served = Served(rules, state_block=16)
    for length in (17, 33, 49, 65):
        served.reuse([*P, 5][:length], 1)
    assert checkpoints(served.engine) == [16, 32, 48, 64]
    served.witness.holdings.forget_states(32, 48)
    for length in range(2, 70):
        hit = served.cache.lookup(CacheRequest("again", [*P, *fresh(6, 6)][:length]))
        assert hit.joint == (64 if length > 64 else 16 if length > 16 else 0)
        assert hit.token_hit == min(64, (length - 1) // 16 * 16)
