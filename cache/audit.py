"""The invariants of serving.md 2 as one callable: what is wrong, one sentence a violation.

This file checks what every manager owes: ownership of indices (I-10, I-11, I-13, I-17) and the
shape of leases. A manager adds its own in `StateCache._audit`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

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
        faults += audit_holders(pool, [(x.request.name, x.pages[g]) for x in live if x.pages[g:]])
    for g, pool in enumerate(storage.states):
        held = [(x.request.name, [s for s in x.slots[g : g + 1] if s]) for x in live]
        faults += audit_holders(pool, held)
    return faults


def audit_holders(pool: Pool, holders: Iterable[tuple[str, Sequence[int]]]) -> list[str]:
    """I-10: what is held is not free, and what is active has exactly one holder. holders: (name,
    indices) each; names may repeat."""
    faults = []
    owners = defaultdict(list)
    for name, indices in holders:
        once = dict.fromkeys(indices)
        for index in once:
            owners[index].append(name)
        if len(once) != len(indices):
            faults.append(f"I-10: {name} holds a {pool.unit} twice: {[*indices]}")
    for index, names in owners.items():
        if not 0 <= index <= pool.size:
            faults.append(f"I-10: {pool.unit} {index} of {names} does not exist")
            continue
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
    name, plan = lease.request.name, lease.plan
    if (len(lease.pages), len(lease.slots)) != (len(storage.pages), len(storage.states)):
        return [
            f"{name} has {len(lease.pages)} page tables and {len(lease.slots)} slots, one each "
            f"for {len(storage.pages)} and {len(storage.states)} groups"
        ]
    boundary = plan.end if plan else lease.computed
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
    if plan and plan.start != lease.computed:
        faults.append(f"I-06: {name} is at {lease.computed}, its plan at {plan.start}")
    if plan and (plan.lease is not lease or lease.phase is not Phase.HOLDING):
        faults.append(
            f"{name} is {lease.phase}, its plan in flight is of {plan.lease.request.name}"
        )
    if plan and (plan.slots, plan.pages) != (tuple(lease.slots), lease.pages):
        faults.append(
            f"I-10: {name} holds slots {lease.slots} and pages {lease.pages}; its plan is in "
            f"{plan.slots} and {plan.pages}"
        )
    return faults
