"""Orders of eviction, against plain sorting."""

import random

from cache.radix.node import Node
from cache.radix.recency import LeafOrder, StateOrder

ROOT = Node(None, b"", 0, [], None)


def leaf(used=0):
    node = Node(ROOT, b"1234", 1, [1], None)
    node.used = used
    return node


def test_leaves_come_out_least_recently_used_first_whatever_happened_before():
    """Random uses, locks, children and evictions: the next one is always what sorting would give,
    and outdated entries are cleared away."""
    random.seed(0)
    order, nodes, clock = LeafOrder(), [leaf() for _ in range(40)], 0
    for _ in range(4000):
        node = random.choice(nodes)
        what = random.choice(["use", "use", "lock", "parent", "evict"])
        if what == "use":
            clock += 1
            node.used = clock
        elif what == "lock":
            node.kv_locks = 1 - node.kv_locks
        elif what == "parent":
            node.children = {} if node.children else {b"x": leaf()}
        elif order.oldest() is not None:
            node = order.oldest()
            clock += 1
            nodes[nodes.index(node)] = fresh = leaf(clock)
            node.parent = None
            order.update(fresh)
        order.update(node)
        free = [n for n in nodes if n in order]
        assert all((n in free) == (n.is_leaf and not n.kv_locks) for n in nodes if n.used)
        assert [*order] == sorted(free, key=lambda n: n.used)
        assert len(order) == len(free)
        assert order.oldest() is min(free, key=lambda n: n.used, default=None)
        assert len(order._heap) <= 4 * len(free) + 65
    assert clock > 1000


def test_a_node_that_is_no_leaf_is_not_in_the_order():
    order, node = LeafOrder(), leaf()
    order.update(node)
    node.children[b"x"] = leaf()
    order.update(node)
    order.update(ROOT)
    assert node not in order and ROOT not in order and order.oldest() is None


def test_states_keep_their_places_while_they_are_locked():
    order, (a, b, c) = StateOrder(), (leaf() for _ in range(3))
    for node in (a, b, c):
        order.touch(node)
    a.state_locks = 1
    assert [*order] == [a, b, c] and len(order) == 3
    assert order.oldest() is b
    order.touch(b)
    assert order.oldest() is c
    a.state_locks = 0
    assert order.oldest() is a
    order.discard(a)
    order.discard(a)
    assert a not in order and [*order] == [c, b]


def test_nothing_is_oldest_where_all_are_locked():
    order, node = StateOrder(), leaf()
    assert order.oldest() is None
    node.state_locks = 1
    order.touch(node)
    assert order.oldest() is None
