"""The driver itself: each fault that is planted in a cache is found, or it would prove nothing."""

import itertools

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from cache.leases import CacheRequest, Lease, StepPlan, Wait, WaitReason
from cache.plain import PlainCache
from cache.pools.allocator import OwnershipError
from tests.cache.driving import KINDS, Driver
from tests.cache.faulty import FAULTY
from tests.cache.machine import QUICK, machine_of
from tests.cache.memory import Shape

TIGHT = Shape(pages=((7, 3), (5, 4)), slots=(3,))
HUNT = settings(QUICK, max_examples=2000, phases=[Phase.generate], report_multiple_bugs=False)


def live(driver: Driver) -> None:
    """Requests fit, wait for either pool, are cancelled, come back, and end in all ways."""

    def admit(name: str, length: int, final: int) -> Lease:
        return driver.admit(CacheRequest(name, range(length)), final)

    def plan(lease: Lease, want: int) -> StepPlan | Wait:
        return driver.plan(driver.can_plan.index(lease), want)

    def run(*wishes: tuple[Lease, int], left: tuple = (), token: tuple = ()) -> None:
        for lease, want in wishes:
            assert isinstance(plan(lease, want), StepPlan)
        driver.run(left)
        while driver.ends:
            driver.commit(0, token)

    driver.misuse()
    driver.begin_step()
    a, b = admit("same name", 7, 12), admit("same name", 6, 8)
    for i in (0, 1):
        driver.plan_in_vain(i, 4)
    run((a, 4), (b, 3))
    driver.end_step()

    driver.begin_step()
    driver.plan_in_vain(0, 3)
    run((a, 3), (b, 3), left=(1,), token=(5, 6))
    assert (a.computed, len(b.tokens)) == (6, 8)
    driver.misuse()
    run((a, 1), token=(5,))
    c = admit("c", 8, 8)
    assert plan(c, 5).reason is WaitReason.PAGES  # the second group has one left and needs two
    d, e = admit("d", 1, 1), admit("e", 1, 1)
    run((d, 1), (a, 1), token=(5,))
    assert plan(e, 1).reason is WaitReason.SLOTS
    assert plan(a, 1).reason is WaitReason.PAGES
    plan(b, 1)
    driver.misuse()
    driver.cancel(0)
    driver.end_step()

    driver.end(driver.idle.index(b), "finish")
    driver.end(driver.idle.index(d), "abort")
    driver.begin_step()
    run((c, 8), (a, 1), token=(5,))
    run((a, 1), token=(5,))
    driver.end(driver.idle.index(c), "preempt")
    run((e, 1), (a, 1), token=(5,))
    plan(a, 1)
    driver.fail(0)
    driver.end_step()
    driver.whole_step(20, 5, 0)
    driver.drain()

    driver.begin_step()
    run((admit("alone", 20, 20), 20))
    driver.drain()


def test_a_scripted_life_is_lived_without_a_fault():
    driver = Driver(PlainCache, TIGHT)
    live(driver)
    assert not [kind for kind in KINDS if not (driver.counts + driver.waits)[kind]]


def test_there_is_something_out_of_order_in_every_situation():
    driver = Driver(PlainCache, TIGHT)
    calls = [{name for name, *_ in driver._out_of_order()}]
    driver.begin_step()
    lease = driver.admit(CacheRequest("r", range(6)), 6)
    calls.append({name for name, *_ in driver._out_of_order()})
    driver.plan(0, 6)
    calls.append({name for name, *_ in driver._out_of_order()})
    driver.run()
    driver.commit(0, ())
    calls.append({name for name, *_ in driver._out_of_order()})
    assert not lease.remaining
    news = [now - before for before, now in itertools.pairwise(calls)]
    assert [len(names) > 0 for names in news] == [True] * 3
    assert "nothing left to plan" in news[-1] and "a second plan" in news[1]


@pytest.mark.parametrize("fault", FAULTY, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found_in_that_life(fault):
    with pytest.raises((AssertionError, OwnershipError), match=fault.found_by):
        live(Driver(fault, TIGHT))


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTY, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found_by_chance(fault):
    with pytest.raises((AssertionError, OwnershipError), match=fault.found_by):
        run_state_machine_as_test(machine_of(fault, st.just(TIGHT)), settings=HUNT)
