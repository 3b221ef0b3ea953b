"""Damage done by hand is found, and named by the invariant that it breaks."""

import pytest

from cache.identity import Identity
from cache.leases import CacheRequest, Copy, CopyKind
from cache.null_executor import NullExecutor
from cache.pools.allocator import Ownership
from cache.radix import key as keys
from cache.radix.audit import audit_tree
from cache.radix.manager import RadixCache
from cache.radix.node import Node
from tests.cache.memory import Shape, make_storage
from tests.cache.radix.planting import Garden


def planted():
    """[1 2] with a state and a lock, [3 4] with a state, a branch [5 6]; [7 8] elsewhere."""
    garden = Garden(page=2, pages=16, slots=8)
    for tokens in ([1, 2], [1, 2, 3, 4], [1, 2, 5, 6], [7, 8]):
        garden.insert(tokens)
    garden.receipt = garden.lock(garden.node([1, 2]))
    return garden


def lost_page(g):
    g.pages.allocator.evict([g.node([7, 8]).pages[0]])


def page_without_node(g):
    g.pages.allocator.donate(g.pages.alloc(1))


def one_page_in_two_nodes(g):
    g.node([7, 8]).pages[:] = g.node([1, 2, 3, 4]).pages


def one_slot_in_two_nodes(g):
    g.node([7, 8]).state = g.node([1, 2]).state


def state_without_slot(g):
    g.slots.allocator.evict([g.node([7, 8]).state])


def too_few_pages(g):
    g.node([7, 8]).pages.clear()


def half_a_page(g):
    node = g.node([7, 8])
    node.key, node.depth = node.key[:4], 1


def empty_edge(g):
    node = g.node([7, 8])
    node.key, node.depth = b"", 0
    node.pages.clear()


def wrong_depth(g):
    g.node([1, 2, 3, 4]).depth = 6


def wrong_name(g):
    children = g.tree.root.children
    children[None, keys.encode([9, 9])] = children.pop((None, keys.encode([7, 8])))


def wrong_parent(g):
    g.node([1, 2, 3, 4]).parent = g.node([7, 8])


def another_salt(g):
    g.node([1, 2, 3, 4]).salt = "s"


def lock_without_receipt(g):
    g.node([7, 8]).kv_locks = 1
    g.tree.leaves.update(g.node([7, 8]))


def receipt_without_lock(g):
    g.node([1, 2]).kv_locks = 0


def state_lock_without_receipt(g):
    g.node([1, 2]).state_locks = 2


def negative_lock(g):
    g.node([7, 8]).state_locks = -1


def locked_state_lost(g):
    g.tree._drop_state(g.node([1, 2]))


def locked_state_changed(g):
    a, b = g.node([1, 2]), g.node([7, 8])
    a.state, b.state = b.state, a.state


def locked_node_evicted(g):
    node = g.node([7, 8])
    g.lock(node)
    g.tree._delete(node)


def state_out_of_order(g):
    g.tree.state_order._members.discard(g.node([7, 8]))


def tombstone_in_order(g):
    g.tree.state_order._members.add(Node(g.tree.root, b"", 0, [], None))


def leaf_out_of_order(g):
    g.tree.leaves._members.discard(g.node([7, 8]))


def inner_node_in_order(g):
    g.tree.leaves._members.add(g.node([1, 2]))


def used_without_notice(g):
    g.node([7, 8]).used = 999


def state_used_without_notice(g):
    g.node([7, 8]).state_used = 999


def evictable_miscounted(g):
    g.tree._kv_total += 2


def protected_miscounted(g):
    g.tree._state_protected -= 1


def tracked_without_request(g):
    g.slots.alloc(1, Ownership.TRACKED)


@pytest.mark.parametrize(
    "damage, name",
    [
        (lost_page, "I-10: pages cached or in the tree"),
        (page_without_node, "I-10: pages cached or in the tree"),
        (one_page_in_two_nodes, "I-10: a page is in two nodes"),
        (one_slot_in_two_nodes, "I-10: a slot is in two nodes"),
        (state_without_slot, "I-10: slots cached or in the tree"),
        (too_few_pages, "I-20: node at 2 has an edge of 2 tokens and 0 pages"),
        (half_a_page, "I-20: node at 1 has an edge of 1 tokens"),
        (empty_edge, "I-20: node at 0 has an edge of 0 tokens"),
        (wrong_depth, "I-23: node at 6 ends 2 tokens after 2"),
        (wrong_name, "I-20: node at 2 is not filed under its first page"),
        (wrong_parent, "I-20: node at 4 is not filed under its first page"),
        (another_salt, "I-09: node at 4 has salt 's' below None"),
        (lock_without_receipt, "I-24: node at 2 has locks 1/0, receipts say 0/0"),
        (receipt_without_lock, "I-24: node at 2 has locks 0/1, receipts say 1/1"),
        (state_lock_without_receipt, "I-24: node at 2 has locks 1/2, receipts say 1/1"),
        (negative_lock, "I-24: node at 2 has 0 KV and -1 state locks"),
        (locked_state_lost, "I-26: node at 2 has lost a locked state"),
        (locked_state_changed, "I-26: node at 2 has lost a locked state"),
        (locked_node_evicted, "I-26: a locked node at 2 was evicted"),
        (state_out_of_order, "I-27: the order of states"),
        (tombstone_in_order, "I-27: the order of states"),
        (leaf_out_of_order, "I-27: the order of leaves"),
        (inner_node_in_order, "I-27: the order of leaves"),
        (used_without_notice, "I-27: leaf at 2 would never be evicted"),
        (state_used_without_notice, "I-27: state at 2 would never be evicted"),
        (evictable_miscounted, "I-27: Ledger"),
        (protected_miscounted, "I-27: Ledger"),
        (tracked_without_request, "I-10: slots tracked or of a request"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_damage_to_the_tree_is_named(damage, name):
    garden = planted()
    damage(garden)
    faults = audit_tree(garden.tree, (), Identity())
    assert any(fault.startswith(name) for fault in faults), faults


class Running:
    """A request in decode over pages that it has published, with a snapshot."""

    def __init__(self):
        self.cache = RadixCache(make_storage(Shape(((8, 2),), (6,))), state_chunk=2)
        self.lease = self.admit(range(7))
        self.step(7, [1])
        self.step(1, [2])
        assert (self.lease.published, len(self.lease.tracker.slots)) == (6, 1)
        assert self.cache._audit() == []

    def admit(self, ids):
        self.cache.begin_step()
        lease = self.cache.admit(CacheRequest("r", ids))
        self.cache.end_step()
        return lease

    def step(self, want, appended):
        executor = NullExecutor(self.cache.storage)
        self.cache.begin_step()
        plan = self.cache.plan(self.lease, want)
        if plan.start == 0:
            executor.run([plan])
        self.cache.commit(self.lease, plan.end, appended)
        self.cache.end_step()


def foreign_page(r):
    r.lease.pages[0][0] = r.lease.pages[0][-1]


def shares_less_than_it_locks(r):
    r.lease.published = 4


def lock_undone(r):
    r.cache.tree.unlock(r.lease.receipt)


def shares_what_it_has_not(r):
    r.lease.computed = 5


def initialised_twice(r):
    r.lease.copies = (Copy(CopyKind.STATE, 0, 1, 2),)


def snapshot_forgotten(r):
    r.lease.tracker.slots.clear()


def snapshot_of_two(r):
    r.lease.exported = ((8, r.lease.tracker.slots[0]),)


@pytest.mark.parametrize(
    "damage, name",
    [
        (foreign_page, "I-05: the first pages of r"),
        (shares_less_than_it_locks, "I-31: r shares 4 tokens, its lock is elsewhere"),
        (lock_undone, "I-25: r has a lock that was undone"),
        (shares_what_it_has_not, "I-31: r shares 6 tokens, has 5"),
        (initialised_twice, "I-07: r has run"),
        (snapshot_forgotten, "I-10: slots tracked or of a request"),
        (snapshot_of_two, "I-10: a slot is of two requests"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_damage_to_a_lease_is_named(damage, name):
    running = Running()
    damage(running)
    faults = running.cache._audit()
    assert any(fault.startswith(name) for fault in faults), faults
