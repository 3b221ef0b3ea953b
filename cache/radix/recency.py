"""Two orders of eviction on two clocks: leaves by use of their pages, states by use of the state.

They differ on purpose (serving 3.7): walking over a node uses its pages, but only resuming from a
state uses the state.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator

from cache.radix.node import Node


class LeafOrder:
    """The unlocked leaves, least recently used first. A heap whose outdated entries are passed over
    when they come up, and cleared away when they are many: O(log n) a step on average."""

    def __init__(self) -> None:
        self._members: set[Node] = set()
        self._heap: list[tuple[int, int, Node]] = []  # used, a tie-break, node
        self._pushed = 0

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, node: Node) -> bool:
        return node in self._members

    def __iter__(self) -> Iterator[Node]:
        """In order of eviction."""
        return iter(sorted(self._members, key=lambda node: node.used))

    def update(self, node: Node) -> None:
        """To be called after a node's use, locks or children have changed."""
        if not node.is_leaf or node.kv_locks:
            self._members.discard(node)
            return
        self._members.add(node)
        self._pushed += 1
        heapq.heappush(self._heap, (node.used, self._pushed, node))
        if len(self._heap) > 4 * len(self._members) + 64:
            self._heap = [(node.used, i, node) for i, node in enumerate(self._members)]
            heapq.heapify(self._heap)

    def forgotten(self) -> list[Node]:
        """Leaves that would never come up: used without `update`. For the audit."""
        known = {(used, node) for used, _, node in self._heap}
        return [node for node in self._members if (node.used, node) not in known]

    def oldest(self) -> Node | None:
        """The next one to evict, None if all leaves are locked."""
        while self._heap:
            used, _, node = self._heap[0]
            if node in self._members and node.used == used:
                return node
            heapq.heappop(self._heap)
        return None


class StateOrder:
    """The nodes that hold a state, locked ones included, least recently used first."""

    def __init__(self) -> None:
        self._nodes: OrderedDict[Node, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, node: Node) -> bool:
        return node in self._nodes

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes)

    def touch(self, node: Node) -> None:
        """A state is new or was resumed from: most recent."""
        self._nodes[node] = None
        self._nodes.move_to_end(node)

    def discard(self, node: Node) -> None:
        """The node has no state any more."""
        self._nodes.pop(node, None)

    def oldest(self) -> Node | None:
        """The next one to evict; O(locked ones that are older)."""
        return next((node for node in self._nodes if not node.state_locks), None)
