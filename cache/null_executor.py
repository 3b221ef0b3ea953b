"""An executor that runs no model: it knows what every slot and row stands for, and counts bytes.

For each slot it remembers the prefix whose state is there, for each latent row the prefix that ends
with it. A plan that would read anything but its own prefix raises: the fault that a real model
turns into plausible wrong text. Contents belong to a generation of an index, so that what was
written before an index was given back is not taken for its new owner's.

Prefixes are known by a chained digest, P_0 = 0, P_n = hash(P_{n-1}, token), salted by the request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

from cache.leases import Copy, CopyKind, Lease, StepPlan
from cache.pools.allocator import Handle, Ownership
from cache.pools.pool import Pool
from cache.pools.storage import Storage


class ExecutionError(AssertionError):
    """A plan would have read or written what is not its own."""


class _State(NamedTuple):
    handle: Handle
    boundary: int
    prefix: int


class _Page(NamedTuple):
    handle: Handle
    rows: dict[int, int]  # place → prefix that ends with this row


@dataclass
class Traffic:
    """Bytes that a real executor would have moved."""

    states_read: int = 0
    states_written: int = 0
    rows_read: int = 0
    rows_written: int = 0
    copied: int = 0


class NullExecutor:
    """Runs plans over `storage`, whose pools need no tensors."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.traffic = Traffic()
        self._states: list[dict[int, _State]] = [{} for _ in storage.states]
        self._pages: list[dict[int, _Page]] = [{} for _ in storage.pages]
        self._chains: WeakKeyDictionary[Lease, list[int]] = WeakKeyDictionary()

    def run(self, plans: Iterable[StepPlan], ends: Mapping[StepPlan, int] | None = None) -> None:
        """One step: the copies of all plans in order, then the plans, all of which read before any
        writes. ends: where the state of a plan is left, if not at its end (rejected tokens).
        ExecutionError says what is wrong; what was run before it stays.
        """
        plans, ends = list(plans), ends or {}
        for plan in plans:
            if plan.lease.plan is not plan:
                raise ExecutionError(f"{plan.lease.request.name}: this plan is not in flight")
            self.copy(plan.copies)
        for plan in plans:
            for g, slot in enumerate(plan.slots):
                self._resume(plan, g, slot)
        written: set[tuple] = set()
        for plan in plans:
            for g, table in enumerate(plan.pages):
                self._write_rows(plan, g, table, written)
            self._keep_states(plan, ends.get(plan, plan.end), written)
        for plan in plans:
            for g, table in enumerate(plan.pages):
                self._attend(plan, g, table)

    def copy(self, copies: Iterable[Copy]) -> None:
        """Run copies in order."""
        for kind, group, source, destination in copies:
            if kind is CopyKind.STATE:
                pool, contents = self.storage.states[group], self._states[group]
            else:
                pool, contents = self.storage.pages[group], self._pages[group]
            content = self._live(pool, contents, source)
            if content is None:
                raise ExecutionError(f"copy from {pool.unit} {source}, which holds nothing")
            own = self._new_or_writable(pool, contents, destination)
            if kind is CopyKind.PAGE:
                content = content._replace(rows=dict(content.rows))
            contents[destination] = content._replace(handle=own)
            self.traffic.copied += pool.unit_bytes

    def place(
        self, pages: Sequence[int], slot: int, tokens: Sequence[int], salt: str | None = None
    ) -> None:
        """Take for granted that these pages and this slot (of the first groups) hold these tokens,
        whole pages of them: for what tests put into an index by hand."""
        pool, page = self.storage.pages[0], self.storage.page_tokens[0]
        chain = _extended([_origin(salt)], tokens)
        for i, index in enumerate(pages):
            rows = {place: chain[i * page + place + 1] for place in range(page)}
            self._pages[0][index] = _Page(pool.allocator.handle(index), rows)
        boundary = len(pages) * page
        handle = self.storage.states[0].allocator.handle(slot)
        self._states[0][slot] = _State(handle, boundary, chain[boundary])

    def boundary_at(self, slot: int, group: int = 0) -> int | None:
        """The boundary whose state this slot holds, None if it holds none of its present owner."""
        content = self._live(self.storage.states[group], self._states[group], slot)
        return content and content.boundary

    def _resume(self, plan: StepPlan, g: int, slot: int) -> None:
        pool = self.storage.states[g]
        self._writable(pool, slot)
        if plan.start == 0:
            return
        content = self._live(pool, self._states[g], slot)
        if content is None or content[1:] != (plan.start, self._chain(plan.lease)[plan.start]):
            held = content and f"the state of another prefix at {content.boundary}"
            raise ExecutionError(
                f"I-01: {plan.lease.request.name} resumes at {plan.start} from slot {slot}, which "
                f"holds {held or 'nothing'}"
            )
        self.traffic.states_read += pool.unit_bytes

    def _write_rows(self, plan: StepPlan, g: int, table: Sequence[int], written: set) -> None:
        pool, page = self.storage.pages[g], self.storage.page_tokens[g]
        name, chain = plan.lease.request.name, self._chain(plan.lease)
        if len(table) * page < plan.end:
            raise ExecutionError(f"{name} has {len(table)} pages of {page}, plans to {plan.end}")
        for t in range(plan.start, plan.end):
            index, place = table[t // page], t % page
            own = self._writable(pool, index)
            self._claim(written, pool, index, place)
            content = self._live(pool, self._pages[g], index)
            if content is None:
                content = self._pages[g][index] = _Page(own, {})
            content.rows[place] = chain[t + 1]
        self.traffic.rows_written += (plan.end - plan.start) * (pool.unit_bytes // page)

    def _keep_states(self, plan: StepPlan, end: int, written: set) -> None:
        chain = self._chain(plan.lease)
        for g, slot in enumerate(plan.slots):
            pool = self.storage.states[g]
            ends = [(end, slot), *((plan.start + e.offset, e.slots[g]) for e in plan.exports)]
            for boundary, destination in ends:
                if destination < 0:
                    continue
                if not plan.start < boundary <= plan.end:
                    raise ExecutionError(
                        f"{plan.lease.request.name} keeps the state at {boundary}, outside of its "
                        f"plan {plan.start}..{plan.end}"
                    )
                own = self._writable(pool, destination)
                self._claim(written, pool, destination)
                self._states[g][destination] = _State(own, boundary, chain[boundary])
                self.traffic.states_written += pool.unit_bytes

    def _attend(self, plan: StepPlan, g: int, table: Sequence[int]) -> None:
        pool, page = self.storage.pages[g], self.storage.page_tokens[g]
        chain = self._chain(plan.lease)
        for t in range(plan.end):
            content = self._live(pool, self._pages[g], table[t // page])
            if content is None or content.rows.get(t % page) != chain[t + 1]:
                raise ExecutionError(
                    f"I-01: {plan.lease.request.name} reads row {t} from page {table[t // page]}, "
                    "which holds another prefix or nothing there"
                )
        self.traffic.rows_read += plan.end * (pool.unit_bytes // page)

    def _chain(self, lease: Lease) -> list[int]:
        """P_0 .. P_n of all known tokens."""
        chain = self._chains.setdefault(lease, [_origin(lease.request.salt)])
        return _extended(chain, lease.tokens[len(chain) - 1 :])

    @staticmethod
    def _claim(written: set, pool: Pool, *place: int) -> None:
        """One writer a place and step."""
        if (id(pool), *place) in written:
            raise ExecutionError(f"I-13: {pool.unit} {place[0]} is written twice in one step")
        written.add((id(pool), *place))

    @staticmethod
    def _live(pool: Pool, contents: dict, index: int) -> _State | _Page | None:
        content = contents.get(index)
        return content if content and pool.allocator.is_live(content.handle) else None

    def _new_or_writable(self, pool: Pool, contents: dict, index: int) -> Handle:
        """A copy may also complete a publication: fill a cached index that holds nothing yet."""
        published = pool.allocator.state_of(index) is Ownership.CACHED
        if published and self._live(pool, contents, index) is None:
            return pool.allocator.handle(index)
        return self._writable(pool, index)

    @staticmethod
    def _writable(pool: Pool, index: int) -> Handle:
        state = pool.allocator.state_of(index)
        if state not in (Ownership.ACTIVE, Ownership.TRACKED):
            raise ExecutionError(f"I-13: {pool.unit} {index} is written, but it is {state}")
        return pool.allocator.handle(index)


def _origin(salt: str | None) -> int:
    return hash(("prefix", salt))


def _extended(chain: list[int], tokens: Iterable[int]) -> list[int]:
    """The chain with a digest more for each token, in place."""
    for token in tokens:
        chain.append(hash((chain[-1], token)))
    return chain
