"""The block manager by its own rules (decision 22): what is kept where, who waits, what is undone.
Pages of 4, state blocks of 8, hashes of 4 tokens, unless a test says otherwise."""

import pytest

from cache.blocks.groups import RowGroup
from cache.blocks.manager import COLD, BlockCache
from cache.leases import CacheRequest, CopyKind, Hit, Lower, Phase, StepPlan, Wait, WaitReason
from cache.pools.allocator import Ownership
from cache.stats import Evictions
from tests.cache.blocks.served import Served
from tests.cache.memory import Shape, make_storage

PROMPT = [*range(100, 160)]
ANY = [*range(500, 560)]


# what is kept where


@pytest.mark.parametrize(
    "tokens, piece, boundaries",
    [
        pytest.param(15, 99, [8, 12], id="tail and the whole block before"),
        pytest.param(13, 99, [8, 12], id="one token is left to run"),
        pytest.param(12, 99, [8], id="of a prompt that fills its units, too"),
        pytest.param(9, 99, [8], id="both at once"),
        pytest.param(5, 99, [4], id="a prompt below a block"),
        pytest.param(4, 99, [], id="a prompt of one unit leaves no token to run"),
        pytest.param(30, 7, [24, 28], id="whatever the pieces"),
        pytest.param(30, 3, [24, 28], id="also below the unit"),
    ],
)
def test_prefill_keeps_where_a_resend_resumes_and_the_whole_block_before(tokens, piece, boundaries):
    s = Served()
    s.run(PROMPT[:tokens], piece=piece)
    assert s.kept(PROMPT) == boundaries
    assert s.kept(PROMPT, kind=RowGroup) == [*range(4, tokens + 1, 4)]
    assert s.hit(PROMPT[:tokens]).joint == max(boundaries, default=0)


def test_what_is_kept_does_not_cut_the_piece_where_the_backend_can_export():
    s = Served()
    lease = s.admit(PROMPT[:15])
    plan = s.step(lease)
    assert (plan.start, plan.end) == (0, 15)
    assert [export.offset for export in plan.exports] == [8, 12]


def test_where_it_cannot_the_piece_ends_there():
    s = Served(export_alignment=8)
    assert s.pieces(PROMPT[:15]) == [12, 15]
    assert s.kept(PROMPT) == [8, 12]


def test_where_prompts_part_is_kept_exactly():
    s = Served()
    s.run(PROMPT[:40])
    other = PROMPT[:22] + ANY[:20]
    lease = s.run(other)
    assert lease.hit == Hit(0, 20, 20, Lower.NO_CHECKPOINT)
    assert s.kept(other) == [20, 40]
    third = s.admit(PROMPT[:21] + ANY[30:40])
    assert (third.hit.joint, third.hit.junction) == (20, None)


def test_boundaries_that_the_caller_names_are_floored_to_the_unit():
    s = Served()
    lease = s.run(PROMPT[:30], checkpoint_at=(10, 16, 3, 31))
    assert lease.named == (8, 16, None, 28)
    assert s.kept(PROMPT) == [8, 16, 24, 28]
    assert s.run(ANY[:30], checkpoint_at=(32,)).named == (None,)


@pytest.mark.parametrize(
    "retention, boundaries",
    [(None, [8, 12, 16, 24, 32]), (16, [8, 12, 16, 32]), (0, [8, 12])],
)
def test_milestones_are_kept_in_prefill_and_in_decode(retention, boundaries):
    s = Served(retention=retention, slots=9)
    lease = s.run(PROMPT[:15], new=20)
    assert s.kept(lease.tokens) == boundaries


def test_a_milestone_inside_a_piece_is_kept_too():
    s = Served(retention=16)
    assert s.pieces(PROMPT[:60]) == [60]
    assert s.kept(PROMPT) == [16, 32, 48, 56]


def test_the_state_at_the_end_of_a_piece_is_kept_without_a_copy_until_the_next_token():
    s = Served(export_alignment=8)
    lease = s.admit(PROMPT[:15])
    kept = s.step(lease)
    assert kept.end == 12 and not kept.copies
    assert s.storage.states[0].allocator.state_of(kept.slots[0]) is Ownership.ACTIVE
    plan = s.step(lease)
    (copy,) = plan.copies
    assert (copy.kind, copy.source, copy.destination) == (
        CopyKind.STATE, kept.slots[0], plan.slots[0]
    )  # fmt: skip
    assert s.storage.states[0].allocator.state_of(kept.slots[0]) is Ownership.CACHED


def test_a_state_that_nobody_wants_is_never_copied():
    s = Served()
    lease = s.admit(PROMPT[:40])
    slots = [(plan := s.step(lease, 5)).slots[0] for _ in range(3)]
    assert len({*slots}) == 1 and not plan.copies


def test_pages_larger_than_the_unit_are_shared_up_to_what_is_kept():
    s = Served(page=16, state_block=16, hash_unit=4)
    s.run(PROMPT[:30])
    assert s.kept(PROMPT, kind=RowGroup) == [16, 28]
    lease = s.admit(PROMPT[:30])
    assert lease.hit.joint == 28 and len(lease.pages[0]) == 1
    plan = s.step(lease)
    assert [copy.kind for copy in plan.copies] == [CopyKind.PAGE, CopyKind.STATE]
    s.cache.finish(lease)
    part = s.admit(PROMPT[:25] + ANY[:9])
    assert (part.hit.joint, part.hit.junction) == (16, None)


def test_one_block_is_found_by_every_boundary_inside_of_it():
    s = Served(page=16, state_block=16, hash_unit=4)
    s.run(PROMPT[:16], checkpoint_at=(4,))
    assert s.kept(PROMPT, kind=RowGroup) == [4, 12, 16]
    assert s.hit(PROMPT[:6]).joint == 4


@pytest.mark.parametrize("states", [0, 1, 3])
@pytest.mark.parametrize("page", [4, (4, 6), ()])
def test_any_number_of_groups(states, page):
    if not page and not states:
        return
    s = Served(page=page, states=states, state_block=[8, 4, 8][:states])
    s.run(PROMPT[:30])
    again = s.hit(PROMPT[:30]).joint
    assert again >= 24
    assert s.run(PROMPT[:30] + ANY[:20]).hit.joint >= again


# who shares what


def test_a_hit_is_held_from_its_admission():
    s = Served(pages=8, slots=6)
    s.run(PROMPT[:15])
    lease = s.admit(PROMPT[:15])
    assert lease.hit.joint == 12 and len(lease.pages[0]) == 3 and not any(lease.slots)
    for i in range(3):  # as much as fits beside
        s.run(ANY[10 * i : 10 * i + 9])
    assert s.hit(PROMPT[:15]).joint == 12
    assert s.step(lease).start == 12


def test_allocation_never_takes_a_block_of_its_own_hit():
    """VL #33775: one page is free, the rest is what was hit."""
    s = Served(pages=4, slots=4)
    s.run(PROMPT[:13])
    assert s.hit(PROMPT[:16]).joint == 12
    lease = s.run(PROMPT[:16])
    assert lease.hit.joint == 12


def test_of_two_who_computed_the_same_the_first_serves():
    s = Served()
    one = s.admit(PROMPT[:15], "one")
    two = s.admit(PROMPT[:15], "two")
    s.steps([one, two])
    assert one.pages != two.pages
    found = s.cache.find(CacheRequest("seen", PROMPT[:15]))
    assert [block.id for block in found.columns[0]] == one.pages[0][:3]
    s.cache.finish(one)
    s.cache.finish(two)
    assert s.hit(PROMPT[:15]).joint == 12


def test_what_is_written_in_this_step_is_waited_for():
    s = Served()
    one = s.admit(PROMPT[:15], "one")
    s.cache.begin_step()
    plan = s.cache.plan(one, 99)
    two = s.cache.admit(CacheRequest("two", PROMPT[:15]))
    assert two.hit.joint == 12 and not any(two.pages)
    assert s.cache.plan(two, 99) == Wait(WaitReason.SAME_STEP)
    s.cache.cancel(plan)
    assert s.cache.plan(two, 99).start == 0
    s.cache.cancel(two.plan)
    s.cache.end_step()
    s.cache.audit()
    s.step(one)
    assert s.step(two).start == 0


def test_it_is_there_when_the_step_has_ended():
    s = Served()
    one = s.admit(PROMPT[:15], "one")
    s.step(one)
    two = s.admit(PROMPT[:15], "two")
    assert s.step(two).start == 12


def test_a_salt_is_another_key_space():
    s = Served()
    s.run(PROMPT[:15], salt="a")
    assert s.hit(PROMPT[:15]).joint == 0 and s.hit(PROMPT[:15], salt="b").joint == 0
    assert s.hit(PROMPT[:15], salt="a").joint == 12


def test_who_may_not_read_computes_everything_and_registers_it():
    s = Served()
    s.run(PROMPT[:15])
    lease = s.run(PROMPT[:15], skip_read=True)
    assert lease.hit == Hit(lower=Lower.NO_REUSE)
    assert s.hit(PROMPT[:15]).joint == 12
    assert s.hit(PROMPT[:15], key_cap=9).joint == 8


def test_without_reuse_nothing_is_kept():
    s = Served(reuse=False)
    s.run(PROMPT[:15], checkpoint_at=(4,))
    assert s.hit(PROMPT[:15]) == Hit(lower=Lower.NO_REUSE)
    assert s.free == [32, 8]


# why a hit is not more


@pytest.mark.parametrize(
    "prompt, lower",
    [
        (ANY[:15], Lower.UNKNOWN),
        (PROMPT[:13], Lower.CAP),
        (PROMPT[:15], Lower.GRID),
        (PROMPT[:60], Lower.UNKNOWN),
    ],
)
def test_why_a_hit_is_not_more(prompt, lower):
    s = Served()
    s.run(PROMPT[:15])
    assert s.hit(prompt).lower is lower


def test_a_state_that_was_reused_is_remembered_as_evicted():
    s = Served(slots=3)
    s.run(PROMPT[:15])
    assert s.hit(PROMPT[:15]).joint == 12
    s.run(ANY[:15])
    hit = s.hit(PROMPT[:15])
    assert hit.lower is Lower.EVICTED and hit.token_hit == 12 and hit.junction == 12
    assert s.cache.stats().evictions == Evictions(0, 2, 0)


def test_evictions_are_counted_by_kind():
    s = Served(pages=4, slots=8)
    s.run(PROMPT[:15])
    s.run(ANY[:15])
    assert s.cache.stats().evictions == Evictions(12, 0, 0)


# who waits


def test_the_deepest_rows_go_first_and_what_was_used_last_stays():
    s = Served(pages=8, slots=8)
    s.run(PROMPT[:15])
    s.run(ANY[:15])
    s.run(PROMPT[:15])
    s.run([*range(9)])
    assert s.hit(PROMPT[:15]).joint == 12
    assert s.hit(ANY[:15]).token_hit < 12


def test_a_first_piece_that_does_not_fit_waits_and_holds_nothing():
    s = Served(pages=6, slots=4)
    s.run(PROMPT[:20], name="other", end=None)
    lease = s.admit(ANY[:12])
    s.cache.begin_step()
    assert s.cache.plan(lease, 12) == Wait(WaitReason.PAGES, 3, 1)
    assert lease.phase is Phase.ADMITTED and not lease.holds
    assert isinstance(s.cache.plan(lease, 4), StepPlan)
    s.cache.cancel(lease.plan)
    s.cache.end_step()


def test_must_fit_waits_for_the_whole_prompt():
    s = Served(pages=6, slots=4)
    s.run(PROMPT[:16], name="other", end=None)
    lease = s.admit(ANY[:12], must_fit=True)
    s.cache.begin_step()
    assert s.cache.plan(lease, 4) == Wait(WaitReason.PAGES, 3, 2)
    s.cache.end_step()


def test_what_a_wait_let_go_is_where_it_was_in_the_order_of_reuse():
    s = Served(pages=6, slots=4)
    s.run(PROMPT[:13])
    s.run(ANY[:8], name="other", end=None)
    order = [[*pool.queue] for pool in s.cache.block_pools]
    lease = s.admit(PROMPT[:40])
    assert lease.hit.joint
    s.cache.begin_step()
    assert isinstance(s.cache.plan(lease, 99), Wait)
    s.cache.end_step()
    assert [[*pool.queue] for pool in s.cache.block_pools] == order


def test_a_checkpoint_is_not_worth_waiting_for():
    s = Served(slots=2)
    s.run(ANY[:3], name="other", end=None)
    lease = s.admit(PROMPT[:15])
    assert not s.step(lease).exports
    s.cache.finish(lease)
    assert not s.kept(PROMPT)


def test_the_most_wanted_gets_the_last_slot():
    s = Served(slots=2)
    s.run(PROMPT[:15])
    assert s.kept(PROMPT) == [12]


def test_a_request_with_one_slot_gives_up_what_it_has_kept_in_it():
    s = Served(slots=1, export_alignment=8)
    assert s.pieces(PROMPT[:15]) == [12, 15]
    assert not s.kept(PROMPT)
    s.run(PROMPT[:13], name="again", end=None)


def test_but_not_what_another_is_about_to_copy():
    s = Served(slots=1, export_alignment=8)
    one = s.admit(PROMPT[:15], "one")
    assert s.step(one).end == 12
    two = s.admit(PROMPT[:15], "two")
    assert two.hit.joint == 12
    s.cache.begin_step()
    assert s.cache.plan(one, 99) == Wait(WaitReason.SLOTS, 1, 0)
    s.cache.abort(two)
    assert s.cache.plan(one, 99).end == 15
    s.cache.cancel(one.plan)
    s.cache.end_step()


def test_who_is_alone_and_has_no_room_to_resume_starts_cold():
    s = Served(slots=1, export_alignment=8)
    one = s.admit(PROMPT[:15])
    s.step(one)
    s.cache.finish(one)
    lease = s.admit(PROMPT[:15])
    assert lease.hit.joint == 12
    assert s.step(lease).start == 0 and lease.hit == COLD
    assert s.cache.stats().lower[Lower.NO_REUSE] == 1


# what is undone


def test_a_plan_that_is_cancelled_leaves_what_was_there_before():
    s = Served(page=16, state_block=16, hash_unit=4)
    s.run(PROMPT[:30])
    lease = s.admit(PROMPT[:50])
    before = [pool.free_count for pool in s.cache.block_pools]
    kept = s.kept(PROMPT), s.kept(PROMPT, kind=RowGroup)
    s.cache.begin_step()
    s.cache.cancel(s.cache.plan(lease, 99))
    s.cache.end_step()
    s.cache.audit()
    assert [pool.free_count for pool in s.cache.block_pools] == before
    assert (s.kept(PROMPT), s.kept(PROMPT, kind=RowGroup)) == kept
    assert (lease.phase, lease.computed) == (Phase.ADMITTED, 28)
    assert s.step(lease).start == 28


def test_a_piece_that_fell_short_registers_what_it_has_reached():
    s = Served()
    lease = s.admit(PROMPT[:15])
    s.step(lease, left=4)
    assert lease.computed == 11
    assert s.kept(PROMPT) == [8] and s.kept(PROMPT, kind=RowGroup) == [4, 8]
    s.step(lease)
    assert s.kept(PROMPT) == [8, 12] and s.kept(PROMPT, kind=RowGroup) == [4, 8, 12]


def test_a_request_that_is_aborted_leaves_what_it_has_registered():
    s = Served()
    s.run(PROMPT[:15], end="abort")
    assert s.hit(PROMPT[:15]).joint == 12 and s.free == [29, 6]


def test_one_that_is_preempted_comes_back_to_its_prompt_and_keeps_where_it_was():
    s = Served()
    lease = s.run(PROMPT[:15], new=10, end="preempt")
    again = s.run(lease.tokens, prompt=15)
    assert again.hit.joint == 12
    assert s.kept(lease.tokens) == [8, 12, 24]


def test_clear_forgets_everything():
    s = Served()
    s.run(PROMPT[:15])
    s.cache.clear()
    assert s.hit(PROMPT[:15]) == Hit(0, 0, None, Lower.UNKNOWN)
    assert s.free == [32, 8]
    s.run(PROMPT[:15])


# what is refused


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(state_block=[8, 8]), r"1 state groups, and state blocks for 2: \(8, 8\)"),
        (dict(state_block=6, hash_unit=4), r"hash unit must divide every block, got 4"),
        (dict(retention=-8), "multiple of the scheduler block 8, got -8"),
        (dict(retention=12), "multiple of the scheduler block 8, got 12"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        BlockCache(make_storage(Shape(((8, 4),), (4,))), **dict(state_block=8) | options)


def test_a_retention_interval_needs_states():
    storage = make_storage(Shape(((8, 4),), ()))
    with pytest.raises(ValueError, match="no state group"):
        BlockCache(storage, retention=8)
    for retention in (None, 0):
        BlockCache(storage, retention=retention)


def test_by_default_a_state_block_is_64_tokens_and_hits_end_on_pages():
    cache = BlockCache(make_storage(Shape(((8, 16),), (4,))))
    assert cache.sizes.states == (64,) and cache.sizes.hits == 16
    assert cache.refusal(8 * 16) is None
    assert cache.refusal(8 * 16 + 1) == "129 tokens need 9 pages; the pool has 8"


def test_a_request_that_comes_back_keeps_where_a_resend_of_its_prompt_resumes():
    """Nobody sends what it had sampled (serving 4.7: tail = P(prompt; h))."""
    s = Served(pages=64, page=4, hash_unit=4, state_block=8, slots=12)
    known = [*PROMPT[:30], *range(500, 520)]
    s.run(known, prompt=30)
    assert {24, 28} <= {*s.kept(known)}
    assert s.hit(known[:30]).joint == 28
