"""A node of the radix tree: an edge of whole pages, and perhaps the state at its end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


class Node:
    """An edge and its end boundary.

    key       tokens of the edge (`radix.key`), whole pages; empty for the root
    depth     tokens from the root to the end of the edge: the boundary of `state`
    pages     one page of latent rows for each page of the key
    state     slot of the checkpoint at `depth`; None: a tombstone (I-21); lost: it had one
    salt      the key space, None for the common one
    kv_locks  receipts anchored here or below; state_locks: receipts that hold this state
    used      when its pages were last of use, on the tree's clock; state_used: its state
    """

    __slots__ = (
        "children", "depth", "key", "kv_locks", "lost", "pages", "parent", "salt", "state",
        "state_locks", "state_used", "used",
    )  # fmt: skip

    def __init__(
        self, parent: Node | None, key: bytes, depth: int, pages: list[int], salt: str | None
    ) -> None:
        self.parent, self.key, self.depth, self.pages, self.salt = parent, key, depth, pages, salt
        self.children: dict[tuple[str | None, bytes] | bytes, Node] = {}
        self.state: int | None = None
        self.lost = False
        self.kv_locks = self.state_locks = 0
        self.used = self.state_used = 0

    @property
    def is_root(self) -> bool:
        return self.parent is None

    @property
    def is_leaf(self) -> bool:
        return not self.children and self.parent is not None

    def path(self) -> Iterator[Node]:
        """From here up to, not including, the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def checkpoints(self) -> frozenset[int]:
        """Boundaries up to here that have a state."""
        return frozenset(node.depth for node in self.path() if node.state is not None)


@dataclass(eq=False)
class Receipt:
    """What a lock took, and so what its release gives back, whatever happened to the node since.

    state: the state at the node is locked, too: the one that is there, or, at a tombstone, the one
    that comes. found: the slot of the one that was there.
    """

    node: Node
    state: bool
    found: int | None
