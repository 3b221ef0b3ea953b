"""Faults that users of such software have met (bug_reports.md), as recipes for a tree alone: edges,
splits, and locks along a path.
"""

import random
import sys

import pytest

from cache.pools.allocator import Ownership, OwnershipError
from cache.radix.node import Receipt
from tests.cache.radix.planting import Garden
from tests.kimi_mini.serving.toy import P, X, Y, Z, fresh


@pytest.mark.parametrize("page", [1, 16])
def test_br04_a_split_leaves_the_checkpoint_at_its_depth(page):
    """The audit has it that no edge is empty and that edges add up to what was inserted."""
    garden = Garden(page=page, pages=200)
    branch = [*P[:48], *fresh(5, 16)]
    garden.insert(P)
    assert garden.match(P[:63]).depth == 0
    assert garden.match(P).depth == garden.match([*P, *X]).depth == 64
    assert garden.insert(branch).already == 48
    assert garden.match([*P[:48], *Y]).depth == 0
    assert garden.match([*P, *X]).depth == garden.match([*branch, 3]).depth == 64
    assert {sum(map(len, path)) for path, state in garden.shape().items() if state} == {64}


def test_br24_what_is_left_of_a_long_prompt_holds_no_more_than_its_own():
    """Views would be small themselves and keep the whole of it alive: every part is of its own."""
    garden = Garden(page=16, pages=300)
    tokens, rng = fresh(1, 4096), random.Random(0)
    garden.insert(tokens)
    for _ in range(100):
        garden.match([*tokens[: rng.randrange(16, 4096)], 99])
    parts = list(garden.tree.nodes())
    assert len(parts) > 50
    for node in parts:
        assert type(node.key) is bytes and type(node.pages) is list, "a view"
    while len(left := list(garden.tree.nodes())) > 1:
        garden.evict(tokens=1)
    (node,) = left
    assert node.depth < 500
    assert sys.getsizeof(node.key) <= 4 * node.depth + 64
    assert sys.getsizeof(node.pages) <= 8 * node.depth // 16 + 128
    assert garden.pages.allocator.count(Ownership.CACHED) == len(node.pages) == node.depth // 16


def test_br38_locks_are_undone_once_and_hold_the_whole_path():
    garden = Garden(page=16)
    tree, branch = garden.tree, [*P[:32], *fresh(5, 32)]
    left, right = garden.insert(P).node, garden.insert(branch).node
    assert tree.ledger() == (96, 0, 2, 0)
    one, other = garden.lock(left), garden.lock(right)
    assert tree.ledger() == (0, 96, 0, 2)
    garden.match(P[:48])  # splits a locked edge
    assert garden.evict(tokens=1000, states=9) == (0, 0)
    garden.unlock(one)
    assert tree.ledger() == (32, 64, 1, 1)
    for receipt in (one, Receipt(left, True, left.state)):
        with pytest.raises(OwnershipError, match="undone before"):
            tree.unlock(receipt)
    assert garden.evict(tokens=1000) == (32, 1)
    assert garden.match(branch).depth == 64
    garden.unlock(other)
    assert tree.ledger() == (64, 0, 1, 0)
    assert garden.evict(tokens=1000) == (64, 1)


def test_br41_a_split_leaves_the_times_of_states_alone():
    """Of rows it refreshes the part below the split, as the engine does (decision 25)."""
    garden = Garden(page=16)
    older, newer = garden.insert(P).node, garden.insert(fresh(8, 64)).node
    garden.match([*P[:32], *Z])
    assert list(garden.tree.state_order) == [older, newer]


def test_br73_a_split_is_floored_to_the_page():
    garden = Garden(page=16)
    garden.insert(P)
    garden.match([*P[:20], *X])
    assert [len(edge) for edge, _ in garden.edges()] == [16, 48]
