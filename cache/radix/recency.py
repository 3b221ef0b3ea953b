"""Two orders of eviction on two clocks: leaves by use of their pages, states by use of the state.

They differ on purpose (serving 3.7): walking over a node uses its pages, but only resuming from a
state uses the state.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterator

from cache.radix.node import Node


class EvictionOrder(ABC):
    """Nodes by their last use, and which of them is the next to evict.

    A heap whose outdated entries are passed over when they come up, and cleared away when they are
    many; what was passed over because of a lock comes back at its old place with the `update` that
    follows the unlock. So each step costs O(log n) on average, whatever is locked.
    """

    def __init__(self) -> None:
        self._members: set[Node] = set()
        self._heap: list[tuple[int, int, Node]] = []  # last use, a tie-break, node
        self._pushed = 0

    @staticmethod
    @abstractmethod
    def last_use(node: Node) -> int: ...

    @staticmethod
    @abstractmethod
    def belongs(node: Node) -> bool: ...

    @staticmethod
    @abstractmethod
    def may_go(node: Node) -> bool:
        """Of one that belongs here: whether it could be evicted now."""

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, node: Node) -> bool:
        return node in self._members

    def __iter__(self) -> Iterator[Node]:
        """Least recently used first."""
        return iter(sorted(self._members, key=self.last_use))

    def update(self, node: Node) -> None:
        """To be called after anything has changed that the three questions above depend on."""
        if not self.belongs(node):
            self._members.discard(node)
            return
        self._members.add(node)
        if self.may_go(node):
            self._push(node)

    def _push(self, node: Node) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (self.last_use(node), self._pushed, node))
        if len(self._heap) > 4 * len(self._members) + 64:
            free = filter(self.may_go, self._members)
            self._heap = [(self.last_use(node), i, node) for i, node in enumerate(free)]
            heapq.heapify(self._heap)

    def forgotten(self) -> list[Node]:
        """What may go and would never come up: changed without `update`. For the audit."""
        known = {(used, node) for used, _, node in self._heap}
        free = filter(self.may_go, self._members)
        return [node for node in free if (self.last_use(node), node) not in known]

    def oldest(self) -> Node | None:
        """The next one to evict, None if nothing may go."""
        while self._heap:
            used, _, node = self._heap[0]
            if node in self._members and self.may_go(node) and self.last_use(node) == used:
                return node
            heapq.heappop(self._heap)
        return None


class LeafOrder(EvictionOrder):
    """The unlocked leaves, by use of their pages."""

    @staticmethod
    def last_use(node: Node) -> int:
        return node.used

    @staticmethod
    def belongs(node: Node) -> bool:
        return node.is_leaf and not node.kv_locks

    @staticmethod
    def may_go(node: Node) -> bool:
        return True


class StateOrder(EvictionOrder):
    """The nodes that hold a state, locked ones included, by use of the state."""

    @staticmethod
    def last_use(node: Node) -> int:
        return node.state_used

    @staticmethod
    def belongs(node: Node) -> bool:
        return node.state is not None

    @staticmethod
    def may_go(node: Node) -> bool:
        return not node.state_locks
