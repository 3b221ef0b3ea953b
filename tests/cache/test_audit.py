"""An audit that cannot fail is a defect: each kind of damage, done by hand, is found and named."""

from dataclasses import replace

import pytest

from cache.audit import AuditError, audit_holders
from cache.leases import CacheRequest, Phase
from cache.plain import PlainCache
from cache.pools.allocator import Ownership
from cache.pools.pool import Pool
from tests.cache.memory import Shape, make_storage

SHAPE = Shape(pages=((8, 4), (8, 3)), slots=(4, 5))


class World:
    """In a step: `idle` is at 5 of 9 tokens, `flying` plans from 4 to 6, `fresh` is admitted."""

    def __init__(self) -> None:
        self.storage = make_storage(SHAPE)
        self.cache = PlainCache(self.storage)
        self.cache.begin_step()
        self.idle, self.flying, self.fresh = (
            self.cache.admit(CacheRequest(name, range(9))) for name in ("idle", "flying", "fresh")
        )
        for lease, computed in ((self.idle, 5), (self.flying, 4)):
            self.cache.plan(lease, computed)
            self.cache.commit(lease, computed)
        self.cache.plan(self.flying, 2)
        self.page, self.slot = self.storage.pages[0], self.storage.states[0]
        self.pages, self.slots = self.page.allocator, self.slot.allocator


DAMAGE = {}


def damage(says: str):
    """Register a way to break a world, and what must be said of it."""

    def register(function):
        DAMAGE[function.__name__] = (function, says)
        return function

    return register


@damage("I-10: slot 2 of .'flying'. is free")
def a_slot_is_freed_under_its_owner(w):
    w.slot.free(w.flying.slots[:1])


@damage("I-10: page 2 of .'idle'. is free")
def a_page_is_freed_under_its_owner(w):
    w.page.free([w.idle.pages[0][1]])


@damage("I-10: page 1 of .'idle'. is free")
def a_page_of_the_second_group_is_freed_under_its_owner(w):
    w.storage.pages[1].free([1])


@damage("I-10: slot 1 of .'idle'. is free")
def a_slot_of_the_second_group_is_freed_under_its_owner(w):
    w.storage.states[1].free([1])


@damage("I-10: slot 3 is active, yet nobody holds it")
def a_slot_is_taken_and_forgotten(w):
    w.slot.alloc(1)


@damage("I-10: page 5 is active, yet nobody holds it")
def a_page_is_taken_and_forgotten(w):
    w.page.alloc(1)


@damage("I-10: page 2 is active, yet nobody holds it")
def a_page_is_dropped_from_its_table(w):
    w.idle.pages[0].pop()


@damage("idle is at 5 with 1 pages, needs 2")
def a_table_is_too_short(w):
    w.page.free([w.idle.pages[0].pop()])


@damage("flying is at 6 with 1 pages, needs 2")
def a_table_is_too_short_for_the_plan_in_flight(w):
    """Its boundary is at 4, where one page would do."""
    w.page.free([w.flying.pages[0].pop()])


@damage("I-10: slot 1 is active, yet held by .'idle', 'flying'.")
def two_rows_share_a_slot(w):
    w.slot.free([2])
    w.flying.slots[0] = 1


@damage("I-10: page 1 is active, yet held by .'idle', 'flying'.")
def two_rows_share_a_page(w):
    w.flying.pages[0][0] = 1


@damage("I-10: page 1 is active, yet held by .'same', 'same'.")
def two_rows_of_one_name_share_a_page(w):
    for lease in (w.idle, w.flying):
        lease.request = replace(lease.request, name="same")
    w.flying.pages[0][0] = 1


@damage(r"I-10: idle holds a page twice: \[1, 1\]")
def a_page_stands_twice_in_one_table(w):
    w.page.free([2])
    w.idle.pages[0][1] = 1


@damage("I-10: page 0 of .'idle'. is reserved")
def the_sink_stands_in_a_table(w):
    w.page.free([1])
    w.idle.pages[0][0] = 0


@damage("I-10: page 99 of .'idle'. does not exist")
def a_table_names_a_page_that_there_is_not(w):
    w.page.free([1])
    w.idle.pages[0][0] = 99


@damage("I-10: slot -1 of .'idle'. does not exist")
def a_slot_is_minus_one(w):
    w.slot.free([1])
    w.idle.slots[0] = -1


@damage("idle is at 5 without a slot")
def a_holder_has_no_slot(w):
    w.slot.free([1])
    w.idle.slots[0] = 0


@damage("idle has 1 page tables and 2 slots, one each for 2 and 2 groups")
def a_table_is_missing(w):
    w.idle.pages = w.idle.pages[:1]


@damage("idle has 2 page tables and 1 slots")
def a_slot_entry_is_missing(w):
    w.idle.slots.pop()


@damage("idle knows 9 tokens, has computed 10 and plans to 10")
def more_is_computed_than_known(w):
    w.idle.computed = 10


@damage("idle knows 9 tokens, has computed -1")
def less_than_nothing_is_computed(w):
    w.idle.computed = -1


@damage("flying knows 5 tokens, has computed 4 and plans to 6")
def a_plan_goes_beyond_what_is_known(w):
    del w.flying.tokens[5:]


@damage("flying knows 9 tokens, has computed 7 and plans to 6")
def a_plan_ends_before_what_is_computed(w):
    w.flying.computed = 7


@damage("I-06: flying is at 3, its plan at 4")
def the_boundary_moves_under_a_plan(w):
    w.flying.computed = 3


@damage("flying is holding, its plan in flight is of idle")
def a_plan_is_in_the_wrong_lease(w):
    w.flying.plan = replace(w.flying.plan, lease=w.idle)


@damage("fresh is admitted, its plan in flight is of fresh")
def a_plan_is_in_flight_before_anything_is_held(w):
    w.fresh.plan = replace(w.flying.plan, lease=w.fresh, start=0)


@damage(r"I-10: flying holds slots \[3, 2\] and pages .*; its plan is in \(2, 2\)")
def a_slot_is_swapped_under_a_plan(w):
    w.slot.free([2])
    w.slot.alloc(1)
    w.flying.slots[0] = 3


@damage("I-10: flying holds slots .* its plan is in")
def a_table_is_replaced_under_a_plan(w):
    w.flying.pages = tuple([*table] for table in w.flying.pages)
    w.flying.pages[0].append(w.page.alloc(1)[0])


@damage("flying has a plan in flight, but no step is open")
def a_step_ends_under_a_plan(w):
    w.cache._in_step = False


@damage("idle has ended, yet is live")
def the_dead_are_among_the_living(w):
    w.idle.phase = Phase.ENDED


@damage("I-10: slot 1 is active, yet nobody holds it")
def a_lease_is_forgotten_with_all_it_holds(w):
    del w.cache._leases[w.idle]


@damage("fresh holds storage before its first plan")
def a_lease_holds_a_slot_before_its_first_plan(w):
    w.fresh.slots[0] = w.slot.alloc(1)[0]


@damage("fresh holds storage before its first plan")
def a_lease_holds_a_page_before_its_first_plan(w):
    w.fresh.pages[1].extend(w.storage.pages[1].alloc(1))


@damage("1 pages are neither active nor free")
def a_page_is_donated_where_nothing_is_shared(w):
    w.pages.donate([1])


@damage("1 slots are neither active nor free")
def a_tracked_slot_is_forgotten(w):
    """The audit of all managers does not know who owns tracked slots; the plain cache has none."""
    w.slot.alloc(1, Ownership.TRACKED)


@damage("1 slots are neither active nor free")
def a_slot_is_received_that_nobody_sends(w):
    w.slot.alloc(1, Ownership.INFLIGHT)


@damage(r"I-10: slot in free list or free, not both: \{1\}")
def the_free_list_names_an_owned_slot(w):
    w.slots._free[1] = None


@damage(r"I-10: slot in free list or free, not both: \{3\}")
def the_free_list_has_lost_a_slot(w):
    w.slots._free.popitem(last=False)


@damage(r"I-10: slot in free list or free, not both: \{99\}")
def the_free_list_names_what_there_is_not(w):
    w.slots._free[99] = None


@damage(r"I-10: slot in free list or free, not both: \{1\}")
def an_owned_slot_is_marked_free(w):
    w.slots._states[1] = Ownership.FREE


@damage("I-10: slot counts .* against a recount")
def a_count_is_off(w):
    w.slots._counts[Ownership.ACTIVE] += 1


@damage("I-10: slot counts .* against a recount")
def a_second_slot_is_reserved(w):
    w.slots._states[3] = Ownership.RESERVED
    del w.slots._free[3]


@damage("I-11: slot 0 is active, not reserved")
def the_sink_is_owned(w):
    w.slots._states[0] = Ownership.ACTIVE


@damage("I-11: slot 0 is in the free list")
def the_sink_is_about_to_be_handed_out(w):
    w.slots._free[0] = None


@damage("I-13: slot 4 was written while it was free")
def a_free_slot_is_written(w):
    w.slot.tensors[1][2, 4] = 0.0


@damage("I-13: page 8 was written while it was free")
def a_free_page_is_written(w):
    w.storage.pages[1].tensors[0][1, 8, 2, 1] = 0.0


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found_and_named(name):
    world = World()
    world.cache.audit()
    break_it, says = DAMAGE[name]
    break_it(world)
    with pytest.raises(AuditError, match=says) as caught:
        world.cache.audit()
    assert str(caught.value) == "; ".join(caught.value.faults)


def test_every_violation_is_listed_not_only_the_first():
    world = World()
    world.slot.alloc(2)
    world.page.alloc(1)
    world.idle.computed = 10
    with pytest.raises(AuditError) as caught:
        world.cache.audit()
    assert sum("nobody holds it" in fault for fault in caught.value.faults) == 3
    assert any("idle knows 9" in fault for fault in caught.value.faults)


def test_an_audit_repairs_nothing():
    world = World()
    world.slot.alloc(1)
    faults = []
    for _ in range(2):
        with pytest.raises(AuditError) as caught:
            world.cache.audit()
        faults.append(caught.value.faults)
    assert faults[0] == faults[1]


def test_what_is_cached_may_have_many_holders_or_none_and_nothing_else_may():
    pool = Pool(4, "page", 1)
    pool.alloc(3)
    pool.allocator.donate([1])
    assert audit_holders(pool, [("a", [1, 2]), ("b", [1, 3])]) == []
    assert audit_holders(pool, [("a", [2]), ("b", [3])]) == []
    (fault,) = audit_holders(pool, [("a", [2, 3]), ("b", [3])])
    assert fault == "I-10: page 3 is active, yet held by ['a', 'b']"
    (fault,) = audit_holders(pool, [("a", [1, 2, 1]), ("b", [3])])
    assert fault == "I-10: a holds a page twice: [1, 2, 1]"
