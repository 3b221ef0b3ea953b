"""Which state is reused when one must be, by a policy instead of the order of the queue.

A block knows no parent; but every state was registered by a request that had its whole prefix, so
the hashes of that prefix tell which of the boundaries above have a state:

    start   the nearest shallower boundary with a state of the same prefix, 0 if there is none; of
            a state that another block has, too, its own: nothing would have to be computed again
    fork    a state that is this for several others. It is chosen only if there is nothing else, as
            in the tree (Marconi's candidates have at most one child)
    used    when it was let go of last: its place in the queue, which grows with every release

The start is kept along: a choice costs O(states), the queue's own O(log states).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from cache.blocks.keys import HashChain, Key
from cache.blocks.pool import Block, BlockPool
from cache.policy.eviction import Evictable, Eviction

SPARE = 64  # lines of what has gone that are no trouble


@dataclass
class Line:
    """A state's prefix. end: its boundary. start, above: boundary and key of the nearest state
    above, 0 and None without one."""

    chain: HashChain
    end: int
    start: int = 0
    above: Key | None = None


class Victims:
    """Over the states of one group, which are all that is in the pool."""

    def __init__(self, pool: BlockPool, policy: Eviction) -> None:
        (self._group,) = pool.pools
        self._pool, self._policy = pool, policy
        self._lines: dict[Key, Line] = {}

    def kept(self, key: Key, boundary: int, chain: HashChain) -> None:
        """There is, or will be, a state of this prefix."""
        if len(self._lines) > 2 * len(self._pool.index) + SPARE:
            self._forget_what_has_gone()
        for line in self._lines.values():
            between = line.start < boundary < line.end
            if between and line.chain.key(boundary, self._group) == key:
                line.start, line.above = boundary, key
        self._lines[key] = Line(chain, boundary)
        self._look_above(self._lines[key])

    def victim(self, idle: Sequence[Block]) -> Block:
        """The one to reuse of these, which have keys and are in the order of the queue."""
        self._forget_what_has_gone()
        children = Counter(line.above for line in self._lines.values())
        keys = [(block, key) for block in idle for key in block.keys]
        keys = [(block, key) for block, key in keys if children[key] < 2] or keys
        states = [self._evictable(block, key) for block, key in keys]
        return keys[self._policy.victim(states, self._pool.queue.back)][0]

    def _evictable(self, block: Block, key: Key) -> Evictable:
        line, alone = self._lines[key], len(self._pool.index[key]) == 1
        return Evictable(
            line.start if alone else line.end, line.end, self._pool.queue.place(block.id)
        )

    def _forget_what_has_gone(self) -> None:
        self._lines = {key: self._lines[key] for key in self._pool.index}
        for line in self._lines.values():
            if line.above is not None and line.above not in self._lines:
                self._look_above(line)

    def _look_above(self, line: Line) -> None:
        """Find the nearest state above anew."""
        line.start, line.above = 0, None
        boundaries = {other.end for other in self._lines.values() if other.end < line.end}
        for boundary in sorted(boundaries, reverse=True):
            key = line.chain.key(boundary, self._group)
            if key in self._lines:
                line.start, line.above = boundary, key
                return
