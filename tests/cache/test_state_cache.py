"""The contract: order of calls, what each changes, and that a refused call changes nothing."""

import pytest

from cache.leases import CacheRequest, Lease, Lower, Phase, StepPlan, Wait, WaitReason
from cache.plain import PlainCache
from cache.state_cache import ContractError
from cache.stats import PoolStats
from tests.cache.memory import Shape, make_storage

SHAPE = Shape(pages=((4, 4),), slots=(2,))


def make_cache(shape: Shape = SHAPE, **options) -> PlainCache:
    return PlainCache(make_storage(shape), **options)


def request(name: str = "r", length: int = 6, **options) -> CacheRequest:
    return CacheRequest(name, range(length), **options)


def admitted(cache: PlainCache, *args, **options) -> Lease:
    """In an open step."""
    if not cache._in_step:
        cache.begin_step()
    return cache.admit(request(*args, **options))


def observed(cache: PlainCache, *leases: Lease) -> tuple:
    return (
        [pool.allocator.free_order() for pool in cache.storage],
        [
            (x.phase, x.plan, x.computed, [*x.tokens], [*x.slots], [[*t] for t in x.pages])
            for x in (*cache._leases, *leases)
        ],
        cache.stats(),
        cache._in_step,
    )


def idle_between(cache):
    lease = admitted(cache)
    cache.end_step()
    return lease


def planned(cache):
    lease = admitted(cache)
    cache.plan(lease, 3)
    return lease


def committed(cache):
    lease = planned(cache)
    cache.commit(lease, 3)
    return lease


def done(cache):
    lease = admitted(cache)
    cache.plan(lease, 6)
    cache.commit(lease, 6)
    return lease


def ended(how):
    def prepare(cache):
        lease = committed(cache)
        getattr(cache, how)(lease)
        return lease

    return prepare


def foreign(cache):
    """Of another cache, and with a plan in flight there."""
    cache.begin_step()
    return planned(make_cache())


def of_nobody(cache):
    cache.begin_step()
    return None


REFUSED = {  # name: (what was before, the call, the error, what it says)
    "begin_step twice": (of_nobody, lambda c, x: c.begin_step(), ContractError, "has not ended"),
    "end_step without a step": (
        idle_between,
        lambda c, x: c.end_step(),
        ContractError,
        "no step is open",
    ),
    "end_step with a plan in flight": (
        planned,
        lambda c, x: c.end_step(),
        ContractError,
        r"plans of \['r'\] were not committed or cancelled",
    ),
    "admit between steps": (
        idle_between,
        lambda c, x: c.admit(request("s")),
        ContractError,
        "admit s: no step is open",
    ),
    "admit nothing": (
        of_nobody,
        lambda c, x: c.admit(request("s", 0)),
        ValueError,
        "request s has no tokens",
    ),
    "plan between steps": (
        idle_between,
        lambda c, x: c.plan(x, 1),
        ContractError,
        "plan r: no step is open",
    ),
    "plan twice": (planned, lambda c, x: c.plan(x, 1), ContractError, "commit or cancel its plan"),
    "plan no tokens": (admitted, lambda c, x: c.plan(x, 0), ValueError, "got 0 and None"),
    "plan less than none": (admitted, lambda c, x: c.plan(x, -1), ValueError, "got -1 and None"),
    "plan in pieces of nothing": (admitted, lambda c, x: c.plan(x, 1, 0), ValueError, "1 and 0"),
    "plan beyond what is known": (done, lambda c, x: c.plan(x, 1), ContractError, "no token is"),
    "commit without a plan": (
        admitted,
        lambda c, x: c.commit(x, 1),
        ContractError,
        "commit r: no plan is in flight",
    ),
    "commit twice": (committed, lambda c, x: c.commit(x, 3), ContractError, "no plan is in flight"),
    "commit nothing": (planned, lambda c, x: c.commit(x, 0, [7]), ValueError, "not among 1..3"),
    "commit too much": (planned, lambda c, x: c.commit(x, 4, [7]), ValueError, "not among 1..3"),
    "commit no list": (planned, lambda c, x: c.commit(x, 3, None), TypeError, "iterable"),
    "finish with a plan in flight": (planned, lambda c, x: c.finish(x), ContractError, "its plan"),
    "abort with a plan in flight": (planned, lambda c, x: c.abort(x), ContractError, "its plan"),
    "preempt with a plan in flight": (
        planned,
        lambda c, x: c.preempt(x),
        ContractError,
        "its plan",
    ),
    "clear within a step": (of_nobody, lambda c, x: c.clear(), ContractError, "a step is open"),
    "clear while somebody is there": (
        idle_between,
        lambda c, x: c.clear(),
        ContractError,
        r"leases of \['r'\] are live",
    ),
}
ON_A_LEASE = {
    "plan": lambda c, x: c.plan(x, 1),
    "commit": lambda c, x: c.commit(x, 3),
    "finish": lambda c, x: c.finish(x),
    "abort": lambda c, x: c.abort(x),
    "preempt": lambda c, x: c.preempt(x),
}


def assert_refused(cache, lease, call, error, says):
    leases = [] if lease is None else [lease]
    before = observed(cache, *leases)
    with pytest.raises(error, match=says) as caught:
        call(cache, lease)
    assert type(caught.value) is error
    assert observed(cache, *leases) == before
    cache.audit()


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_out_of_order_is_refused_and_changes_nothing(name):
    prepare, call, error, says = REFUSED[name]
    cache = make_cache()
    assert_refused(cache, prepare(cache), call, error, says)


@pytest.mark.parametrize("verb", ON_A_LEASE)
@pytest.mark.parametrize("how", ["finish", "abort", "preempt"])
def test_an_ended_lease_is_good_for_nothing(how, verb):
    cache = make_cache()
    lease = ended(how)(cache)
    assert lease.phase is Phase.ENDED
    says = f"{verb} r: the lease has ended"
    assert_refused(cache, lease, ON_A_LEASE[verb], ContractError, says)


@pytest.mark.parametrize("verb", ON_A_LEASE)
def test_a_lease_of_another_cache_is_not_ours(verb):
    """Its indices are numbers of other pools: freed here, they would be somebody else's."""
    cache = make_cache()
    lease = foreign(cache)
    assert_refused(cache, lease, ON_A_LEASE[verb], ContractError, "is not ours")
    assert_refused(cache, lease, lambda c, x: c.cancel(x.plan), ContractError, "is not ours")


def test_a_plan_is_cancelled_once_and_only_while_it_is_in_flight():
    cache = make_cache()
    lease = admitted(cache)
    old = cache.plan(lease, 3)
    cache.cancel(old)
    assert_refused(cache, lease, lambda c, x: c.cancel(old), ContractError, "no such plan")
    new = cache.plan(lease, 3)
    assert_refused(cache, lease, lambda c, x: c.cancel(old), ContractError, "no such plan")
    cache.commit(lease, 3)
    assert_refused(cache, lease, lambda c, x: c.cancel(new), ContractError, "no such plan")


def test_a_refused_call_leaves_the_step_usable():
    cache = make_cache()
    lease = planned(cache)
    for name in ("end_step with a plan in flight", "commit too much", "plan twice"):
        with pytest.raises((ContractError, ValueError)):
            REFUSED[name][1](cache, lease)
    cache.commit(lease, 3, [9])
    cache.end_step()
    assert lease.tokens == [0, 1, 2, 3, 4, 5, 9] and lease.computed == 3


@pytest.mark.parametrize("alignment", [0, -16])
def test_exports_are_aligned_to_something(alignment):
    with pytest.raises(ValueError, match=f"at least 1, got {alignment}"):
        make_cache(export_alignment=alignment)


def test_a_look_up_is_allowed_at_any_time_and_changes_nothing():
    cache = make_cache()
    before = observed(cache)
    assert cache.lookup(request()).joint == 0
    assert observed(cache) == before
    planned(cache)
    before = observed(cache)
    assert cache.lookup(request()).lower is Lower.NO_REUSE
    assert observed(cache) == before


def test_a_lease_holds_nothing_before_its_first_plan_and_nothing_once_that_is_cancelled():
    cache = make_cache()
    lease = admitted(cache)
    before = observed(cache)
    assert lease.phase is Phase.ADMITTED and lease.slots == [0] and lease.pages == ([],)
    plan = cache.plan(lease, 5)
    assert lease.phase is Phase.HOLDING and lease.slots == [1] and lease.pages == ([1, 2],)
    cache.cancel(plan)
    assert observed(cache)[1:] == before[1:]
    assert [pool.free_count for pool in cache.storage] == [4, 2]
    assert isinstance(cache.plan(lease, 5), StepPlan)


def test_a_later_plan_is_cancelled_back_to_its_boundary():
    cache = make_cache()
    lease = committed(cache)
    plan = cache.plan(lease, 3)
    assert lease.pages == ([1, 2],)
    cache.cancel(plan)
    assert (lease.phase, lease.computed, lease.slots, lease.pages) == (
        Phase.HOLDING,
        3,
        [1],
        ([1],),
    )
    assert cache.plan(lease, 3).start == 3


def test_commit_counts_what_is_in_the_state_and_what_is_only_known():
    cache = make_cache()
    lease = committed(cache)
    assert (lease.computed, lease.remaining, lease.plan) == (3, 3, None)
    cache.plan(lease, 3)
    assert cache.commit(lease, 6, iter([40, 41])) == ()
    assert (lease.computed, lease.remaining) == (6, 2)
    assert lease.tokens == [0, 1, 2, 3, 4, 5, 40, 41]
    assert list(cache.plan(lease, 9).tokens) == [40, 41]


def test_after_a_commit_of_less_the_rest_is_planned_again():
    """The pages of the whole plan are held already, more than the next piece needs."""
    cache = make_cache(Shape(pages=((4, 1),), slots=(1,)))
    lease = admitted(cache, length=4)
    cache.plan(lease, 3)
    cache.commit(lease, 1)
    plan = cache.plan(lease, 1)
    assert (plan.start, plan.end) == (1, 2)
    cache.audit()
    cache.commit(lease, 2)
    assert cache.plan(lease, 2).end == 4
    assert cache.stats().computed_tokens == 2


@pytest.mark.parametrize("how", ["finish", "abort", "preempt"])
@pytest.mark.parametrize("between", [True, False], ids=["between steps", "within a step"])
def test_s10_whoever_ends_gives_everything_back(how, between):
    cache = make_cache()
    bystander, lease = committed(cache), committed(cache)
    if between:
        cache.end_step()
    getattr(cache, how)(lease)
    cache.audit()
    assert [pool.free_count for pool in cache.storage] == [3, 1]
    assert bystander.slots == [1]
    counts = cache.stats()
    assert (counts.finished, counts.aborted, counts.preempted, counts.leases) == (
        how == "finish",
        how == "abort",
        how == "preempt",
        1,
    )


@pytest.mark.parametrize("how", ["finish", "abort", "preempt"])
def test_a_lease_that_never_planned_ends_like_any_other(how):
    cache = make_cache()
    lease = idle_between(cache)
    getattr(cache, how)(lease)
    cache.audit()
    cache.clear()


def test_clear_makes_the_pools_as_they_were_new():
    cache = make_cache()
    leases = [committed(cache) for _ in range(2)]
    cache.end_step()
    for lease in reversed(leases):
        cache.finish(lease)
    assert cache.storage.states[0].allocator.free_order() == (2, 1)
    cache.clear()
    assert cache.storage.states[0].allocator.free_order() == (1, 2)
    assert cache.storage.pages[0].allocator.free_order() == (1, 2, 3, 4)
    assert cache.stats().finished == 2, "what has been counted stays"


def test_refusal_is_for_what_cannot_run_even_alone():
    cache = make_cache(Shape(pages=((4, 4), (5, 3)), slots=(1,)))
    assert cache.refusal(15) is None
    assert "16 tokens need 6 pages; the pool has 5" in cache.refusal(16)
    assert "1,700 tokens need 425 pages" in cache.refusal(1700)


def test_statistics_are_of_the_moment_they_were_asked_for():
    cache = make_cache()
    before = cache.stats()
    lease = planned(cache)
    admitted(cache, "s")
    waiting = [admitted(cache, name, 16, must_fit=True) for name in "tu"]
    assert [cache.plan(x, 1).reason for x in waiting] == [WaitReason.PAGES] * 2
    during = cache.stats()
    cache.commit(lease, 2)
    cache.end_step()
    cache.finish(lease)
    assert before.pools == (PoolStats("page", 128, 4, 4, 0, 0, 0, 0), before.pools[1])
    assert (before.leases, before.lookups, before.waits) == (0, 0, {})
    assert during.pools[0] == PoolStats("page", 128, 4, 3, 1, 0, 0, 0)
    assert during.pools[1] == PoolStats("slot", 88, 2, 1, 1, 0, 0, 0)
    assert (during.leases, during.lookups, during.steps) == (4, 0, 0)
    assert during.waits == {WaitReason.PAGES: 2} and during.computed_tokens == 0
    after = cache.stats()
    assert (after.leases, after.steps, after.computed_tokens, after.finished) == (3, 1, 2, 1)
    assert after.lookups == 1  # the others have not run


def test_a_wait_is_a_value_with_what_would_end_it_and_the_next_plan_may_succeed():
    """BR-45 in small: the third waits, and runs once a slot is back."""
    cache = make_cache()
    first, second = planned(cache), planned(cache)
    third = admitted(cache)
    before = observed(cache)
    assert cache.plan(third, 1) == Wait(WaitReason.SLOTS, needed=1, free=0)
    assert observed(cache)[:2] == before[:2]
    cache.commit(first, 3)
    cache.finish(first)
    plan = cache.plan(third, 1)
    assert plan.start == 0 and plan.slots == (1,)
    assert second.slots == [2]


@pytest.mark.parametrize("last", [False, True])
def test_the_manager_is_told_whether_the_request_ends_here(last):
    """What an ending request leaves is for `finish` to publish, so commit must not do it too."""
    told = []

    class Listening(PlainCache):
        def _commit(self, lease, plan, last):
            told.append((lease.computed, lease.plan, plan.end, last))
            return ()

    cache = Listening(make_storage(SHAPE))
    lease = admitted(cache)
    cache.plan(lease, 3)
    cache.commit(lease, 2, last=last)
    assert told == [(2, None, 3, last)]


def test_who_is_there_is_known_in_the_order_of_arrival():
    cache = make_cache()
    a, b = admitted(cache, "a"), admitted(cache, "b")
    assert cache.in_step and cache.live_leases == (a, b)
    cache.end_step()
    cache.abort(a)
    assert not cache.in_step and cache.live_leases == (b,)
