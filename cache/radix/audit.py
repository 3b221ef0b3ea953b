"""The invariants of the radix tree and of what its manager adds to a lease (serving.md 2.1 to 2.3),
one sentence a violation. What all managers owe is in `cache.audit`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from cache.identity import Identity
from cache.leases import Lease
from cache.pools.allocator import Ownership
from cache.pools.pool import Pool
from cache.radix import key as keys
from cache.radix.entries import audit_entries
from cache.radix.node import Node
from cache.radix.tree import Ledger, RadixTree


def audit_tree(tree: RadixTree, leases: Iterable[Lease], identity: Identity) -> list[str]:
    """Violations in the tree, between it and its pools, and between it and live leases."""
    leases, nodes = list(leases), list(tree.nodes())
    faults = [fault for node in nodes for fault in _audit_node(tree, node)]
    faults += _audit_pool(tree.pages_pool, [page for node in nodes for page in node.pages])
    faults += _audit_pool(tree.states_pool, [n.state for n in nodes if n.state is not None])
    faults += _audit_locks(tree, nodes)
    faults += _audit_orders(tree, nodes)
    faults += _audit_tracked(tree.states_pool, leases)
    for lease in leases:
        faults += _audit_lease(tree, lease)
    return faults or audit_entries(tree, identity)


def _audit_lease(tree: RadixTree, lease: Lease) -> list[str]:
    faults, name, receipt = [], lease.request.name, lease.receipt
    shared = [] if receipt is None else tree.pages_of(receipt.node)
    if lease.pages[0][: lease.published // tree.page] != shared:
        faults.append(f"I-05: the first pages of {name} are not those of its lock")
    if lease.published != (0 if receipt is None else receipt.node.depth):
        faults.append(f"I-31: {name} shares {lease.published} tokens, its lock is elsewhere")
    if receipt is not None and receipt not in tree.receipts:
        faults.append(f"I-25: {name} has a lock that was undone")
    if lease.published > lease.computed:
        faults.append(f"I-31: {name} shares {lease.published} tokens, has {lease.computed}")
    if lease.copies and (lease.ran or lease.plan is not None):
        faults.append(f"I-07: {name} has run, and its slot is yet to be initialised")
    return faults


def _audit_tracked(pool: Pool, leases: list[Lease]) -> list[str]:
    """Tracked slots are those of trackers and of exports in flight, each of one lease."""
    held = [
        slot
        for lease in leases
        for slot in (*lease.tracker.slots, *(slot for _, slot in lease.exported))
    ]
    return _audit_state(pool, held, Ownership.TRACKED, "of two requests", "of a request")


def _audit_node(tree: RadixTree, node: Node) -> list[str]:
    faults, name = [], f"node at {node.depth}"
    length = keys.length(node.key)
    if not length or length % tree.page or len(node.pages) * tree.page != length:
        faults.append(f"I-20: {name} has an edge of {length} tokens and {len(node.pages)} pages")
    if node.depth != node.parent.depth + length:
        faults.append(f"I-23: {name} ends {length} tokens after {node.parent.depth}")
    if node.parent.children.get(tree.filed_under(node)) is not node:
        faults.append(f"I-20: {name} is not filed under its first page")
    if node.salt != (node.parent.salt if not node.parent.is_root else node.salt):
        faults.append(f"I-09: {name} has salt {node.salt!r} below {node.parent.salt!r}")
    if node.kv_locks < node.state_locks or min(node.kv_locks, node.state_locks) < 0:
        faults.append(f"I-24: {name} has {node.kv_locks} KV and {node.state_locks} state locks")
    return faults


def _audit_pool(pool: Pool, held: list[int]) -> list[str]:
    return _audit_state(pool, held, Ownership.CACHED, "in two nodes", "in the tree")


def _audit_state(
    pool: Pool, held: list[int], state: Ownership, twice: str, there: str
) -> list[str]:
    faults, indices = [], range(1, pool.size + 1)
    marked = {index for index in indices if pool.allocator.state_of(index) is state}
    if len(set(held)) != len(held):
        faults.append(f"I-10: a {pool.unit} is {twice}: {sorted(held)}")
    if marked != set(held):
        faults.append(f"I-10: {pool.unit}s {state} or {there}, not both: {marked ^ set(held)}")
    return faults


def _audit_locks(tree: RadixTree, nodes: list[Node]) -> list[str]:
    kv: Counter[Node] = Counter()
    state: Counter[Node] = Counter()
    faults = []
    for receipt in tree.receipts:
        node = receipt.node
        kv.update(node.path())
        state[node] += receipt.state
        if receipt.found not in (None, node.state):
            faults.append(f"I-26: node at {node.depth} has lost a locked state")
    alive = {tree.root, *nodes}
    faults += [
        f"I-26: a locked node at {receipt.node.depth} was evicted"
        for receipt in tree.receipts
        if receipt.state and receipt.node not in alive
    ]
    return faults + [
        f"I-24: node at {node.depth} has locks {node.kv_locks}/{node.state_locks}, receipts say "
        f"{kv[node]}/{state[node]}"
        for node in nodes
        if (node.kv_locks, node.state_locks) != (kv[node], state[node])
    ]


def _audit_orders(tree: RadixTree, nodes: list[Node]) -> list[str]:
    faults = []
    if set(tree.state_order) != {node for node in nodes if node.state is not None}:
        faults.append("I-27: the order of states is not that of the nodes with a state")
    if set(tree.leaves) != {node for node in nodes if node.is_leaf and not node.kv_locks}:
        faults.append("I-27: the order of leaves is not that of the unlocked leaves")
    for kind, order in (("leaf", tree.leaves), ("state", tree.state_order)):
        faults += [f"I-27: {kind} at {n.depth} would never be evicted" for n in order.forgotten()]
    tokens = {True: 0, False: 0}
    states = {True: 0, False: 0}
    for node in nodes:
        tokens[node.kv_locks > 0] += keys.length(node.key)
        states[node.state_locks > 0] += node.state is not None
    recount = Ledger(tokens[False], tokens[True], states[False], states[True])
    if recount != tree.ledger():
        faults.append(f"I-27: {tree.ledger()} against a recount {recount}")
    return faults
