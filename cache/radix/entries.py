"""Records of what the tree holds: one for each page of rows, two for each state (decision 27).

Made where objects are to leave the process, and by the audit; the tree itself gets by with less.
"""

from __future__ import annotations

from collections.abc import Iterator

from cache.entry import CacheEntry, StateKind, completes
from cache.identity import Identity, prefix_hashes
from cache.pools.allocator import OwnershipError
from cache.radix import key as keys
from cache.radix.node import Node
from cache.radix.tree import RadixTree


def checkpoints(
    tree: RadixTree, identity: Identity
) -> Iterator[tuple[Node, dict[int, bytes], list[CacheEntry]]]:
    """For each node with a state: the chained hashes of its prefix by boundary, page by page, and
    the records of all that a resume there needs, rows in order first. OwnershipError if something
    in the tree is free."""
    rows: dict[Node, list[CacheEntry]] = {}  # of the edge
    for node in tree.nodes():
        rows[node] = _rows(tree, identity, node, rows)
        if node.state is not None:
            path = [*node.path()][::-1]
            entries = [entry for part in path for entry in rows[part]]
            hashes = {entry.end: entry.prefix_hash for entry in entries}
            above = (part.depth for part in path[-2::-1] if part.state is not None)
            parent = hashes.get(next(above, 0))
            yield node, hashes, [*entries, *_points(tree, identity, node, hashes, parent)]


def audit_entries(tree: RadixTree, identity: Identity) -> list[str]:
    """I-01: what the tree would resume from is complete, as far as records can tell."""
    try:
        return [
            f"I-01: the records of the node at {node.depth} do not allow a resume there"
            for node, hashes, entries in checkpoints(tree, identity)
            if not completes(entries, identity, node.salt, hashes, node.depth)
        ]
    except OwnershipError as error:
        return [f"I-01: the tree holds what is not there: {error}"]


def _rows(
    tree: RadixTree, identity: Identity, node: Node, rows: dict[Node, list[CacheEntry]]
) -> list[CacheEntry]:
    above = rows.get(node.parent)
    origin = above[-1].prefix_hash if above else identity.origin(node.salt)
    start = node.depth - keys.length(node.key)
    chain = prefix_hashes(origin, keys.decode(node.key), tree.page)
    return [
        CacheEntry(
            StateKind.MLA_KV,
            identity,
            node.salt,
            prefix_hash,
            start + i * tree.page,
            start + (i + 1) * tree.page,
            tree.pages_pool.unit,
            (tree.pages_pool.allocator.handle(page),),
        )
        for i, (page, prefix_hash) in enumerate(zip(node.pages, chain, strict=False))
    ]


def _points(
    tree: RadixTree,
    identity: Identity,
    node: Node,
    hashes: dict[int, bytes],
    parent: bytes | None,
) -> list[CacheEntry]:
    """Recurrent and conv state share a slot."""
    slot = tree.states_pool.allocator.handle(node.state)
    return [
        CacheEntry(
            kind,
            identity,
            node.salt,
            hashes.get(node.depth, b""),
            node.depth,
            node.depth,
            tree.states_pool.unit,
            (slot,),
            parent=parent,
        )
        for kind in (StateKind.RECURRENT, StateKind.CONV)
    ]
