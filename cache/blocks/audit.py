"""The invariants of block pools and of what leases hold of them (serving.md 2.2, 2.4), one sentence
a violation. What all managers owe is in `cache.audit`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from cache.blocks.groups import Group, RowGroup, StateGroup
from cache.blocks.lease import BlockLease, Pair
from cache.blocks.pool import Block, BlockPool
from cache.pools.allocator import Ownership

WRITABLE = (Ownership.ACTIVE, Ownership.TRACKED)


def audit_blocks(
    groups: Sequence[Group], leases: Iterable[BlockLease], pairs: Iterable[Pair], in_step: bool
) -> list[str]:
    """Violations in the pools, and between them and live leases. pairs: copies that are to run."""
    leases, pairs = list(leases), list(pairs)
    holders: Counter[Block] = Counter()
    for group in groups:
        for lease in leases:
            holders.update(group.table(lease).held())
    for pair in pairs:
        holders.update((pair.source, pair.destination))
    faults: list[str] = []
    for pool in dict.fromkeys(group.pool for group in groups):
        faults += _audit_pool(pool, holders)
        if pool.fresh and not in_step:
            faults.append(f"I-41: {len(pool.fresh)} keys are fresh, and no step is open")
    for group in groups:
        for lease in leases:
            audit = _audit_rows if isinstance(group, RowGroup) else _audit_state
            faults += audit(group, lease)
    return faults + _audit_entries(groups)


def _audit_pool(pool: BlockPool, holders: Counter[Block]) -> list[str]:
    faults = []
    indexed: dict[Block, list[bytes]] = {}
    for key, blocks in pool.index.items():
        for block in blocks.values():
            indexed.setdefault(block, []).append(key)
    for block in pool.blocks:
        state = pool.state_of(block)
        if block.refs != holders[block]:
            faults.append(f"I-10: {block} has {holders[block]} holders")
        if sorted(indexed.get(block, [])) != sorted(block.keys):
            faults.append(f"I-33: {block} is found by other keys than it has")
        if (block.id in pool.queue) != (block.id > 0 and not block.refs):
            faults.append(f"I-36: {block} is in the queue or held, not one of both")
        bare = not block.refs and not block.keys
        if bare != (state in (Ownership.FREE, Ownership.RESERVED)):
            faults.append(f"I-10: {block} has memory that is {state}")
        if not block.refs and state in WRITABLE:
            faults.append(f"I-10: nobody holds {block}, yet its memory is {state}")
    for physical in pool.pools.values():
        own = {block.id for block in pool.blocks if block.pool is physical}
        used = {
            index
            for index in range(1, physical.size + 1)
            if physical.allocator.state_of(index) is not Ownership.FREE
        }
        if own != used:
            faults.append(f"I-10: {physical.unit}s in use or of a block, not both: {own ^ used}")
    return faults


def _audit_rows(group: RowGroup, lease: BlockLease) -> list[str]:
    name, table = lease.request.name, group.table(lease)
    faults = []
    if lease.pages[group.index] != [block.id for block in table.blocks]:
        faults.append(f"I-10: pages {lease.pages[group.index]} of {name} are not its blocks")
    for column, block in enumerate(table.blocks):
        writable = group.pool.state_of(block) is Ownership.ACTIVE
        if column < lease.computed // group.block and table.full > column and writable:
            faults.append(f"I-35: {block} of {name} is full, and may still be written")
        if column >= lease.computed // group.block and not writable:
            faults.append(f"I-35: {block} of {name} is to be written, and may not be")
    if table.keyed > len(table.blocks) or table.full > len(table.blocks):
        faults.append(f"I-33: {name} has registered columns that it does not have")
    return faults


def _audit_state(group: StateGroup, lease: BlockLease) -> list[str]:
    name, table, slot = lease.request.name, group.table(lease), lease.slots[group.index]
    faults = []
    end = lease.plan.end if lease.plan else lease.computed
    if slot and (table.running is None or table.running.id != slot):
        faults.append(f"I-10: {name} runs in slot {slot}, its table says {table.running}")
    if table.running is not None and table.reached != end:
        faults.append(f"I-34: {name} is at {end}, its running state at {table.reached}")
    if any(column >= table.length for column in table.columns):
        faults.append(f"I-34: {name} has states beyond its {table.length} columns")
    if lease.plan is not None and not _is_written_by(group, table.running, lease):
        faults.append(f"I-35: {name} writes to {table.running}, which others may read")
    return faults


def _is_written_by(group: StateGroup, running: Block | None, lease: BlockLease) -> bool:
    """A block in flight is private, and what it is found by is what this piece makes of it."""
    ahead = lease.piece is not None and all(
        boundary > lease.computed for boundary in running.keys.values()
    )
    return running is not None and group.pool.state_of(running) is Ownership.ACTIVE and ahead


def _audit_entries(groups: Sequence[Group]) -> list[str]:
    """I-33: a state stands for one boundary, and a block of rows for none beyond its end."""
    faults = []
    by_number = {group.number: group for group in groups}
    for pool in dict.fromkeys(group.pool for group in groups):
        for block in pool.blocks:
            numbers = {int.from_bytes(key[-4:], "big") for key in block.keys}
            if any(pool.pools.get(number) is not block.pool for number in numbers):
                faults.append(f"I-33: {block} has keys of a group that it is not of")
            states = any(isinstance(by_number.get(number), StateGroup) for number in numbers)
            if states and len(block.keys) > 1:
                faults.append(f"I-33: {block} holds one state, and is found as several")
    return faults
