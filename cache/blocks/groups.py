"""What a piece of a request needs of each group, and how it gets it.

Rows are append-only: a table grows by columns, and a hit that ends inside a block goes on in a copy
of it. A state is overwritten by the next token, so before a piece runs the running state must be in
a block that its request may write (I-35): where it is, if nobody else has a use for it, else in a
fresh one, by copy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from cache.blocks.coordinator import Columns
from cache.blocks.lease import BlockLease, Pair, Piece, Registered, RowTable, StateTable
from cache.blocks.pool import Block, BlockPool
from cache.columns import column_of
from cache.leases import Copy, CopyKind, WaitReason
from cache.pools.allocator import Ownership


@dataclass(frozen=True, eq=False)
class Group(ABC):
    """number: in keys. index: among the groups of its kind. block: tokens."""

    number: int
    index: int
    block: int
    pool: BlockPool

    kind: ClassVar[CopyKind]
    lacks: ClassVar[WaitReason]

    @abstractmethod
    def table(self, lease: BlockLease) -> RowTable | StateTable: ...

    @abstractmethod
    def adopt(self, lease: BlockLease, columns: Columns, boundary: int) -> None:
        """Hold what was found up to a boundary, above 0."""

    @abstractmethod
    def drop(self, lease: BlockLease) -> None:
        """Empty the table; what was in it is somebody else's business now."""

    @abstractmethod
    def needs(self, lease: BlockLease, end: int) -> int:
        """Blocks without which a piece up to `end` cannot run."""

    @abstractmethod
    def take(self, lease: BlockLease, end: int, piece: Piece) -> None:
        """Take them; where the piece runs is in the lease."""

    @abstractmethod
    def undo(self, lease: BlockLease, piece: Piece) -> None:
        """The table as it was before `take`; its keys are gone."""

    @abstractmethod
    def settle(self, lease: BlockLease) -> None:
        """The piece has run, up to lease.computed."""

    @abstractmethod
    def has(self, block: Block, boundary: int) -> bool:
        """Whether what a block stands for, up to a boundary, was written before this step."""

    def unadopt(self, lease: BlockLease) -> None:
        """Undo `adopt`."""
        self.pool.unhold(reversed(self.table(lease).held()))
        self.drop(lease)

    def give_back(self, lease: BlockLease) -> None:
        """All, the last column first, so that it is the first to be reused."""
        held = self.table(lease).held()
        self.drop(lease)
        self.let_go(reversed(held))

    def let_go(self, blocks: Iterable[Block]) -> None:
        """Its request has no use for them any more."""
        blocks = [*blocks]
        self.pool.donate(blocks)
        self.pool.release(blocks)

    def key(self, lease: BlockLease, block: Block, boundary: int, piece: Piece) -> bool:
        """Let a block be found as the first `boundary` tokens; False if it is already."""
        key = lease.chain.key(boundary, self.number)
        new = self.pool.register(block, key, boundary)
        if new:
            piece.registered.append(Registered(self.pool, block, key, boundary))
        return new

    def copy(self, piece: Piece, source: Block, destination: Block) -> None:
        """Before the piece runs."""
        piece.copies.append(Copy(self.kind, self.index, source.id, destination.id))

    def copy_held(self, piece: Piece, source: Block, destination: Block) -> None:
        """The same, and both stay until then, whatever becomes of the table."""
        self.copy(piece, source, destination)
        self.pool.hold((source, destination))
        piece.pairs.append(Pair(self.number, source, destination))


class RowGroup(Group):
    """An attention group."""

    kind, lacks = CopyKind.PAGE, WaitReason.PAGES

    def table(self, lease: BlockLease) -> RowTable:
        return lease.rows[self.index]

    def adopt(self, lease: BlockLease, columns: Columns, boundary: int) -> None:
        self.pool.hold(columns)
        whole = boundary // self.block
        tail = columns[whole] if whole < len(columns) else None
        lease.rows[self.index] = RowTable(columns[:whole], tail, keyed=whole, full=whole)
        lease.pages[self.index][:] = [block.id for block in columns[:whole]]

    def drop(self, lease: BlockLease) -> None:
        lease.rows[self.index] = RowTable()
        lease.pages[self.index].clear()

    def needs(self, lease: BlockLease, end: int) -> int:
        return max(0, -(-end // self.block) - len(self.table(lease).blocks))

    def take(self, lease: BlockLease, end: int, piece: Piece) -> None:
        table = self.table(lease)
        taken = self.pool.take(self.needs(lease, end), self.number)
        if table.tail is not None:
            self.copy_held(piece, table.tail, taken[0])
            self.pool.release([table.tail])
            table.tail = None
        table.blocks += taken
        lease.pages[self.index].extend(block.id for block in taken)

    def undo(self, lease: BlockLease, piece: Piece) -> None:
        table, columns = self.table(lease), piece.columns[self.index]
        table.tail = piece.tails[self.index]
        if table.tail is not None:
            self.pool.hold([table.tail])
        taken = table.blocks[columns:]
        del table.blocks[columns:], lease.pages[self.index][columns:]
        table.keyed = min(table.keyed, lease.computed // self.block)
        self.let_go(reversed(taken))

    def has(self, block: Block, boundary: int) -> bool:
        return block.filled >= boundary

    def register(self, lease: BlockLease, end: int, piece: Piece) -> None:
        """The blocks that are full at `end`."""
        table = self.table(lease)
        for column in range(table.keyed, min(end, lease.chain.reach) // self.block):
            self.key(lease, table.blocks[column], (column + 1) * self.block, piece)
            table.keyed = column + 1

    def register_inside(self, lease: BlockLease, boundary: int, piece: Piece) -> None:
        """A block up to a boundary inside of it, if it is inside."""
        if boundary % self.block:
            self.key(lease, self.table(lease).blocks[boundary // self.block], boundary, piece)

    def settle(self, lease: BlockLease) -> None:
        """Whole blocks will not be written again."""
        table, full = self.table(lease), lease.computed // self.block
        for column in range(table.full, -(-lease.computed // self.block)):
            table.blocks[column].filled = min((column + 1) * self.block, lease.computed)
        self.pool.donate(table.blocks[table.full : full])
        table.full = max(table.full, full)
        table.keyed = min(table.keyed, full)


@dataclass(frozen=True, eq=False)
class StateGroup(Group):
    """A state group. A state that is kept stays where it is, and the request moves on; without a
    block to move to it takes the state back, which is not worth waiting for."""

    capacity: int

    kind, lacks = CopyKind.STATE, WaitReason.SLOTS

    def table(self, lease: BlockLease) -> StateTable:
        return lease.states[self.index]

    def adopt(self, lease: BlockLease, columns: Columns, boundary: int) -> None:
        (state,) = held = [block for block in columns if block is not None]
        self.pool.hold(held)
        state.resumed = True
        self.table(lease).run_in(len(columns) - 1, boundary, state)

    def drop(self, lease: BlockLease) -> None:
        lease.states[self.index] = StateTable(self.capacity)
        lease.slots[self.index] = 0

    def needs(self, lease: BlockLease, end: int) -> int:
        running = self.table(lease).running
        return 0 if running is not None and self._may_write(lease, running) else 1

    def _may_write(self, lease: BlockLease, running: Block) -> bool:
        """Once its keys are given up."""
        active = self.pool.state_of(running) is Ownership.ACTIVE
        return self._own(lease, running) and active and running.refs == 1

    def _own(self, lease: BlockLease, block: Block) -> bool:
        """Whether the request has run on it: what it has found is others' to write."""
        return lease.slots[self.index] == block.id

    def take(self, lease: BlockLease, end: int, piece: Piece) -> None:
        new = self.table(lease).running
        if new is None:
            (new,) = self.pool.take(1, self.number)
        elif not self.pool.writable(new):
            new = self._moved_on(lease, new, piece)
        self._run_in(lease, column_of(end, self.block), end, new)

    def _moved_on(self, lease: BlockLease, running: Block, piece: Piece) -> Block:
        if not self.pool.free_count:
            self.pool.forget(running)
            return running
        (fresh,) = self.pool.take(1, self.number)
        self._replace(lease, running, fresh, piece)
        return fresh

    def _replace(self, lease: BlockLease, running: Block, fresh: Block, piece: Piece) -> None:
        """The running state goes on in a copy, and leaves the table."""
        self.copy_held(piece, running, fresh)
        self.table(lease).remove(running)
        (self.let_go if self._own(lease, running) else self.pool.release)([running])

    def _run_in(self, lease: BlockLease, column: int, end: int, block: Block) -> None:
        self.table(lease).run_in(column, end, block)
        lease.slots[self.index] = block.id

    def undo(self, lease: BlockLease, piece: Piece) -> None:
        taken, before = self.table(lease).held(), piece.states[self.index]
        kept = before.held()
        self.pool.hold(block for block in kept if block not in taken)
        lease.states[self.index] = before
        lease.slots[self.index] = piece.slots[self.index]
        self.let_go(block for block in reversed(taken) if block not in kept)

    def key(self, lease: BlockLease, block: Block, boundary: int, piece: Piece) -> bool:
        if self.pool.choice is not None:
            self.pool.choice.kept(lease.chain.key(boundary, self.number), boundary, lease.chain)
        return super().key(lease, block, boundary, piece)

    def has(self, block: Block, boundary: int) -> bool:
        fresh = self.pool.fresh
        return not any(block in fresh.get(key, ()) for key in block.keys)

    def keep(self, lease: BlockLease, boundary: int) -> Block:
        """A block for a state that is exported at a boundary inside the piece."""
        (block,) = self.pool.take(1, self.number, Ownership.TRACKED)
        self.table(lease).put(column_of(boundary, self.block), boundary, block)
        return block

    def settle(self, lease: BlockLease) -> None:
        """All but the running state is the cache's."""
        table = self.table(lease)
        others = [block for block in table.held() if block is not table.running]
        for block in others:
            table.remove(block)
        self.let_go(others)
        self._run_in(lease, column_of(lease.computed, self.block), lease.computed, table.running)
