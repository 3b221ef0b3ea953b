"""StateCache: the one contract between whoever runs steps and whoever remembers state.

The engine, the golden replay and the simulator use this and nothing else; managers (plain, radix,
blocks) fill in the hooks at the end. One step:

    begin_step()
      lookup(request)  → Hit            changes nothing but statistics
      admit(request)   → Lease | Wait   looks up and pins; a lease of a miss holds no storage yet
      plan(lease, ..)  → StepPlan | Wait   takes the storage of one piece, all of it or none
      cancel(plan)                      its tokens will not run: what the plan took is given back
      ...                               run the plans' copies, then the model
      commit(lease, ..) → copies        the tokens have run; run the returned copies at once
    end_step()                          what the step has registered is there for all (a manager may
                                        have it there from the commit on, as the tree does)

    finish / abort / preempt (lease)    give everything back; in or between steps
    abandon                             after a call that was cut short: end all leases and the step
    clear                               between steps
    stats, audit                        at any time

Safe to use: a plan until its commit or cancel; a lease until it ends; nothing of a step after
end_step but leases. What is handed out may be written by its holder alone, the rest is read-only.

How it fails. Not now is a value, `Wait`, and changes nothing: a lease whose first plan waits holds
nothing, and its next plan looks up again. Never is `refusal`, asked before a request enters. Misuse
(a plan without a step, a second plan in flight, an ended lease) raises ContractError, before
anything is changed: a fault of the caller's program. Exhaustion never raises (decision 28).
What comes from outside (Ctrl-C, out of memory) may cut any call short, at any line, and leaves the
books torn; then `abandon` is the only call that may follow, and it may be cut short, too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence

from cache.audit import AuditError, audit_leases
from cache.identity import Identity
from cache.leases import (
    CacheRequest,
    Copy,
    Hit,
    Lease,
    Lower,
    Phase,
    StepPlan,
    Wait,
    WaitReason,
)
from cache.pools.storage import Storage
from cache.stats import Evictions, PoolStats, Stats


class ContractError(RuntimeError):
    """A call out of order. Nothing has been changed by it."""


class StateCache(ABC):
    """The contract. Public methods check the order of calls and keep the books that all managers
    share; a manager's own work is in the hooks with a leading underscore.

    export_alignment: the KDA backend's (decision 7); exports of plans fall on its multiples.
    identity: who computes what is kept here (decision 27: one for all of it).
    """

    def __init__(
        self,
        storage: Storage,
        *,
        export_alignment: int = 1,
        identity: Identity = Identity(),  # noqa: B008 (frozen)
    ) -> None:
        if export_alignment < 1:
            raise ValueError(f"export_alignment must be at least 1, got {export_alignment}")
        self.storage = storage
        self.export_alignment = export_alignment
        self.identity = identity
        self._leases: dict[Lease, None] = {}  # live ones, oldest first
        self._in_step = False
        self._counts: Counter[str] = Counter()
        self._waits: Counter[WaitReason] = Counter()
        self._lower: Counter[Lower] = Counter()

    @property
    def in_step(self) -> bool:
        """Whether a step is open."""
        return self._in_step

    @property
    def live_leases(self) -> tuple[Lease, ...]:
        """Leases that have not ended, oldest first."""
        return tuple(self._leases)

    def begin_step(self) -> None:
        """Open a step. ContractError if one is open."""
        self._require(not self._in_step, "begin_step: the step before it has not ended")
        self._in_step = True

    def end_step(self) -> None:
        """Close the step: its registrations are live, copy sources and late columns are let go.
        ContractError while a plan is neither committed nor cancelled."""
        self._require(self._in_step, "end_step: no step is open")
        flying = [lease.request.name for lease in self._leases if lease.plan]
        self._require(not flying, f"end_step: plans of {flying} were not committed or cancelled")
        self._end_step()
        self._in_step = False
        self._counts["steps"] += 1

    def lookup(self, request: CacheRequest) -> Hit:
        """What this request would hit if admitted now. No side effect on what is cached."""
        return self._lookup(request)

    def refusal(self, tokens: int) -> str | None:
        """Why a sequence that computes `tokens` tokens could never run to its end here, even alone;
        None if it can."""
        for pool, pages in zip(self.storage.pages, self.storage.pages_for(tokens), strict=True):
            if pages > pool.size:
                return f"{tokens:,} tokens need {pages:,} pages; the pool has {pool.size:,}"
        for pool in self.storage.states:
            if self._slots_to_start > pool.size:
                return f"a request needs {self._slots_to_start} slots; the pool has {pool.size:,}"
        return None

    def admit(self, request: CacheRequest) -> Lease | Wait:
        """Look up and pin what was hit. After a miss the lease holds no storage until its first
        plan. Changes: pins, recency, perhaps evictions. ValueError for a request without tokens."""
        self._require(self._in_step, f"admit {request.name}: no step is open")
        if not request.ids:
            raise ValueError(f"request {request.name} has no tokens")
        lease = self._admit(request)
        if isinstance(lease, Wait):
            return self._counted(lease)
        self._leases[lease] = None
        return lease

    def plan(self, lease: Lease, want: int, max_chunk: int | None = None) -> StepPlan | Wait:
        """Storage for the next tokens of the lease: at most `want`, at most what is known. The
        cache may clip further, to where a state is worth keeping.

        max_chunk: the largest piece that any step may take (configured, not what this step has
        left; decision 26). Changes: the lease's pages and slots, pools, perhaps evictions; on Wait
        nothing. A lease may have one plan in flight.
        """
        self._require(self._in_step, f"plan {lease.request.name}: no step is open")
        self._require_idle(lease, "plan")
        if want < 1 or (max_chunk is not None and max_chunk < 1):
            raise ValueError(f"want and max_chunk must be at least 1, got {want} and {max_chunk}")
        self._require(lease.remaining > 0, f"plan {lease.request.name}: no token is left to run")
        plan = self._plan(lease, min(want, lease.remaining), max_chunk)
        if isinstance(plan, Wait):
            return self._counted(plan)
        lease.phase, lease.plan = Phase.HOLDING, plan
        return plan

    def cancel(self, plan: StepPlan) -> None:
        """The tokens of this plan do not run: give back what it took. Only for plans whose step has
        touched no memory; where it has, the lease is to end, too. After a step that failed half
        way there is `abandon`."""
        lease = plan.lease
        self._require_ours(lease, "cancel")
        self._require(lease.plan is plan, f"cancel: {lease.request.name} has no such plan")
        self._cancel(plan)
        lease.plan = None
        if not lease.ran:
            lease.phase = Phase.ADMITTED

    def commit(
        self, lease: Lease, computed: int, appended: Sequence[int] = (), *, last: bool = False
    ) -> tuple[Copy, ...]:
        """The plan ran: the first `computed` tokens are in the state, and the ids `appended` (a new
        sample) are known but not in it. Publishes what became publishable; with `last` the request
        is about to end, and that is left to `finish`.

        Changes the lease's boundary, and perhaps its pages and slots. The returned copies are to be
        run at once, in order, before the next commit. Raises ContractError without a plan in
        flight, ValueError for a boundary outside it; `computed` below the plan's end is for an
        executor that left the state there.
        """
        self._require_ours(lease, "commit")
        plan, appended = lease.plan, list(appended)
        self._require(plan is not None, f"commit {lease.request.name}: no plan is in flight")
        if not plan.start < computed <= plan.end:
            raise ValueError(
                f"commit {lease.request.name}: the plan ran tokens {plan.start}..{plan.end}, "
                f"boundary {computed} is not among {plan.start + 1}..{plan.end}"
            )
        self._counts["computed"] += computed - plan.start
        if not lease.ran:  # before that, what was found may yet be lost (BR-71)
            self._count_hit(lease.hit)
        lease.plan, lease.ran = None, True
        lease.computed = computed
        lease.tokens.extend(appended)
        return self._commit(lease, plan, last)

    def finish(self, lease: Lease) -> None:
        """The request is done: publish what is worth it, give the rest back."""
        self._end(lease, "finish", publish=True)

    def abort(self, lease: Lease) -> None:
        """The request is not wanted any more: give back; what was published stays."""
        self._end(lease, "abort", publish=False)

    def preempt(self, lease: Lease) -> None:
        """Give the storage to others. The request comes back as a new one with all tokens known."""
        self._end(lease, "preempt", publish=False)

    def abandon(self) -> None:
        """After a step or any other call that was cut short, wherever it was: every live lease has
        ended, its plan is forgotten, every private index is free, what is cached stays, and no step
        is open.

        Nothing is undone index by index: the pools are made anew from what the manager says it has
        cached, and a manager may drop some of that, or all. Counts leases as preempted; counts of
        the call that was cut short may be off by one. Never refuses. If it is cut short itself, the
        step stays open as it was, and calling it again completes it.
        """
        self._abandon()
        for lease in tuple(self._leases):
            self._counts["preempt"] += lease.phase is not Phase.ENDED
            lease.phase, lease.plan = Phase.ENDED, None
            lease.slots[:] = [0] * len(lease.slots)
            for table in lease.pages:
                table.clear()
        self._leases.clear()
        self._in_step = False

    def clear(self) -> None:
        """Forget everything; all indices of all pools are free. ContractError while leases live."""
        self._require(not self._in_step, "clear: a step is open")
        live = [lease.request.name for lease in self._leases]
        self._require(not live, f"clear: leases of {live} are live")
        self._clear()

    def stats(self) -> Stats:
        """A snapshot; later calls do not change it."""
        count = self._counts
        return Stats(
            tuple(PoolStats.of(pool) for pool in self.storage),
            len(self._leases),
            *(count[name] for name in ("steps", "lookups", "joint", "token_hit", "computed")),
            *(count[name] for name in ("finish", "abort", "preempt")),
            dict(self._waits),
            dict(self._lower),
            self._evictions(),
        )

    def audit(self) -> None:
        """Check every invariant that applies; AuditError with all that are violated. O(all)."""
        faults = audit_leases(self.storage, self._leases) + self._audit()
        if not self._in_step:
            names = [lease.request.name for lease in self._leases if lease.plan]
            faults += [f"{name} has a plan in flight, but no step is open" for name in names]
        if faults:
            raise AuditError(faults)

    @abstractmethod
    def _lookup(self, request: CacheRequest) -> Hit: ...

    @abstractmethod
    def _admit(self, request: CacheRequest) -> Lease | Wait: ...

    @abstractmethod
    def _plan(self, lease: Lease, want: int, max_chunk: int | None) -> StepPlan | Wait:
        """want: 1 .. lease.remaining."""

    @abstractmethod
    def _cancel(self, plan: StepPlan) -> None: ...

    @abstractmethod
    def _commit(self, lease: Lease, plan: StepPlan, last: bool) -> tuple[Copy, ...]:
        """lease.computed and lease.tokens are those after the step already."""

    @abstractmethod
    def _release(self, lease: Lease, publish: bool) -> None:
        """Give back pages, slots and pins of a lease without a plan in flight."""

    @property
    def _slots_to_start(self) -> int:
        """Slots that a request must have at once to run at all."""
        return 1

    def _end_step(self) -> None:  # noqa: B027 (a cache without pending keys has nothing to do)
        """Make pending keys live, let copy sources go."""

    def _abandon(self) -> None:
        """Only what is cached is not free; no lease is live any more. Whatever was cut short, this
        very call included, must not matter."""
        for pool in self.storage:
            pool.reclaim()

    def _clear(self) -> None:
        for pool in self.storage:
            pool.clear()

    def _evictions(self) -> Evictions:
        """What has been evicted so far; a clear is no eviction."""
        return Evictions()

    def _audit(self) -> list[str]:
        """Violations of a manager's own invariants."""
        return []

    def _end(self, lease: Lease, how: str, *, publish: bool) -> None:
        self._require_idle(lease, how)
        self._release(lease, publish)
        lease.phase = Phase.ENDED
        del self._leases[lease]
        self._counts[how] += 1

    def _counted(self, wait: Wait) -> Wait:
        self._waits[wait.reason] += 1
        return wait

    def _count_hit(self, hit: Hit) -> None:
        self._counts.update(lookups=1, joint=hit.joint, token_hit=hit.token_hit)
        self._lower[hit.lower] += 1

    def _require_idle(self, lease: Lease, verb: str) -> None:
        self._require_ours(lease, verb)
        name = lease.request.name
        self._require(lease.plan is None, f"{verb} {name}: commit or cancel its plan first")

    def _require_ours(self, lease: Lease, verb: str) -> None:
        name = lease.request.name
        self._require(lease in self._leases, f"{verb} {name}: the lease has ended or is not ours")

    @staticmethod
    def _require(condition: bool, message: str) -> None:
        if not condition:
            raise ContractError(message)
