"""What a lease of the block manager holds, group by group, and what its plan in flight changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from cache.blocks.keys import HashChain, Key
from cache.blocks.pool import Block, BlockPool
from cache.leases import Copy, Lease
from cache.visit import Visit


@dataclass
class RowTable:
    """Of one attention group. blocks: column by column. tail: the block of a hit that ends inside
    of it, to be copied before it is written. keyed, full: columns from the start that have been
    registered, and that nobody writes to any more."""

    blocks: list[Block] = field(default_factory=list)
    tail: Block | None = None
    keyed: int = 0
    full: int = 0

    def held(self) -> list[Block]:
        return [*self.blocks, *([] if self.tail is None else [self.tail])]


@dataclass
class StateBlock:
    """A column of a state group: at most `capacity` states inside of it, each in a slot of its own.
    With a capacity of one a state that is to stay must make room for the one that goes on."""

    capacity: int
    entries: dict[int, Block] = field(default_factory=dict)  # by boundary

    def put(self, boundary: int, block: Block) -> None:
        """ValueError if it is full."""
        if len(self.entries) == self.capacity:
            raise ValueError(
                f"a state block for {self.capacity} states has those at {[*self.entries]}, and no "
                f"room for the one at {boundary}"
            )
        self.entries[boundary] = block


@dataclass
class StateTable:
    """Of one state group. length: columns, most of them without a state (null). running: the state
    that the request goes on from. keyed: columns from the start that have been registered.
    inside: the running state is inside its column, and shared or found by others."""

    capacity: int
    length: int = 0
    columns: dict[int, StateBlock] = field(default_factory=dict)
    running: Block | None = None
    keyed: int = 0
    inside: bool = False

    def put(self, column: int, boundary: int, block: Block) -> None:
        """A state into a column; the table is as long as that at least."""
        self.columns.setdefault(column, StateBlock(self.capacity)).put(boundary, block)
        self.length = max(self.length, column + 1)

    def remove(self, block: Block) -> None:
        """Out of the column where it is."""
        for column, cell in [*self.columns.items()]:
            cell.entries = {n: other for n, other in cell.entries.items() if other is not block}
            if not cell.entries:
                del self.columns[column]

    def run_in(self, column: int, boundary: int, block: Block) -> None:
        """The running state is in this block, in this column, and will be at this boundary."""
        self.remove(block)
        self.put(column, boundary, block)
        self.running = block

    def states(self) -> list[tuple[int, Block]]:
        """Boundaries and blocks, from the first column on."""
        cells = (self.columns[column] for column in sorted(self.columns))
        return [entry for cell in cells for entry in cell.entries.items()]

    def held(self) -> list[Block]:
        return [block for _, block in self.states()]

    def at(self, boundary: int) -> Block | None:
        """A block whose state is at this boundary."""
        return next((block for n, block in self.states() if n == boundary), None)

    @property
    def reached(self) -> int:
        """Boundary of the running state, 0 if there is none."""
        return next((n for n, block in self.states() if block is self.running), 0)

    def copied(self) -> StateTable:
        cells = {c: StateBlock(self.capacity, {**s.entries}) for c, s in self.columns.items()}
        return StateTable(self.capacity, self.length, cells, self.running, self.keyed, self.inside)


class Pair(NamedTuple):
    """A copy between blocks one of which is in no table: both are held until it has run."""

    group: int  # number
    source: Block
    destination: Block


class Registered(NamedTuple):
    """A key that a plan has given to a block, and the boundary that it stands for."""

    pool: BlockPool
    block: Block
    key: Key
    boundary: int


class Wanted(NamedTuple):
    """Boundaries of a piece whose states are to be kept, ascending; newest: the one of them that is
    wanted only until the request has a newer one."""

    boundaries: tuple[int, ...] = ()
    newest: int | None = None


NOTHING = Wanted()


@dataclass
class Piece:
    """What a plan in flight has taken and changed. columns, tails, states, slots: of the lease's
    tables as they were. wanted: what it would keep; kept: by boundary that it exports, the blocks
    of state groups by index. moved: blocks that have taken over the keys of a state that is written
    from now on."""

    columns: list[int]
    tails: list[Block | None]
    states: list[StateTable]
    slots: list[int]
    wanted: Wanted = NOTHING
    copies: list[Copy] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    kept: dict[int, dict[int, Block]] = field(default_factory=dict)
    registered: list[Registered] = field(default_factory=list)
    moved: list[Block] = field(default_factory=list)


@dataclass(eq=False, kw_only=True)
class BlockLease(Lease):
    """rows, states: one a group. visit: its questions to the admission policy; recurring: the whole
    block of the prompt that the policy wants. newest: states that stay until it has newer ones.
    piece: of the plan in flight. stale: holds nothing of what was found, and the next plan looks up
    again."""

    chain: HashChain = field(init=False)
    visit: Visit = field(init=False)
    recurring: int | None = None
    rows: list[RowTable]
    states: list[StateTable]
    newest: list[Registered] = field(default_factory=list)
    piece: Piece | None = None
    stale: bool = False

    @property
    def decodes(self) -> bool:
        """All tokens that it came with are in the state."""
        return self.computed >= len(self.request.ids)

    @property
    def holds(self) -> bool:
        """Anything at all, of its own or shared."""
        return any(table.held() for table in (*self.rows, *self.states))

    def new_piece(self) -> Piece:
        """Before anything is taken for it."""
        return Piece(
            [len(table.blocks) for table in self.rows],
            [table.tail for table in self.rows],
            [table.copied() for table in self.states],
            [*self.slots],
        )
