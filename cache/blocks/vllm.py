"""vLLM's own rules for the block manager, to the letter (compat="vllm").

Against ours: one free list counts the blocks of all groups; a state table is indexed by position,
and a block of it holds one state, so that the running state changes its block with the column and a
state inside a column that is to stay moves out of the way, by copy (reversed copy-on-write); what a
request ran in is held until its next piece; pieces end where a state is to be kept, and export one
at most; a wait may give back the state before the running one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cache.blocks.coordinator import Columns, Found
from cache.blocks.groups import RowGroup, StateGroup
from cache.blocks.keys import HashChain
from cache.blocks.lease import BlockLease, Pair, Piece
from cache.blocks.manager import BlockCache
from cache.blocks.pool import Block, BlockPool
from cache.boundaries import ChunkRule, InnerCheckpoint, chunk_end, floored, inner_checkpoint
from cache.columns import column_of
from cache.leases import Wait
from cache.policy.retention import Retention, reachable_boundaries, replay_boundaries
from cache.pools.allocator import Ownership
from cache.pools.storage import Storage

STATES = "linear_state"  # the engine's name of a state group


@dataclass(frozen=True, eq=False)
class EngineRows(RowGroup):
    """cacheable: what registration is floored to. unit: of hashes."""

    cacheable: int
    unit: int

    def register(self, lease: BlockLease, end: int, piece: Piece) -> None:
        end = floored(end, self.cacheable)
        super().register(lease, end, piece)
        tail = min(floored(lease.prompt - 1, self.unit), lease.chain.reach)
        if 0 < tail <= end:
            self.register_inside(lease, tail, piece)

    def key(self, lease: BlockLease, block: Block, boundary: int, piece: Piece) -> bool:
        """When more of a block is registered, what was registered of it before is so once more, and
        stands behind its duplicates from then on."""
        if block.keys and max(block.keys.values()) < boundary:
            for key in block.keys:
                self.pool.renew(block, key)
        return super().key(lease, block, boundary, piece)


@dataclass(frozen=True, eq=False)
class PositionalStates(StateGroup):
    """A state group whose column p is for the state after (p+1) B tokens (I-34).

    rule: where pieces end and export. retention: which states are registered. cacheable: what
    registration is floored to. dense: a column without a state has a block all the same (state mode
    "none").
    """

    rule: ChunkRule
    retention: Retention
    cacheable: int
    dense: bool

    def adopt(self, lease: BlockLease, columns: Columns, boundary: int) -> None:
        super().adopt(lease, columns, boundary)
        table = self.table(lease)
        table.inside = boundary % self.block > 0
        table.keyed = boundary // self.block

    def export(self, lease: BlockLease, end: int) -> InnerCheckpoint | None:
        """The state that a piece up to `end` keeps from inside of it."""
        prefill_end = max(lease.prompt, len(lease.tokens) - 1)
        if self.retention.interval == 0 and end < prefill_end:
            return None
        export = inner_checkpoint(self.rule, lease.computed, end)
        taken = export is not None and export.column in self.table(lease).columns
        return None if taken else export

    def needs(self, lease: BlockLease, end: int) -> int:
        table = self.table(lease)
        columns = -(-end // self.block) - table.length
        needed = int(self._makes_room(lease, end))
        if columns > 0:
            needed += columns if self.dense else 1 + (self.export(lease, end) is not None)
        return needed

    def _makes_room(self, lease: BlockLease, end: int) -> bool:
        """Whether the running state cannot go on in its block, although it is not full."""
        table = self.table(lease)
        if table.running is None:
            return False
        stays = -(-end // self.block) <= table.length
        return table.inside or (stays and not self.pool.writable(table.running))

    def take(self, lease: BlockLease, end: int, piece: Piece) -> None:
        table = self.table(lease)
        if self._makes_room(lease, end):
            if table.inside and self._own(lease, table.running):
                self._move_out(table.running, piece)
            else:
                self._go_on_in_copy(lease, piece)
            table.inside = False
        last, running = -(-end // self.block) - 1, table.running
        if last >= table.length:
            running = self._next_column(lease, last, end, piece)
        self._run_in(lease, max(last, table.length - 1), end, running)

    def _move_out(self, running: Block, piece: Piece) -> None:
        """The keys of the running state go to a copy that only the cache has."""
        (copy,) = self.pool.take(1, self.number, Ownership.TRACKED)
        self.pool.move_keys(running, copy)
        piece.moved.append(copy)
        self.copy_held(piece, running, copy)
        self.pool.release([copy])

    def _go_on_in_copy(self, lease: BlockLease, piece: Piece) -> None:
        table, source = self.table(lease), self.table(lease).running
        (copy,) = self.pool.take(1, self.number)
        self._replace(lease, source, copy, piece)
        table.run_in(table.length - 1, lease.computed, copy)

    def _next_column(self, lease: BlockLease, last: int, end: int, piece: Piece) -> Block:
        """A block of its own for the column of `end`; the one before stays where it is."""
        table, before = self.table(lease), self.table(lease).running
        for column in range(table.length, last) if self.dense else ():
            (block,) = self.pool.take(1, self.number, Ownership.TRACKED)
            table.put(column, (column + 1) * self.block, block)
        export = self.export(lease, end)
        if export is not None:
            (block,) = self.pool.take(1, self.number, Ownership.TRACKED)
            table.put(export.column, export.boundary, block)
            piece.kept.setdefault(export.boundary, {})[self.index] = block
        (running,) = self.pool.take(1, self.number)
        if before is not None:
            self.copy(piece, before, running)
            if self._own(lease, before) or before in (pair.destination for pair in piece.pairs):
                self.pool.donate([before])
        return running

    def undo(self, lease: BlockLease, piece: Piece) -> None:
        """Keys that have moved are lost: whether the copy has run is not known, nor whether the
        state has been overwritten."""
        for block in piece.moved:
            self.pool.forget(block)
        super().undo(lease, piece)
        self.table(lease).inside &= not piece.moved

    def register(self, lease: BlockLease, end: int, piece: Piece) -> None:
        """The states at the ends of columns that retention keeps, and the one that a resend of the
        prompt resumes from, wherever it is. Where the content is another, nothing is registered:
        the engine would (a piece that runs past the end of a block that it has resumed inside)."""
        table, end = self.table(lease), floored(end, self.cacheable)
        alignment, junction = self.rule.hits, lease.hit.junction
        replays = replay_boundaries(lease.prompt, self.rule.unit)
        named = (*replays, *(() if junction is None else (junction,)))
        reachable = reachable_boundaries(named, alignment=alignment, block=self.block)
        columns = range(table.keyed, min(end, lease.chain.reach) // self.block)
        for column, keeps in zip(
            columns, self.retention.mask(columns, self.block, reachable), strict=True
        ):
            cell = table.columns.get(column)
            block = cell and cell.entries.get((column + 1) * self.block)
            if keeps and block:
                self.key(lease, block, (column + 1) * self.block, piece)
            table.keyed = column + 1
        kept = {boundary: blocks.get(self.index) for boundary, blocks in piece.kept.items()}
        for boundary, block in kept.items():
            if block is None:
                continue
            milestone = boundary % self.block == 0 and self.retention.keeps(boundary, ())
            resend = boundary == self.rule.resend_boundary(lease.prompt, alignment)
            if milestone or resend or boundary == junction:
                self.key(lease, block, boundary, piece)
            else:
                self.pool.forget(block)
        if not any(kept.values()):
            self._register_tail(lease, end, piece)

    def _register_tail(self, lease: BlockLease, end: int, piece: Piece) -> None:
        table, tail = self.table(lease), self.rule.resend_boundary(lease.prompt, self.rule.unit)
        block = table.at(end)
        if end != tail or block is None or not self.key(lease, block, tail, piece):
            return
        if tail % self.block:
            table.inside, table.keyed = True, tail // self.block

    def retire(self, lease: BlockLease) -> None:
        """Give back the columns before the one of the running state, the last one first."""
        table = self.table(lease)
        limit = column_of(lease.computed, self.block)
        old = [table.columns.pop(c) for c in sorted(table.columns, reverse=True) if c < limit]
        self.let_go(block for cell in old for block in cell.entries.values())

    def settle(self, lease: BlockLease) -> None:
        table = self.table(lease)
        self.pool.donate(block for block in table.held() if block is not table.running)
        if table.reached != lease.computed:  # the executor stopped before the end
            table.run_in(table.length - 1, lease.computed, table.running)
            table.keyed = min(table.keyed, lease.computed // self.block)
            table.inside = False


class VLLMCache(BlockCache):
    """inner_checkpoint: alignment at which the backend exports one state from inside a piece, None
    if it exports none. state_mode: "align"; without reuse also "none" and "all", where every column
    has a block. kinds: of all groups in the engine's order, "linear_state" for state groups, any
    others for attention groups; without, these come first. rows_at_once: whole blocks of rows may
    be shared in the very step that writes them, as the engine does; then the plans of a step run
    all or none, and the books are right when it has ended (I-41). Other arguments, errors: as
    `BlockCache`; ValueError, too, for policies, and for pools that are not of one size.

    clips: whether `plan` clips pieces; the engine's scheduler does.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        inner_checkpoint: int | None = None,
        state_mode: str = "align",
        kinds: Sequence[str] = (),
        rows_at_once: bool = False,
        reuse: bool = True,
        **arguments,
    ) -> None:
        if state_mode not in ("align", "none", "all") or (reuse and state_mode != "align"):
            raise ValueError(
                "the state mode must be 'align', or without reuse 'none' or 'all' as well, got "
                f"{state_mode!r}"
            )
        if inner_checkpoint is not None and inner_checkpoint < 1:
            raise ValueError(
                f"inner_checkpoint must be at least 1 token, or None, got {inner_checkpoint}"
            )
        policies = [name for name in ("admission", "eviction") if arguments.get(name) is not None]
        if policies:
            raise ValueError(f"the engine's own rules know no policies, got {policies}")
        self._inner, self._dense = inner_checkpoint, state_mode != "align"
        count = len(storage.pages)
        self._kinds = tuple(kinds) or (*["rows"] * count, *[STATES] * len(storage.states))
        if len(self._kinds) - self._kinds.count(STATES) != count or len(self._kinds) != len(
            [*storage]
        ):
            raise ValueError(
                f"there are {count} attention and {len(storage.states)} state groups, got kinds "
                f"{self._kinds}"
            )
        self._at_once = rows_at_once
        self._copied_pairs: list[Pair] = []  # that have run in this step
        self.clips = True
        super().__init__(storage, reuse=reuse, **arguments)

    def _make_groups(self) -> None:
        super()._make_groups()
        self.coordinator.in_turn = True

    def _numbers(self) -> Sequence[int]:
        states = [kind == STATES for kind in self._kinds]
        return sorted(range(len(states)), key=states.__getitem__)

    def _block_pools(self, numbers: Sequence[int]) -> list[BlockPool]:
        """One for all."""
        shared = BlockPool(dict(zip(numbers, self.storage, strict=True)))
        return [shared for _ in self.storage]

    def _kind(self, number: int) -> str:
        return self._kinds[number]

    @property
    def rule(self) -> ChunkRule:
        """Where pieces end, without the largest piece, which a plan is given."""
        sizes = self.sizes
        hits = sizes.hits if self.reuse else sizes.scheduler
        return ChunkRule(sizes.state, sizes.unit, hits, export_alignment=self._inner)

    @property
    def _cacheable(self) -> int:
        """What registration is floored to: among several groups a hit could match no more."""
        floor = not self.sizes.partial_hits and len(self._kinds) > 1
        return self.sizes.scheduler if floor else 1

    def _row_group(self, number: int, index: int, block: int, pool: BlockPool) -> EngineRows:
        return EngineRows(number, index, block, pool, self._cacheable, self.sizes.unit)

    def _state_group(self, number: int, index: int, block: int, pool: BlockPool) -> StateGroup:
        rule = self.rule._replace(block=block)
        common = (rule, self.retention, self._cacheable, self._dense)
        return PositionalStates(number, index, block, pool, 1, *common)

    def refusal(self, tokens: int) -> str | None:
        """Counts, beside the rows, what a request may hold at once for other reasons: for each
        attention group the source of a copied tail; for each state group the states read and
        written, an export, and both ends of a copy until its step is over."""
        blocks = sum(self.storage.pages_for(tokens)) + len(self._rows)
        for group in self._states:
            blocks += 6 + (-(-tokens // group.block) if self._dense else 0)
        size = self.block_pools[0].size
        if blocks > size:
            return f"{tokens:,} tokens may need {blocks:,} blocks; the pool has {size:,}"
        return None

    def _named(self, lease: BlockLease) -> tuple[None, ...]:
        """The engine knows no boundaries that a caller names."""
        return (None,) * len(lease.request.checkpoint_at)

    def _is_fresh(self, found: Found, chain: HashChain) -> bool:
        """A state counts as fresh even if an older block has the same."""
        states = self._states if found.joint else ()
        if any(chain.key(found.joint, g.number) in g.pool.fresh for g in states):
            return True
        if not self._at_once:
            return super()._is_fresh(found, chain)
        # what a hit ends inside of is copied before the step writes anything
        tails = [group for group in self._rows if found.joint % group.block]
        return any(self._is_written_now(g, found, found.joint // g.block) for g in tails)

    def end_of_piece(self, lease: BlockLease, want: int, max_chunk: int | None) -> int:
        start, want = lease.computed, min(want, max_chunk or want)
        if not self.clips or self._dense or not self._states:
            return start + want
        return chunk_end(
            self.rule._replace(limit=max_chunk),
            start,
            want,
            prompt=lease.prompt,
            tokens=len(lease.tokens),
            junction=lease.hit.junction,
        )

    def _alone(self, lease: BlockLease) -> bool:
        """The engine never gives up a hit for want of room; `refusal` sees to it that there is."""
        return False

    def _shortage(self, lease: BlockLease, end: int, first: bool) -> Wait | None:
        for group in self._states:
            if not first:
                group.retire(lease)
        return super()._shortage(lease, end, first)

    def _keep_inside(self, lease: BlockLease, end: int, piece: Piece) -> None:
        """Done with the columns."""

    def _register(self, lease: BlockLease, end: int, piece: Piece) -> None:
        for group in self.groups:
            group.register(lease, end, piece)

    def _copied(self, pairs: list[Pair]) -> None:
        self._copied_pairs += pairs

    def _pairs(self) -> list[Pair]:
        return [*super()._pairs(), *self._copied_pairs]

    def _end_step(self) -> None:
        """Both ends of every copy are let go, group by group."""
        self._let_go(sorted(self._copied_pairs, key=lambda pair: pair.group))
        self._copied_pairs.clear()
        super()._end_step()

    def _abandon(self) -> None:
        super()._abandon()
        self._copied_pairs.clear()
