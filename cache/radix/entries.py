"""Records of what the tree holds: one for each page of rows, two for each state (decision 27).

Made where objects are to leave the process, and by the audit; the tree itself gets by with less.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from cache.entry import POINTS, CacheEntry, Form, Required, StateKind, completes
from cache.identity import Identity, prefix_hashes
from cache.pools.allocator import OwnershipError
from cache.pools.pool import Pool
from cache.radix import key as keys
from cache.radix.node import Node
from cache.radix.tree import RadixTree

Layers = Mapping[StateKind, tuple[int, ...]]


def required_by(tree: RadixTree, layers: Layers | None = None) -> dict[StateKind, Required]:
    """What a model over the tree's pools resumes from. layers: its ids of the layers of each kind,
    in the order of the memory; without, they are counted from 0 within a kind. Pools that only
    account stand for one layer. ValueError for other numbers of layers than there is memory of."""
    pages, slots = tree.pages_pool, tree.states_pool
    found = {
        StateKind.MLA_KV: _stored(pages, 0, "latent_rope", 3),  # [layers, pages+1, page, L+R]
        StateKind.RECURRENT: _stored(slots, 0, "head,v,k", 2),
        StateKind.CONV: _stored(slots, 1, "time,qkv_channel", 2),
    }
    for kind, ids in (layers or {}).items():
        count = len(found[kind].layers)
        if len({*ids}) != len(ids) or len(ids) != count:
            raise ValueError(f"{kind} is stored for {count} layers, got the ids {ids}")
        found[kind] = found[kind]._replace(layers=ids)
    return found


def _stored(pool: Pool, which: int, layout: str, inner: int) -> Required:
    """inner: the first axis inside of one object, or of one row."""
    if not pool.tensors:
        return Required((0,), Form(None, layout, ()))
    tensor = pool.tensors[which]
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Required(tuple(range(len(tensor))), Form(dtype, layout, tuple(tensor.shape[inner:])))


def checkpoints(
    tree: RadixTree, identity: Identity, stored: Mapping[StateKind, Required]
) -> Iterator[tuple[Node, dict[int, bytes], list[CacheEntry]]]:
    """For each node with a state: the chained hashes of its prefix by boundary, page by page, and
    the records of all that a resume there needs, rows in order first. stored: `required_by`.
    OwnershipError if something in the tree is free."""
    rows: dict[Node, list[CacheEntry]] = {}  # of the edge
    for node in tree.nodes():
        rows[node] = _rows(tree, identity, node, rows, stored[StateKind.MLA_KV])
        if node.state is not None:
            path = [*node.path()][::-1]
            entries = [entry for part in path for entry in rows[part]]
            hashes = {entry.end: entry.prefix_hash for entry in entries}
            above = (part.depth for part in path[-2::-1] if part.state is not None)
            parent = hashes.get(next(above, 0))
            yield node, hashes, [*entries, *_points(tree, identity, node, hashes, parent, stored)]


def audit_entries(tree: RadixTree, identity: Identity) -> list[str]:
    """I-01: what the tree would resume from is complete, as far as records can tell."""
    required = required_by(tree)
    try:
        return [
            f"I-01: the records of the node at {node.depth} do not allow a resume there"
            for node, hashes, entries in checkpoints(tree, identity, required)
            if not completes(entries, identity, node.salt, hashes, node.depth, required)
        ]
    except OwnershipError as error:
        return [f"I-01: the tree holds what is not there: {error}"]


def _rows(
    tree: RadixTree,
    identity: Identity,
    node: Node,
    rows: Mapping[Node, list[CacheEntry]],
    stored: Required,
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
            *stored,
            tree.pages_pool.unit,
            (tree.pages_pool.allocator.handle(page),),
            refs=node.kv_locks,
            last_access=node.used,
        )
        for i, (page, prefix_hash) in enumerate(zip(node.pages, chain, strict=False))
    ]


def _points(
    tree: RadixTree,
    identity: Identity,
    node: Node,
    hashes: Mapping[int, bytes],
    parent: bytes | None,
    stored: Mapping[StateKind, Required],
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
            *stored[kind],
            tree.states_pool.unit,
            (slot,),
            parent=parent,
            refs=node.state_locks,
            last_access=node.state_used,
        )
        for kind in POINTS
    ]
