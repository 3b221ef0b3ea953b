"""Inserts: what is there is given back, what is new hangs where it parts (serving 9.3)."""

import pytest

from cache.identity import Identity, prefix_hashes
from cache.pools.allocator import Ownership
from cache.radix.entries import checkpoints, required_by
from tests.cache.radix.planting import FORK, LONG, OTHER, Garden, upto


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


def test_the_hashes_of_a_branch_go_on_from_where_it_parts():
    """R28"""
    garden, identity = Garden(grid=2), Identity("model")
    garden.insert([1, 2, 3, 4])
    garden.insert([1, 2, 5, 6])
    found = checkpoints(garden.tree, identity, required_by(garden.tree))
    assert [hashes for _, hashes, _ in found] == [
        dict(enumerate(prefix_hashes(identity.origin(), tokens, 1), 1))
        for tokens in ([1, 2, 3, 4], [1, 2, 5, 6])
    ]


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


def test_too_few_pages_are_refused_before_anything_has_changed():
    garden = Garden(page=2, pages=8)
    garden.insert(upto(2))
    with pytest.raises(ValueError, match="3 pages of tokens came with 2 pages"):
        garden.tree.insert([1, 2, 3, 4, 5, 6], garden.pages.alloc(2), 1)
    assert garden.edges() == [([1, 2], True)]
