"""The cap on the states of one path (serving 3.7)."""

import pytest

from cache.pools.pool import Pool
from cache.radix.tree import RadixTree
from cache.stats import Evictions
from tests.cache.radix.planting import Garden, upto


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


@pytest.mark.parametrize("cap", [0, -1])
def test_a_cap_below_one_is_refused(cap):
    with pytest.raises(ValueError, match=f"at least 1 or without a cap, got {cap}"):
        RadixTree(Pool(1, "page", 1), 1, Pool(1, "slot", 1), cap)


def test_one_state_may_be_thinned_out_by_name_where_the_cap_would_take_it():
    garden = Garden(grid=2)
    for tokens in (upto(2), upto(4), upto(6), [1, 2, 8, 9]):
        garden.insert(tokens)
    fork, inner, leaf = (garden.node(upto(n)) for n in (2, 4, 6))
    receipt = garden.lock(inner)
    assert not any(garden.tree.thin(node) for node in (fork, inner, leaf))
    garden.unlock(receipt)
    assert garden.tree.thin(inner) and not garden.tree.thin(inner)
    garden.audit()
    assert [node.depth for node in garden.tree.nodes() if node.state is not None] == [2, 6, 4]
    assert garden.tree.evictions == Evictions(0, 1, 1)
