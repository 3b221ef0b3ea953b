"""Who owns which index: every arrow, every refusal, and a naive dict to compare with."""

import itertools

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cache.pools.allocator import PRIVATE, Allocator, Handle, Ownership, OwnershipError

FREE, ACTIVE, TRACKED, INFLIGHT, CACHED, RESERVED = (
    Ownership.FREE,
    Ownership.ACTIVE,
    Ownership.TRACKED,
    Ownership.INFLIGHT,
    Ownership.CACHED,
    Ownership.RESERVED,
)
ARROWS = {  # call: what it allows, and where it leads
    "donate": ((ACTIVE, TRACKED), CACHED),
    "land as active": ((INFLIGHT,), ACTIVE),
    "land as cached": ((INFLIGHT,), CACHED),
    "free": (PRIVATE, FREE),
    "evict": ((CACHED,), FREE),
}


def follow(allocator: Allocator, arrow: str, indices) -> object:
    verb, _, target = arrow.partition(" as ")
    call = getattr(allocator, verb)
    return call(indices, Ownership(target)) if target else call(indices)


def in_each_state() -> tuple[Allocator, dict[Ownership, int]]:
    """An allocator, and one of its indices in each state."""
    allocator = Allocator(6, "slot")
    at = {state: allocator.alloc(1, state)[0] for state in PRIVATE}
    at[CACHED] = allocator.alloc(1)[0]
    allocator.donate([at[CACHED]])
    return allocator, {**at, FREE: 5, RESERVED: 0}


def observed(allocator: Allocator) -> tuple:
    return (
        [allocator.state_of(i) for i in range(allocator.size + 1)],
        allocator.free_order(),
        [allocator.count(state) for state in Ownership],
        list(allocator._generations),
    )


def test_s01_indices_come_from_the_head_and_go_back_to_the_tail():
    allocator = Allocator(4)
    assert allocator.alloc(2) == [1, 2]
    allocator.free([1])
    assert allocator.alloc(3) == [3, 4, 1]
    assert allocator.alloc(1) is None


def test_indices_given_back_together_come_again_in_the_order_they_were_given():
    allocator = Allocator(4)
    allocator.alloc(4)
    allocator.free([3, 1])
    allocator.free([2])
    assert allocator.alloc(3) == [3, 1, 2]


def test_reclaim_makes_the_books_anew_from_what_is_cached():
    """Whatever they said: here they are torn in every way."""
    allocator, at = in_each_state()
    handles = {state: allocator.handle(i) for state, i in at.items() if state is not FREE}
    allocator._free.update({at[ACTIVE]: None, 0: None})
    allocator._counts[TRACKED] = 7
    allocator._states[at[INFLIGHT]] = FREE  # its generation has not followed yet
    for _ in range(2):
        assert allocator.reclaim([at[CACHED]]) == [1, 2, 3, 5, 6]
        assert allocator.audit() == []
        assert allocator.free_order() == (1, 2, 3, 5, 6)
    assert [state for state, handle in handles.items() if allocator.is_live(handle)] == [
        CACHED, RESERVED,
    ]  # fmt: skip
    allocator.alloc(5)
    assert not any(allocator.is_live(handles[state]) for state in PRIVATE)


@pytest.mark.parametrize("keep", [[0], [7], [-1], [4, 4]])
def test_reclaim_refuses_to_keep_what_cannot_be_cached(keep):
    allocator, _ = in_each_state()
    before = observed(allocator)
    with pytest.raises(OwnershipError, match="reclaim: each slot once, of 1..6; got"):
        allocator.reclaim(keep)
    assert observed(allocator) == before


def test_newest_first_they_come_again_at_once_and_in_the_order_they_were_given():
    allocator = Allocator(5, newest_first=True)
    allocator.alloc(4)
    allocator.free([3, 1])
    allocator.free([2])
    allocator.donate([4])
    assert allocator.free_order() == (2, 3, 1, 5)
    allocator.evict([4])
    assert allocator.alloc(5) == [4, 2, 3, 1, 5]
    allocator.clear()
    assert allocator.free_order() == (1, 2, 3, 4, 5)


def test_s02_too_many_is_none_and_takes_nothing():
    allocator = Allocator(4)
    before = observed(allocator)
    assert allocator.alloc(5) is None
    assert observed(allocator) == before
    assert allocator.alloc(4) == [1, 2, 3, 4]


def test_nothing_can_be_asked_of_a_full_pool():
    allocator = Allocator(1)
    allocator.alloc(1)
    assert allocator.alloc(0) == []
    assert allocator.alloc(1) is None


def test_s03_rows_and_states_are_counted_apart():
    """The request row goes and comes back; the state it kept is neither lost nor drawn again."""
    rows, states = Allocator(10, "row"), Allocator(20, "slot")
    (row,), (state,) = rows.alloc(1), states.alloc(1)
    assert (rows.free_count, states.free_count) == (9, 19)
    states.free([state])
    rows.free([row])
    assert (rows.free_count, states.free_count) == (10, 20)
    (row,), (state,) = rows.alloc(1), states.alloc(1)
    rows.free([row])
    assert (rows.free_count, states.free_count) == (10, 19)
    rows.alloc(1)
    assert (rows.free_count, states.free_count) == (9, 19)
    assert states.state_of(state) is ACTIVE


@pytest.mark.parametrize("arrow", ARROWS)
@pytest.mark.parametrize("state", Ownership)
def test_each_arrow_leaves_from_its_states_alone(arrow, state):
    """S04 among them: free of a free index. What is refused has changed nothing."""
    allocator, at = in_each_state()
    index = at[state]
    allowed, target = ARROWS[arrow]
    before = observed(allocator)
    if state in allowed:
        follow(allocator, arrow, [index])
        assert allocator.state_of(index) is target
        assert not allocator.audit()
    else:
        with pytest.raises(
            OwnershipError, match=rf"slot {index} is {state}.*allowed: {allowed[0]}"
        ):
            follow(allocator, arrow, [index])
        assert observed(allocator) == before


@pytest.mark.parametrize("arrow", ARROWS)
@pytest.mark.parametrize("bad", ["free", "twice", "beyond", "negative"])
def test_one_bad_index_among_good_ones_and_none_is_moved(arrow, bad):
    allocator = Allocator(4)
    state = ARROWS[arrow][0][0]
    good = allocator.alloc(2, ACTIVE if state is CACHED else state)
    if state is CACHED:
        allocator.donate(good)
    last = {"free": 4, "twice": good[0], "beyond": 5, "negative": -1}[bad]
    before = observed(allocator)
    with pytest.raises(ValueError if bad in ("beyond", "negative") else OwnershipError):
        follow(allocator, arrow, [*good, last])
    assert observed(allocator) == before


def test_s04_a_double_free_is_an_error_also_when_the_index_has_a_new_owner_in_between():
    allocator = Allocator(2)
    allocator.alloc(2)
    allocator.free([1])
    with pytest.raises(OwnershipError, match="free: index 1 is free"):
        allocator.free([1])
    assert allocator.free_order() == (1,)


def test_the_reserved_index_is_never_handed_out_or_taken():
    allocator = Allocator(3)
    assert 0 not in allocator.alloc(3)
    for arrow in ARROWS:
        with pytest.raises(OwnershipError, match="index 0 is reserved"):
            follow(allocator, arrow, [0])
    allocator.clear()
    assert allocator.state_of(0) is RESERVED


@pytest.mark.parametrize("state", [FREE, CACHED, RESERVED])
def test_nothing_is_allocated_into_a_state_that_is_not_private(state):
    allocator = Allocator(2)
    with pytest.raises(ValueError, match="active, tracked, inflight"):
        allocator.alloc(1, state)
    assert allocator.free_count == 2


@pytest.mark.parametrize("state", [FREE, CACHED, RESERVED, TRACKED, INFLIGHT])
def test_what_arrives_lands_as_active_or_cached_and_as_nothing_else(state):
    allocator = Allocator(2)
    allocator.alloc(1, INFLIGHT)
    if state is CACHED:
        allocator.land([1], state)
        assert allocator.state_of(1) is CACHED
        return
    with pytest.raises(ValueError, match="active or cached"):
        allocator.land([1], state)
    assert allocator.state_of(1) is INFLIGHT


@pytest.mark.parametrize("size", [0, -1])
def test_a_pool_of_nothing_is_refused(size):
    with pytest.raises(ValueError, match=f"at least one page, got {size}"):
        Allocator(size, "page")


def test_a_negative_count_is_refused():
    with pytest.raises(ValueError, match="got -1"):
        Allocator(2).alloc(-1)


def test_s05_clear_gives_all_back_in_order_whatever_they_were():
    allocator, at = in_each_state()
    handles = [allocator.handle(at[state]) for state in (*PRIVATE, CACHED)]
    allocator.clear()
    assert allocator.free_order() == (1, 2, 3, 4, 5, 6)
    assert allocator.count(FREE) == 6 and not any(map(allocator.is_live, handles))
    assert not allocator.audit()


def test_br82_what_was_handed_out_does_not_change_with_the_free_list():
    allocator = Allocator(3)
    a, b = allocator.alloc(1), allocator.alloc(1)
    allocator.free(a)
    allocator.alloc(2)
    assert (a, b) == ([1], [2])
    taken = allocator.alloc(0)
    taken.append(7)
    assert all(type(index) is int for index in (*a, *b))
    assert not allocator.audit()


@pytest.mark.parametrize("verb", ["free", "evict"])
def test_br82_an_index_read_from_a_tensor_leaves_no_view_in_the_free_list(verb):
    """A page table row given back as it is: its memory is written again, the free list must not."""
    allocator = Allocator(3)
    table = torch.tensor(allocator.alloc(3))
    if verb == "evict":
        allocator.donate(table)
    assert getattr(allocator, verb)(table[:2]) == [1, 2]
    table[:] = 3
    assert allocator.free_order() == (1, 2)
    assert all(type(index) is int for index in allocator.free_order())


def test_br82_the_same_index_twice_in_a_tensor_is_a_double_free():
    """Two elements of a tensor are two objects, unequal as keys of a set."""
    allocator = Allocator(3)
    allocator.alloc(3)
    with pytest.raises(OwnershipError, match=r"named twice in \[2, 2\]"):
        allocator.free(torch.tensor([2, 2]))
    assert allocator.free_count == 0


@pytest.mark.parametrize("index", [1.0, "1", None])
def test_an_index_that_is_no_integer_is_refused_before_anything_moves(index):
    allocator = Allocator(2)
    allocator.alloc(2)
    with pytest.raises(TypeError):
        allocator.free([2, index])
    assert allocator.free_count == 0


def test_indices_may_come_from_a_generator():
    allocator = Allocator(3)
    allocator.alloc(3)
    assert allocator.free(i for i in (3, 1)) == [3, 1]


def test_a_handle_is_stale_once_its_index_was_given_back_and_stays_so():
    allocator = Allocator(1)
    for arrow in ("free", "evict"):
        allocator.alloc(1)
        handle = allocator.handle(1)
        assert allocator.is_live(handle)
        if arrow == "evict":
            allocator.donate([1])
            assert allocator.is_live(handle), "a gift is the same content"
        follow(allocator, arrow, [1])
        assert not allocator.is_live(handle)
        allocator.alloc(1)
        assert not allocator.is_live(handle), "the index has another owner"
        assert allocator.is_live(allocator.handle(1))
        allocator.free([1])


def test_a_handle_outlives_the_arrival_of_what_it_names():
    allocator = Allocator(1)
    allocator.alloc(1, INFLIGHT)
    handle = allocator.handle(1)
    allocator.land([1], ACTIVE)
    assert allocator.is_live(handle)


def test_a_free_index_cannot_be_held():
    with pytest.raises(OwnershipError, match="page 2 is free"):
        Allocator(2, "page").handle(2)


@pytest.mark.parametrize("index", [-1, 3])
def test_indices_that_do_not_exist_are_named_with_those_that_do(index):
    allocator = Allocator(2, "page")
    for call in (allocator.state_of, allocator.handle, lambda i: allocator.is_live(Handle(i, 0))):
        with pytest.raises(ValueError, match=f"page {index} does not exist; there are 0..2"):
            call(index)


class AgainstADict(RuleBasedStateMachine):
    """The allocator beside {index: state} and a plain list."""

    @initialize(size=st.integers(1, 7), newest_first=st.booleans())
    def make(self, size, newest_first):
        self.real = Allocator(size, newest_first=newest_first)
        self.states = {0: RESERVED, **dict.fromkeys(range(1, size + 1), FREE)}
        self.queue = list(range(1, size + 1))
        self.handles = []  # (handle, is it live)

    @rule(count=st.integers(0, 4), state=st.sampled_from(PRIVATE))
    def alloc(self, count, state):
        got = self.real.alloc(count, state)
        if count > len(self.queue):
            assert got is None
            return
        assert got == self.queue[:count]
        del self.queue[:count]
        self.states |= dict.fromkeys(got, state)
        self.handles += [[self.real.handle(i), True] for i in got]

    @rule(arrow=st.sampled_from(list(ARROWS)), indices=st.lists(st.integers(-1, 8), max_size=4))
    def move(self, arrow, indices):
        """Any indices, most of them wrong."""
        allowed, target = ARROWS[arrow]
        legal = len({*indices}) == len(indices)
        legal &= all(self.states.get(i) in allowed for i in indices)
        if not legal:
            with pytest.raises((OwnershipError, ValueError)):
                follow(self.real, arrow, indices)
            return
        self._move(arrow, indices, target)

    @rule(arrow=st.sampled_from(list(ARROWS)), data=st.data())
    def move_well(self, arrow, data):
        allowed, target = ARROWS[arrow]
        can = [i for i, state in self.states.items() if state in allowed]
        indices = data.draw(st.lists(st.sampled_from(can), unique=True)) if can else []
        self._move(arrow, indices, target)

    def _move(self, arrow, indices, target):
        got = follow(self.real, arrow, indices)
        self.states |= dict.fromkeys(indices, target)
        if target is FREE:
            assert got == indices
            self.queue = [*indices, *self.queue] if self.real.newest_first else self.queue + indices
            self._forget(indices)

    def _forget(self, indices):
        for entry in self.handles:
            entry[1] &= entry[0].index not in indices

    @rule()
    def clear(self):
        self.real.clear()
        self._forget(self.states)
        self.states |= {i: FREE for i in self.states if i}
        self.queue = list(range(1, self.real.size + 1))

    @invariant()
    def agree(self):
        if not hasattr(self, "real"):
            return
        assert {i: self.real.state_of(i) for i in self.states} == self.states
        assert self.real.free_order() == tuple(self.queue)
        assert self.real.free_count == len(self.queue)
        for state in Ownership:
            assert self.real.count(state) == list(self.states.values()).count(state)
        assert [self.real.is_live(handle) for handle, _ in self.handles] == [
            live for _, live in self.handles
        ]
        for a, b in itertools.pairwise(sorted(handle for handle, live in self.handles if live)):
            assert a.index != b.index, "two live handles of one index of different age"
        assert self.real.audit() == []


TestAgainstADict = AgainstADict.TestCase
TestAgainstADict.settings = settings(
    max_examples=60, deadline=None, derandomize=True, database=None
)
