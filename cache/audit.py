"""The invariants of serving.md 2 as one callable: what is wrong, one sentence a violation.

This file checks what every manager owes: ownership of indices (I-10, I-11, I-13, I-17) and the
shape of leases. A manager adds its own in `StateCache._audit`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from cache.leases import Lease, Phase
from cache.pools.allocator import Ownership
from cache.pools.pool import Pool
from cache.pools.storage import Storage


class AuditError(AssertionError):
    """Invariants do not hold; `faults` lists all of them."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults


def audit_leases(storage: Storage, leases: Iterable[Lease]) -> list[str]:
    """Violations among pools and live leases."""
    live = list(leases)
    faults = [fault for pool in storage for fault in pool.audit()]
    for lease in live:
        faults += _audit_lease(storage, lease)
    for g, pool in enumerate(storage.pages):
        faults += audit_holders(pool, {lease.request.name: lease.pages[g] for lease in live})
    for g, pool in enumerate(storage.states):
        held = {lease.request.name: [s for s in (lease.slots[g],) if s] for lease in live}
        faults += audit_holders(pool, held)
    return faults


def audit_holders(pool: Pool, holders: dict[str, list[int]]) -> list[str]:
    """I-10: what is held is not free, and what is active has exactly one holder."""
    faults = []
    owners = defaultdict(list)
    for name, indices in holders.items():
        for index in indices:
            owners[index].append(name)
    for index, names in owners.items():
        state = pool.allocator.state_of(index)
        if state in (Ownership.FREE, Ownership.RESERVED):
            faults.append(f"I-10: {pool.unit} {index} of {names} is {state}")
        elif state is not Ownership.CACHED and len(names) > 1:
            faults.append(f"I-10: {pool.unit} {index} is {state}, yet held by {names}")
    for index in range(1, pool.size + 1):
        if pool.allocator.state_of(index) is Ownership.ACTIVE and index not in owners:
            faults.append(f"I-10: {pool.unit} {index} is active, yet nobody holds it")
    return faults


def _audit_lease(storage: Storage, lease: Lease) -> list[str]:
    faults = []
    name = lease.request.name
    boundary = lease.plan.end if lease.plan else lease.computed
    if not 0 <= lease.computed <= boundary <= len(lease.tokens):
        faults.append(
            f"{name} knows {len(lease.tokens)} tokens, has computed {lease.computed} and plans to "
            f"{boundary}"
        )
    if lease.phase is Phase.ENDED:
        faults.append(f"{name} has ended, yet is live")
    for table, pages in zip(lease.pages, storage.pages_for(boundary), strict=True):
        if lease.phase is Phase.HOLDING and len(table) < pages:
            faults.append(f"{name} is at {boundary} with {len(table)} pages, needs {pages}")
    if lease.phase is Phase.HOLDING and not all(lease.slots):
        faults.append(f"{name} is at {boundary} without a slot: {lease.slots}")
    if lease.plan and lease.plan.start != lease.computed:
        faults.append(f"I-06: {name} is at {lease.computed}, its plan at {lease.plan.start}")
    return faults
