"""The cache that remembers nothing: what it takes, when it waits, and that it leaks nothing."""

from dataclasses import replace

import pytest

from cache.leases import CacheRequest, Hit, Lease, Lower, StepPlan, Wait, WaitReason
from cache.null_executor import ExecutionError, NullExecutor
from cache.plain import PlainCache
from tests.cache.memory import RealMemory, Shape, make_storage


class Served:
    """A cache with both executors, one call a step."""

    def __init__(self, pages=((8, 4),), slots=(2,)) -> None:
        self.storage = make_storage(Shape(tuple(pages), tuple(slots)))
        self.cache = PlainCache(self.storage)
        self.null, self.memory = NullExecutor(self.storage), RealMemory(self.storage)
        self.full = self.free

    @property
    def free(self) -> list[int]:
        return [pool.free_count for pool in self.storage]

    def admit(self, ids, name="r", **options) -> Lease:
        self.cache.begin_step()
        lease = self.cache.admit(CacheRequest(name, ids, **options))
        self.cache.end_step()
        return lease

    def step(self, lease: Lease, want: int, appended=()) -> StepPlan | Wait:
        self.cache.begin_step()
        plan = self.cache.plan(lease, want)
        if isinstance(plan, StepPlan):
            for executor in (self.null, self.memory):
                executor.run([plan], {})
            self.cache.commit(lease, plan.end, appended)
        self.cache.end_step()
        self.cache.audit()
        return plan

    def run(self, ids, new=0, piece=99) -> Lease:
        """A prompt in pieces, then `new` tokens of decode."""
        lease = self.admit(ids)
        while lease.remaining:
            last = lease.remaining <= piece
            self.step(lease, piece, [7] if last and new else ())
            new -= last
        return lease


def test_a_row_takes_one_slot_a_group_and_the_pages_that_its_tokens_fill():
    served = Served(pages=((8, 4), (6, 3)), slots=(2, 3))
    lease = served.admit(range(13))
    for want, end, pages in ((4, 4, (1, 2)), (1, 5, (2, 2)), (1, 6, (2, 2)), (99, 13, (4, 5))):
        plan = served.step(lease, want)
        assert plan.end == lease.computed == end
        assert tuple(map(len, plan.pages)) == pages
        assert plan.slots == (1, 1) and plan.copies == plan.exports == ()
    assert served.free == [4, 1, 1, 2]


@pytest.mark.parametrize(
    "want, max_chunk, end", [(5, None, 5), (5, 3, 3), (3, 5, 3), (99, None, 9), (99, 64, 9)]
)
def test_a_piece_is_what_is_wanted_known_and_allowed(want, max_chunk, end):
    served = Served()
    lease = served.admit(range(9))
    served.cache.begin_step()
    plan = served.cache.plan(lease, want, max_chunk)
    assert (plan.start, plan.end, list(plan.tokens)) == (0, end, list(range(end)))


def test_nothing_is_ever_hit_not_even_what_ran_a_moment_ago():
    served = Served()
    served.cache.finish(served.run(range(9)))
    lease = served.admit(range(9))
    assert (
        lease.hit == served.cache.lookup(CacheRequest("s", range(9))) == Hit(lower=Lower.NO_REUSE)
    )
    assert served.step(lease, 9).start == 0


@pytest.mark.parametrize("how", ["finish", "abort", "preempt"])
def test_br08_the_next_owner_of_a_slot_starts_from_zeros(how):
    """One slot. The plan starts at 0, so whatever the slot holds is not looked at; what it holds is
    NaN, so whoever looks is found out."""
    served = Served(slots=(1,))
    first = served.run(range(20))
    slot = first.slots[0]
    getattr(served.cache, how)(first)
    second = served.admit([1, 2])
    served.cache.begin_step()
    plan = served.cache.plan(second, 2)
    assert (plan.start, plan.slots) == (0, (slot,))
    assert all(tensor[:, slot].isnan().all() for tensor in served.storage.states[0].tensors)
    lie = replace(plan, start=1)
    second.plan = lie
    for executor in (served.null, served.memory):
        with pytest.raises((ExecutionError, AssertionError)):
            executor.run([lie], {})


@pytest.mark.parametrize("when", ["in prefill", "in decode"])
def test_br39_a_preempted_request_computes_all_of_its_tokens_anew(when):
    served = Served(pages=((8, 4),), slots=(2,))
    lease = served.run(range(10), new=3)
    if when == "in prefill":
        served.cache.preempt(lease)
        lease = served.admit(range(20), "a")
        served.step(lease, 6)
    tokens = [*lease.tokens]
    served.cache.preempt(lease)
    assert served.free == served.full
    other = served.run(range(50, 62))
    back = served.admit(tokens, "a")
    assert (back.computed, back.remaining) == (0, len(tokens))
    assert served.step(back, 4).start == 0
    served.cache.finish(other)
    while back.remaining:
        served.step(back, 5)
    assert served.null.boundary_at(back.slots[0]) == len(tokens)
    served.cache.finish(back)
    assert served.free == served.full


def test_br12_what_waits_for_pages_gives_its_slot_back_each_time():
    """Pages for one of the two; three ways out of the queue, fifty times."""
    served = Served(pages=((3, 4),), slots=(3,))
    holder = served.run(range(6))
    before = served.free
    for round in range(50):
        lease = served.admit(range(9))
        for _ in range(2):
            assert served.step(lease, 9) == Wait(WaitReason.PAGES, needed=3, free=1)
            assert served.free == before and not any(lease.slots)
        getattr(served.cache, ("finish", "abort", "preempt")[round % 3])(lease)
        assert served.free == before
    small = served.run(range(3))
    for lease in (holder, small):
        served.cache.finish(lease)
    assert served.free == served.full


def test_br45_the_third_of_two_slots_waits_and_nobody_fails():
    served = Served(slots=(2,))
    first, second = served.admit(range(9)), served.admit(range(9))
    third = served.admit(range(5))
    for end in (3, 6, 9):
        assert served.step(first, 3).end == end and served.step(second, 3).end == end
        assert served.step(third, 5) == Wait(WaitReason.SLOTS, needed=1, free=0)
    served.cache.abort(second)
    assert served.step(third, 5).slots == (2,)
    assert served.null.boundary_at(2) == 5


def test_br45_a_state_group_that_is_full_holds_the_others_back_whole():
    """Of unequal state groups the smaller decides, and nothing is taken of the larger."""
    served = Served(slots=(3, 1))
    served.run(range(3))
    before = served.free
    lease = served.admit(range(3))
    assert served.step(lease, 3) == Wait(WaitReason.SLOTS, needed=1, free=0)
    assert served.free == before


def test_all_page_groups_or_none():
    """The first group has room for 6 tokens more, the second has not: neither gives anything."""
    served = Served(pages=((8, 4), (3, 4)), slots=(2,))
    first = served.run(range(7))
    lease = served.admit(range(6))
    before = served.free
    assert served.step(lease, 6) == Wait(WaitReason.PAGES, needed=2, free=1)
    assert served.free == before and lease.pages == ([], [])
    assert isinstance(served.step(lease, 4), StepPlan)
    before = served.free
    assert served.step(lease, 2) == Wait(WaitReason.PAGES, needed=1, free=0)
    assert served.free == before and list(map(len, lease.pages)) == [1, 1]
    served.cache.finish(first)
    assert served.step(lease, 2).start == 4


def test_br46_a_token_that_fits_the_open_page_needs_no_page():
    served = Served(pages=((2, 4),), slots=(2,))
    a, b = served.admit(range(3)), served.admit(range(4))
    served.step(a, 3, [9])
    served.step(b, 4, [9])
    assert served.free[0] == 0
    assert isinstance(served.step(a, 1), StepPlan)
    assert served.step(b, 1) == Wait(WaitReason.PAGES, needed=1, free=0)


@pytest.mark.parametrize("prompt, new", [(31, 2), (20, 13), (32, 1), (1, 32)])
def test_br28_two_pages_of_sixteen_hold_exactly_thirty_two_computed_tokens(prompt, new):
    """The last sample is never computed: 32 rows for 33 known tokens, and not one more."""
    served = Served(pages=((2, 16),), slots=(1,))
    assert served.cache.refusal(32) is None and served.cache.refusal(33)
    lease = served.admit(range(prompt))
    for _ in range(new):
        assert isinstance(served.step(lease, 99, [7]), StepPlan)
    assert (lease.computed, len(lease.tokens)) == (32, 33)
    assert served.free == [0, 0]
    assert served.step(lease, 1) == Wait(WaitReason.PAGES, needed=1, free=0)


def test_br40_tiny_prompts_leave_nothing_behind():
    served = Served(pages=((2, 16),), slots=(1,))
    for round in range(300):
        ids = range(1 if round % 2 else 15)
        lease = served.admit(ids)
        if round % 3:
            served.step(lease, 99)
        getattr(served.cache, ("finish", "abort")[round % 2])(lease)
        assert served.free == served.full
    assert served.cache.stats().leases == 0


def test_br76_whoever_fills_the_pool_alone_gets_on_in_any_pieces():
    """Pieces smaller than a page, must_fit, and a pool of exactly the request's size."""
    for piece in (1, 3, 32):
        served = Served(pages=((2, 16), (11, 3)), slots=(1,))
        lease = served.admit(range(32), must_fit=True)
        steps = 0
        while lease.remaining:
            assert isinstance(served.step(lease, piece), StepPlan)
            steps += 1
        assert steps == -(-32 // piece)


def test_must_fit_waits_for_room_for_all_known_tokens_and_only_at_first():
    served = Served(pages=((5, 4),), slots=(3,))
    other = served.run(range(8))
    lease = served.admit(range(16), must_fit=True)
    assert served.step(lease, 1) == Wait(WaitReason.PAGES, needed=4, free=3)
    careless = served.admit(range(16))
    assert served.step(careless, 1).end == 1
    served.cache.abort(careless)
    served.cache.finish(other)
    assert served.step(lease, 1).end == 1
    assert served.free[0] == 4, "room was there; it is not reserved"
    late = served.run(range(12))
    assert served.step(lease, 1).end == 2, "later pieces take what they need"
    assert served.step(lease, 9) == Wait(WaitReason.PAGES, needed=2, free=1)
    served.cache.finish(late)
    assert served.step(lease, 14).end == 16


def test_options_of_prefix_caches_change_nothing():
    for options in (
        dict(salt="t"),
        dict(skip_read=True),
        dict(checkpoint_at=(2, 4)),
        dict(key_cap=0),
    ):
        served = Served()
        lease = served.admit(range(9), **options)
        assert lease.hit == Hit(lower=Lower.NO_REUSE)
        assert served.step(lease, 9).end == 9


@pytest.mark.parametrize("pages, slots", [((), (2,)), (((4, 4),), ())], ids=["no MLA", "no KDA"])
def test_a_model_of_one_kind_of_layer_is_served_all_the_same(pages, slots):
    served = Served(pages=pages, slots=slots)
    lease = served.admit(range(9))
    served.cache.begin_step()
    plan = served.cache.plan(lease, 5)
    served.cache.cancel(plan)
    assert served.free == served.full
    served.cache.end_step()
    for want in (5, 4):
        served.step(lease, want)
    served.cache.finish(lease)
    assert served.free == served.full


def test_samples_of_one_prompt_may_have_one_name():
    """Names are for messages; the audit must tell the holders apart nevertheless."""
    served = Served(slots=(2,))
    a, b = served.run(range(5)), served.run(range(5))
    assert a.request.name == b.request.name
    served.cache.audit()
    served.cache.finish(a)
    served.cache.audit()
    assert b.pages == ([3, 4],)
