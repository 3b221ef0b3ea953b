"""The invariants of the radix tree (serving.md 2.3), one sentence a violation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from cache.leases import Lease
from cache.pools.allocator import Ownership
from cache.pools.pool import Pool
from cache.radix import key as keys
from cache.radix.node import Node
from cache.radix.tree import Ledger, RadixTree


def audit_tree(tree: RadixTree, leases: Iterable[Lease]) -> list[str]:
    """Violations in the tree, between it and its pools, and between it and live leases."""
    nodes = list(tree.nodes())
    faults = [fault for node in nodes for fault in _audit_node(tree, node)]
    faults += _audit_pool(tree.pages_pool, [page for node in nodes for page in node.pages])
    faults += _audit_pool(tree.states_pool, [n.state for n in nodes if n.state is not None])
    faults += _audit_locks(tree, nodes)
    faults += _audit_orders(tree, nodes)
    for lease in leases:
        if lease.pages[0][: lease.published // tree.page] != _shared(tree, lease):
            faults.append(f"{lease.request.name}: its first pages are not those of its lock")
        if lease.published and lease.receipt.node.depth != lease.published:
            faults.append(f"I-31: {lease.request.name} shares {lease.published} tokens, locks less")
    return faults


def _shared(tree: RadixTree, lease: Lease) -> list[int]:
    return tree.pages_of(lease.receipt.node) if lease.receipt is not None else []


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
    if node.state_locks and node.state is None:
        faults.append(f"I-26: {name} lost a locked state")
    return faults


def _audit_pool(pool: Pool, held: list[int]) -> list[str]:
    faults = []
    cached = {i for i in range(1, pool.size + 1) if pool.allocator.state_of(i) is Ownership.CACHED}
    if len(set(held)) != len(held):
        faults.append(f"I-10: a {pool.unit} is in two nodes")
    if cached != set(held):
        faults.append(f"I-10: {pool.unit}s cached or in the tree, not both: {cached ^ set(held)}")
    return faults


def _audit_locks(tree: RadixTree, nodes: list[Node]) -> list[str]:
    kv: Counter[Node] = Counter()
    state: Counter[Node] = Counter()
    for receipt in tree.receipts:
        kv.update(receipt.node.path())
        state[receipt.node] += receipt.state
    return [
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
    tokens = {True: 0, False: 0}
    states = {True: 0, False: 0}
    for node in nodes:
        tokens[node.kv_locks > 0] += keys.length(node.key)
        states[node.state_locks > 0] += node.state is not None
    recount = Ledger(tokens[False], tokens[True], states[False], states[True])
    if recount != tree.ledger():
        faults.append(f"I-27: {tree.ledger()} against a recount {recount}")
    return faults
