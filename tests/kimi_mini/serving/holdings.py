"""What a prefix cache holds: the same questions to a tree and to hashed blocks.

`held` says of every page and slot in it what it stands for, in tokens. A tree has them on its
edges. Blocks have hashes of them, so whoever wants to know shows all that runs to `learn` before.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import Tensor

from cache.blocks.groups import Group, RowGroup
from cache.blocks.manager import BlockCache
from cache.blocks.pool import Block, BlockPool, Entry
from cache.boundaries import floored
from cache.leases import StepPlan
from cache.pools.pool import Pool
from cache.radix import key as keys
from cache.radix.manager import RadixCache
from cache.radix.node import Node
from kimi_mini import Engine

EVERYTHING = 1 << 30


class Held(NamedTuple):
    """An index of a pool. A page has the rows of tokens[start:], a slot the state after all of
    them, and no rows: start is their number."""

    pool: Pool
    index: int
    tokens: tuple[int, ...]
    start: int

    @property
    def boundary(self) -> int:
        return len(self.tokens)

    @property
    def is_state(self) -> bool:
        return self.start == self.boundary

    def goes_on(self, other: Held) -> bool:
        """Whether it is the same place with at least as much in it."""
        return self.start == other.start and self.tokens[: other.boundary] == other.tokens

    def content(self) -> list[Tensor]:
        """Views of what it stands for, all layers first: [layers, rows, ...] or [layers, ...]."""
        return [part_of(tensor, self.index, self) for tensor in self.pool.tensors]


def part_of(tensor: Tensor, index: int, what: Held) -> Tensor:
    """As much of an index as `what` has."""
    whole = tensor[:, index]
    return whole if what.is_state else whole[:, : what.boundary - what.start]


class Holdings(ABC):
    """Of one cache. Salts are to differ from none: tokens do not tell them apart."""

    @abstractmethod
    def learn(self, plan: StepPlan) -> None:
        """This is going to run."""

    @abstractmethod
    def held(self) -> list[Held]:
        """Everything that a request may resume from, longest prefixes first."""

    @abstractmethod
    def checkpoints(self) -> list[int]:
        """Boundaries of all states, ascending."""

    @abstractmethod
    def evict_states(self, count: int) -> int:
        """At most so many, as if for want of room; how many it was."""

    @abstractmethod
    def evict_kv(self, tokens: int) -> int:
        """About so many tokens of rows; how many it was."""

    @abstractmethod
    def assert_unlocked(self) -> None:
        """Nothing is kept for anybody who is gone."""

    @abstractmethod
    def assert_empty(self) -> None:
        """Nothing is left in the books."""


def holdings_of(engine: Engine) -> Holdings:
    """ValueError for an engine that keeps nothing."""
    if isinstance(engine.cache, RadixCache):
        return TreeHoldings(engine.cache)
    if isinstance(engine.cache, BlockCache):
        return BlockHoldings(engine.cache)
    raise ValueError(f"there is nothing to be held by {type(engine.cache).__name__}")


def tokens_to(node: Node) -> tuple[int, ...]:
    """The tokens from the root to the end of a node."""
    edges = [keys.decode(part.key) for part in node.path()]
    return tuple(token for edge in reversed(edges) for token in edge)


class TreeHoldings(Holdings):
    def __init__(self, cache: RadixCache) -> None:
        self.cache, self.tree = cache, cache.tree

    def learn(self, plan: StepPlan) -> None:
        """Its edges say it all."""

    def held(self) -> list[Held]:
        return sorted(self._each(), key=lambda held: -held.boundary)

    def _each(self) -> Iterator[Held]:
        pages, states = self.cache.storage
        page = self.cache.page
        for node in self.tree.nodes():
            tokens = tokens_to(node)
            if node.state is not None:
                yield Held(states, node.state, tokens, node.depth)
            first = node.depth - len(node.pages) * page
            for i, index in enumerate(node.pages):
                start = first + i * page
                yield Held(pages, index, tokens[: start + page], start)

    def checkpoints(self) -> list[int]:
        return sorted(node.depth for node in self.tree.nodes() if node.state is not None)

    def evict_states(self, count: int) -> int:
        return self.tree.evict_states(count).states

    def evict_kv(self, tokens: int) -> int:
        return self.tree.evict_kv(tokens).tokens

    def assert_unlocked(self) -> None:
        ledger = self.tree.ledger()
        assert (ledger.kv_protected, ledger.state_protected) == (0, 0)
        assert not self.tree.receipts

    def assert_empty(self) -> None:
        assert not self.tree.root.children and not list(self.tree.nodes())


class BlockHoldings(Holdings):
    def __init__(self, cache: BlockCache) -> None:
        self.cache = cache
        self._prefixes: dict[bytes, tuple[int, ...]] = {}

    def learn(self, plan: StepPlan) -> None:
        tokens = plan.lease.tokens[: plan.end]
        chain = self.cache.chain_of(tokens, plan.lease.request.salt)
        unit = chain.unit
        for boundary in range(floored(plan.start, unit) + unit, chain.reach + 1, unit):
            self._prefixes[chain.at(boundary)] = tuple(tokens[:boundary])

    def held(self) -> list[Held]:
        """Of a block that is found as several parts of it, the longest."""
        longest: dict[Block, Held] = {}
        for group, entry in self._entries():
            tokens = self._prefixes[entry.key[:-4]]
            rows = isinstance(group, RowGroup)
            start = floored(len(tokens) - 1, group.block) if rows else len(tokens)
            new = Held(entry.block.pool, entry.block.id, tokens, start)
            known = longest.get(entry.block, new)
            longest[entry.block] = max(known, new, key=lambda held: held.boundary)
        return sorted(longest.values(), key=lambda held: -held.boundary)

    def _entries(self) -> Iterator[tuple[Group, Entry]]:
        """With the group of each; what is being written in an open step is not there yet."""
        by_number = {group.number: group for group in self.cache.groups}
        for pool in self.cache.block_pools:
            for entry in pool.entries():
                if entry.block not in pool.fresh.get(entry.key, ()):
                    yield by_number[int.from_bytes(entry.key[-4:], "big")], entry

    def checkpoints(self) -> list[int]:
        """Each once, however many blocks have it."""
        states = {e.key: e.boundary for g, e in self._entries() if not isinstance(g, RowGroup)}
        return sorted(states.values())

    def evict_states(self, count: int) -> int:
        (states,) = self.cache.storage.states
        return self._evict(states, count)

    def evict_kv(self, tokens: int) -> int:
        (pages,) = self.cache.storage.pages
        page = self.cache.storage.page_tokens[0]
        return self._evict(pages, -(-tokens // page)) * page

    def _evict(self, physical: Pool, count: int) -> int:
        """Those that would be reused first."""
        evicted = 0
        for pool, block in self._idle_blocks():
            if block.pool is physical and evicted < count:
                pool._evict(block)
                evicted += 1
        return evicted

    def _idle_blocks(self) -> Iterable[tuple[BlockPool, Block]]:
        """That are found by something, and that nobody holds; in the order of reuse."""
        blocks = ((pool, pool.blocks[id]) for pool in self.cache.block_pools for id in pool.queue)
        return [(pool, block) for pool, block in blocks if block.keys]

    def assert_unlocked(self) -> None:
        for pool in self.cache.block_pools:
            assert pool.free_count == pool.size and not pool.fresh, pool

    def assert_empty(self) -> None:
        assert not [*self._entries()]
