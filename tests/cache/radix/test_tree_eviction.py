"""What goes, in which order, and what goes along (serving 3.7, 9.3)."""

import pytest

from cache.stats import Evictions
from tests.cache.radix.planting import FORK, LONG, OTHER, Garden, upto


def test_pages_go_leaf_by_leaf_states_alone_where_something_hangs_below():
    """R02 to R05"""
    garden = Garden()
    for tokens in ([1, 2, 3], LONG, OTHER, FORK):
        garden.insert(tokens)
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


def test_a_tombstone_that_becomes_a_leaf_goes_along_if_it_is_not_to_be_kept():
    """R07 of the engine's older tree; what went is counted once."""
    garden = Garden(grid=2, keep_tombstones=False)
    garden.insert(upto(3))
    garden.insert(upto(5))
    assert garden.evict(states=1) == (0, 1)
    assert garden.edges() == [([1, 2, 3], False), ([4, 5], True)]  # an inner one stays
    assert garden.evict(tokens=1) == (5, 1)
    assert (garden.edges(), garden.free) == ([], (128, 20))
    assert garden.tree.evictions == Evictions(5, 2, 0)


@pytest.mark.parametrize("keep, left", [(True, 4), (False, 0)])
def test_tombstones_go_along_all_the_way_up(keep, left):
    """R10, whose last eviction takes the leaf below two tombstones."""
    garden = Garden(grid=2, keep_tombstones=keep)
    for n in (2, 4, 6):
        garden.insert(upto(n))
    assert [garden.evict(states=1) for _ in range(3)] == [(0, 1), (0, 1), (6 - left, 1)]
    assert garden.free == (128 - left, 20)


def test_tombstones_go_along_up_to_a_state_a_fork_or_a_lock():
    garden = Garden(grid=2, keep_tombstones=False)
    for tokens in (upto(2), upto(6), [1, 2, 3, 4, 7, 8]):
        garden.insert(tokens)
    assert garden.seen([1, 2, 3, 4, 9]) == (2, 4, 4)
    assert garden.evict(tokens=1) == (2, 1)
    assert garden.edges() == [([1, 2], True), ([3, 4], False), ([7, 8], True)]
    receipt = garden.lock(garden.node(upto(4)))
    assert garden.evict(tokens=99) == (2, 1)
    garden.unlock(receipt)
    assert garden.edges() == [([1, 2], True), ([3, 4], False)]
    assert garden.evict(tokens=1) == (2, 0)
    assert garden.edges() == [([1, 2], True)]


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


def test_more_than_there_is_evicts_what_there_is():
    """R29"""
    garden = Garden()
    garden.insert(upto(4))
    assert garden.evict(100, 100) == (4, 1)
    assert garden.free == (128, 20)


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
