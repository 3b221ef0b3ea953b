"""The engine's own rules through the contract: L01 .. L20 of serving 9.8, and what the recorded
scenarios do not show."""

import pytest

from cache.blocks.groups import RowGroup
from cache.blocks.vllm import VLLMCache
from cache.leases import CopyKind, Wait, WaitReason
from tests.cache.blocks.served import Served
from tests.cache.memory import Shape, make_storage

L01 = [0, 0, 1, 1, 2, 2]


def served(page, block, unit=None, retention=0, **options):
    sizes = dict(pages=60, slots=60, page=page, state_block=block, hash_unit=unit)
    return Served(VLLMCache, **sizes, retention=retention, **options)


def prompt(length, *, like=0):
    """Tokens, the first `like` of which all prompts have."""
    return [*range(like), *(1000 * length + i for i in range(like, length))]


def test_l01_the_prompt_is_cut_where_a_resend_would_want_to_resume():
    s = served(2, 4, 2)
    assert s.pieces(L01) == [4, 6]
    assert s.kept(L01) == [4]
    assert s.kept(L01, kind=RowGroup) == [2, 4, 6]


def test_l02_a_state_inside_a_block_that_goes_on_moves_to_a_copy_and_the_request_stays():
    s = served(2, 4, 2, retention=None)
    s.pieces(L01)
    longer = [*L01, 3, 3]
    lease = s.admit(longer)
    assert (lease.hit.joint, lease.hit.junction) == (4, 6)
    assert s.step(lease).end == 6
    kept_at_6 = lease.slots[0]
    plan = s.step(lease)
    assert plan.end == 8 and lease.slots[0] == kept_at_6
    assert [copy.source for copy in plan.copies if copy.kind is CopyKind.STATE] == [kept_at_6]
    assert s.kept(longer) == [4, 6, 8]
    assert s.hit([*L01, 9]).joint == 6


def test_l03_l04_a_longer_prompt_resumes_inside_the_block():
    s = served(32, 128, 32)
    assert s.pieces(prompt(97, like=97)) == [96, 97]
    assert s.kept(prompt(97, like=97)) == [96]
    lease = s.admit(prompt(157, like=97))
    assert lease.hit.joint == 96
    first = s.step(lease, 200)
    assert first.end == 128 and first.copies
    assert s.step(lease, 200).end == 157
    assert s.kept(prompt(157, like=97)) == [96, 128]


def test_l05_a_junction_inside_a_block_is_not_kept():
    s = served(32, 128, 32)
    s.pieces(prompt(97, like=97))
    for length in (140, 141):
        lease = s.admit(prompt(length, like=80))
        assert (lease.hit.joint, lease.hit.junction) == (0, 64)
        s.cache.abort(lease)
        assert s.pieces(prompt(length, like=80)) == [128, length]


@pytest.mark.parametrize("unit, hit", [(128, 4480), (None, 4096)])
def test_l06_l07_what_fine_units_are_worth(unit, hit):
    s = served(128 if unit else 4096, 4096, unit)
    if unit:
        assert s.pieces(prompt(4481, like=4481)) == [4096, 4480, 4481]
        assert s.kept(prompt(4481, like=4481)) == [4096, 4480]
        assert s.pieces(prompt(5481, like=4481), end=None) == [5376, 5481]
    else:
        s.pieces(prompt(4481, like=4481))
    assert s.hit(prompt(5000, like=4481)).joint == hit


FORTY_ONE = prompt(41, like=41)


def eights(retention):
    s = served(4, 4, retention=retention)
    s.pieces(FORTY_ONE, piece=8)
    return s


def test_l08_dense_keeps_what_every_piece_ended_with():
    s = eights(None)
    assert s.kept(FORTY_ONE) == [8, 16, 24, 32, 40]
    assert s.hit(prompt(33, like=25)).joint == 24
    assert s.hit([*FORTY_ONE, *range(8)]).joint == 40
    assert s.hit(FORTY_ONE).joint == 40


@pytest.mark.parametrize(
    "retention, before, hit, after",
    [(0, [40], 0, [24, 32]), (16, [16, 32, 40], 16, [16, 24, 32])],
    ids=["l09", "l10"],
)
def test_the_first_who_parts_from_a_prompt_pays_for_the_junction(retention, before, hit, after):
    s = eights(retention)
    assert s.kept(FORTY_ONE) == before
    sharer = prompt(33, like=25)
    lease = s.admit(sharer)
    assert (lease.hit.joint, lease.hit.junction) == (hit, 24)
    s.cache.abort(lease)
    ends = s.pieces(sharer, piece=8)
    assert ends == [n for n in (8, 16, 24, 32, 33) if n > hit]
    assert s.kept(sharer) == after
    assert s.hit(prompt(34, like=25)).joint == 24


@pytest.mark.parametrize(
    "retention, kept", [(8, [8, 16, 24, 32, 40]), (20, [40])], ids=["l11", "l12"]
)
def test_an_interval_keeps_what_pieces_meet_of_it(retention, kept):
    assert eights(retention).kept(FORTY_ONE) == kept


@pytest.mark.parametrize("retention, kept, longer", [(None, [36, 40], 40), (0, [36], 36)])
def test_l13_the_end_of_a_prompt_that_fills_its_blocks(retention, kept, longer):
    s = served(4, 4, retention=retention)
    tokens = prompt(40, like=40)
    s.pieces(tokens)
    assert s.kept(tokens) == kept
    assert s.hit(tokens).joint == 36
    lease = s.admit(prompt(45, like=40))
    assert (lease.hit.joint, lease.hit.junction or longer) == (longer, 40)
    if retention == 0:
        s.cache.abort(lease)
        assert s.pieces(prompt(45, like=40)) == [40, 44, 45]


def test_l17_a_state_exported_from_inside_saves_the_cuts():
    s = served(16, 32, 16, inner_checkpoint=16)
    tokens = prompt(120, like=120)
    assert s.pieces(tokens, end=None) == [120]
    (lease,) = s.cache.live_leases
    assert [*lease.states[0].columns] == [2, 3] and [*lease.states[0].columns[2].entries] == [112]
    assert s.kept(tokens) == [112]
    assert s.hit(tokens).joint == 112


@pytest.mark.parametrize("retention, kept", [(None, [112, 128, 224, 240]), (0, [224])])
def test_l18_what_an_earlier_piece_could_export_is_kept_if_dense(retention, kept):
    s = served(16, 16, inner_checkpoint=16, retention=retention)
    tokens = prompt(240, like=240)
    assert s.pieces(tokens, piece=128) == [128, 240]
    assert s.kept(tokens) == kept


def test_l20_what_is_read_what_runs_and_what_is_exported_are_three_blocks():
    s = served(16, 32, 16, inner_checkpoint=16)
    s.pieces(prompt(49, like=49))
    lease = s.admit(prompt(200, like=49))
    assert lease.hit.joint == 48
    plan = s.step(lease, 200)
    (export,) = plan.exports
    (source,) = (
        {c.source for c in plan.copies if c.kind is CopyKind.STATE}
        - {*lease.slots}
        - {c.destination for c in plan.copies}
    )
    assert len({source, plan.slots[0], export.slots[0]}) == 3
    assert s.hit(prompt(60, like=49)).joint == 48


# what the recorded scenarios do not show


def test_one_free_list_counts_both_kinds():
    s = served(4, 8)
    assert s.cache.block_pools[0].free_count == 60
    s.pieces(prompt(8), end=None)
    assert s.cache.block_pools[0].free_count == 60 - 3
    (lease,) = s.cache.live_leases
    assert not {*lease.pages[0]} & {*lease.slots}


def test_pools_must_be_of_one_size():
    with pytest.raises(ValueError, match=r"pools of one size, got \[3, 4\]"):
        VLLMCache(make_storage(Shape(((3, 4),), (4,))), state_block=4)


@pytest.mark.parametrize("mode, reuse", [("none", True), ("all", True), ("other", False)])
def test_a_state_mode_that_there_is_not_is_refused(mode, reuse):
    storage = make_storage(Shape(((4, 4),), (4,)))
    with pytest.raises(ValueError, match=f"state mode must be 'align', .*got '{mode}'"):
        VLLMCache(storage, state_block=4, state_mode=mode, reuse=reuse)


def test_kinds_must_be_those_of_the_pools():
    storage = make_storage(Shape(((4, 4),), (4,)))
    with pytest.raises(ValueError, match="1 attention and 1 state groups, got kinds"):
        VLLMCache(storage, state_block=4, kinds=["mla", "mla"])


def test_a_wait_gives_back_the_state_before_the_running_one_and_nothing_else():
    s = Served(VLLMCache, pages=13, slots=13, page=4, state_block=4)
    first = s.admit(prompt(24))
    s.step(first, 8)
    s.step(first, 8)
    held = [*first.states[0].columns]
    s.run(prompt(20), name="other", end=None)
    s.cache.begin_step()
    wait = s.cache.plan(first, 8)
    assert isinstance(wait, Wait) and wait.reason is WaitReason.PAGES
    assert (held, [*first.states[0].columns]) == ([1, 3], [3])
    s.cache.end_step()
    s.cache.audit()


def test_after_a_cancelled_move_the_state_that_was_left_is_not_written():
    s = served(4, 8)
    lease = s.admit(prompt(30))
    s.step(lease, 8)
    s.cache.begin_step()
    plan = s.cache.plan(lease, 8)
    s.cache.cancel(plan)
    s.cache.end_step()
    s.cache.audit()
    assert s.step(lease, 16).end == 24


@pytest.mark.parametrize("left, kept", [(0, [112]), (8, [112]), (9, [])])
def test_an_exported_state_that_the_piece_has_not_reached_has_no_key(left, kept):
    """I-40"""
    s = served(16, 32, 16, inner_checkpoint=16)
    tokens = prompt(120, like=120)
    lease = s.admit(tokens)
    s.step(lease, 120, left=left)
    assert (lease.computed, s.kept(tokens)) == (120 - left, kept)
    while lease.remaining:
        s.step(lease, 120)
    assert s.kept(tokens) == [112]


def test_an_exported_state_has_no_key_once_its_plan_is_cancelled():
    """I-40"""
    s = served(16, 32, 16, inner_checkpoint=16)
    tokens = prompt(120, like=120)
    lease = s.admit(tokens)
    s.cache.begin_step()
    plan = s.cache.plan(lease, 120)
    assert plan.exports and s.kept(tokens) == [112]
    s.cache.cancel(plan)
    assert s.kept(tokens) == []
    s.cache.end_step()


def test_keys_that_moved_are_lost_with_the_plan_that_is_cancelled():
    """Whether the copy has run is not known, nor whether the state was overwritten."""
    s = served(2, 4, 2, retention=None)
    lease = s.admit([*L01, 3])
    assert [s.step(lease).end, s.step(lease).end] == [4, 6]
    s.cache.begin_step()
    plan = s.cache.plan(lease, 1)
    assert plan.copies
    s.cache.cancel(plan)
    s.cache.end_step()
    s.cache.audit()
    assert s.kept([*L01, 3]) == [4]
    assert s.step(lease).end == 7


def test_rows_that_are_written_in_this_step_are_waited_for_unless_shared_at_once():
    for at_once in (False, True):
        s = Served(VLLMCache, states=0, pages=20, page=4, rows_at_once=at_once)
        tokens = prompt(9)
        s.cache.begin_step()
        one, two = (s.cache.admit(r) for r in map(s.request, ("a", "b"), [tokens] * 2))
        plan = s.cache.plan(one, 9)
        three = s.cache.admit(s.request("c", tokens))
        answer = s.cache.plan(three, 9)
        assert three.hit.joint == (8 if at_once else 0)
        assert at_once or answer == Wait(WaitReason.SAME_STEP)
        if at_once:
            for executor in s.executors:
                executor.run([plan, answer], {})
            s.cache.commit(three, 9)
        else:
            for executor in s.executors:
                executor.run([plan], {})
        s.cache.commit(one, 9)
        s.cache.abort(two)
        s.cache.end_step()
        s.cache.audit()


def test_a_request_that_would_fill_the_pool_is_refused_before_it_enters():
    s = Served(VLLMCache, pages=20, slots=20, page=4, state_block=8)
    assert s.cache.refusal(13 * 4) is None
    assert "20" in s.cache.refusal(20 * 4)
