"""Faults that users of such software have met (bug_reports.md), as recipes against the real model:
life cycles of pools (class LIF), whether with a tree or with hashed blocks.

By vLLM's rules one list counts pages and slots, and a request may need more than its rows.
"""

import pytest

from cache.leases import CacheRequest, Lower, WaitReason
from kimi_mini import SamplingParams
from tests.kimi_mini.serving.alone import oracle_engine
from tests.kimi_mini.serving.reuse import (
    ALL_OURS,
    HASHED,
    OURS,
    TREE,
    VLLM,
    a_few_of,
    assert_all_comes_back,
    assert_idle,
    by_our_rules,
    checkpoints,
    run,
)
from tests.kimi_mini.serving.toy import P, Served, X, fresh


@pytest.mark.parametrize("rules, aborted", a_few_of(3, ALL_OURS, [False, True]), ids=str)
def test_br08_the_next_owner_of_the_only_slot_starts_from_zeros(rules, aborted):
    pages = 64 // rules.page + rules.spare
    served = Served(rules, state_slots=1, kv_pages=pages, grid=16, running=True)
    first = served.add(fresh(1, 50), 8)
    while len(first.sequences[0].output_ids) < 3:
        served.engine.step()
    if aborted:
        served.engine.abort(first.request_id)
    run(served.engine)
    for prompt in ([5, 6], fresh(2, 20), fresh(1, 50), [5, 6]):
        served.reuse(prompt, 8)
    assert_all_comes_back(served.engine)


@pytest.mark.parametrize("rules, slots", a_few_of(3, ALL_OURS, [3, 6]), ids=str)
def test_br12_who_finds_a_prefix_and_never_gets_in_leaves_nothing_behind(rules, slots):
    """Fifty times: one fills the pages, one that has found P waits for some and is cancelled."""
    options = dict(state_slots=slots, kv_pages=144 // rules.page + rules.spare)
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
    waits = engine.cache.stats().waits
    assert sum(waits.values()) >= 50 and (slots == 3 or waits[WaitReason.PAGES] >= 50)
    assert_all_comes_back(engine)


@by_our_rules
def test_br24_checkpoints_are_no_slices_of_what_was_computed(rules):
    """All memory is that of the pools, whatever has been published."""
    served = Served(rules, grid=16)
    served.reuse(fresh(1, 300), 20)
    for pool in served.cache.storage:
        held = sum(tensor.untyped_storage().nbytes() for tensor in pool.tensors)
        assert held == (pool.size + 1) * pool.unit_bytes


@by_our_rules
def test_br38_what_a_reader_holds_stays_and_what_another_has_let_go_may_leave(rules):
    """Two of a common beginning, one of which has gone: its branch alone can be evicted, and in the
    end all of it."""
    served = Served(rules, grid=16, prefill_chunk=16, state_slots=60, kv_pages=90)
    branches = [[*P[:32], *fresh(5, 33)], [*P[:32], *fresh(6, 33)]]
    for branch in branches:
        served.reuse(branch, 1)
    stays, goes = (served.add([*branch, 3], 4) for branch in branches)
    served.engine.step()
    served.engine.abort(goes.request_id)
    served.holdings.evict_kv(1000), served.holdings.evict_states(1000)
    served.engine.cache.audit()
    held = {what.tokens for what in served.holdings.held() if not what.is_state}
    assert held == {tuple(branches[0][:n]) for n in (16, 32, 48, 64)}
    (own,) = served.run(stays)
    assert own.cached_tokens == 64
    hit = served.ask(branches[1]).hit
    assert (hit.joint, hit.token_hit) == (0, 32)  # the reader has no use for the state at 32
    assert_all_comes_back(served.engine)


# prompts of B and A, pages, piece: A gives way
GIVING_WAY = {
    "decode": (3, 50, 76, 99),
    "third piece": (3, 50, 56, 20),
    "planned already": (60, 6, 64, 4),
}


@pytest.mark.parametrize("rules, when", a_few_of(2, OURS, [*GIVING_WAY]), ids=str)
def test_br39_who_gave_way_comes_back_as_if_nothing_had_been(rules, when):
    """B is older; pages of one token."""
    b_prompt, a_prompt, pages, chunk = GIVING_WAY[when]
    served = Served(
        rules, page=1, kv_pages=pages + rules.spare, state_slots=6, prefill_chunk=chunk, grid=16,
        running=True,
    )  # fmt: skip
    b = served.add([9] * b_prompt, 5 if b_prompt > 9 else 30)
    for _ in range(2):
        served.engine.step()
    a = served.add(fresh(4, a_prompt), min(16, pages + 1 - a_prompt))
    served.run(a, b)
    assert a.output().outputs[0].timings.preemptions >= 1
    assert_all_comes_back(served.engine)


@by_our_rules
def test_br40_requests_shorter_than_a_page_leave_no_trace(rules):
    engine = oracle_engine(**rules.engine(state_slots=2, kv_pages=2 + rules.spare))
    for i in range(500):
        engine.add_request([5] * (1 + 14 * (i % 2)), SamplingParams(max_tokens=1))
        early = engine.add_request([6] * 15, SamplingParams(max_tokens=1))
        engine.abort(early.request_id)
        run(engine)
    for i in range(1000):
        assert engine.cache.lookup(CacheRequest("unknown", [i] * 40)).token_hit == 0
    assert all(pool.free == pool.size for pool in engine.cache.stats().pools)
    assert_all_comes_back(engine)


@by_our_rules
def test_br45_the_third_waits_and_checkpoints_are_left_out(rules):
    """10 tokens and 20 more pass a boundary while all is taken; 20 have one inside of a piece."""
    pages, dense = (9 if rules is VLLM else 60), (dict(retention="none") if rules.blocks else {})
    served = Served(rules, state_slots=2, kv_pages=pages, grid=16, **dense)
    lengths = (10, 10, 10) if rules is VLLM else (10, 20, 20)
    requests = [served.add(fresh(seed, length), 20) for seed, length in enumerate(lengths)]
    for _ in range(10):
        served.engine.step()
    assert len(served.engine.scheduler.running) == 2
    served.run(*requests)
    waits = served.cache.stats().waits
    assert waits[WaitReason.PAGES if rules is VLLM else WaitReason.SLOTS] >= 1
    assert_all_comes_back(served.engine)


@pytest.mark.parametrize("rules, costs", [(TREE, 48), (HASHED, 32)], ids=str)
def test_br46_pages_that_are_needed_cost_pages_and_no_more_than_those_of_a_leaf(rules, costs):
    """Twelve pages with three prompts of three. Five are needed, two have to go; a token that fits
    the open page takes nothing; one that does not takes a page that is free, or the next."""
    served = Served(rules, kv_pages=12, grid=16)
    for seed in range(3):
        served.reuse(fresh(seed, 49), 1)
    assert served.cache.stats().pools[0].cached == 9
    request = served.add(fresh(9, 75), 10)  # five pages, then a sixth
    evicted = []
    while not request.finished:
        served.engine.step()
        evicted.append(served.cache.stats().evictions.tokens)
    assert evicted[:-1] == [costs] * 6 + [48] * 3
    served.run(request)
    assert [served.reuse(fresh(seed, 49), 1) for seed in (2, 1, 0)] == [48, 48, 0]
    assert_all_comes_back(served.engine)


@pytest.mark.parametrize("rules", [TREE, HASHED], ids=str)
def test_br46_a_slot_that_is_needed_costs_one_state(rules):
    served = Served(rules, state_slots=4, kv_pages=60)
    for seed in range(3):
        served.reuse(fresh(seed, 49), 1)
    assert (checkpoints(served.engine), served.cache.stats().evictions.states) == ([48] * 3, 0)
    served.reuse(fresh(3, 49), 1)
    assert (checkpoints(served.engine), served.cache.stats().evictions.states) == ([48] * 3, 1)
    assert [served.reuse(fresh(seed, 49), 1) for seed in (3, 2, 1, 0)] == [48, 48, 48, 0]


def test_br46_one_list_gives_up_whatever_is_the_oldest():
    """Five prompts leave two pages and a state each, and nine blocks are bare. 200 tokens take 13
    pages, a state that runs and one to keep; then 33 tokens three pages and two states, and two
    blocks are bare."""
    served = Served(VLLM, kv_pages=24, state_slots=24, grid=16, retention="none")
    for seed in range(5):
        served.reuse(fresh(seed, 33), 1)
    assert served.cache.stats().evictions[:2] == (0, 0)
    served.reuse(fresh(5, 200), 1)
    assert served.cache.stats().evictions[:2] == (4 * 16, 2)
    served.reuse(fresh(6, 33), 1)
    assert served.cache.stats().evictions[:2] == (6 * 16, 3)
    assert_all_comes_back(served.engine)


@pytest.mark.parametrize("rules, slots, budget", a_few_of(3, OURS, [1, 2], [32, 5]), ids=str)
def test_br76_a_pool_of_exactly_the_request_with_its_own_prefix_in_it(rules, slots, budget):
    """Budget 32 below a grid of 64."""
    served = Served(
        rules, state_slots=slots, kv_pages=7 + rules.spare, max_batch_tokens=budget,
        prefill_chunk=64,
    )  # fmt: skip
    prompt = fresh(1, 100)
    for _ in range(3):
        served.ask(prompt, 13)
    assert served.engine.totals.steps <= 3 * (100 // min(budget, 16) + 7 + 13)
    assert_all_comes_back(served.engine)


@by_our_rules
def test_br92_a_lost_inner_state_is_made_up_for_by_the_one_before_it(rules):
    served = Served(rules, grid=16, state_slots=90, kv_pages=90)
    for length in (17, 33, 49, 65):
        served.reuse([*P, 5][:length], 1)
    assert checkpoints(served.engine) == [16, 32, 48, 64]
    served.reuse([*P, 5], 1), served.reuse([*P[:16], *X], 1)  # now the inner two are the oldest
    assert served.holdings.evict_states(2) == 2
    assert checkpoints(served.engine) == [16, 64]
    for length in range(2, 70):
        hit = served.cache.lookup(CacheRequest("again", [*P, *fresh(6, 6)][:length]))
        assert hit.joint == (64 if length > 64 else 16 if length > 16 else 0)
        assert hit.token_hit == min(64, (length - 1) // 16 * 16)
        evicted = 16 < length - 1 < 64 and (length - 1) // 16 > 1
        assert (hit.lower is Lower.EVICTED) == evicted
    assert [served.reuse(P[:n], 1) for n in (40, 40)] == [16, 32]
    assert_all_comes_back(served.engine)
