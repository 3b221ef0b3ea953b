"""Ctrl-C before any line of the block manager, and a second one while the first is being repaired:
what is found afterwards is what it says it is."""

from itertools import count

import pytest

from cache import state_cache
from cache.blocks import free_queue, groups, lease, manager, pool, vllm
from cache.blocks.manager import BlockCache
from cache.blocks.vllm import VLLMCache
from cache.pools import allocator
from cache.pools import pool as memory
from tests.cache.blocks.served import Served
from tests.kimi_mini.serving.interrupts import Interrupt

WATCHED = [state_cache, free_queue, groups, lease, manager, pool, vllm, allocator, memory]
TEXT = [1, 2, 3, 1, 2, 4, 1, 1, 5, 2, 3, 3, 4, 1, 2, 6, 7, 1, 2, 2, 9, 1, 3, 3]
OTHER = [*TEXT[:9], 8, 8, 7, 7, 6, 6, 8, 7]
CACHES = {
    "ours": (BlockCache, dict(pages=10, page=4, state_block=4, hash_unit=2, slots=4)),
    "ours, exports cut": (
        BlockCache,
        dict(pages=13, page=2, state_block=8, slots=3, export_alignment=8, retention=8),
    ),
    "vllm": (VLLMCache, dict(pages=20, slots=20, page=8, state_block=4, hash_unit=2)),
    "vllm, exports": (
        VLLMCache,
        dict(pages=20, slots=20, page=4, state_block=4, hash_unit=2, inner_checkpoint=2,
             retention=None),
    ),
}  # fmt: skip


def serve(s):
    """Hits, waits, a piece that falls short, a cancelled plan, a preemption, two requests at a
    time."""
    s.run(TEXT[:19], piece=7)
    one, two = s.admit(TEXT, "one"), s.admit(OTHER, "two")
    s.steps([one, two], 6)
    if one.remaining:
        s.step(one, 6, left=1)
    if two.remaining:
        s.cache.begin_step()
        answer = s.cache.plan(two, 5)
        if two.plan is not None:
            s.cache.cancel(answer)
        s.cache.end_step()
        s.step(two, 9)
    s.cache.preempt(one)
    s.cache.finish(two)
    s.run(OTHER[:15], new=2)


def survive(make, options, at, gap):
    """The place of the interruption, or None if everything was over before it."""
    s = Served(make, **options)
    interrupt = Interrupt(at, WATCHED, gap)
    with interrupt.watching():
        try:
            serve(s)
        except KeyboardInterrupt:
            for _ in range(2):
                try:
                    s.cache.abandon()
                    break
                except KeyboardInterrupt:
                    pass
    if interrupt.place is None:
        return None
    s.cache.abandon()
    s.cache.audit()
    assert not s.cache.live_leases and not s.cache.in_step, interrupt.place
    serve(s)
    s.cache.clear()
    assert all(pool.free_count == pool.size for pool in s.storage), interrupt.place
    return interrupt.place


def strike(name, gap, stride):
    """Interrupted before one line in `stride`; the places."""
    places = set()
    for at in count(7, stride):
        place = survive(*CACHES[name], at, gap)
        if place is None:
            return places
        places.add(place)


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("gap", [None, 30])
def test_after_an_interruption_anywhere_all_that_is_found_is_right(name, gap):
    assert len(strike(name, gap, stride=797)) > 5


@pytest.mark.slow
@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("gap", [None, 8])
def test_the_same_before_many_more_lines(name, gap):
    assert len(strike(name, gap, stride=13)) > 100
