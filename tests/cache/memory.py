"""Small real pools for tests, and an executor that runs plans on them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from cache.leases import Copy, CopyKind, Lease, StepPlan
from cache.pools.pool import Pool
from cache.pools.storage import Storage

LONGEST = 40  # tokens of a request, where no pool says less


class Shape(NamedTuple):
    """pages: (pages, rows a page) of each attention group; slots of each state group."""

    pages: tuple[tuple[int, int], ...] = ((8, 4),)
    slots: tuple[int, ...] = (2,)

    @property
    def longest(self) -> int:
        return min((count * page for count, page in self.pages), default=LONGEST)


def make_storage(shape: Shape, *, poison: bool = True) -> Storage:
    """Pools with float64 tensors of two layers and few numbers each; no two kinds of equal size."""
    pages = [
        Pool(n, "page", 32 * page, [torch.zeros(2, n + 1, page, 2).double()], poison=poison)
        for n, page in shape.pages
    ]
    states = [
        Pool(
            n,
            "slot",
            88,
            [torch.zeros(2, n + 1, 1, 4).double(), torch.zeros(3, n + 1).double()],
            poison=poison,
        )
        for n in shape.slots
    ]
    return Storage(tuple(pages), tuple(page for _, page in shape.pages), tuple(states))


class RealMemory:
    """Runs plans on tensors: each state and row is a number that tells its prefix, the same in all
    layers. What is resumed or attended to must be the lease's own, so it must have been written."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def run(self, plans: Sequence[StepPlan], ends: Mapping[StepPlan, int]) -> None:
        for plan in plans:
            self.copy(plan.copies)
        for plan in plans:
            self._resume(plan)
        for plan in plans:
            self._write(plan, ends.get(plan, plan.end))
        for plan in plans:
            self._attend(plan)

    def copy(self, copies: Iterable[Copy]) -> None:
        for kind, group, source, destination in copies:
            pools = self.storage.states if kind is CopyKind.STATE else self.storage.pages
            pools[group].copy(source, destination)

    def _resume(self, plan: StepPlan) -> None:
        for pool, slot in zip(self.storage.states, plan.slots, strict=True):
            for tensor in pool.tensors:
                if plan.start:
                    own = marks(plan.lease)[plan.start]
                    assert (tensor[:, slot] == own).all(), (plan.start, slot, tensor[:, slot])

    def _write(self, plan: StepPlan, end: int) -> None:
        mark = marks(plan.lease)
        for g, (pool, table) in enumerate(zip(self.storage.pages, plan.pages, strict=True)):
            for t in range(plan.start, plan.end):
                index, place = divmod(t, self.storage.page_tokens[g])
                pool.tensors[0][:, table[index], place] = mark[t + 1]
        for g, pool in enumerate(self.storage.states):
            kept = [(end, plan.slots[g])]
            kept += [(plan.start + e.offset, e.slots[g]) for e in plan.exports if e.slots[g] > 0]
            for boundary, slot in kept:
                for tensor in pool.tensors:
                    tensor[:, slot] = mark[boundary]

    def _attend(self, plan: StepPlan) -> None:
        own = torch.tensor(marks(plan.lease)[1 : plan.end + 1]).double()
        for g, (pool, table) in enumerate(zip(self.storage.pages, plan.pages, strict=True)):
            rows = pool.tensors[0][:, list(table)].flatten(1, 2)[:, : plan.end]  # [layers, S, 2]
            assert (rows == own[:, None]).all(), (g, list(table), rows[0, :, 0], own)


def marks(lease: Lease) -> list[int]:
    """A number for each prefix of the known tokens, exact in float64."""
    marks = [len(lease.request.salt or "") + 1]
    for token in lease.tokens:
        marks.append((marks[-1] * 1_000_003 + token + 11) % (1 << 31))
    return marks
