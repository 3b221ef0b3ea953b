"""Faults that users of such software have met (bug_reports.md), as recipes against the real model:
life cycles of pools (class LIF).
"""

import random
import sys

import pytest

from cache.leases import Lower, WaitReason
from cache.pools.allocator import Ownership, OwnershipError
from cache.radix.node import Receipt
from kimi_mini import SamplingParams
from kimi_mini.serving.caches import CacheOptions
from tests.cache.radix.planting import Garden
from tests.kimi_mini.serving.alone import oracle_engine
from tests.kimi_mini.serving.reuse import (
    STRATEGIES,
    Rules,
    assert_all_comes_back,
    assert_idle,
    checkpoints,
    run,
)
from tests.kimi_mini.serving.toy import P, Served, X, fresh


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("aborted", [False, True])
def test_br08_the_next_owner_of_the_only_slot_starts_from_zeros(strategy, aborted):
    page = 1 if strategy == "no_buffer" else 16
    served = Served(Rules(strategy), page=page, state_slots=1, state_chunk=16)
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


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("slots", [3, 6])
def test_br12_who_matches_and_never_gets_in_leaves_nothing_behind(strategy, slots):
    """Fifty times: one fills the pages, one that matches P waits for some and is cancelled."""
    page = 1 if strategy == "no_buffer" else 16
    options = CacheOptions(strategy=strategy)
    engine = oracle_engine(
        prefix_cache="radix", cache_options=options, audit=True, page=page, state_slots=slots,
        kv_pages=144 // page,
    )  # fmt: skip
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


def test_br24_what_is_left_of_a_long_prompt_holds_no_more_than_its_own():
    """Views would be small themselves and keep the whole of it alive: every part is of its own."""
    garden = Garden(page=16, pages=300)
    tokens, rng = fresh(1, 4096), random.Random(0)
    garden.insert(tokens)
    for _ in range(100):
        garden.match([*tokens[: rng.randrange(16, 4096)], 99])
    parts = list(garden.tree.nodes())
    assert len(parts) > 50
    for node in parts:
        assert type(node.key) is bytes and type(node.pages) is list, "a view"
    while len(left := list(garden.tree.nodes())) > 1:
        garden.evict(tokens=1)
    (node,) = left
    assert node.depth < 500
    assert sys.getsizeof(node.key) <= 4 * node.depth + 64
    assert sys.getsizeof(node.pages) <= 8 * node.depth // 16 + 128
    assert garden.pages.allocator.count(Ownership.CACHED) == len(node.pages) == node.depth // 16


def test_br24_checkpoints_are_no_slices_of_what_was_computed():
    """All memory is that of the pools, whatever has been published."""
    served = Served(state_chunk=16)
    served.reuse(fresh(1, 300), 20)
    for pool in served.cache.storage:
        held = sum(tensor.untyped_storage().nbytes() for tensor in pool.tensors)
        assert held == (pool.size + 1) * pool.unit_bytes


def test_br38_locks_are_undone_once_and_hold_the_whole_path():
    garden = Garden(page=16)
    tree, branch = garden.tree, [*P[:32], *fresh(5, 32)]
    left, right = garden.insert(P).node, garden.insert(branch).node
    assert tree.ledger() == (96, 0, 2, 0)
    one, other = garden.lock(left), garden.lock(right)
    assert tree.ledger() == (0, 96, 0, 2)
    garden.match(P[:48])  # splits a locked edge
    assert garden.evict(tokens=1000, states=9) == (0, 0)
    garden.unlock(one)
    assert tree.ledger() == (32, 64, 1, 1)
    for receipt in (one, Receipt(left, True, left.state)):
        with pytest.raises(OwnershipError, match="undone before"):
            tree.unlock(receipt)
    assert garden.evict(tokens=1000) == (32, 1)
    assert garden.match(branch).depth == 64
    garden.unlock(other)
    assert tree.ledger() == (64, 0, 1, 0)
    assert garden.evict(tokens=1000) == (64, 1)


@pytest.mark.parametrize(
    "b_prompt, a_prompt, pages, chunk",
    [
        pytest.param(3, 50, 76, 99, id="decode"),
        pytest.param(3, 50, 56, 20, id="third piece"),
        pytest.param(60, 6, 64, 4, id="planned already"),
    ],
)
def test_br39_who_gave_way_comes_back_as_if_nothing_had_been(b_prompt, a_prompt, pages, chunk):
    """B is older; pages of one token."""
    served = Served(page=1, kv_pages=pages, state_slots=6, prefill_chunk=chunk, state_chunk=16)
    served.witness.running = True
    b = served.add([9] * b_prompt, 5 if b_prompt > 9 else 30)
    for _ in range(2):
        served.engine.step()
    a = served.add(fresh(4, a_prompt), min(16, pages + 1 - a_prompt))
    served.run(a, b)
    assert a.output().outputs[0].timings.preemptions >= 1
    assert_all_comes_back(served.engine)


def test_br40_requests_shorter_than_a_page_leave_no_trace():
    engine = oracle_engine(prefix_cache="radix", state_slots=2, page=16, kv_pages=2)
    tree = engine.cache.tree
    for i in range(500):
        engine.add_request([5] * (1 + 14 * (i % 2)), SamplingParams(max_tokens=1))
        early = engine.add_request([6] * 15, SamplingParams(max_tokens=1))
        engine.abort(early.request_id)
        run(engine)
    for i in range(1000):
        assert tree.match([i] * 40).depth == 0
    assert not tree.root.children and tree.root.kv_locks == tree.root.state_locks == 0
    assert all(pool.free == pool.size for pool in engine.cache.stats().pools)
    assert_all_comes_back(engine)


def test_br45_the_third_of_two_slots_waits_and_checkpoints_are_left_out():
    """10 tokens and 20 more pass a boundary while both slots are taken."""
    served = Served(state_slots=2, state_chunk=16)
    requests = [served.add(fresh(seed, 10), 20) for seed in (1, 2, 3)]
    for _ in range(10):
        served.engine.step()
    assert len(served.engine.scheduler.running) == 2
    served.run(*requests)
    stats = served.cache.stats()
    assert stats.waits[WaitReason.SLOTS] >= 10 and stats.preempted == 0
    assert_all_comes_back(served.engine)


def test_br46_what_is_evicted_is_what_a_piece_needs():
    """Pools are apart here: pages make room for pages, one leaf of three; a token that fits the
    open page takes nothing, and one that does not takes the page that is free."""
    served = Served(state_slots=12, kv_pages=12, state_chunk=16)
    for seed in range(3):
        served.reuse(fresh(seed, 49), 1)
    assert served.cache.stats().pools[0].cached == 9
    request = served.add(fresh(9, 75), 10)  # five pages, then a sixth
    free = []
    while not request.finished:
        served.engine.step()
        free.append(served.cache.stats().pools[0].free)
    assert free[:-1] == [1] * 6 + [0] * 3
    served.run(request)
    assert [served.reuse(fresh(seed, 49), 1) for seed in (2, 1, 0)] == [48, 48, 0]
    assert_all_comes_back(served.engine)


def test_br46_a_slot_that_is_needed_costs_one_state():
    served = Served(state_slots=4, kv_pages=60)
    for seed in range(3):
        served.reuse(fresh(seed, 49), 1)
    assert (checkpoints(served.engine), served.cache.stats().evictions.states) == ([48] * 3, 0)
    served.reuse(fresh(3, 49), 1)
    assert (checkpoints(served.engine), served.cache.stats().evictions.states) == ([48] * 3, 1)
    assert [served.reuse(fresh(seed, 49), 1) for seed in (3, 2, 1, 0)] == [48, 48, 48, 0]


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("budget", [5, 32])
def test_br76_a_pool_of_exactly_the_request_with_its_own_prefix_in_it(slots, budget):
    """Budget 32 below a grid of 64."""
    served = Served(
        state_slots=slots, kv_pages=7, max_batch_tokens=budget, prefill_chunk=64, state_chunk=64
    )
    prompt = fresh(1, 100)
    for _ in range(3):
        served.ask(prompt, 13)
    assert served.engine.totals.steps <= 3 * (100 // min(budget, 16) + 7 + 13)
    assert_all_comes_back(served.engine)


def test_br92_a_lost_inner_state_is_made_up_for_by_the_one_before_it():
    served = Served(state_chunk=16)
    for length in (17, 33, 49, 65):
        served.reuse([*P, 5][:length], 1)
    assert checkpoints(served.engine) == [16, 32, 48, 64]
    served.reuse([*P[:16], *X], 1)  # now the inner two are the oldest
    assert served.tree.evict_states(2) == (0, 2)
    assert checkpoints(served.engine) == [16, 64]
    for length in range(2, 70):
        prompt = [*P, *fresh(6, 6)][:length]
        request = served.add(prompt, 1)
        hit = served.cache.lookup(request.sequences[0].storage_request())
        served.engine.abort(request.request_id)
        assert hit.joint == (64 if length > 64 else 16 if length > 16 else 0)
        evicted = 16 < length - 1 < 64 and (length - 1) // 16 > 1
        assert (hit.lower is Lower.EVICTED) == evicted
    assert [served.reuse(P[:n], 1) for n in (40, 40)] == [16, 32]
    assert_all_comes_back(served.engine)
