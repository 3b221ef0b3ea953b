"""Locks of pages and of states, and the receipts that undo them (serving 9.3)."""

import pytest

from cache.pools.allocator import OwnershipError
from cache.radix.tree import Ledger
from tests.cache.radix.planting import Garden, upto


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
