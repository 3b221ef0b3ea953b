"""The radix manager by its own rules (decision 22): what is kept where, who waits, what is
undone."""

from dataclasses import replace

import pytest

from cache.leases import CacheRequest, Copy, CopyKind, Hit, Lower, Phase, StepPlan, Wait, WaitReason
from cache.pools.allocator import Ownership
from cache.radix.manager import COLD, RadixCache
from cache.state_cache import ContractError
from cache.stats import Evictions
from tests.cache.memory import Shape, make_storage
from tests.cache.radix.served import Served

PROMPT = [*range(100, 140)]
ANY = [*range(500, 540)]


# what is kept where: pages of 2, grid of 4


@pytest.mark.parametrize(
    "tokens, piece, boundaries",
    [
        pytest.param(15, 99, [12, 14], id="grid and prompt end"),
        pytest.param(16, 99, [14, 16], id="a prompt that ends on the grid"),
        pytest.param(13, 99, [12], id="both at once"),
        pytest.param(15, 6, [4, 12, 14], id="grids are absolute, whatever the pieces"),
        pytest.param(15, 5, [4, 8, 12, 14], id="cuts fall on pages"),
        pytest.param(15, 3, [4, 8, 12, 14], id="also pieces below the grid"),
        pytest.param(2, 99, [], id="a prompt of one page leaves no token to run"),
        pytest.param(3, 99, [2], id="the shortest that can be hit"),
    ],
)
def test_prefill_keeps_the_grid_boundary_of_each_piece_and_the_end_of_the_prompt(
    tokens, piece, boundaries
):
    served = Served()
    served.run(PROMPT[:tokens], piece=piece, end="abort")
    assert served.kept(PROMPT) == boundaries


def test_a_prompt_that_comes_again_computes_its_last_page_only():
    served = Served()
    served.run(PROMPT[:15])
    lease = served.admit(PROMPT[:15])
    assert (lease.hit.joint, lease.remaining) == (14, 1)
    served = Served()
    served.run(PROMPT[:16])
    assert served.hit(PROMPT[:16]).joint == 14


def test_where_prompts_part_is_kept_besides_the_tail():
    """The engine's junction takes the place of the tail; ours joins it."""
    served = Served()
    served.run(PROMPT[:31])
    other = PROMPT[:18] + ANY[:13]
    lease = served.run(other)
    assert lease.hit == Hit(0, 18, 18, Lower.NO_CHECKPOINT)
    assert served.kept(other) == [18, 28, 30]
    third = served.admit(PROMPT[:18] + ANY[20:])
    assert third.hit == Hit(18, 18, None, Lower.UNKNOWN)


@pytest.mark.parametrize("named, kept", [((5,), 4), ((6,), 6), ((1,), None), ((5, 6, 7), 6)])
def test_boundaries_that_the_caller_names_are_floored_to_the_page(named, kept):
    """Decision 31"""
    served = Served(state_chunk=32)
    lease = served.run(PROMPT[:15], checkpoint_at=named)
    where = [boundary for boundary in lease.named if boundary]
    assert served.kept(PROMPT) == sorted({14, *where}) and kept in lease.named
    assert kept is None or kept in lease.named


def test_a_piece_ends_at_a_boundary_that_the_backend_cannot_export():
    """Exports on multiples of 4 counted from the piece; resumed at 6, 12 is none of them."""
    served = Served(export_alignment=4, state_chunk=32)
    served.run(PROMPT[:15], checkpoint_at=(6,))
    assert served.kept(PROMPT) == [6, 12]
    lease = served.admit(PROMPT[:6] + ANY[:9], checkpoint_at=(12,))
    assert lease.hit.joint == 6
    plans = [served.step(lease), served.step(lease)]
    assert [(plan.start, plan.end) for plan in plans] == [(6, 12), (12, 15)]
    assert served.kept(PROMPT[:6] + ANY) == [6, 12]


@pytest.mark.parametrize("alignment, boundaries", [(1, [12, 14]), (4, [12]), (8, [8, 12])])
def test_the_prompt_end_is_where_the_backend_can_export(alignment, boundaries):
    """The tail at 12 is exported where 4 divides it, or else given up: the piece is not cut."""
    served = Served(export_alignment=alignment)
    served.run(PROMPT[:15], end="abort")
    assert served.kept(PROMPT) == [b for b in boundaries if b % alignment == 0]


def test_decode_keeps_a_state_every_interval_and_a_finished_request_leaves_the_newest():
    served = Served(interval=6)
    lease = served.run(PROMPT[:7], new=14, end=None)
    assert (lease.computed, lease.tracker.last, lease.tracker.prev) == (20, 18, 12)
    assert served.kept(lease.tokens) == [4, 6]
    served.cache.finish(lease)
    assert served.kept(lease.tokens) == [4, 6, 18]
    turn = [*lease.tokens, 5, 5, 5]
    assert served.admit(turn).hit.joint == 18


def test_without_an_interval_it_is_the_last_page_of_all_that_was_computed():
    served = Served()
    lease = served.run(PROMPT[:7], new=8)
    assert (lease.computed, served.kept(lease.tokens)) == (14, [4, 6, 14])
    served = Served(export_alignment=4)
    lease = served.run(PROMPT[:7], new=8)
    assert served.kept(lease.tokens) == [4, 12]


def test_a_request_that_ends_with_its_prompt_leaves_what_its_prompt_has_left():
    served = Served()
    lease = served.admit(PROMPT[:15])
    served.step(lease, last="finish")
    assert served.kept(PROMPT) == [12, 14]


def test_a_preempted_request_comes_back_to_what_it_has_published():
    served = Served()
    lease = served.run(PROMPT[:15], new=5, end="preempt")
    back = served.admit(lease.tokens)
    assert back.hit.joint == 14
    assert served.step(back).start == 14


def test_the_state_before_a_shorter_end_is_not_kept():
    """The executor left the state short of the plan's end: exports beyond are none (rejected)."""
    served = Served()
    lease = served.admit(PROMPT[:15])
    served.step(lease, left=2)
    assert (lease.computed, served.kept(PROMPT)) == (13, [12])
    served.step(lease)
    assert served.kept(PROMPT) == [12, 14]


def test_no_buffer_publishes_every_end_and_finishing_gives_the_state_itself():
    served = Served(page=1, strategy="no_buffer", state_chunk=64)
    lease = served.run(PROMPT[:10], piece=5, new=4, end=None)
    assert served.kept(PROMPT) == [5, 9, 10]
    slot = lease.slots[0]
    served.cache.finish(lease)
    assert lease.computed == 13
    assert served.cache.tree.match(lease.tokens[:13]).node.state == slot


def test_a_lazy_row_has_one_slot_besides_its_own_but_for_the_step_that_passes_a_boundary():
    served = Served(strategy="extra_buffer_lazy", interval=4)
    lease = served.run(PROMPT[:7], new=2, end=None)
    assert (lease.computed, len(lease.tracker.slots)) == (8, 1)
    free = served.free[1]
    for _ in range(3):
        served.step(lease, appended=[1])
    served.cache.begin_step()
    served.cache.plan(lease, 1)
    assert len(lease.tracker.slots) == 2 and served.free[1] == free - 1
    served.cache.cancel(lease.plan)
    served.cache.end_step()
    assert len(lease.tracker.slots) == 1 and served.free[1] == free
    served.step(lease, appended=[1])
    assert (lease.tracker.last, served.free[1]) == (12, free)


def test_without_reuse_nothing_is_kept_and_nothing_is_hit():
    served = Served(reuse=False)
    lease = served.run(PROMPT[:15], new=6, end=None)
    assert lease.tracker.slots == [] and served.kept(PROMPT) == []
    served.cache.finish(lease)
    assert served.free == [32, 8]
    assert served.hit(PROMPT) == Hit(lower=Lower.NO_REUSE)


def test_states_of_one_path_are_capped():
    served = Served(path_cap=2)
    served.run(PROMPT[:31], piece=8)
    assert served.kept(PROMPT) == [28, 30]
    assert served.cache.stats().evictions == Evictions(0, 3, 3)


# what is shared, and what never changes


def test_s06_those_who_hit_one_state_have_slots_of_their_own_and_it_never_changes():
    served = Served(page=1)
    served.run(PROMPT[:9], checkpoint_at=(8,))
    (source,) = [n.state for n in served.cache.tree.nodes() if n.depth == 8]
    pool = served.storage.states[0]
    before = [tensor[:, source].clone() for tensor in pool.tensors]
    a, b = (served.admit([*PROMPT[:8], x], name=str(x)) for x in (1, 2))
    assert len({a.slots[0], b.slots[0], source}) == 3
    assert a.copies == (Copy(CopyKind.STATE, 0, source, a.slots[0]),)
    plans = served.steps([a, b], appended=[7])
    assert [plan.start for plan in plans] == [8, 8]
    for token in (8, 9):
        served.steps([a, b], appended=[token])
    for tensor, then in zip(pool.tensors, before, strict=True):
        assert (tensor[:, source] == then).all()
        assert not (tensor[:, a.slots[0]] == tensor[:, b.slots[0]]).all()
    assert a.copies == ()


def test_s07_the_state_that_was_found_is_never_given_up_for_the_slot_to_resume_in():
    served = Served(page=1, slots=3, state_chunk=8, strategy="no_buffer")
    served.run(PROMPT[:8], end="finish")
    served.cache.tree.evict_states(9)
    cached = served.run(PROMPT[:9], end="finish")
    served.cache.tree.evict_until(slots=2)
    assert served.kept(PROMPT) == [9]
    others = [served.admit([x] * 3, name=str(x)) for x in (1, 2)]
    served.cache.begin_step()
    for lease in others:
        served.cache.plan(lease, 1)
    wait = served.cache.admit(CacheRequest("late", PROMPT[:12]))
    assert wait == Wait(WaitReason.SLOTS, 1, 0)
    for lease in others:
        served.cache.cancel(lease.plan)
    served.cache.end_step()
    assert served.kept(PROMPT) == [9] and cached.phase is Phase.ENDED
    served.cache.abort(others[0])
    late = served.admit(PROMPT[:12])
    assert late.hit.joint == 9


def test_s08_of_two_equal_prompts_the_second_adopts_what_the_first_has_published():
    served = Served(page=1, pages=128, slots=20)
    a, b = (served.admit(PROMPT[:5], name=name) for name in "ab")
    served.steps([a, b])
    assert served.kept(PROMPT) == [4]
    assert a.pages[0][:4] == b.pages[0][:4] and a.pages[0][4] != b.pages[0][4]
    assert a.receipt.node is b.receipt.node and a.receipt.node.kv_locks == 2
    assert served.free == [128 - 6, 20 - 3]
    for lease in (a, b):
        served.cache.finish(lease)
    assert served.free == [128 - 4, 20 - 1]


def test_rows_beyond_the_joint_boundary_are_computed_again_and_given_back():
    """I-05: token hit 18, resumed at 0; the pages of 0..18 are the first one's in the end."""
    served = Served()
    first = served.run(PROMPT[:31], end=None)
    second = served.admit(PROMPT[:18] + ANY[:3])
    served.step(second)
    assert second.hit.token_hit == 18 and second.published == 20
    assert second.pages[0][:9] == first.pages[0][:9]
    assert served.free[0] == 32 - 16 - 2
    served.cache.finish(first)
    served.cache.finish(second)


def test_shared_pages_are_those_of_the_path_and_the_rest_are_own():
    served = Served()
    first = served.run(PROMPT[:15], end=None)
    second = served.run(PROMPT[:14] + ANY[:3], end=None)
    assert first.pages[0][:7] == second.pages[0][:7]
    states = [served.storage.pages[0].allocator.state_of(page) for page in second.pages[0]]
    assert states == [Ownership.CACHED] * 8 + [Ownership.ACTIVE]


# who waits, who computes, what is undone


def test_without_a_slot_there_is_no_checkpoint_and_no_failure():
    served = Served(slots=1)
    lease = served.run(PROMPT[:15], new=9, checkpoint_at=(8,))
    assert lease.computed == 23 and served.kept(lease.tokens) == []
    assert served.free == [32, 1]


def test_the_most_wanted_checkpoint_gets_the_last_slot():
    served = Served(slots=2)
    served.run(PROMPT[:15], checkpoint_at=(8,), end="abort")
    assert served.kept(PROMPT) == [14]


@pytest.mark.parametrize("waited", [False, True], ids=["at once", "after a wait"])
def test_alone_with_the_only_slot_a_request_computes_instead_of_waiting_for_ever(waited):
    served = Served(page=1, slots=1, strategy="no_buffer")
    if waited:
        first = served.run(PROMPT[:8], end=None)
        lease = served.admit(PROMPT[:12])
        assert served.step(lease) == Wait(WaitReason.SLOTS, 1, 0)
        served.cache.finish(first)
    else:
        served.run(PROMPT[:8])
        assert served.hit(PROMPT[:12]) == COLD
        lease = served.admit(PROMPT[:12])
    assert served.kept(PROMPT) == [8]
    assert served.step(lease).start == 0
    assert lease.hit == COLD == Hit(lower=Lower.NO_REUSE)


def test_a_request_that_is_not_alone_waits_for_the_slot():
    served = Served(page=1, slots=2, strategy="no_buffer")
    served.run(PROMPT[:8])
    lock = served.cache.tree.lock(served.cache.tree.match(PROMPT[:8]).node)
    other = served.run(ANY[:3], end=None)
    assert served.admit(PROMPT[:12]) == Wait(WaitReason.SLOTS, 1, 0)
    served.cache.tree.unlock(lock)
    served.cache.abort(other)
    assert served.admit(PROMPT[:12]).hit.joint == 8


def test_a_first_plan_that_waits_holds_nothing_and_the_next_one_looks_up_again():
    served = Served(pages=10, slots=4)
    served.run(PROMPT[:9])
    other = served.run(ANY[:8], end=None)
    lease = served.admit(PROMPT[:8] + ANY[20:28])
    assert lease.hit.joint == 8
    wait = served.step(lease)
    assert wait == Wait(WaitReason.PAGES, 4, 2)
    assert (lease.phase, lease.slots, lease.pages, lease.computed) == (
        Phase.ADMITTED,
        [0],
        ([],),
        0,
    )
    assert lease.receipt is None
    served.cache.abort(other)
    plan = served.step(lease)
    assert (plan.start, plan.end, lease.hit.joint) == (8, 16, 8)


def test_must_fit_takes_what_the_first_piece_needs_and_evicts_no_more():
    served = Served(pages=8, slots=4)
    served.run(ANY[:9])
    assert served.free[0] == 4
    lease = served.admit(PROMPT[:14], must_fit=True)
    plan = served.step(lease, 4)
    assert (plan.end, served.kept(ANY)) == (4, [8])
    served.run(ANY[:9], end=None, salt="s")
    late = served.admit(ANY[20:32], must_fit=True)
    assert served.step(late, 2) == Wait(WaitReason.PAGES, 6, 1)


@pytest.mark.parametrize("hits", [False, True])
@pytest.mark.parametrize("strategy", ["extra_buffer", "extra_buffer_lazy"])
def test_a_cancelled_first_plan_gives_back_all_but_what_admitting_gave(hits, strategy):
    served = Served(strategy=strategy)
    if hits:
        served.run(PROMPT[:15])
    lease = served.admit(PROMPT[:13] + ANY[:5], checkpoint_at=(14,))
    before = [*served.free, [*lease.slots], lease.copies, [*lease.pages[0]], lease.computed]
    served.cache.begin_step()
    plan = served.cache.plan(lease, 99)
    assert plan.exports and plan.slots[0] and lease.copies == ()
    served.cache.cancel(plan)
    served.cache.end_step()
    served.cache.audit()
    assert [*served.free, lease.slots, lease.copies, lease.pages[0], lease.computed] == before
    assert (lease.hit.joint, lease.phase) == (12 * hits, Phase.ADMITTED)
    assert served.step(lease).start == 12 * hits


def test_a_cancelled_later_plan_leaves_the_row_where_it_was():
    served = Served(interval=4)
    lease = served.run(PROMPT[:7], new=5, end=None)
    before = [*served.free, [*lease.pages[0]], [*lease.tracker.slots], lease.published]
    for _ in range(3):
        served.cache.begin_step()
        served.cache.cancel(served.cache.plan(lease, 1))
        served.cache.end_step()
        served.cache.audit()
    assert [*served.free, lease.pages[0], lease.tracker.slots, lease.published] == before
    assert served.step(lease).end == 12


def test_s10_a_request_that_has_only_its_slot_gives_it_back():
    served = Served()
    served.run(PROMPT[:15])
    free = served.free
    lease = served.admit(PROMPT[:15])
    assert served.free[1] == free[1] - 1
    served.cache.abort(lease)
    assert served.free == free
    assert served.cache.tree.ledger().kv_protected == 0


def test_s05_clear_makes_everything_free_and_waits_for_those_who_hold_something():
    served = Served()
    lease = served.run(PROMPT[:15], new=3, end=None)
    with pytest.raises(ContractError, match="live"):
        served.cache.clear()
    served.cache.finish(lease)
    assert served.hit(PROMPT[:15]).joint == 14
    served.cache.clear()
    assert served.hit(PROMPT[:15]) == Hit()
    assert [pool.allocator.free_order() for pool in served.storage] == [
        tuple(range(1, 33)),
        tuple(range(1, 9)),
    ]


# per request


def test_key_spaces_share_nothing():
    served = Served()
    served.run(PROMPT[:15], salt="a")
    assert [served.hit(PROMPT[:15], salt=salt).joint for salt in ("a", "b", "", None)] == [
        14,
        0,
        0,
        0,
    ]


def test_who_may_not_read_computes_everything_and_publishes_as_usual():
    served = Served()
    lease = served.run(PROMPT[:15], skip_read=True)
    assert lease.hit == Hit(lower=Lower.NO_REUSE)
    assert served.run(PROMPT[:15], skip_read=True).hit.joint == 0
    assert served.hit(PROMPT[:15]).joint == 14


@pytest.mark.parametrize("cap, joint", [(14, 14), (13, 12), (0, 0), (99, 14)])
def test_a_look_up_reads_no_more_than_it_may(cap, joint):
    served = Served()
    served.run(PROMPT[:15])
    lease = served.admit(PROMPT[:15], key_cap=cap)
    assert lease.hit.joint == joint


def test_why_the_joint_boundary_is_not_higher():
    served = Served(state_chunk=64)
    served.run(PROMPT[:15], checkpoint_at=(8,))
    whys = {
        Lower.CAP: PROMPT[:15],
        Lower.GRID: PROMPT[:16],
        Lower.UNKNOWN: PROMPT[:14] + ANY[:9],
        Lower.NO_CHECKPOINT: PROMPT[:12] + ANY[:9],
    }
    assert {served.hit(ids).lower: ids for ids in whys.values()} == whys
    served.cache.tree._drop_state(served.cache.tree.match(PROMPT[:8]).node)
    assert served.hit(PROMPT[:10] + ANY[:9]).lower is Lower.EVICTED
    assert served.hit(PROMPT[:15], skip_read=True).lower is Lower.NO_REUSE
    for ids in whys.values():
        served.run(ids)
    lower = served.cache.stats().lower
    assert lower[Lower.CAP] == lower[Lower.GRID] == 1 and sum(lower.values()) == 5


def test_statistics_are_a_snapshot():
    served = Served()
    served.run(PROMPT[:15])
    before = served.cache.stats()
    served.run(PROMPT[:15])
    assert (before.lower, before.evictions) == ({Lower.UNKNOWN: 1}, Evictions())
    served.cache.tree.evict_kv(99)
    assert served.cache.stats().evictions.tokens == 14


# the constructor


@pytest.mark.parametrize(
    "shape, options, message",
    [
        (Shape(((4, 2), (4, 2)), (2,)), {}, "one attention and one state group, got 2 and 1"),
        (Shape(((4, 2),), (2, 2)), {}, "one attention and one state group, got 1 and 2"),
        (Shape(((4, 2),)), dict(strategy="no_buffer"), "needs pages of one token, got 2"),
        (Shape(((4, 2),)), dict(strategy="other"), "'other' is not a valid Strategy"),
        (Shape(((4, 2),)), dict(interval=0), "interval must be at least 1, got 0"),
        (Shape(((4, 2),)), dict(state_chunk=0), "state_chunk must be at least 1, got 0"),
        (Shape(((4, 2),)), dict(path_cap=0), "states per path must be at least 1"),
        (Shape(((4, 2),)), dict(export_alignment=0), "export_alignment must be at least 1"),
    ],
)
def test_what_does_not_go_together_is_refused(shape, options, message):
    with pytest.raises(ValueError, match=message):
        RadixCache(make_storage(shape), **options)


def test_a_lookup_changes_nothing():
    served = Served()
    served.run(PROMPT[:31])
    tree = served.cache.tree
    before = [(n.depth, n.used, n.state) for n in tree.nodes()], [*tree.state_order]
    assert served.hit(PROMPT[:18] + ANY) == Hit(0, 18, 18, Lower.NO_CHECKPOINT)
    assert ([(n.depth, n.used, n.state) for n in tree.nodes()], [*tree.state_order]) == before


def test_a_plan_is_a_step_plan_whose_copies_come_with_the_first_piece_only():
    served = Served()
    served.run(PROMPT[:15])
    lease = served.admit(PROMPT[:14] + ANY[:9])
    first, second = served.step(lease, 4), served.step(lease, 4)
    assert isinstance(first, StepPlan) and len(first.copies) == 1
    assert second.copies == () and second.start == first.end == 18
    assert replace(second.lease.request, name="x").ids == lease.request.ids


def test_a_long_prompt_keeps_its_passing_checkpoints_at_nobody_elses_cost():
    """BR-47: with the pool full, the newest of the grid takes the slot of the oldest of its own."""
    served = Served(slots=6, pages=64, state_chunk=4)
    served.run(ANY[:9])
    lease = served.admit(PROMPT[:31])
    while lease.computed < 31:
        served.step(lease, 4)
    assert (served.kept(PROMPT), served.kept(ANY)) == ([20, 24, 28, 30], [8])
    assert served.cache.stats().evictions == Evictions(0, 4, 4)


def test_a_boundary_that_is_worth_it_may_evict_and_one_of_the_grid_may_not():
    served = Served(slots=2, state_chunk=4)
    served.run(ANY[:9])
    lease = served.admit(PROMPT[:15])
    served.step(lease, 6)
    assert (served.kept(PROMPT), served.kept(ANY)) == ([], [8])
    served.step(lease, 9)
    assert (served.kept(PROMPT), served.kept(ANY)) == ([14], [])


def test_what_was_found_counts_when_it_has_been_used():
    """BR-71: a hit whose first piece waits, then runs without it, was none."""
    served = Served(pages=10, slots=4)
    served.run(PROMPT[:9])
    other = served.run(ANY[:8], end=None)
    lease = served.admit(PROMPT[:8] + ANY[20:28])
    assert lease.hit.joint == 8 and isinstance(served.step(lease), Wait)
    served.cache.tree.evict_kv(99)
    served.cache.abort(other)
    served.step(lease)
    stats = served.cache.stats()
    assert (stats.lookups, stats.joint_hit_tokens, stats.token_hit_tokens) == (3, 0, 0)
    assert stats.lower == {Lower.UNKNOWN: 3}


def test_a_look_up_that_is_repeated_evicts_nothing_for_a_slot_while_pages_are_short():
    served = Served(pages=10, slots=4)
    served.run(PROMPT[:9])
    served.run(ANY[:5], salt="kept")
    served.run(ANY[20:22], end=None)
    lease = served.admit(PROMPT[:8] + ANY[20:36])
    assert isinstance(served.step(lease), Wait)
    served.run(ANY[36:38], end=None)
    assert served.free == [2, 0]
    assert served.step(lease).reason is WaitReason.PAGES
    assert served.kept(ANY, "kept") == [4] and served.cache.stats().evictions == Evictions()


def test_a_request_that_comes_back_keeps_where_a_resend_of_its_prompt_resumes():
    served = Served(pages=64, state_chunk=64)
    known = [*range(100, 130), *range(500, 520)]
    served.run(known, prompt=30)
    assert served.hit(known[:30]).joint == 28
