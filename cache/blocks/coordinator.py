"""What a request can resume from: the largest boundary that every group has (serving 4.4, 4.5).

    L = N - 1
    repeat:  each group in turn, attention first, lowers L to what it has there
    until nobody does.        junction: the longest that some group had on the way, if above L

A group only ever lowers L, so the largest common boundary comes out, whatever the order, and it
comes to an end (I-38). Rows are closed downward: one look-up of theirs serves every lower L.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from cache.blocks.keys import HashChain
from cache.blocks.pool import Block, BlockPool
from cache.blocks.sizes import BlockSizes
from cache.boundaries import floored

Columns = list[Block | None]  # by column of a group's table; None: nothing is needed of it


class Member(NamedTuple):
    """A group: its number, which is part of its keys, and where its blocks are."""

    number: int
    pool: BlockPool


class Alike(NamedTuple):
    """Groups of one kind and block: found together or not at all."""

    block: int
    members: tuple[Member, ...]

    def at(self, chain: HashChain, boundary: int) -> list[Block] | None:
        """Their blocks for this boundary, or None if one of them has none."""
        blocks = []
        for number, pool in self.members:
            block = pool.find(chain.key(boundary, number))
            if block is None:
                return None
            blocks.append(block)
        return blocks


class Found(NamedTuple):
    """joint: the boundary. longest: of some group on the way there. reach: how far all rows go; the
    longest without any. columns: of every group up to the joint boundary, by number."""

    joint: int
    longest: int
    reach: int
    columns: tuple[Columns, ...]


class Coordinator:
    """Over the groups of one cache, numbered from 0.

    in_turn: rows are looked for only as far as the groups before them reach, as the engine does. Of
    attention groups of several kinds a later one then misses what it has registered only beyond.
    """

    def __init__(self, sizes: BlockSizes, rows: Sequence[Alike], states: Sequence[Alike]) -> None:
        self.sizes, self.rows, self.states = sizes, tuple(rows), tuple(states)
        self.in_turn = False
        self._groups = sum(len(group.members) for group in (*rows, *states))

    def find(self, chain: HashChain, limit: int, eagle: Collection[int] = ()) -> Found:
        """The best for at most `limit` tokens. Changes nothing.

        eagle: attention groups, by number, whose last unit has to be computed again: one more is
        looked for, once, and dropped (VL #45614: never let that raise the boundary of others).
        """
        columns: list[Columns] = [[] for _ in range(self._groups)]
        reaches: dict[Alike, int] = {}  # of rows
        longest, length = 0, max(limit, 0)
        while True:
            current = length
            for group in (*self.rows, *self.states):
                if group in reaches:
                    current = min(current, reaches[group])
                    continue
                if group in self.rows:
                    drop = any(member.number in eagle for member in group.members)
                    most = current if self.in_turn else max(limit, 0)
                    reach, found = find_rows(group, chain, most, self.sizes, drop=drop)
                    reaches[group], current = reach, min(current, reach)
                else:
                    current, found = find_state(group, chain, current, self.sizes)
                for member, blocks in zip(group.members, found, strict=True):
                    columns[member.number] = blocks
                longest = max(longest, current)
            if current >= length:
                break
            length = current
        for group in self.rows:
            for member in group.members:
                del columns[member.number][-(-length // group.block) :]
        reach = min(reaches.values(), default=longest)
        return Found(length, longest, reach, tuple(columns))

    def alone(self, chain: HashChain, limit: int) -> tuple[int, ...]:
        """How far each group would go without those that are not like it, by number."""
        reaches = [0] * self._groups
        for group in (*self.rows, *self.states):
            find = find_rows if group in self.rows else find_state
            reach, _ = find(group, chain, max(limit, 0), self.sizes)
            for member in group.members:
                reaches[member.number] = reach
        return tuple(reaches)


def alike(groups: Iterable[tuple[str, int, Member]]) -> tuple[Alike, ...]:
    """Groups, each with its kind and block, that agree in both together, in the order of the first
    of each."""
    members: dict[tuple[str, int], list[Member]] = {}
    for kind, block, member in groups:
        members.setdefault((kind, block), []).append(member)
    return tuple(Alike(block, tuple(own)) for (_, block), own in members.items())


def find_rows(
    group: Alike, chain: HashChain, limit: int, sizes: BlockSizes, *, drop: bool = False
) -> tuple[int, list[Columns]]:
    """How far rows go from the start without a gap, and their blocks: whole ones until the first
    that is missing, then, if hits may end inside, the longest part of that one."""
    block, unit = group.block, sizes.hits
    inside = unit < block and block % unit == 0
    if drop:
        limit += unit if inside else block
    limit = min(limit, chain.reach)
    columns: list[Columns] = [[] for _ in group.members]
    reach = 0
    while reach + block <= limit and (found := group.at(chain, reach + block)):
        _append(columns, found)
        reach += block
    if inside:
        for boundary in range(floored(min(limit, reach + block - unit), unit), reach, -unit):
            if found := group.at(chain, boundary):
                _append(columns, found)
                reach = boundary
                break
    if drop and reach:
        reach -= min(unit, block)
    reach = floored(reach, unit)
    for blocks in columns:
        del blocks[-(-reach // block) :]
    return reach, columns


def find_state(
    group: Alike, chain: HashChain, limit: int, sizes: BlockSizes
) -> tuple[int, list[Columns]]:
    """The highest boundary with a state, and its block in the column where it is: from right to
    left, for a state needs none before it."""
    block, unit = group.block, sizes.hits
    step = unit if unit < block else block
    for boundary in range(floored(min(limit, chain.reach), step), 0, -step):
        if boundary % unit == 0 and (found := group.at(chain, boundary)):
            empty: Columns = [None] * ((boundary - 1) // block)
            return boundary, [[*empty, state] for state in found]
    return 0, [[] for _ in group.members]


def _append(columns: list[Columns], found: list[Block]) -> None:
    for blocks, block in zip(columns, found, strict=True):
        blocks.append(block)
