"""The executor that runs no model finds what a real model turns into plausible wrong text."""

from dataclasses import replace

import pytest

from cache.leases import CacheRequest, Copy, CopyKind, ExportTo, Hit, Lease, Phase, StepPlan
from cache.null_executor import ExecutionError, NullExecutor, Traffic
from cache.pools.allocator import Ownership
from tests.cache.memory import Shape, make_storage

SHAPE = Shape(pages=((8, 4),), slots=(4,))


class Bench:
    """Storage without a manager: leases are given indices by hand."""

    def __init__(self, shape: Shape = SHAPE) -> None:
        self.storage = make_storage(shape)
        self.executor = NullExecutor(self.storage)

    def lease(
        self, ids=range(12), name: str = "r", pages: int = 3, salt: str | None = None
    ) -> Lease:
        tables = tuple(pool.alloc(pages) for pool in self.storage.pages)
        slots = [pool.alloc(1)[0] for pool in self.storage.states]
        request = CacheRequest(name, ids, salt=salt)
        return Lease(request, Hit(), tables, slots, phase=Phase.HOLDING)

    def plan(self, lease: Lease, end: int, start: int | None = None, **changes) -> StepPlan:
        start = lease.computed if start is None else start
        plan = StepPlan(lease, start, end, lease.pages, tuple(lease.slots))
        lease.plan = replace(plan, **changes)
        return lease.plan

    def run(self, lease: Lease, end: int, start: int | None = None, **changes) -> None:
        self.executor.run([self.plan(lease, end, start, **changes)])
        lease.plan, lease.computed = None, end


def refused(says: str):
    return pytest.raises(ExecutionError, match=says)


def test_pieces_run_one_after_the_other_and_the_state_is_at_their_ends():
    bench = Bench()
    lease = bench.lease()
    assert bench.executor.boundary_at(1) is None
    for end in (3, 4, 9, 12):
        bench.run(lease, end)
        assert bench.executor.boundary_at(1) == end


@pytest.mark.parametrize("start", [3, 5, 11])
def test_i01_a_state_is_resumed_at_its_own_boundary_alone(start):
    """Too early counts tokens twice, too late skips some."""
    bench = Bench()
    lease = bench.lease()
    bench.run(lease, 4)
    with refused(f"I-01: r resumes at {start} from slot 1, which holds .* at 4"):
        bench.run(lease, 12, start)


def test_i01_a_slot_without_a_state_cannot_be_resumed():
    bench = Bench()
    with refused("resumes at 4 from slot 1, which holds nothing"):
        bench.run(bench.lease(), 8, 4)


def test_i06_a_row_at_zero_starts_from_zeros_whatever_its_slot_holds():
    bench = Bench()
    lease = bench.lease()
    bench.run(lease, 4)
    bench.run(lease, 2, start=0)
    assert bench.executor.boundary_at(1) == 2
    with refused("at 2"):
        bench.run(lease, 6, 4)


def test_a_slot_of_another_request_is_foreign_even_at_the_same_boundary():
    bench = Bench()
    a, b = bench.lease(), bench.lease([5, *range(1, 12)], "b")
    bench.run(a, 4)
    bench.run(b, 4)
    with refused("b resumes at 4 from slot 1, which holds the state of another prefix at 4"):
        bench.run(b, 6, slots=(1,))


def test_a_prefix_differs_by_its_first_token_and_by_its_salt():
    """Everything after the difference is equal: only a chained identity tells them apart."""
    bench = Bench()
    a = bench.lease([9, 2, 3, 4], pages=1)
    b = bench.lease([8, 2, 3, 4], "b", pages=1)
    c = bench.lease([9, 2, 3, 4], "c", pages=1, salt="tenant")
    bench.run(a, 3)
    for lease in (b, c):
        with refused(
            f"{lease.request.name} resumes at 3 from slot 1, which holds .*another prefix"
        ):
            bench.run(lease, 4, 3, slots=(1,))


def test_equal_prefixes_may_share_what_is_there():
    """As a prefix cache would have it: another lease, a copy of the state, the same page below."""
    bench = Bench()
    a, b = bench.lease(), bench.lease([*range(4), 50, 51], "b", pages=2)
    bench.run(a, 4)
    b.pages[0][0] = a.pages[0][0]
    bench.run(b, 6, 4, copies=(Copy(CopyKind.STATE, 0, 1, 2),))
    assert (bench.executor.boundary_at(1), bench.executor.boundary_at(2)) == (4, 6)


def test_a_stale_generation_is_nobodys_state():
    """The slot was given back and handed out again: what it holds is not its new owner's."""
    bench = Bench(Shape(pages=((8, 4),), slots=(1,)))
    a = bench.lease()
    bench.run(a, 4)
    pool = bench.storage.states[0]
    pool.free([1])
    b = bench.lease(name="b")
    assert b.slots == [1] and bench.executor.boundary_at(1) is None
    b.pages = a.pages
    with refused("b resumes at 4 from slot 1, which holds nothing"):
        bench.run(b, 8, 4)


def test_a_stale_generation_is_nobodys_page():
    bench = Bench(Shape(pages=((3, 4),), slots=(2,)))
    a = bench.lease(pages=1)
    bench.run(a, 4)
    bench.storage.pages[0].free([1])
    bench.storage.pages[0].alloc(2)
    assert bench.storage.pages[0].alloc(1) == [1]
    a.pages = ([1, 2],)
    with refused("I-01: r reads row 0 from page 1, which holds another prefix or nothing there"):
        bench.run(a, 5)


def test_a_donated_state_is_still_there_and_cannot_be_written():
    bench = Bench()
    lease = bench.lease()
    bench.run(lease, 4)
    bench.storage.states[0].allocator.donate([1])
    assert bench.executor.boundary_at(1) == 4
    with refused("I-13: slot 1 is written, but it is cached"):
        bench.run(lease, 6)


@pytest.mark.parametrize("missing", [0, 3, 4])
def test_a_missing_row_is_found_wherever_it_is(missing):
    """The pages of another lease hold all rows but one."""
    bench = Bench()
    lease = bench.lease()
    bench.run(lease, 6)
    page, place = divmod(missing, 4)
    del bench.executor._pages[0][lease.pages[0][page]].rows[place]
    with refused(f"r reads row {missing} from page {lease.pages[0][page]}"):
        bench.run(lease, 7)


def test_a_page_of_another_prefix_is_found():
    bench = Bench()
    a, b = bench.lease(), bench.lease([5, *range(1, 12)], "b")
    bench.run(a, 4)
    bench.run(b, 4)
    with refused("b reads row 0 from page 1, which holds another prefix"):
        bench.run(b, 8, pages=([1, *b.pages[0][1:]],))


def test_pages_in_the_wrong_order_are_found():
    bench = Bench()
    lease = bench.lease()
    bench.run(lease, 8)
    lease.pages[0][:2] = lease.pages[0][1::-1]
    with refused("reads row 0 from page 2"):
        bench.run(lease, 9)


def test_a_table_that_is_too_short_is_found_before_anything_is_written():
    bench = Bench()
    lease = bench.lease(pages=1)
    with refused("r has 1 pages of 4, plans to 5"):
        bench.run(lease, 5)
    assert bench.executor.boundary_at(1) is None


@pytest.mark.parametrize("state", [Ownership.FREE, Ownership.CACHED, Ownership.INFLIGHT])
@pytest.mark.parametrize("unit", ["page", "slot"])
def test_i13_only_what_is_private_is_written(unit, state):
    bench = Bench()
    lease = bench.lease(pages=1)
    pool = bench.storage.pages[0] if unit == "page" else bench.storage.states[0]
    index = 1
    if state is Ownership.CACHED:
        pool.allocator.donate([1])
    elif state is Ownership.FREE:
        pool.free([1])
    else:
        (index,) = pool.alloc(1, state)
    changes = {"pages": ([index],)} if unit == "page" else {"slots": (index,)}
    with refused(f"I-13: {unit} {index} is written, but it is {state}"):
        bench.run(lease, 3, **changes)


@pytest.mark.parametrize("unit", ["page", "slot"])
def test_i11_the_sink_is_no_place_for_a_row(unit):
    bench = Bench()
    lease = bench.lease(pages=1)
    changes = {"pages": ([0],)} if unit == "page" else {"slots": (0,)}
    with refused(f"I-13: {unit} 0 is written, but it is reserved"):
        bench.run(lease, 3, **changes)


def test_tracked_slots_receive_states_too():
    bench = Bench()
    lease = bench.lease()
    (tracked,) = bench.storage.states[0].alloc(1, Ownership.TRACKED)
    bench.run(lease, 10, exports=(ExportTo(8, (tracked,)),))
    assert (bench.executor.boundary_at(1), bench.executor.boundary_at(tracked)) == (10, 8)
    lease.slots[0] = tracked
    bench.run(lease, 12, 8)


def test_an_export_counts_from_the_start_of_its_plan():
    bench = Bench()
    lease = bench.lease()
    (tracked,) = bench.storage.states[0].alloc(1, Ownership.TRACKED)
    bench.run(lease, 5)
    bench.run(lease, 12, exports=(ExportTo(3, (tracked,)),))
    assert bench.executor.boundary_at(tracked) == 8


@pytest.mark.parametrize("offset", [0, -1, 6])
def test_an_export_outside_of_its_plan_is_found(offset):
    bench = Bench()
    lease = bench.lease()
    bench.storage.states[0].alloc(1)
    bench.run(lease, 4)
    with refused(rf"r keeps the state at {4 + offset}, outside of its plan 4\.\.9"):
        bench.run(lease, 9, exports=(ExportTo(offset, (2,)),))


@pytest.mark.parametrize("what", ["rows", "exports", "own slot"])
def test_i10_a_slot_is_written_once_a_step(what):
    """Two rows that start from zeros in one slot would each be right alone."""
    bench = Bench()
    a, b = bench.lease(name="a"), bench.lease(name="b")
    (tracked,) = bench.storage.states[0].alloc(1, Ownership.TRACKED)
    export = (ExportTo(2, (tracked,)),)
    plans = {
        "rows": [bench.plan(a, 4), bench.plan(b, 4, slots=(1,))],
        "exports": [bench.plan(a, 4, exports=export), bench.plan(b, 4, exports=export)],
        "own slot": [bench.plan(a, 4, exports=(ExportTo(2, (1,)),))],
    }[what]
    for plan in plans:
        plan.lease.plan = plan
    slot = tracked if what == "exports" else 1
    with refused(f"I-13: slot {slot} is written twice in one step"):
        bench.executor.run(plans)


def test_i10_a_row_is_written_once_a_step():
    bench = Bench()
    a, b = bench.lease(name="a"), bench.lease(name="b")
    with refused("I-13: page 1 is written twice in one step"):
        bench.executor.run([bench.plan(a, 4), bench.plan(b, 4, pages=a.pages)])


def test_rows_read_what_was_there_before_the_step_not_what_a_neighbour_writes():
    """B would resume from the state that A leaves in this very step."""
    bench = Bench()
    a, b = bench.lease(), bench.lease(name="b")
    b.pages[0][0] = a.pages[0][0]
    plans = [bench.plan(a, 4), bench.plan(b, 6, 4, slots=(1,))]
    with refused("b resumes at 4 from slot 1, which holds nothing"):
        bench.executor.run(plans)


def test_a_plan_that_is_no_longer_in_flight_is_not_run():
    bench = Bench()
    lease = bench.lease()
    old = bench.plan(lease, 4)
    new = bench.plan(lease, 3)
    with refused("r: this plan is not in flight"):
        bench.executor.run([old])
    bench.executor.run([new])
    lease.plan = None
    with refused("not in flight"):
        bench.executor.run([new])


def test_a_state_may_be_left_short_of_the_plan():
    bench = Bench()
    lease = bench.lease()
    plan = bench.plan(lease, 8)
    bench.executor.run([plan], {plan: 5})
    lease.computed = 5
    assert bench.executor.boundary_at(1) == 5
    bench.run(lease, 9)


@pytest.mark.parametrize("end", [2, 9])
def test_a_state_is_not_left_outside_of_its_plan(end):
    bench = Bench()
    lease = bench.lease()
    bench.run(lease, 2)
    plan = bench.plan(lease, 8)
    with refused(rf"keeps the state at {end}, outside of its plan 2\.\.8"):
        bench.executor.run([plan], {plan: end})


@pytest.mark.parametrize("kind", CopyKind)
def test_a_copy_wants_a_source_that_holds_something(kind):
    bench = Bench()
    bench.lease()
    unit = "slot" if kind is CopyKind.STATE else "page"
    with refused(f"copy from {unit} 3, which holds nothing"):
        bench.executor.copy([Copy(kind, 0, 3, 1)])


@pytest.mark.parametrize("kind", CopyKind)
def test_a_copy_writes_what_is_private_alone(kind):
    bench = Bench()
    bench.run(bench.lease(pages=1), 4)
    unit = "slot" if kind is CopyKind.STATE else "page"
    pool = bench.storage.states[0] if kind is CopyKind.STATE else bench.storage.pages[0]
    with refused(f"I-13: {unit} 2 is written, but it is free"):
        bench.executor.copy([Copy(kind, 0, 1, 2)])
    pool.alloc(1, Ownership.INFLIGHT)
    with refused(f"I-13: {unit} 2 is written, but it is inflight"):
        bench.executor.copy([Copy(kind, 0, 1, 2)])
    with refused(f"I-13: {unit} 0 is written, but it is reserved"):
        bench.executor.copy([Copy(kind, 0, 1, 0)])


@pytest.mark.parametrize("kind", CopyKind)
def test_a_copy_may_fill_what_has_just_been_published_and_only_once(kind):
    """Afterwards it is a checkpoint, and a checkpoint never changes (I-12)."""
    bench = Bench()
    bench.run(bench.lease(pages=1), 4)
    unit = "slot" if kind is CopyKind.STATE else "page"
    pool = bench.storage.states[0] if kind is CopyKind.STATE else bench.storage.pages[0]
    pool.alloc(1)
    pool.allocator.donate([2])
    bench.executor.copy([Copy(kind, 0, 1, 2)])
    with refused(f"I-13: {unit} 2 is written, but it is cached"):
        bench.executor.copy([Copy(kind, 0, 1, 2)])
    pool.evict([2])
    pool.alloc(pool.free_count)
    pool.allocator.donate([2])
    bench.executor.copy([Copy(kind, 0, 1, 2)])


def test_a_copied_page_goes_its_own_way():
    """Copy-on-write of a tail: both continue, neither sees the other's rows."""
    bench = Bench()
    a = bench.lease([1, 2, 3, 4], pages=1)
    b = bench.lease([1, 2, 8, 9], "b", pages=1)
    bench.run(a, 2)
    copies = (Copy(CopyKind.STATE, 0, 1, 2), Copy(CopyKind.PAGE, 0, 1, 2))
    bench.run(b, 4, 2, copies=copies)
    bench.run(a, 4)
    rows = [bench.executor._pages[0][page].rows for page in (1, 2)]
    assert all(rows[0][t] == rows[1][t] for t in (0, 1))
    assert all(rows[0][t] != rows[1][t] for t in (2, 3))


def test_copies_run_in_order_and_all_before_any_plan():
    bench = Bench()
    a = bench.lease(range(6), pages=2)
    b = bench.lease(range(6), "b", pages=2)
    c = bench.lease(range(6), "c", pages=2)
    bench.run(a, 4)
    b.pages[0][0] = c.pages[0][0] = a.pages[0][0]
    chain = (Copy(CopyKind.STATE, 0, 1, 2), Copy(CopyKind.STATE, 0, 2, 3))
    plans = [bench.plan(a, 5), bench.plan(b, 5, 4), bench.plan(c, 5, 4, copies=chain)]
    bench.executor.run(plans)
    assert [bench.executor.boundary_at(slot) for slot in (1, 2, 3)] == [5, 5, 5]
    lease = bench.lease(range(6), "d", pages=2)
    backwards = (Copy(CopyKind.STATE, 0, lease.slots[0], 2), chain[0])
    with refused("copy from slot 4, which holds nothing"):
        bench.executor.copy(backwards)


def test_what_is_placed_by_hand_is_what_these_tokens_are():
    bench = Bench()
    lease = bench.lease(salt="tenant")
    for tokens, salt in (([9, *range(1, 8)], "tenant"), (range(8), None)):
        bench.executor.place(lease.pages[0][:2], 1, tokens, salt)
        with refused("I-01: r resumes at 8"):
            bench.run(lease, 9, 8)
    bench.executor.place(lease.pages[0][:2], 1, range(8), "tenant")
    with refused("I-01: r resumes at 7"):
        bench.run(lease, 9, 7)
    bench.run(lease, 12, 8)


def test_each_group_is_its_own():
    """Unequal pages and slots: a fault in the second group alone is found."""
    bench = Bench(Shape(pages=((8, 4), (9, 3)), slots=(2, 3)))
    bench.storage.states[1].alloc(1)
    lease = bench.lease()
    assert lease.slots == [1, 2]
    bench.run(lease, 5)
    assert (bench.executor.boundary_at(1, 0), bench.executor.boundary_at(2, 1)) == (5, 5)
    bench.run(lease, 7)
    with refused("resumes at 7 from slot 3"):
        bench.storage.states[1].alloc(1)
        bench.run(lease, 8, slots=(1, 3))
    bench.storage.pages[1].free([lease.pages[1][2]])
    with refused("page 3 is written, but it is free"):
        bench.run(lease, 9, 7)


def test_bytes_are_those_of_a_real_executor():
    """Rows of 32 bytes, states of 88: a piece of five tokens, then one token, then a copy."""
    bench = Bench()
    lease = bench.lease()
    (tracked,) = bench.storage.states[0].alloc(1, Ownership.TRACKED)
    bench.run(lease, 5, exports=(ExportTo(4, (tracked,)),))
    assert bench.executor.traffic == Traffic(0, 2 * 88, 5 * 32, 5 * 32, 0)
    bench.run(lease, 6)
    assert bench.executor.traffic == Traffic(88, 3 * 88, 11 * 32, 6 * 32, 0)
    bench.executor.copy([Copy(CopyKind.STATE, 0, 1, tracked)])
    assert bench.executor.traffic == Traffic(88, 3 * 88, 11 * 32, 6 * 32, 88)
