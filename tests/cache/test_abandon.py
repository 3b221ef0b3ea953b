"""abandon: after a call that was cut short, whatever the books say.

Random calls with it in between, and leases whose books are torn by hand. Ctrl-C at any line of the
managers and pools is in tests/kimi_mini/serving/test_engine_interrupts.py.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

from cache.leases import CacheRequest, Phase
from cache.plain import PlainCache
from cache.pools.allocator import Ownership
from cache.radix.manager import RadixCache
from cache.state_cache import ContractError
from tests.cache.machine import QUICK, machine_of
from tests.cache.memory import Shape, make_storage

CACHES = {"plain": PlainCache, "radix": RadixCache}
SHAPES = st.builds(
    Shape,
    st.tuples(st.tuples(st.integers(2, 8), st.integers(1, 4))),
    st.tuples(st.integers(2, 5)),
)


@pytest.mark.parametrize("name", CACHES)
def test_at_any_time_it_ends_all_leases_and_the_step_and_life_goes_on(name):
    class Machine(machine_of(CACHES[name], SHAPES)):
        @precondition(lambda self: self.driver.tokens)
        @rule()
        def abandon(self) -> None:
            self.driver.abandon()

    run_state_machine_as_test(Machine, settings=settings(QUICK, max_examples=30))


def running(cache, name="r", length=6):
    if not cache.in_step:
        cache.begin_step()
    lease = cache.admit(CacheRequest(name, range(length)))
    cache.plan(lease, length)
    return lease


@pytest.mark.parametrize("make", CACHES.values())
def test_what_nobody_knows_of_is_free_again(make):
    """An index taken and not yet noted, and one given back that is still noted."""
    cache = make(make_storage(Shape()))
    lease = running(cache)
    pages, slots = cache.storage
    pages.alloc(2)
    slots.free(lease.slots)
    handle = pages.allocator.handle(lease.pages[0][0])
    cache.abandon()
    assert (pages.free_count, slots.free_count) == (pages.size, slots.size)
    assert not pages.allocator.is_live(handle)
    assert (lease.phase, lease.plan) == (Phase.ENDED, None)
    assert cache.stats().preempted == 1
    cache.audit()
    with pytest.raises(ContractError, match="has ended"):
        cache.preempt(lease)
    running(cache)


def test_what_is_cached_stays_without_its_locks():
    cache = RadixCache(make_storage(Shape(((8, 2),), (4,))), state_chunk=2)
    lease = running(cache)
    cache.commit(lease, 6, [9])
    cache.end_step()
    cached = [pool.allocator.count(Ownership.CACHED) for pool in cache.storage]
    slots = cache.storage.states[0].allocator
    handles = [slots.handle(node.state) for node in cache.tree.state_order]
    hit = cache.lookup(CacheRequest("again", range(7)))
    assert all(cached) and hit.joint
    cache.begin_step()
    cache.plan(lease, 1)
    cache.abandon()
    assert [pool.allocator.count(Ownership.CACHED) for pool in cache.storage] == cached
    assert cache.lookup(CacheRequest("again", range(7))) == hit
    assert all(map(slots.is_live, handles))
    assert not cache.tree.receipts and cache.tree.ledger().kv_protected == 0
    cache.audit()
    cache.clear()


def test_a_published_state_whose_copy_may_not_have_run_is_dropped():
    """Without a buffer the copy comes after the publication; once the step has ended, it has run.
    The state at 5 came from within the piece, which has run."""
    for ended in (False, True):
        cache = RadixCache(make_storage(Shape(((8, 1),), (4,))), strategy="no_buffer")
        lease = running(cache)
        assert cache.commit(lease, 6, [9])
        if ended:
            cache.end_step()
        cache.abandon()
        hit = cache.lookup(CacheRequest("again", range(7)))
        assert (hit.joint, hit.token_hit) == (6 if ended else 5, 6)
        cache.audit()


def test_a_split_that_was_cut_short_loses_what_is_below_it_and_no_index(monkeypatch):
    cache = RadixCache(make_storage(Shape(((8, 2),), (4,))), state_chunk=2)
    lease = running(cache, length=8)
    cache.commit(lease, 8, [9])
    cache.finish(lease)
    cache.end_step()
    (node,) = cache.tree.root.children.values()
    while len(node.pages) < 2:
        (node,) = node.children.values()

    def interrupted(*_):
        raise KeyboardInterrupt

    touch, cache.tree._touch = cache.tree._touch, interrupted
    cache.begin_step()
    with pytest.raises(KeyboardInterrupt):
        cache.admit(CacheRequest("other", [*range(node.depth - 2), 7, 7, 7]))
    cache.tree._touch = touch
    cache.abandon()
    cache.audit()
    cache.clear()
    assert all(pool.free_count == pool.size for pool in cache.storage)
