"""Orders of eviction, against plain sorting."""

import random

import pytest

from cache.radix.node import Node
from cache.radix.recency import LeafOrder, StateOrder

ROOT = Node(None, b"", 0, [], None)


def leaf(used=0, state=None):
    node = Node(ROOT, b"1234", 1, [1], None)
    node.used, node.state, node.state_used = used, state, used
    return node


class Leaves:
    """What happens to a leaf: use, locks, children, eviction."""

    order = LeafOrder

    @staticmethod
    def use(node, time):
        node.used = time

    @staticmethod
    def lock(node):
        node.kv_locks = 1 - node.kv_locks

    @staticmethod
    def leave(node):
        node.children = {} if node.children else {b"x": leaf()}

    @staticmethod
    def evict(node):
        node.parent = None

    @staticmethod
    def members(nodes):
        return [n for n in nodes if n.is_leaf and not n.kv_locks]

    free = members


class States:
    """What happens to a state: use, locks (two at a time), loss and return, eviction."""

    order = StateOrder

    @staticmethod
    def use(node, time):
        node.state_used = time

    @staticmethod
    def lock(node):
        node.state_locks = (node.state_locks + 1) % 3

    @staticmethod
    def leave(node):
        node.state = 1 if node.state is None else None

    @staticmethod
    def evict(node):
        node.state = None

    @staticmethod
    def members(nodes):
        return [n for n in nodes if n.state is not None]

    @classmethod
    def free(cls, nodes):
        return [n for n in cls.members(nodes) if not n.state_locks]


@pytest.mark.parametrize("kind", [Leaves, States])
def test_the_least_recently_used_comes_out_first_whatever_happened_before(kind):
    """The next one is always what sorting would give, and outdated entries are cleared away."""
    random.seed(0)
    order, nodes, clock = kind.order(), [leaf(n, state=1) for n in range(40)], 40
    for node in nodes:
        order.update(node)
    for _ in range(4000):
        node = random.choice(nodes)
        what = random.choice(["use", "use", "lock", "lock", "leave", "evict"])
        clock += 1
        if what == "use":
            kind.use(node, clock)
        elif what != "evict":
            getattr(kind, what)(node)
        elif (node := order.oldest()) is not None:
            kind.evict(node)
            nodes[nodes.index(node)] = fresh = leaf(clock, state=1)
            order.update(fresh)
        else:
            continue
        order.update(node)
        assert [*order] == sorted(kind.members(nodes), key=order.last_use)
        assert len(order) == len(kind.members(nodes))
        assert all((n in order) == (n in kind.members(nodes)) for n in nodes)
        assert order.oldest() is min(kind.free(nodes), key=order.last_use, default=None)
        assert order.forgotten() == []
        assert len(order._heap) <= 4 * len(nodes) + 65


def test_a_node_that_is_no_leaf_is_not_in_the_order():
    order, node = LeafOrder(), leaf()
    order.update(node)
    node.children[b"x"] = leaf()
    order.update(node)
    order.update(ROOT)
    assert node not in order and ROOT not in order and order.oldest() is None


def states(count):
    order, nodes = StateOrder(), [leaf(i + 1, state=1) for i in range(count)]
    for node in nodes:
        order.update(node)
    return order, nodes


def test_states_keep_their_places_while_they_are_locked():
    order, (a, b, c) = states(3)
    a.state_locks = 1
    order.update(a)
    assert [*order] == [a, b, c] and len(order) == 3
    assert order.oldest() is b
    b.state_used = 4
    order.update(b)
    assert order.oldest() is c
    a.state_locks = 0
    order.update(a)
    assert order.oldest() is a
    a.state = None
    order.update(a)
    order.update(a)
    assert a not in order and [*order] == [c, b]


def test_nothing_is_oldest_where_all_are_locked():
    order, (node,) = states(1)
    node.state_locks = 1
    order.update(node)
    assert order.oldest() is None and [*order] == [node]
    assert StateOrder().oldest() is None


def test_what_changes_without_notice_is_forgotten():
    order, (a, b, c) = states(3)
    a.state_locks = 1
    assert order.oldest() is b
    a.state_locks = 0  # it has been passed over, and nobody has said that it may go again
    c.state_used = 99
    assert {*order.forgotten()} == {a, c}
    order.update(a)
    order.update(c)
    assert order.forgotten() == [] and order.oldest() is a
