"""The tree, row by row of serving.md 9.3, and against a model that knows prefixes only."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cache.identity import Identity, prefix_hashes
from cache.pools.allocator import Ownership, OwnershipError
from cache.pools.pool import Pool
from cache.radix.entries import checkpoints
from cache.radix.tree import Ledger, RadixTree
from cache.stats import Evictions
from tests.cache.machine import QUICK
from tests.cache.radix.planting import Garden


def upto(n, first=1):
    return list(range(first, first + n))


LONG, OTHER, FORK = upto(7), [10, 11, 12], [1, 2, 3, 4, 5, 60, 70]


def r01(**sizes):
    garden = Garden(**sizes)
    for tokens in ([1, 2, 3], LONG, OTHER, FORK):
        garden.insert(tokens)
    return garden


def test_an_insert_gives_back_what_is_there_and_splits_where_it_parts():
    """R01"""
    garden, seen = Garden(), []
    for tokens in ([1, 2, 3], LONG, OTHER, FORK):
        seen.append((garden.insert(tokens).already, *garden.free))
    assert seen == [(0, 125, 19), (3, 121, 18), (0, 118, 17), (5, 116, 16)]
    assert garden.shape() == {
        ((1, 2, 3),): 1,
        ((1, 2, 3), (4, 5)): None,
        ((1, 2, 3), (4, 5), (6, 7)): 2,
        ((1, 2, 3), (4, 5), (60, 70)): 4,
        ((10, 11, 12),): 3,
    }


def test_pages_go_leaf_by_leaf_states_alone_where_something_hangs_below():
    """R02 to R05"""
    garden = r01()
    assert garden.evict(tokens=1) == (3, 1)
    assert garden.evict(states=1) == (0, 1)
    assert garden.edges()[0] == ([1, 2, 3], False)
    assert garden.seen(upto(5)) == (0, 5, 4)
    assert garden.seen(FORK) == (7, 7, None)
    assert garden.seen(LONG) == (7, 7, None)
    assert garden.evict(states=1) == (2, 1)
    assert garden.seen(FORK) == (0, 5, 4)
    assert garden.seen(LONG) == (7, 7, None)
    assert garden.tree.evictions == Evictions(5, 3, 0)


def test_a_match_makes_only_the_state_that_it_found_recent():
    """R06"""
    garden = Garden(grid=3)
    for tokens in ([1, 2, 3], upto(6), [7, 8, 9], upto(6, 7)):
        garden.insert(tokens)
    for tokens in (upto(6), upto(6, 7), upto(6)):
        assert garden.match(tokens).depth == 6
    assert [garden.evict(states=1) for _ in range(4)] == [(0, 1), (0, 1), (3, 1), (3, 1)]
    assert garden.edges() == [([1, 2, 3], False), ([7, 8, 9], False)]


def test_a_tombstone_that_becomes_a_leaf_stays_until_its_pages_are_wanted():
    """R07"""
    garden = Garden(grid=2)
    garden.insert(upto(3))
    garden.insert(upto(5))
    assert garden.evict(states=1) == (0, 1)
    assert garden.evict(tokens=1) == (2, 1)
    assert garden.edges() == [([1, 2, 3], False)]
    assert garden.evict(tokens=1) == (3, 0)


def test_a_match_that_leaves_an_edge_splits_it_and_makes_no_state():
    """R08"""
    garden = Garden(grid=2)
    garden.insert(upto(6))
    assert garden.seen([1, 2, 3, 4, 9]) == (0, 4, 4)
    assert garden.edges() == [([1, 2, 3, 4], False), ([5, 6], True)]


def test_an_insert_fills_a_tombstone_and_a_second_one_is_refused():
    """R09"""
    garden = Garden(grid=2)
    garden.insert(upto(6))
    garden.match([1, 2, 3, 4, 9])
    done = garden.insert(upto(4))
    assert (done.already, done.refused) == (4, False)
    assert garden.seen([1, 2, 3, 4, 9]) == (4, 4, None)
    done = garden.insert(upto(4))
    assert (done.already, done.refused, *garden.free) == (4, True, 122, 18)


def test_states_of_a_path_go_from_the_one_that_was_not_used_for_longest():
    """R10"""
    garden = Garden(grid=2)
    for n in (2, 4, 6):
        garden.insert(upto(n))
    assert [garden.evict(states=1) for _ in range(3)] == [(0, 1), (0, 1), (2, 1)]
    assert (garden.edges(), garden.free) == ([([1, 2], False), ([3, 4], False)], (124, 20))


def test_whole_leaves_go_for_any_number_of_tokens():
    """R11"""
    garden = Garden(grid=2)
    for n in (2, 4, 6):
        garden.insert(upto(n))
    assert garden.evict(tokens=1) == (2, 1)
    assert garden.evict(tokens=3) == (4, 2)
    assert garden.edges() == []


def test_leaves_of_a_fork_go_with_their_states_and_the_fork_stays():
    """R12"""
    garden = Garden(grid=2)
    garden.insert([1, 2, 3, 4])
    garden.insert([1, 2, 5, 6])
    assert [garden.evict(states=1) for _ in range(2)] == [(2, 1), (2, 1)]
    assert garden.edges() == [([1, 2], False)]


def test_a_lock_keeps_the_pages_of_the_path_and_the_state_of_its_node_alone():
    """R13 and R14"""
    garden = Garden(grid=2)
    for n in (2, 4, 6):
        garden.insert(upto(n))
    receipt = garden.lock(garden.match([1, 2, 3, 4, 9]).node)
    assert garden.locks() == [(1, 0), (1, 1), (0, 0)]
    assert garden.tree.ledger() == Ledger(2, 4, 2, 1)
    assert garden.evict(states=9) == (2, 2)
    assert garden.edges() == [([1, 2], False), ([3, 4], True)]
    assert garden.evict(tokens=99) == (0, 0)
    garden.unlock(receipt)
    assert garden.evict(tokens=99) == (4, 1)
    assert garden.free == (128, 20)


def test_locks_count_and_each_is_undone_once():
    """R15, and a lock that is undone twice"""
    garden = Garden(grid=2)
    node = garden.insert(upto(4)).node
    garden.match([1, 2, 9])
    first, second = garden.lock(node), garden.lock(node)
    assert (garden.locks(), garden.tree.ledger()[:2]) == ([(2, 0), (2, 2)], (0, 4))
    garden.unlock(first)
    assert (garden.locks(), garden.tree.ledger()[:2]) == ([(1, 0), (1, 1)], (0, 4))
    garden.unlock(second)
    assert (garden.locks(), garden.tree.ledger()[:2]) == ([(0, 0), (0, 0)], (4, 0))
    with pytest.raises(OwnershipError, match="undone before"):
        garden.unlock(first)
    assert garden.locks() == [(0, 0), (0, 0)]


def test_the_upper_part_of_a_split_inherits_the_lock_of_pages_and_not_of_the_state():
    """R16"""
    garden = Garden(grid=2)
    receipt = garden.lock(garden.insert(upto(6)).node)
    garden.match([1, 2, 9])
    assert garden.edges() == [([1, 2], False), ([3, 4, 5, 6], True)]
    assert (garden.locks(), garden.tree.ledger()) == ([(1, 0), (1, 1)], Ledger(0, 6, 0, 1))
    garden.unlock(receipt)
    assert garden.locks() == [(0, 0), (0, 0)]


def test_an_eviction_passes_locked_states_by():
    """R17"""
    garden = Garden(grid=2)
    receipt = garden.lock(garden.insert([1, 2]).node)
    garden.insert([3, 4])
    garden.insert([5, 6])
    assert garden.evict(states=1) == (2, 1)
    assert garden.edges() == [([1, 2], True), ([5, 6], True)]
    assert garden.evict(states=5) == (2, 1)
    garden.unlock(receipt)
    assert garden.evict(states=5) == (2, 1)


def test_a_match_makes_pages_recent():
    """R18"""
    garden = Garden(grid=2)
    for tokens in ([1, 2], [3, 4], [5, 6]):
        garden.insert(tokens)
    garden.match([1, 2])
    garden.evict(tokens=1)
    assert garden.edges() == [([1, 2], True), ([5, 6], True)]
    garden.evict(tokens=1)
    assert garden.edges() == [([1, 2], True)]


@pytest.mark.parametrize("cap, left", [(1, [8]), (2, [6, 8]), (3, [4, 6, 8]), (None, [2, 4, 6, 8])])
def test_states_of_a_long_path_thin_out_from_the_root(cap, left):
    """R19"""
    garden = Garden(cap=cap, grid=2)
    for n in (2, 4, 6, 8):
        garden.insert(upto(n))
    assert [n.depth for n in garden.tree.nodes() if n.state is not None] == left
    assert garden.free == (120, 20 - len(left))
    assert garden.tree.evictions == Evictions(0, 4 - len(left), 4 - len(left))


def test_the_state_of_a_fork_is_spared_by_the_cap():
    """R20"""
    garden, states = Garden(cap=2, grid=2), []
    for tokens in ([1, 2], upto(4), [1, 2, 8, 9], upto(6), upto(8)):
        garden.insert(tokens)
        states.append(sorted(n.depth for n in garden.tree.nodes() if n.state is not None))
    assert states == [[2], [2, 4], [2, 4, 4], [2, 4, 6], [2, 4, 8]]
    assert garden.node([1, 2]).state == 1 and garden.node([1, 2, 8, 9]).state == 3


def test_a_refused_state_does_not_make_others_give_way():
    """The engine thins out after an insert that has brought a state; a lock has spared one here."""
    garden = Garden(cap=1, grid=2)
    receipt = garden.lock(garden.insert(upto(2)).node)
    garden.insert(upto(4))
    garden.unlock(receipt)
    assert garden.insert(upto(4)).refused
    assert garden.edges() == [([1, 2], True), ([3, 4], True)]
    garden.insert(upto(6))
    assert [state for _, state in garden.edges()] == [False, False, True]


def test_duplicates_behind_what_the_caller_shares_are_freed():
    """R21"""
    garden = Garden()
    taken = [garden.pages.alloc(n) for n in (3, 7, 8)]
    slots = garden.slots.alloc(3)
    tree = garden.tree
    assert tree.insert(upto(3), taken[0], slots[0]).already == 0
    assert tree.insert(upto(7), taken[1], slots[1]).already == 3
    assert garden.pages.free_count == 128 - 18 + 3
    assert tree.insert(upto(8), taken[2], slots[2], owned=2).already == 7
    assert garden.pages.free_count == 128 - 18 + 3 + 5
    assert [garden.pages.allocator.state_of(i) for i in taken[2]] == (
        [Ownership.ACTIVE] * 2 + [Ownership.FREE] * 5 + [Ownership.CACHED]
    )


def test_keys_are_floored_to_pages():
    """R22"""
    garden = Garden(page=4, pages=32, grid=4)
    garden.insert(range(8))
    garden.insert(range(16))
    others = [100, 101]
    assert garden.seen(range(7)) == (0, 4, 4)
    assert garden.seen(range(9)) == (8, 8, None)
    assert garden.seen(range(13)) == (8, 12, 12)
    assert garden.seen([*range(15), *others]) == (8, 12, 12)


def test_the_junction_is_floored_to_the_grid_not_to_the_page():
    """R23"""
    garden = Garden(page=4, pages=32, grid=8)
    garden.insert(range(8))
    garden.insert(range(24))
    seen = [garden.seen([*range(n), 100, 101, 102, 103]) for n in (12, 16, 20, 24)]
    assert seen == [(8, 12, None), (8, 16, 16), (8, 20, 16), (24, 24, None)]


def test_the_junction_of_a_prefix_without_any_state():
    """R24"""
    garden = Garden()
    garden.insert(range(16))
    seen = [garden.seen([*range(n), 100]) for n in (3, 5, 8, 11, 12, 15)]
    assert seen == [(0, 3, None), (0, 5, 4), (0, 8, 8), (0, 11, 8), (0, 12, 12), (0, 15, 12)]


def test_the_joint_boundary_is_a_state_and_the_junction_lies_above_it():
    """R25"""
    garden = Garden()
    garden.insert(range(8))
    garden.insert(range(16))
    seen = [garden.seen([*range(n), 100]) for n in (7, 8, 9, 12, 15, 16)]
    assert seen == [
        *((0, 7, 4), (8, 8, None), (8, 9, None), (8, 12, 12), (8, 15, 12), (16, 16, None)),
    ]


def test_br04_a_repeated_prompt_hits_once_a_state_lies_below_its_last_token():
    """R26"""
    garden = Garden(grid=2)
    garden.insert(upto(8))
    assert garden.seen(upto(7)) == (0, 7, 6)
    done = garden.insert(upto(6))
    assert (done.already, done.refused) == (6, False)
    assert garden.insert(upto(8)).refused
    assert garden.seen(upto(7)) == (6, 7, None)


def test_key_spaces_share_nothing():
    """R27"""
    garden = Garden()
    assert garden.insert(upto(4), salt="A").already == 0
    assert garden.insert(upto(4), salt="B").already == 0
    depths = [garden.match(upto(4), salt).depth for salt in ("A", "C", None, "")]
    assert depths == [4, 0, 0, 0]
    garden.insert(upto(4), salt="")
    assert [garden.match(upto(4), salt).depth for salt in (None, "")] == [0, 4]


def test_the_hashes_of_a_branch_go_on_from_where_it_parts():
    """R28"""
    garden, identity = Garden(grid=2), Identity("model")
    garden.insert([1, 2, 3, 4])
    garden.insert([1, 2, 5, 6])
    chains = {node.depth: hashes for node, hashes, _ in checkpoints(garden.tree, identity)}
    found = [[*hashes.values()] for _, hashes, _ in checkpoints(garden.tree, identity)]
    assert found == [
        [*prefix_hashes(identity.origin(), tokens, 1)] for tokens in ([1, 2, 3, 4], [1, 2, 5, 6])
    ]
    assert [*chains[4]] == [1, 2, 3, 4]


def test_more_than_there_is_evicts_what_there_is():
    """R29"""
    garden = Garden()
    garden.insert(upto(4))
    assert garden.evict(100, 100) == (4, 1)
    assert garden.free == (128, 20)


def test_an_empty_key_matches_nothing_and_refuses_its_state():
    """R31"""
    garden = Garden(page=4, pages=8)
    assert garden.seen([]) == garden.seen([1, 2, 3]) == (0, 0, None)
    done = garden.insert([1, 2, 3])
    assert (done.already, done.refused, done.node) == (0, True, garden.tree.root)
    assert garden.free == (32, 20)


def test_a_reset_alone_does_not_refill_the_pools():
    """R32"""
    garden = Garden()
    garden.insert([9, 9])
    garden.tree.reset()
    assert (garden.edges(), garden.free) == ([], (126, 19))


def test_the_root_pins_nothing_nor_does_what_has_been_evicted():
    garden = Garden()
    node = garden.insert(upto(4)).node
    garden.unlock(garden.lock(garden.tree.root))
    garden.evict(tokens=4)
    receipt = garden.lock(node)
    assert garden.tree.ledger() == Ledger(0, 0, 0, 0)
    garden.unlock(receipt)


def test_a_lock_at_a_tombstone_keeps_the_state_that_comes():
    """RULES S19"""
    garden = Garden(grid=2)
    garden.insert(upto(6))
    garden.match([1, 2, 3, 4, 9])
    receipt = garden.lock(garden.node(upto(4)))
    assert garden.tree.ledger() == Ledger(2, 4, 1, 0)
    garden.insert(upto(4))
    assert garden.tree.ledger() == Ledger(2, 4, 1, 1)
    assert garden.evict(states=9) == (2, 1)
    garden.unlock(receipt)
    assert garden.tree.ledger() == Ledger(4, 0, 1, 0)


def test_a_path_lock_does_not_keep_states_above_and_a_lock_of_pages_keeps_none():
    garden = Garden(grid=2)
    for n in (2, 4):
        garden.insert(upto(n))
    garden.lock(garden.node(upto(4)), state=False)
    assert garden.evict(states=9) == (0, 2)
    assert garden.edges() == [([1, 2], False), ([3, 4], False)]


def test_the_state_may_be_let_go_before_the_pages():
    garden = Garden()
    receipt = garden.lock(garden.insert(upto(4)).node)
    garden.tree.unlock_state(receipt)
    garden.tree.unlock_state(receipt)
    assert (garden.locks(), garden.tree.ledger()) == ([(1, 0)], Ledger(0, 4, 1, 0))
    garden.unlock(receipt)
    assert garden.locks() == [(0, 0)]


def test_pages_beyond_the_joint_boundary_are_not_made_recent_but_for_a_fresh_split():
    """RULES S17, decision 25"""
    garden = Garden(grid=2)
    for tokens in (upto(2), upto(4), [7, 8]):
        garden.insert(tokens)
    garden.evict(states=0)
    tombstone = garden.node(upto(4))
    garden.tree._drop_state(tombstone)
    assert garden.match(upto(4)).depth == 2
    garden.evict(tokens=1)  # [3, 4] was walked over, and not used
    assert garden.edges() == [([1, 2], True), ([7, 8], True)]
    garden = Garden(grid=2)
    garden.insert(upto(4))
    garden.insert([7, 8])
    garden.match([1, 2, 9])  # [3, 4] is now a leaf of its own, newer than [7, 8]
    garden.evict(tokens=1)
    assert garden.edges() == [([1, 2], False), ([3, 4], True)]


def test_a_match_says_whether_a_state_has_been_lost_on_the_way():
    garden = Garden(grid=2)
    for n in (2, 4, 6):
        garden.insert(upto(n))
    assert not garden.match([*upto(4), 9]).lost
    garden.tree._drop_state(garden.node(upto(4)))
    assert garden.match([*upto(4), 9]).lost
    assert not garden.match(upto(6)).lost
    garden.insert(upto(4))
    assert not garden.match([*upto(4), 9]).lost


def test_room_is_made_with_no_more_than_it_takes_or_not_at_all():
    garden = Garden(pages=12, slots=4, grid=2)
    for first in (1, 3, 5, 7):
        garden.insert(upto(2, first))
    assert garden.tree.make_room(pages=5, slots=1)
    assert garden.edges() == [([3, 4], True), ([5, 6], True), ([7, 8], True)]
    assert not garden.tree.make_room(slots=5) and not garden.tree.make_room(pages=13)
    receipt = garden.lock(garden.node([3, 4]))
    assert not garden.tree.make_room(slots=4) and not garden.tree.make_room(pages=11)
    assert len(garden.edges()) == 3
    assert garden.tree.evict_until(slots=4) == (4, 2)
    assert garden.edges() == [([3, 4], True)]
    garden.unlock(receipt)


def test_too_few_pages_are_refused_before_anything_has_changed():
    garden = Garden(page=2, pages=8)
    garden.insert(upto(2))
    with pytest.raises(ValueError, match="3 pages of tokens came with 2 pages"):
        garden.tree.insert([1, 2, 3, 4, 5, 6], garden.pages.alloc(2), 1)
    assert garden.edges() == [([1, 2], True)]


@pytest.mark.parametrize("cap", [0, -1])
def test_a_cap_below_one_is_refused(cap):
    with pytest.raises(ValueError, match=f"at least 1 or without a cap, got {cap}"):
        RadixTree(Pool(1, "page", 1), 1, Pool(1, "slot", 1), cap)


class Steps:
    """Counts what a tree does where its cost is: nodes touched by an eviction or a look-up."""

    def __init__(self, tree, monkeypatch):
        self.touched = 0
        for order in (tree.leaves, tree.state_order):
            for name in ("update", "touch", "discard"):
                if hasattr(order, name):
                    monkeypatch.setattr(order, name, self.counting(getattr(order, name)))

    def counting(self, call):
        def counted(*args):
            self.touched += 1
            return call(*args)

        return counted


def test_the_cost_of_a_call_does_not_depend_on_the_size_of_the_tree(monkeypatch):
    """Nodes that a call looks after, in a tree of 3 nodes and of 3000: the same."""
    counts = []
    for size in (3, 3000):
        garden = Garden(pages=2 * size + 40, slots=size + 10)
        tree = garden.tree
        for i in range(size):
            (slot,) = garden.slots.alloc(1)
            tree.insert([1000 + i, 1], garden.pages.alloc(2), slot)
        with monkeypatch.context() as patch:
            steps, seen = Steps(tree, patch), []
            for call in (
                lambda tree=tree: tree.match([1000, 1, 5]),
                lambda tree=tree: tree.match([1001, 9]),
                lambda tree=tree: tree.evict_kv(1),
                lambda tree=tree: tree.evict_states(1),
                lambda g=garden, t=tree: t.insert(
                    [1000, 1, 2, 3], g.pages.alloc(4), g.slots.alloc(1)[0]
                ),
                lambda tree=tree: tree.unlock(tree.lock(tree.match([1000, 1]).node)),
            ):
                call()
                seen.append(steps.touched)
        counts.append(seen)
    assert counts[0] == counts[1]


def pages_of(tokens, page):
    return [tuple(tokens[: n + page]) for n in range(0, len(tokens) - page + 1, page)]


class Prefixes(RuleBasedStateMachine):
    """A tree against a model that knows no nodes: which prefix has which page, and which slot. What
    goes is the tree's choice; the model says what may."""

    salts = st.sampled_from([None, None, "s"])
    texts = st.builds(
        lambda stem, own: (stem + own)[:12],
        st.sampled_from([[1] * 12, [1, 1, 1, 2] * 3, [2] * 12]).flatmap(
            lambda text: st.integers(0, 12).map(lambda n: text[:n])
        ),
        st.lists(st.integers(1, 3), max_size=3),
    )

    @initialize(page=st.sampled_from([1, 2, 3]), cap=st.sampled_from([None, None, 1, 2]))
    def make(self, page, cap):
        self.garden = Garden(page=page, pages=60 // page, slots=8, cap=cap)
        self.tree, self.page = self.garden.tree, page
        self.pages, self.slots = {}, {}  # (salt, prefix) → page or slot
        self.held = []  # receipts with their prefixes, and whether with the state

    @rule(tokens=texts, salt=salts)
    def match(self, tokens, salt):
        own = [(salt, prefix) for prefix in pages_of(tokens, self.page)]
        walked = [p for p in own if p in self.pages]
        match = self.garden.match(tokens, salt)
        assert match.kv_depth == len(walked) * self.page
        assert match.depth == max((len(p[1]) for p in walked if p in self.slots), default=0)
        assert match.pages == [self.pages[p] for p in walked[: match.depth // self.page]]
        self.last = match.node, walked[: match.depth // self.page]

    @rule(tokens=texts, salt=salts, share=st.booleans())
    def insert(self, tokens, salt, share):
        room = self.garden.pages.free_count, self.garden.slots.free_count
        if room[0] < len(tokens) // self.page or not room[1]:
            return
        own = [(salt, prefix) for prefix in pages_of(tokens, self.page)]
        there = [p for p in own if p in self.pages]
        owned = self.tree.peek(tokens, salt).depth if share else 0
        done = self.garden.insert(tokens, owned=owned, salt=salt)
        assert done.already == len(there) * self.page
        assert done.refused == (not own or own[-1] in self.slots)
        pages = dict(zip(own, self.tree.pages_of(done.node), strict=True))
        assert all(pages[p] == self.pages[p] for p in there)
        self.pages |= pages
        if not done.refused:
            self.slots[own[-1]] = done.node.state
            self._thin_out(own)
        self.last = done.node, own
        self.agree()

    def _thin_out(self, own):
        """The cap, by what the tree has left of the states on this path."""
        cap, lost = self.tree.path_cap, []
        now = self._slots_of_tree()
        for p in [p for p in own if p in self.slots and p not in now]:
            lost.append(p)
            assert p != own[-1] and not self._locked(p) and self._ways_on(p) == 1
            del self.slots[p]
        left = [p for p in own if p in self.slots]
        spared = [p for p in left[:-1] if self._locked(p) or self._ways_on(p) != 1]
        assert cap is None or len(left) <= max(cap, len(spared) + 1)
        assert not lost or len(left) >= cap

    def _ways_on(self, p):
        """Edges that leave from a prefix at which a node ends."""
        return len({q[1][len(p[1]) :][: self.page] for q in self.pages if self._below(q, p)})

    @staticmethod
    def _below(q, p):
        return q[0] == p[0] and len(q[1]) > len(p[1]) and q[1][: len(p[1])] == p[1]

    def _locked(self, p):
        return any(with_state and own and own[-1] == p for _, own, with_state in self.held)

    @precondition(lambda self: hasattr(self, "last"))
    @rule(state=st.booleans())
    def lock(self, state):
        node, own = self.last
        if not all(p in self.pages for p in own):
            own = []  # it has been evicted since
        self.held.append((self.garden.lock(node, state=state), own, state))

    @precondition(lambda self: self.held)
    @rule(i=st.integers(0, 9))
    def unlock(self, i):
        self.garden.unlock(self.held.pop(i % len(self.held))[0])

    @rule(tokens=st.integers(1, 12), ahead=st.booleans())
    def evict_kv(self, tokens, ahead):
        before = self.tree.ledger()
        free = self.garden.pages.free_count
        if ahead:
            self.tree.evict_until(pages=free + -(-tokens // self.page))
            gone = (self.garden.pages.free_count - free) * self.page
        else:
            gone = self.garden.evict(tokens=tokens)[0]
        assert gone >= min(tokens, before.kv_evictable)
        held = {*self.slots}
        assert self._forget() == gone
        assert all(p not in self.pages for p in held - self.slots.keys())

    @rule(count=st.integers(1, 4))
    def evict_states(self, count):
        before, held = self.tree.ledger(), len(self.slots)
        tokens, states = self.garden.evict(states=count)
        assert states == min(count, before.state_evictable)
        assert self._forget() == tokens
        assert len(self.slots) == held - states

    def _forget(self):
        """What the tree has not any more was evictable: no page above one that stays, nothing that
        is locked. Returns the tokens that went."""
        pages, slots = self._pages_of_tree(), self._slots_of_tree()
        kept = {p for _, own, _ in self.held for p in own}
        gone = {p for p in self.pages if p not in pages}
        assert not gone & kept
        assert all(q in gone for p in gone for q in self.pages if self._below(q, p))
        for p in [p for p in self.slots if p not in slots]:
            assert not self._locked(p)
            del self.slots[p]
        for p in gone:
            del self.pages[p]
        self.agree()
        return len(gone) * self.page

    def _pages_of_tree(self):
        found = {}
        for node in self.tree.nodes():
            path = [*node.path()][::-1]
            tokens = [t for part in path for t in self._tokens(part)]
            for p, page in zip(pages_of(tokens, self.page), self.tree.pages_of(node), strict=True):
                found[node.salt, p] = page
        return found

    def _slots_of_tree(self):
        return {
            (node.salt, tuple(t for part in [*node.path()][::-1] for t in self._tokens(part))): (
                node.state
            )
            for node in self.tree.nodes()
            if node.state is not None
        }

    @staticmethod
    def _tokens(node):
        return [int.from_bytes(node.key[i : i + 4], "little") for i in range(0, len(node.key), 4)]

    def agree(self):
        assert self._pages_of_tree() == self.pages
        assert self._slots_of_tree() == self.slots
        locked = {p for _, own, _ in self.held for p in own}
        assert self.tree.ledger().kv_protected >= len(locked) * self.page


def test_the_tree_knows_the_prefixes_that_were_put_into_it():
    run_state_machine_as_test(Prefixes, settings=QUICK)
