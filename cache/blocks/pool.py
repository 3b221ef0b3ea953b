"""BlockPool: blocks, what finds them, who holds them, and which is reused next (serving 4.3).

A block id is book-keeping (decision 30); it equals the index in the physical pool of the group that
the block was handed to. Over the pool of one group it limits that group alone; over the pools of
all groups, which are then of one size, ids are counted once for all, as the engine does.

    taken      from the head of the queue, or, of states, as a policy chooses; only then are its
               keys removed (I-36)
    let go     without a key to the head, reused first; with one to the tail (LRU)
    hit        held once more, out of the queue

In the physical pool a block is ACTIVE or TRACKED while somebody may write to it, even if it has a
key already (rows are appended behind what the key stands for), CACHED once nobody does but a key or
a holder is left, and free without either. Block 0 is nobody's, ever.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from cache.blocks.free_queue import FreeQueue
from cache.blocks.keys import HashChain, Key
from cache.pools.allocator import PRIVATE, Ownership, OwnershipError
from cache.pools.pool import Pool

NULL = 0  # the block of a column without storage


class Block:
    """refs: holders. keys: what it is found by, with the boundary that each stands for, the oldest
    first. filled: of rows, boundary up to which they have been written. resumed: of a state, by
    somebody else. pool: where its memory is, None while it has none. place: where it was in the
    queue."""

    __slots__ = ("filled", "id", "keys", "place", "pool", "refs", "resumed")

    def __init__(self, id: int) -> None:
        self.id, self.refs = id, 0
        self.keys: dict[Key, int] = {}
        self.pool: Pool | None = None
        self.filled = 0
        self.place: int | None = None
        self.resumed = False

    def __repr__(self) -> str:
        return f"block {self.id} of {self.refs} holders, for {[*self.keys.values()]}"


class Entry(NamedTuple):
    """One key of one block."""

    key: Key
    boundary: int
    block: Block


class Choice(Protocol):
    """Which of the states that nobody holds is reused when one must be."""

    def kept(self, key: Key, boundary: int, chain: HashChain) -> None:
        """One has been registered, of this sequence."""

    def victim(self, idle: Sequence[Block]) -> Block:
        """idle: in the order of the queue, all with keys."""


class BlockPool:
    """pools: by group number, the physical pool that its blocks have their memory in. ValueError if
    they are not of one size.

    index: the blocks of each key by id, the oldest first. fresh: what was registered in this step,
    whose bytes are perhaps still to be written (I-41). choice: None for the head of the queue.
    """

    def __init__(self, pools: Mapping[int, Pool]) -> None:
        sizes = {pool.size for pool in pools.values()}
        if len(sizes) != 1:
            raise ValueError(
                f"groups that share their blocks need pools of one size, got {sorted(sizes)}"
            )
        self.pools = dict(pools)
        (self.size,) = sizes
        self.blocks = [Block(id) for id in range(self.size + 1)]
        self.queue = FreeQueue(range(1, self.size + 1))
        self.fresh: dict[Key, list[Block]] = {}
        self.index: dict[Key, dict[int, Block]] = {}
        self.choice: Choice | None = None
        self._lost: OrderedDict[Key, None] = OrderedDict()  # of reused blocks, the latest last
        self.reused: dict[Pool, int] = dict.fromkeys(self.pools.values(), 0)  # with keys, so far

    @property
    def free_count(self) -> int:
        """Blocks that can be taken, those with keys included."""
        return len(self.queue)

    # what is found

    def find(self, key: Key) -> Block | None:
        """The oldest block with this key. Changes nothing."""
        found = self.index.get(key)
        return next(iter(found.values())) if found else None

    def entries(self) -> Iterator[Entry]:
        """Every key of every block."""
        for key, found in self.index.items():
            for block in found.values():
                yield Entry(key, block.keys[key], block)

    def register(self, block: Block, key: Key, boundary: int) -> bool:
        """From now on `block` stands for the first `boundary` tokens of a prefix; False if it does
        already. Several blocks may have one key, and one block several."""
        if key in block.keys:
            return False
        self.fresh.setdefault(key, []).append(block)
        self.index.setdefault(key, {})[block.id] = block
        block.keys[key] = boundary
        self._lost.pop(key, None)
        return True

    def renew(self, block: Block, key: Key) -> None:
        """Of the blocks with this key it is the last to serve from now on."""
        found = self.index[key]
        found[block.id] = found.pop(block.id)

    def unregister(self, block: Block, key: Key) -> None:
        """Undo it. KeyError if the block has no such key."""
        found = self.index[key]
        del block.keys[key]
        del found[block.id]
        if not found:
            del self.index[key]
        fresh = self.fresh.get(key, [])
        if block in fresh:
            fresh.remove(block)
            if not fresh:
                del self.fresh[key]

    def forget(self, block: Block) -> None:
        """Remove all keys of a block, held or not; without a holder it is free, where it is in the
        queue."""
        for key in [*block.keys]:
            self.unregister(block, key)
        if not block.refs:
            self._give_back(block)

    def discard(self, block: Block) -> None:
        """The same, and without a holder it is the next to be reused."""
        if not block.refs:
            self.queue.remove(block.id)
            self.queue.push_front([block.id])
        self.forget(block)

    def move_keys(self, source: Block, destination: Block) -> None:
        """`destination` stands for what `source` did."""
        for key, boundary in [*source.keys.items()]:
            self.unregister(source, key)
            self.register(destination, key, boundary)

    def was_lost(self, key: Key) -> bool:
        """Whether a block with this key was reused, and none has it now, as far as is remembered:
        as many keys as there are blocks."""
        return key in self._lost

    # who holds what

    def take(self, count: int, group: int, state: Ownership = Ownership.ACTIVE) -> list[Block]:
        """So many blocks for a group, each with one holder. Their keys are gone. OwnershipError,
        changing nothing, if there are not as many."""
        if count > len(self.queue):
            raise OwnershipError(f"take: {count} blocks, of which {len(self.queue)} are free")
        pool, taken = self.pools[group], []
        for _ in range(count):
            block = self._next()
            self._evict(block)
            pool.take([block.id], state)
            block.pool, block.refs, block.filled, block.resumed = pool, 1, 0, False
            block.place = None
            taken.append(block)
        return taken

    def _next(self) -> Block:
        """Out of the queue: its head, or, where there is a choice and all have keys, the victim."""
        if self.choice is None:
            return self.blocks[self.queue.pop()]
        idle = [self.blocks[id] for id in self.queue]
        bare = (block for block in idle if not block.keys)
        block = next(bare, None) or self.choice.victim(idle)
        self.queue.remove(block.id)
        return block

    def _evict(self, block: Block) -> None:
        if block.keys:
            self.reused[block.pool] += 1
        for key in [*block.keys]:
            self.unregister(block, key)
            if key not in self.index:
                self._lost[key] = None
                self._lost.move_to_end(key)
                if len(self._lost) > self.size:
                    self._lost.popitem(last=False)
        self._give_back(block)

    def hold(self, blocks: Iterable[Block]) -> None:
        """One holder more each; out of the queue."""
        for block in blocks:
            if not block.refs:
                block.place = self.queue.remove(block.id)
            block.refs += 1

    def unhold(self, blocks: Iterable[Block]) -> None:
        """Undo `hold`: whoever has no other holder is where it was in the queue; who was not in it,
        because others have let go of it since, goes there as with `release`."""
        for block in blocks:
            if block.refs > 1:
                block.refs -= 1
            elif block.place is None:
                self.release([block])
            else:
                block.refs = 0
                self._settle(block)
                self.queue.put_back(block.id, block.place)

    def release(self, blocks: Iterable[Block]) -> None:
        """One holder less each; whoever has none left goes into the queue: without keys to the
        head, the first of them next, with keys to the tail. OwnershipError if nobody holds one."""
        bare, keyed = [], []
        for block in blocks:
            if not block.refs:
                raise OwnershipError(f"release: nobody holds {block}")
            block.refs -= 1
            block.place = None
            if not block.refs:
                self._settle(block)
                (keyed if block.keys else bare).append(block.id)
        self.queue.push_front(bare)
        self.queue.push_back(keyed)

    def donate(self, blocks: Iterable[Block]) -> None:
        """Nobody writes to them any more."""
        for block in blocks:
            if self.state_of(block) in PRIVATE:
                block.pool.allocator.donate([block.id])

    def writable(self, block: Block) -> bool:
        """Whether its one holder may overwrite it (I-35)."""
        return block.refs == 1 and not block.keys and self.state_of(block) is Ownership.ACTIVE

    def state_of(self, block: Block) -> Ownership:
        """Of its memory."""
        if block.id == NULL:
            return Ownership.RESERVED
        return block.pool.allocator.state_of(block.id) if block.pool else Ownership.FREE

    def _settle(self, block: Block) -> None:
        """Nobody holds it any more."""
        if block.keys:
            self.donate([block])
        else:
            self._give_back(block)

    def _give_back(self, block: Block) -> None:
        """Its memory, if it has any."""
        pool, block.pool = block.pool, None
        if pool is not None:
            private = pool.allocator.state_of(block.id) in PRIVATE
            (pool.free if private else pool.evict)([block.id])

    # the whole

    def end_step(self) -> None:
        """What was registered in the step is there."""
        self.fresh.clear()

    def reset(self) -> None:
        """Forget all keys. The order of reuse stays (serving 4.3). OwnershipError while a block is
        held."""
        if len(self.queue) != self.size:
            raise OwnershipError(f"reset: {self.size - len(self.queue)} blocks are held")
        for block in self.blocks[1:]:
            self.forget(block)
        self.fresh.clear()
        self._lost.clear()

    def rebuild(self) -> dict[Pool, list[int]]:
        """Make the books anew after a call that was cut short: nobody holds anything, and what is
        fresh, or known here but not there, is dropped. Returns the blocks that are left, by pool,
        for `Pool.reclaim`. May be cut short itself and called again."""
        order = {id: i for i, id in enumerate(self.queue)}
        index: dict[Key, dict[int, Block]] = {}
        kept: dict[int, dict[Key, int]] = {}
        for key, found in self.index.items():
            fresh = self.fresh.get(key, ())
            for block in found.values():
                if key in block.keys and block not in fresh and block.pool is not None:
                    index.setdefault(key, {})[block.id] = block
                    kept.setdefault(block.id, {})[key] = block.keys[key]
        survivors: dict[Pool, list[int]] = {pool: [] for pool in self.pools.values()}
        for block in self.blocks[1:]:
            block.refs, block.keys = 0, kept.get(block.id, {})
            if block.keys:
                survivors[block.pool].append(block.id)
            else:
                block.pool = None
        last = len(order)
        ids = sorted(range(1, self.size + 1), key=lambda id: (id in kept, order.get(id, last), id))
        self.index, self.queue = index, FreeQueue(ids)
        self.fresh.clear()
        return survivors
