"""SGLang's own rules (compat="sglang") where more than arithmetic is needed (serving.md 3, 9.4)."""

from functools import partial

import pytest

from cache.leases import Copy, CopyKind, Hit, Lower, Wait, WaitReason
from cache.pools.allocator import Ownership
from cache.radix.sglang import INTERVAL, SGLangCache
from tests.cache.memory import Shape, make_storage
from tests.cache.radix.served import Served

PROMPT, OTHER = [*range(100, 140)], [*range(500, 540)]


def served(**options):
    """Page 1, grid 4, a snapshot every 8 tokens of decode."""
    return Served(SGLangCache, **dict(page=1, pages=64, slots=8, interval=8) | options)


def tracked(plan):
    """(boundary, slot) that a piece keeps."""
    return [(plan.start + export.offset, *export.slots) for export in plan.exports]


def test_one_request_from_end_to_end():
    """serving.md 3.14, S09"""
    s = served(slots=4)
    lease = s.admit(PROMPT[:10])
    assert (lease.hit, lease.slots) == (Hit(), [0])
    plan = s.step(lease, appended=[1000])
    assert (plan.slots, tracked(plan)) == ((1,), [(8, 2)])
    assert lease.tracker.slots == [4, 3]  # 2 was given, 4 has its place
    assert (lease.published, lease.receipt.node.state, s.kept(PROMPT)) == (8, 2, [8])
    copies = []
    for i in range(7):
        s.cache.begin_step()
        plan = s.cache.plan(lease, 1)
        for executor in s.executors:
            executor.run([plan], {})
        copies += s.cache.commit(lease, plan.end, [1001 + i])
        for executor in s.executors:
            executor.copy(copies[-1:] if plan.end == 16 else ())
        s.cache.end_step()
        s.cache.audit()
    assert copies == [Copy(CopyKind.STATE, 0, 1, 3)]
    assert (lease.computed, lease.tracker.last) == (17, 16)
    s.cache.finish(lease)
    assert [(n.depth, n.state) for n in s.cache.tree.nodes()] == [(8, 2), (16, 3)]
    assert (s.free, s.storage.states[0].allocator.free_order()) == ([48, 2], (1, 4))


@pytest.mark.parametrize(
    "strategy, two_tracks, needed",
    [
        *(("no_buffer", True, 1), ("extra_buffer", True, 3), ("extra_buffer", False, 2)),
        *(("extra_buffer_lazy", True, 2), ("extra_buffer_lazy", False, 2)),
    ],
)
def test_slots_that_a_request_must_have(strategy, two_tracks, needed):
    """RULES S21"""
    s = served(slots=needed, strategy=strategy, two_tracks=two_tracks)
    assert s.cache.refusal(10) is None
    lease = s.run(PROMPT[:3], end=None)
    assert s.free[1] == 0
    s.cache.abort(lease)
    if needed > 1:
        small = served(slots=needed - 1, strategy=strategy, two_tracks=two_tracks)
        assert f"needs {needed} slots" in small.cache.refusal(10)


def test_pieces_keep_states_on_a_grid_of_their_own():
    """RULES S9: pieces of 6 keep 4, 10, 16"""
    s = served()
    lease = s.admit(PROMPT[:22])
    kept = []
    while lease.remaining:
        kept += tracked(s.step(lease, 6))
    assert [boundary for boundary, _ in kept] == [4, 10, 16, 22]
    assert s.kept(PROMPT) == [4, 10, 16, 22]


def test_pieces_below_the_grid_keep_and_publish_nothing():
    """T25, RULES S9"""
    s = served()
    lease = s.run(PROMPT[:9], piece=3, end=None)
    assert (lease.published, s.kept(PROMPT)) == (0, [])


def test_the_junction_takes_the_place_of_the_tail_and_nothing_is_published_beyond():
    """RULES S6"""
    s = served()
    s.run(PROMPT[:20])
    second = s.admit(PROMPT[:10] + OTHER[:8])
    assert second.hit == Hit(0, 10, 8, Lower.NO_CHECKPOINT)
    assert [b for b, _ in tracked(s.step(second))] == [8]
    assert second.published == 8
    s.cache.finish(second)
    third = s.admit(PROMPT[:10] + OTHER[8:16])
    assert third.hit == Hit(8, 10, None, Lower.NO_CHECKPOINT)


def test_a_junction_that_is_no_whole_chunk_from_the_resume_point_is_ignored():
    """RULES S8: resumed at 6, the junction at 12"""
    s = served(strategy="no_buffer")
    s.run(PROMPT[:6])
    s = served()
    s.run(PROMPT[:20], piece=6)
    for node in [n for n in s.cache.tree.nodes() if n.depth > 4]:
        s.cache.tree._drop_state(node)
    s.cache.tree.match(PROMPT[:6])
    lease = s.admit(PROMPT[:14] + OTHER[:5])
    assert (lease.hit.joint, lease.hit.junction) == (4, 12)
    assert [b for b, _ in tracked(s.step(lease, 5))] == [8]
    assert [b for b, _ in tracked(s.step(lease))] == [17]


def test_finishing_leaves_the_latest_snapshot_and_nothing_without_one():
    """RULES S11, T21"""
    s = served()
    lease = s.run(PROMPT[:5], new=20)
    assert (lease.computed, s.kept(lease.tokens)) == (24, [4, 24])
    s = served()
    lease = s.run(PROMPT[:9], new=5)
    assert s.kept(lease.tokens) == [8]
    assert s.free == [64 - 8, 7]


def test_a_request_that_ends_with_its_last_piece_publishes_that_once():
    s = served()
    lease = s.admit(PROMPT[:10])
    s.step(lease, last="finish")
    assert s.kept(PROMPT) == [8]
    assert s.storage.states[0].allocator.free_order() == (4, 5, 6, 7, 8, 1, 3)


def test_without_a_slot_to_take_its_place_no_state_is_given():
    """I-15; the engine ends here. Published with a later piece, or with the end."""
    s = served(slots=3)
    lease = s.admit(PROMPT[:12])
    s.step(lease, 4)
    assert (lease.published, lease.tracker.last, s.kept(PROMPT)) == (0, 4, [])
    s.step(lease, 4)
    assert (lease.published, lease.tracker.last) == (0, 8)
    s.cache.finish(lease)
    assert s.kept(PROMPT) == [8]


@pytest.mark.parametrize("strategy, kept", [("extra_buffer_lazy", [12]), ("extra_buffer", [4])])
def test_a_lazy_row_would_rather_lose_the_state_that_it_came_from(strategy, kept):
    """serving.md 3.9: its copy is done"""
    s = served(strategy=strategy, slots=3 if strategy == "extra_buffer_lazy" else 4)
    s.run(PROMPT[:5])
    lease = s.admit(PROMPT[:12])
    assert lease.hit.joint == 4
    s.step(lease)
    assert s.kept(PROMPT) == kept
    assert lease.published == max(kept)


def test_a_key_that_would_be_floored_below_its_state_is_not_published():
    """I-23, SG #34760: after a piece that ended inside a page, as no engine's does"""
    s = served(page=4, pages=16)
    lease = s.admit(PROMPT[:20])
    s.step(lease, 5, max_chunk=3)
    assert lease.computed == 3
    plan = s.step(lease, 9)
    assert (plan.start, plan.end, tracked(plan)) == (3, 12, [])
    assert [b for b, _ in tracked(s.step(lease))] == [20]
    assert s.kept(PROMPT) == [20]


def test_a_state_that_was_written_in_vain_is_not_taken_for_the_one_it_was_written_over():
    """One tracked slot, which keeps 4 for want of another; the next piece stops before its 8."""
    s = served(slots=2, two_tracks=False)
    lease = s.admit(PROMPT[:20])
    s.step(lease, 4)
    assert lease.tracker.last == 4
    s.step(lease, 4, left=1)
    assert (lease.computed, lease.tracker.last) == (7, None)
    s.cache.finish(lease)
    assert s.kept(PROMPT) == [] and s.free == [64, 2]


def test_slots_are_freed_before_pages():
    """The leaf of the oldest state goes, and with it enough pages; the oldest leaf stays."""
    s = served(strategy="extra_buffer_lazy", slots=5, pages=11)
    s.run(PROMPT[:5])
    s.run(OTHER[:5])
    s.run([1, 2], end=None)
    s.cache.tree.match([*PROMPT[:2], 9])  # a fresh split: the pages behind it are newest
    assert s.free == [1, 1]
    s.step(s.admit([3] * 3))
    assert s.kept(PROMPT) == [] and s.kept(OTHER) == [4]


def test_with_pages_of_several_tokens_a_piece_asks_for_one_more():
    """The engine allows for a piece that begins a page, and decode for a new page at every step."""
    s = served(page=4, pages=6)
    s.run(PROMPT[:9])
    lease = s.admit(OTHER[:12])
    assert s.free[0] == 4
    s.step(lease, appended=[1])
    assert s.free[0] == 1 and s.kept(PROMPT) == [8]
    s.step(lease, 1, [2])
    assert s.free[0] == 0
    s.step(lease, 1, [3])  # within its page, and the cached ones go all the same
    assert s.kept(PROMPT) == [] and s.free[0] == 2


def test_a_cut_is_floored_to_the_page_and_waits_where_nothing_is_left():
    s = served(page=4, pages=16)
    lease = s.admit(PROMPT[:20])
    assert s.step(lease, 3) == Wait(WaitReason.CHUNK, 4, 3)
    assert s.step(lease, 7).end == 4
    assert s.step(lease, 3) == Wait(WaitReason.CHUNK, 4, 3)
    assert s.step(lease, 16).end == 20


@pytest.mark.parametrize("strategy", ["no_buffer", "extra_buffer", "extra_buffer_lazy"])
def test_without_caching_slots_are_tracked_and_nothing_is_kept(strategy):
    s = served(strategy=strategy, reuse=False)
    lease = s.run(PROMPT[:10], new=8, end=None)
    assert len(lease.tracker.slots) == s.cache._slots_to_start - 1
    s.cache.finish(lease)
    assert (s.free, [*s.cache.tree.nodes()]) == ([64, 8], [])


def test_no_buffer_publishes_a_copy_of_every_end_and_gives_the_state_itself_at_last():
    """RULES S10"""
    s = served(strategy="no_buffer")
    lease = s.run(PROMPT[:10], piece=4, new=3, end=None)
    assert s.kept(PROMPT) == [4, 8, 10]
    assert lease.slots == [1]
    s.cache.finish(lease)
    (last,) = [n for n in s.cache.tree.nodes() if n.depth == 12]
    assert last.state == 1
    assert s.storage.states[0].allocator.state_of(1) is Ownership.CACHED


def test_two_who_compute_the_same_prompt_share_what_the_first_has_published():
    """RULES S20"""
    s = served(pages=32, slots=10)
    a, b = (s.admit(PROMPT[:9], name=name) for name in "ab")
    s.steps([a, b])
    (node,) = s.cache.tree.nodes()
    assert (node.depth, node.kv_locks, node.state_locks) == (8, 2, 2)
    assert a.pages[0][:8] == b.pages[0][:8]
    assert s.free == [32 - 10, 10 - 7]


def test_the_cap_on_a_path():
    """RULES S25"""
    s = served(path_cap=2)
    s.run(PROMPT[:20], piece=4)
    assert s.kept(PROMPT) == [16, 20]


def test_defaults_are_the_engine_s():
    cache = SGLangCache(make_storage(Shape(((8, 16),), (4,))))
    assert (cache.grids.checkpoint, cache.grids.track, cache.decode_grid) == (
        64,
        INTERVAL,
        INTERVAL,
    )
    with pytest.raises(ValueError, match="interval must be at least 1, got 0"):
        SGLangCache(make_storage(Shape()), interval=0)
    with pytest.raises(ValueError, match="pages of one token"):
        SGLangCache(make_storage(Shape(((8, 4),))), strategy="no_buffer")


@pytest.mark.parametrize("page, pieces", [(1, False), (4, True)])
def test_whoever_configures_it_may_ask_whether_pieces_must_be_long(page, pieces):
    make = partial(SGLangCache, make_storage(Shape(((8, page),), (4,))))
    assert make().tracks_pieces
    assert page > 1 or not make(strategy="no_buffer").tracks_pieces
