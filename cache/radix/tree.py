"""The radix tree: which prefixes have latent pages, and at which boundaries a state (serving 3.4).

    match    walk, split where the key ends inside an edge, find the deepest state on the way
    insert   add pages and a state at the end of a key; what is there already is given back
    lock     KV of the path, state of the node; evictions pass locked ones by
    evict    KV leaf by leaf; a state alone where something hangs below it (tombstone)

The tree owns the indices that it holds: pages and slots are `cached` from insert to eviction.
Every operation costs O(length of the key), an eviction O(log nodes).
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import NamedTuple

from cache.joint import joint_boundary
from cache.policy.eviction import Evictable, Eviction
from cache.pools.allocator import OwnershipError
from cache.pools.pool import Pool
from cache.radix import key as keys
from cache.radix.node import Node, Receipt
from cache.radix.recency import LeafOrder, StateOrder
from cache.stats import Evictions


class Match(NamedTuple):
    """What a walk found. node: the deepest with pages and a state, the root if there is none; its
    depth is the joint boundary. kv_depth: how far pages alone reach. lost: a node on the way beyond
    has had a state and lost it."""

    node: Node
    kv_depth: int
    pages: list[int]  # of the path down to `node`
    lost: bool

    @property
    def depth(self) -> int:
        return self.node.depth


class Inserted(NamedTuple):
    """node: the end of the key. already: tokens the tree had before. refused: it has a state there
    already, and the caller keeps the one it brought."""

    node: Node
    already: int
    refused: bool


class Freed(NamedTuple):
    """What an eviction gave back, side effects included."""

    tokens: int
    states: int

    def __add__(self, other: Freed) -> Freed:
        return Freed(self.tokens + other.tokens, self.states + other.states)


NOTHING = Freed(0, 0)


class Ledger(NamedTuple):
    """Tokens and states that may be evicted, and those that a lock protects."""

    kv_evictable: int
    kv_protected: int
    state_evictable: int
    state_protected: int


class RadixTree:
    """Over a page pool with `page` rows a page and a state pool.

    path_cap         states on one path from the root, None for no cap
    keep_tombstones  a tombstone whose last child goes stays as a leaf until its pages are wanted.
                     False: it goes along, unless it is locked (the engine's older tree)
    eviction         which state goes when one must; None: the least recently used, in O(log states)
                     instead of O(states). Pages go by recency in any case
    ValueError for a cap below 1.
    """

    def __init__(
        self,
        pages: Pool,
        page: int,
        states: Pool,
        path_cap: int | None = None,
        *,
        keep_tombstones: bool = True,
        eviction: Eviction | None = None,
    ) -> None:
        if path_cap is not None and path_cap < 1:
            raise ValueError(f"states per path must be at least 1 or without a cap, got {path_cap}")
        self.page, self.path_cap, self.keep_tombstones = page, path_cap, keep_tombstones
        self.pages_pool, self.states_pool, self.eviction = pages, states, eviction
        self._page_bytes = page * keys.WIDTH
        self._tokens_evicted = self._states_evicted = self._states_capped = 0
        self._start()

    def reset(self) -> None:
        """Forget every node, lock and receipt. Frees nothing: the pools are to be cleared, too."""
        self._start()

    def _start(self) -> None:
        self.root = Node(None, b"", 0, [], None)
        self.leaves = LeafOrder()
        self.state_order = StateOrder()
        self._clock = itertools.count(1)  # of uses, of pages or of states
        self.receipts: set[Receipt] = set()
        self._kv_total = self._kv_protected = self._state_protected = 0

    def rebuild(self, unfilled: Container[int] = ()) -> tuple[list[int], list[int]]:
        """After a call that was cut short at any line: no lock is left, and all books but the nodes
        themselves are made anew. Returns the pages and slots that the tree holds; all others that
        were its own are to be given back. Cut short itself, it is to be called again. unfilled:
        slots whose bytes may not have come yet, which no node may keep.

        What hangs from the root is sound at any time, because an index is written before a node
        names it, a node is complete before it is hung up, and taken down before its indices go. A
        split that was cut short may have lost what is below the cut; so that is forgotten.
        """
        nodes = list(self.nodes())
        for node in nodes:
            if node.state is not None and node.state in unfilled:
                node.state = None
        leaves, state_order = LeafOrder(), StateOrder()
        for node in nodes:
            node.kv_locks = node.state_locks = 0
            leaves.update(node)
            state_order.update(node)
        self.receipts = set()
        self.leaves, self.state_order = leaves, state_order
        self._kv_total = sum(keys.length(node.key) for node in nodes)
        self._kv_protected = self._state_protected = 0
        states = [node.state for node in nodes if node.state is not None]
        return [page for node in nodes for page in node.pages], states

    # look-up

    def match(self, tokens: Sequence[int], salt: str | None = None) -> Match:
        """The longest usable prefix of `tokens` (floored to pages).

        May split an edge; refreshes the pages of the path to the found node, deepest newest, and of
        what is below a fresh split, and the state of the found node alone (I-28).
        """
        path, kv_depth = self._walk(self._key(tokens), salt)
        best = self._resumable(path, kv_depth)
        self._touch(reversed([*best.path()]))
        self._touch_state(best)
        return Match(best, kv_depth, self.pages_of(best), _lost_beyond(best, path))

    def peek(self, tokens: Sequence[int], salt: str | None = None) -> Match:
        """As `match`, changing nothing."""
        path, kv_depth = self._walk(self._key(tokens), salt, split=False)
        best = self._resumable(path, kv_depth)
        return Match(best, kv_depth, self.pages_of(best), _lost_beyond(best, path))

    def _resumable(self, path: Sequence[Node], kv_depth: int) -> Node:
        """The node at the joint boundary; the root, at 0, is always legal."""
        holders = {node.depth: node for node in path if node.state is not None}
        return holders.get(joint_boundary([kv_depth], [holders], kv_depth), self.root)

    def pages_of(self, node: Node) -> list[int]:
        """Pages from the root to the end of a node."""
        parts = [part.pages for part in node.path()]
        return [page for pages in reversed(parts) for page in pages]

    # growth

    def insert(
        self,
        tokens: Sequence[int],
        pages: Sequence[int],
        state: int,
        *,
        owned: int = 0,
        salt: str | None = None,
    ) -> Inserted:
        """Pages and the state after the last of `tokens`, which is floored to pages (I-21, I-23).

        pages: one for each page of tokens, of which those of the first `owned` tokens are the
        tree's own already; the others are the caller's and become the tree's, or, where it has
        those rows, are freed. state: a slot of the caller's, which becomes the tree's unless it is
        refused. A node that had lost its state is filled again; states beyond the path cap go.
        Raises ValueError for too few pages, before anything is changed.
        """
        key = self._key(tokens)
        count = len(key) // self._page_bytes
        if len(pages) < count:
            raise ValueError(f"{count} pages of tokens came with {len(pages)} pages of rows")
        if not key:
            return Inserted(self.root, 0, refused=True)
        path, already = self._walk(key, salt)
        self._touch(path)
        shared = already // self.page
        for part in path:
            first = max(owned, part.depth - keys.length(part.key))
            self.pages_pool.free(pages[first // self.page : part.depth // self.page])
        node = path[-1] if path else self.root
        if shared < count:
            node = self._grow(node, key[shared * self._page_bytes :], pages[shared:count], salt)
        refused = node.state is not None
        self._touch_state(node)
        if not refused:
            self._hold(node, state)
            self._apply_path_cap(node)
        return Inserted(node, already, refused)

    def _hold(self, node: Node, state: int) -> None:
        self.states_pool.allocator.donate([state])
        node.state, node.lost = state, False
        self.state_order.update(node)
        self._state_protected += node.state_locks > 0  # a lock at a tombstone waits for it

    def _grow(self, parent: Node, key: bytes, pages: Sequence[int], salt: str | None) -> Node:
        self.pages_pool.allocator.donate(pages)
        node = Node(parent, key, parent.depth + keys.length(key), [*pages], salt)
        parent.children[self._filed_under(parent, key, salt)] = node
        self._kv_total += keys.length(key)
        self._touch([node])
        self.leaves.update(parent)
        return node

    def _apply_path_cap(self, tail: Node) -> None:
        """States of a long path thin out from the root; forks and what is in use are spared."""
        if self.path_cap is None:
            return
        holders = [node for node in tail.path() if node.state is not None]
        excess = len(holders) - self.path_cap
        for node in reversed(holders):
            if excess <= 0:
                return
            if node is not tail:
                excess -= self.thin(node)

    def thin(self, node: Node) -> bool:
        """Take the state of a node that is not worth its slot any more: it becomes a tombstone.
        False, and nothing is changed, for one that has none, is locked, or is a fork or a leaf."""
        if node.state is None or node.state_locks or len(node.children) != 1:
            return False
        self._drop_state(node)
        self._states_capped += 1
        return True

    # locks

    def lock(self, node: Node, *, state: bool = True) -> Receipt:
        """Keep the pages of the path to `node`, and, if wanted, its state, until `unlock`. Of the
        root, and of a node that is not in the tree any more, there is nothing to keep."""
        receipt = Receipt(node, state and not node.is_root, node.state if state else None)
        for part in node.path():
            if not part.kv_locks:
                self._kv_protected += keys.length(part.key)
            part.kv_locks += 1
            self.leaves.update(part)
        if receipt.state:
            self._state_protected += node.state is not None and not node.state_locks
            node.state_locks += 1
            self.state_order.update(node)
        self.receipts.add(receipt)
        return receipt

    def unlock(self, receipt: Receipt) -> None:
        """Undo exactly one lock. OwnershipError if it has been undone."""
        self._require_live(receipt, "unlock")
        self.unlock_state(receipt)
        self.receipts.remove(receipt)
        for part in receipt.node.path():
            part.kv_locks -= 1
            if not part.kv_locks:
                self._kv_protected -= keys.length(part.key)
            self.leaves.update(part)

    def unlock_state(self, receipt: Receipt) -> None:
        """Let go of the state before the pages, if it is locked; errors as `unlock`."""
        self._require_live(receipt, "unlock_state")
        if not receipt.state:
            return
        node, receipt.state, receipt.found = receipt.node, False, None
        node.state_locks -= 1
        self.state_order.update(node)
        self._state_protected -= node.state is not None and not node.state_locks

    def _require_live(self, receipt: Receipt, verb: str) -> None:
        if receipt not in self.receipts:
            raise OwnershipError(f"{verb}: the lock at {receipt.node.depth} has been undone before")

    # eviction

    def evict_kv(self, tokens: int) -> Freed:
        """At least so many tokens' pages, leaf by leaf, states with them; less if all is locked."""
        freed = NOTHING
        while freed.tokens < tokens and (leaf := self.leaves.oldest()) is not None:
            freed += self._delete(leaf)
        return freed

    def evict_states(self, count: int) -> Freed:
        """At least so many states: an unlocked leaf goes with its pages, any other node becomes a
        tombstone, whose edge counts as a part of those below it: Marconi's merge into the child."""
        freed = NOTHING
        while freed.states < count and (node := self._next_state()) is not None:
            if node in self.leaves:
                freed += self._delete(node)
            else:
                self._drop_state(node)
                freed += Freed(0, 1)
        return freed

    def _next_state(self) -> Node | None:
        """The node whose state goes next, None if all are locked. A policy chooses among forks only
        if there is nothing else: what `has_room` has promised must be found."""
        if self.eviction is None:
            return self.state_order.oldest()
        unlocked = [node for node in self.state_order if not node.state_locks]
        nodes = [node for node in unlocked if len(node.children) < 2] or unlocked
        if not nodes:
            return None
        states = [Evictable(_resumable_above(n), n.depth, n.state_used) for n in nodes]
        return nodes[self.eviction.victim(states, next(self._clock))]

    def has_room(self, pages: int = 0, slots: int = 0) -> bool:
        """Whether so many pages and slots are free or could be evicted. O(1)."""
        ledger = self.ledger()
        return (
            self.pages_pool.free_count + ledger.kv_evictable // self.page >= pages
            and self.states_pool.free_count + ledger.state_evictable >= slots
        )

    def make_room(self, pages: int = 0, slots: int = 0) -> bool:
        """Evict until so many pages and slots are free, no more than it takes, pages first. False,
        and nothing is evicted, if locks prevent it."""
        if not self.has_room(pages, slots):
            return False
        self.evict_until(pages, slots)
        return True

    def evict_until(self, pages: int = 0, slots: int = 0) -> Freed:
        """Evict until so many pages and slots are free, no more than it takes, pages first; less if
        locks prevent it."""
        freed = NOTHING
        while self.pages_pool.free_count < pages and (leaf := self.leaves.oldest()) is not None:
            freed += self._delete(leaf)
        while self.states_pool.free_count < slots and (one := self.evict_states(1)).states:
            freed += one
        return freed

    def _delete(self, leaf: Node) -> Freed:
        """Take a leaf down, and, if they are not kept, the tombstones that it leaves as leaves."""
        parent = leaf.parent
        freed = self._take_down(leaf)
        if not self.keep_tombstones:
            while parent in self.leaves and parent.state is None:
                leaf, parent = parent, parent.parent
                freed += self._take_down(leaf)
        return freed

    def _take_down(self, leaf: Node) -> Freed:
        states = int(leaf.state is not None)
        if states:
            self._drop_state(leaf)
        parent = leaf.parent
        del parent.children[self.filed_under(leaf)]  # before its pages go (see `rebuild`)
        leaf.parent = None
        self.pages_pool.evict(leaf.pages)
        self._kv_total -= keys.length(leaf.key)
        self._tokens_evicted += keys.length(leaf.key)
        self.leaves.update(leaf)
        self.leaves.update(parent)
        return Freed(keys.length(leaf.key), states)

    def _drop_state(self, node: Node) -> None:
        state, node.state, node.lost = node.state, None, True  # before it goes (see `rebuild`)
        self.states_pool.evict([state])
        self.state_order.update(node)
        self._states_evicted += 1

    # books

    def ledger(self) -> Ledger:
        """The four amounts (I-27), kept along."""
        return Ledger(
            self._kv_total - self._kv_protected,
            self._kv_protected,
            len(self.state_order) - self._state_protected,
            self._state_protected,
        )

    @property
    def evictions(self) -> Evictions:
        """What has been evicted so far; a reset is none."""
        return Evictions(self._tokens_evicted, self._states_evicted, self._states_capped)

    def nodes(self) -> Iterator[Node]:
        """All but the root, parents first, children by salt and tokens."""
        stack = [self.root]
        while stack:
            node = stack.pop()
            if not node.is_root:
                yield node
            stack += sorted(
                node.children.values(),
                key=lambda n: (n.salt or "", keys.decode(n.key)),
                reverse=True,
            )

    # walking

    def _key(self, tokens: Sequence[int]) -> bytes:
        return keys.encode(tokens[: len(tokens) // self.page * self.page])

    def filed_under(self, node: Node) -> object:
        """The name of a node among its parent's children."""
        return self._filed_under(node.parent, node.key, node.salt)

    def _filed_under(self, parent: Node, key: bytes, salt: str | None) -> object:
        """A child is filed under its first page; below the root, under its salt too (I-20)."""
        first = key[: self._page_bytes]
        return (salt, first) if parent.is_root else first

    def _walk(self, key: bytes, salt: str | None, split: bool = True) -> tuple[list[Node], int]:
        """Nodes whose edges the key follows to their ends, and the tokens it follows in all. With
        `split`, an edge that it leaves on the way is split there, so that the two agree."""
        node, path, at = self.root, [], 0
        while at < len(key):
            first = key[at : at + self._page_bytes]
            child = node.children.get(self._filed_under(node, first, salt))
            if child is None:
                break
            if key.startswith(child.key, at):
                at += len(child.key)
                path.append(child)
                node = child
                continue
            shared = keys.common_pages(child.key, key[at : at + len(child.key)], self._page_bytes)
            if split:
                path.append(self._split(child, shared))
            at += shared * self._page_bytes
            break
        return path, at // keys.WIDTH

    def _split(self, lower: Node, pages: int) -> Node:
        """Put a node after the first `pages` pages of an edge. The state stays at its boundary, in
        the lower part; the upper part has its locks of pages and none of state (serving 3.5)."""
        parent, cut = lower.parent, pages * self._page_bytes
        upper = Node(
            parent,
            lower.key[:cut],
            parent.depth + pages * self.page,
            lower.pages[:pages],
            lower.salt,
        )
        upper.kv_locks = lower.kv_locks
        # from here until `lower` hangs below it, `upper` is a sound leaf (see `rebuild`)
        parent.children[self._filed_under(parent, upper.key, upper.salt)] = upper
        lower.key, lower.pages, lower.parent = lower.key[cut:], lower.pages[pages:], upper
        upper.children[self._filed_under(upper, lower.key, lower.salt)] = lower
        self._touch([lower])  # decision 25: the walk has come through both parts
        upper.used = lower.used
        return upper

    def _touch(self, nodes: Iterable[Node]) -> None:
        """In order, the last one newest."""
        for node in nodes:
            node.used = next(self._clock)
            self.leaves.update(node)

    def _touch_state(self, node: Node) -> None:
        node.state_used = next(self._clock)
        self.state_order.update(node)


def _resumable_above(node: Node) -> int:
    """The boundary from which the state of a node would be computed again."""
    return next((part.depth for part in node.parent.path() if part.state is not None), 0)


def _lost_beyond(best: Node, path: Sequence[Node]) -> bool:
    return any(node.lost for node in path if node.depth > best.depth)
