"""A driver of any StateCache: legal calls in any order, illegal ones in between, all checked.

After every call: the cache's own audit, the books kept here against its leases and its statistics,
the sum over each pool. Two executors run the plans: the null one, which knows what every slot and
row stands for, and `RealMemory`, which writes and reads small poisoned tensors. What a manager must
promise beyond the contract is for its own tests.

`machine.machine_of(make_cache)` lets hypothesis choose the calls.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial, wraps

import pytest

from cache.blocks.vllm import VLLMCache
from cache.leases import CacheRequest, Lease, Phase, StepPlan, Wait, WaitReason
from cache.null_executor import NullExecutor
from cache.pools.allocator import PRIVATE, Ownership
from cache.pools.storage import Storage
from cache.state_cache import ContractError, StateCache
from tests.cache.memory import RealMemory, Shape, make_storage

SHORTAGE = (WaitReason.PAGES, WaitReason.SLOTS)
# what is counted, and must have happened for a run to prove anything
KINDS = (
    *("finish", "abort", "preempt", "came back", "planned again", "committed less"),
    *("cancelled first", "cancelled later", "held, then waited", *SHORTAGE),
)


def checked(call: Callable) -> Callable:
    """Everything is looked at after the call. Where a call has failed, nothing is sound."""

    @wraps(call)
    def wrapper(self, *args):
        self.sound = False
        self.calls += 1
        result = call(self, *args)
        self.check()
        self.sound = True
        return result

    return wrapper


class Driver:
    """Makes calls and checks what each has done. Leases are named by any integer, modulo those
    that may be meant."""

    def __init__(self, make_cache: Callable[[Storage], StateCache], shape: Shape) -> None:
        self.storage = make_storage(shape)
        self.cache = make_cache(self.storage)
        self.executors = (NullExecutor(self.storage), RealMemory(self.storage))
        self.calls = 0
        self.in_step = False
        self.tokens: dict[Lease, list[int]] = {}  # of live leases: what must be known
        self.computed: dict[Lease, int] = {}  # of those that have planned: what is in the state
        self.final: dict[Lease, int] = {}  # tokens it may grow to
        self.ends: dict[StepPlan, int] = {}  # of plans that have run: where the state was left
        self.gone: list[tuple[CacheRequest, int]] = []  # preempted, to come back; final lengths
        self.counts: Counter[str] = Counter()
        self.waits: Counter[WaitReason] = Counter()
        self.first: set[StepPlan] = set()  # those that were their leases' first
        self.ended: list[Lease] = []
        self.used: list[StepPlan] = []
        self.stranger = make_cache(make_storage(shape))
        self.stranger.begin_step()
        self.foreign = self.stranger.admit(CacheRequest("foreign", [1]))
        self.foreign_plan = self.stranger.plan(self.foreign, 1)
        self.check()
        self.sound = True

    @property
    def flying(self) -> list[Lease]:
        return [lease for lease in self.tokens if lease.plan]

    @property
    def idle(self) -> list[Lease]:
        return [lease for lease in self.tokens if not lease.plan]

    @property
    def can_plan(self) -> list[Lease]:
        return [lease for lease in self.idle if lease.remaining]

    @property
    def to_run(self) -> list[StepPlan]:
        return [lease.plan for lease in self.flying if lease.plan not in self.ends]

    @checked
    def begin_step(self) -> None:
        self.cache.begin_step()
        self.in_step = True

    @checked
    def end_step(self) -> None:
        self.cache.end_step()
        self.in_step = False
        self.counts["steps"] += 1

    @checked
    def admit(self, request: CacheRequest, final: int) -> Lease | Wait | None:
        """None for what the cache says it can never run to its end."""
        if self.cache.refusal(final):
            return None
        before = self.snapshot()
        hit = self.cache.lookup(request)
        assert self.snapshot() == before, "a look-up has changed something"
        last = len(request.ids) - 1
        allowed = last if request.key_cap is None else min(last, request.key_cap)
        assert 0 <= hit.joint <= min(hit.token_hit, allowed), (
            f"{hit}, at most {allowed} may be read"
        )
        assert hit.joint == 0 or not request.skip_read
        lease = self.cache.admit(request)
        if isinstance(lease, Wait):
            self.waits[lease.reason] += 1
            assert self.snapshot() == (*before[:-1], self.cache.stats())
        else:
            assert lease.hit == hit, f"admitted with {lease.hit}, the look-up said {hit}"
            assert lease.phase is Phase.ADMITTED, f"admitted as {lease.phase}"
            assert (lease.plan, lease.request) == (None, request)
            self.tokens[lease] = list(request.ids)
            self.final[lease] = final
        return lease

    def readmit(self, i: int) -> Lease | Wait | None:
        """One that was preempted comes back with all of its tokens known."""
        back = self.gone.pop(i % len(self.gone))
        lease = self.admit(*back)
        if not isinstance(lease, Lease):
            self.gone.append(back)
        else:
            self.counts["came back"] += 1
        return lease

    @checked
    def plan(self, i: int, want: int, max_chunk: int | None = None) -> StepPlan | Wait:
        lease = self.can_plan[i % len(self.can_plan)]
        before, first = self.snapshot(), lease not in self.computed
        plan = self.cache.plan(lease, want, max_chunk)
        if isinstance(plan, Wait):
            self._waited(lease, plan, want, before, first)
        else:
            self._planned(lease, plan, want, max_chunk, first)
        return plan

    def _waited(self, lease: Lease, wait: Wait, want: int, before: tuple, first: bool) -> None:
        self.waits[wait.reason] += 1
        alone = len(self.tokens) == 1
        assert not (alone and wait.reason in SHORTAGE), f"{wait}, yet nobody else holds anything"
        if wait.reason in SHORTAGE:
            assert wait.needed > wait.free >= 0, wait
        if not first:
            assert self._unchanged(before), "a wait has changed something"
            self.counts["held, then waited"] += 1
            needed = self.storage.pages_for(lease.computed + min(want, lease.remaining))
            short = [len(t) < pages for t, pages in zip(lease.pages, needed, strict=True)]
            assert any(short) or wait.reason is not WaitReason.PAGES, "the open pages would do"
            return
        assert lease.phase is Phase.ADMITTED
        assert not any(lease.slots), "a lease whose first plan waits holds nothing"
        if wait.reason is not WaitReason.LOADING:
            assert not any(lease.pages), "a lease whose first plan waits holds nothing"
        for old, new in zip(before[-1].pools, self.cache.stats().pools, strict=True):
            assert new.active <= old.active and new.tracked <= old.tracked, (old, new)

    def _unchanged(self, before: tuple) -> bool:
        """As it was before a wait. The engine's own rules give back what a lease no longer needs,
        even then."""
        pools, leases, _ = self.snapshot()
        changes = {
            change
            for (states, _), (then, _) in zip(pools, before[0], strict=True)
            for change in zip(then, states, strict=True)
            if change[0] is not change[1]
        }
        if isinstance(self.cache, VLLMCache) and changes:
            return leases == before[1] and changes == {(Ownership.CACHED, Ownership.FREE)}
        return (pools, leases) == before[:-1]

    def _planned(
        self, lease: Lease, plan: StepPlan, want: int, max_chunk: int | None, first: bool
    ) -> None:
        if not first:
            at = self.computed[lease]
            assert plan.start == at, f"planned from {plan.start}, the state is at {at}"
            self.counts["planned again"] += 1
        else:
            self.first.add(plan)
        self.computed[lease] = plan.start
        longest = min(want, len(self.tokens[lease]) - plan.start, max_chunk or want)
        assert 0 < plan.end - plan.start <= longest, f"{plan.start}..{plan.end}, wanted {longest}"
        assert plan.lease is lease and lease.plan is plan and lease.phase is Phase.HOLDING
        assert list(plan.tokens) == self.tokens[lease][plan.start : plan.end]
        for pool, slot in zip(self.storage.states, plan.slots, strict=True):
            assert pool.allocator.state_of(slot) is Ownership.ACTIVE
        for table, pages in zip(plan.pages, self.storage.pages_for(plan.end), strict=True):
            assert len(table) >= pages, f"planned to {plan.end} with {len(table)} pages"
        for export in plan.exports:
            at_end = export.offset == plan.end - plan.start
            assert at_end or export.offset % self.cache.export_alignment == 0

    @checked
    def cancel(self, i: int) -> None:
        """One whose step has touched no memory."""
        can = self.to_run
        plan = can[i % len(can)]
        self._cancel(plan)

    def _cancel(self, plan: StepPlan) -> None:
        lease, first = plan.lease, plan in self.first
        self.cache.cancel(plan)
        self.used.append(plan)
        self.counts["cancelled first" if first else "cancelled later"] += 1
        assert lease.plan is None
        assert lease.phase is (Phase.ADMITTED if first else Phase.HOLDING), lease.phase
        if first:
            del self.computed[lease]

    @checked
    def plan_in_vain(self, i: int, want: int) -> None:
        """A plan that is cancelled at once leaves no less storage than before; what a look-up has
        found may be held on to."""
        lease = self.can_plan[i % len(self.can_plan)]
        free = [pool.free_count for pool in self.storage]
        plan = self.plan(i, want)
        if isinstance(plan, StepPlan):
            self._cancel(plan)
        after = [pool.free_count for pool in self.storage]
        less = any(now < then for now, then in zip(after, free, strict=True))
        assert not less or lease.hit.joint, "a cancelled plan keeps storage"

    @checked
    def run(self, left: Sequence[int] = ()) -> None:
        """All plans that have not run yet; left: how far from its end a plan's state is left."""
        plans = self.to_run
        ends = {p: max(p.start + 1, p.end - n) for p, n in zip(plans, left, strict=False) if n}
        for executor in self.executors:
            executor.run(plans, ends)
        self.ends.update({plan: ends.get(plan, plan.end) for plan in plans})
        for plan in plans:
            for g, slot in enumerate(plan.slots):
                assert self.executors[0].boundary_at(slot, g) == self.ends[plan]

    @checked
    def commit(self, i: int, appended: Sequence[int], last: str | None = None) -> None:
        """One that has run. Only a row that has run all it knew can have sampled anything. last:
        how the request ends right after, if it does."""
        can = [lease for lease in self.flying if lease.plan in self.ends]
        lease = can[i % len(can)]
        plan = lease.plan
        end = self.ends.pop(plan)
        room = self.final[lease] - len(self.tokens[lease])
        appended = appended[:room] if end == len(self.tokens[lease]) else ()
        self.counts["committed less"] += end < plan.end
        if not lease.ran:
            hit = lease.hit
            self.counts.update(lookups=1, joint=hit.joint, token_hit=hit.token_hit)
        copies = self.cache.commit(lease, end, iter(appended), last=last is not None)
        for executor in self.executors:
            executor.copy(copies)
        self.used.append(plan)
        self.tokens[lease] += appended
        self.computed[lease] = end
        self.counts["computed"] += end - plan.start
        if last is not None:
            self._end(lease, last)

    @checked
    def end(self, i: int, how: str) -> None:
        """finish, abort or preempt."""
        lease = self.idle[i % len(self.idle)]
        self._end(lease, how)

    def _end(self, lease: Lease, how: str) -> None:
        getattr(self.cache, how)(lease)
        self.counts[how] += 1
        tokens, final = self.tokens.pop(lease), self.final.pop(lease)
        self.computed.pop(lease, None)
        assert lease.phase is Phase.ENDED and lease.plan is None
        self.ended.append(lease)
        if how == "preempt":
            self.gone.append((replace(lease.request, ids=tokens), final))

    @checked
    def fail(self, i: int) -> None:
        """A step fails half way: memory is torn, so its lease gives everything up."""
        lease = self.flying[i % len(self.flying)]
        self.ends.pop(lease.plan, None)
        self._cancel(lease.plan)
        self._end(lease, "preempt")

    @checked
    def abandon(self) -> None:
        """Anything fails half way: every lease has ended, nothing is private, no step is open; once
        more changes nothing that can be seen."""
        self.cache.abandon()
        assert not self.cache.in_step and not self.cache.live_leases
        self.in_step = False
        self.ends.clear()
        self.used += [lease.plan for lease in self.tokens if lease.plan]
        for lease, tokens in self.tokens.items():
            assert lease.phase is Phase.ENDED and lease.plan is None
            assert not any(lease.slots) and not any(lease.pages)
            self.counts["preempt"] += 1
            self.gone.append((replace(lease.request, ids=tokens), self.final[lease]))
            self.ended.append(lease)
        for book in (self.tokens, self.final, self.computed):
            book.clear()
        for pool in self.storage:
            assert not any(pool.allocator.count(state) for state in PRIVATE)
        before = self.snapshot()
        self.cache.abandon()
        assert self.snapshot() == before, "a second abandon has changed something"

    @checked
    def misuse(self) -> None:
        """Every call that would be out of order now is refused and changes nothing."""
        for name, error, call in self._out_of_order():
            before = self.snapshot()
            with pytest.raises(error) as caught:
                call()
            assert type(caught.value) is error, (name, caught.value)
            assert self.snapshot() == before, f"{name} was refused and has changed something"

    def _out_of_order(self) -> Iterable[tuple[str, type[Exception], Callable[[], object]]]:
        """(what, the error it must raise, the call)."""
        cache = self.cache
        if self.in_step:
            yield "begin_step within a step", ContractError, cache.begin_step
            yield "no tokens", ValueError, lambda: cache.admit(CacheRequest("empty", []))
        else:
            early = CacheRequest("early", [1, 2])
            yield "end_step without a step", ContractError, cache.end_step
            yield "admit between steps", ContractError, lambda: cache.admit(early)
        drops = type(cache).clear is not StateCache.clear  # SGLang's rules abort what is live
        if self.in_step or (self.tokens and not drops):
            yield "clear too early", ContractError, cache.clear
        for lease in (*self.ended[-1:], self.foreign):
            yield "plan of another", ContractError, partial(cache.plan, lease, 1)
            yield "commit of another", ContractError, partial(cache.commit, lease, 1)
            yield from self._no_ends(lease)
        for plan in (*self.used[-1:], self.foreign_plan):
            yield "cancel of a used plan", ContractError, partial(cache.cancel, plan)
        for lease in self.flying[:1]:
            yield from self._no_ends(lease)
            yield "end_step in flight", ContractError, cache.end_step
            yield "a second plan", ContractError, partial(cache.plan, lease, 1)
            commit = partial(cache.commit, lease)
            yield "commit of nothing", ValueError, partial(commit, lease.plan.start, [1])
            yield "commit beyond", ValueError, partial(commit, lease.plan.end + 1, [1])
            yield "no list", TypeError, partial(commit, lease.plan.end, None)
        for lease in self.idle[:1]:
            yield "commit without a plan", ContractError, partial(cache.commit, lease, 1)
            if self.in_step:
                yield "want nothing", ValueError, partial(cache.plan, lease, 0)
                yield "no chunk", ValueError, partial(cache.plan, lease, 1, 0)
            else:
                yield "plan between steps", ContractError, partial(cache.plan, lease, 1)
        for lease in [lease for lease in self.idle if not lease.remaining][:1]:
            yield "nothing left to plan", ContractError, partial(cache.plan, lease, 1)

    def _no_ends(self, lease: Lease) -> Iterable[tuple[str, type[Exception], Callable]]:
        for end in (self.cache.finish, self.cache.abort, self.cache.preempt):
            yield f"{end.__name__} too late or early", ContractError, partial(end, lease)

    def snapshot(self) -> tuple:
        """All that can be seen of the cache; its statistics last."""
        pools = [
            (tuple(map(p.allocator.state_of, range(p.size + 1))), p.allocator.free_order())
            for p in self.storage
        ]
        leases = [
            (
                (x.phase, x.plan, x.computed, x.hit, x.request),
                (tuple(x.tokens), tuple(x.slots), tuple(map(tuple, x.pages))),
            )
            for x in (*self.tokens, *self.ended[-1:], self.foreign)
        ]
        return pools, leases, self.cache.stats()

    def check(self) -> None:
        self.cache.audit()
        stats, count = self.cache.stats(), self.counts
        for pool in stats.pools:
            assert pool.size == pool.free + pool.active + pool.tracked + pool.inflight + pool.cached
        assert (stats.leases, stats.steps) == (len(self.tokens), count["steps"])
        assert stats.computed_tokens == count["computed"]
        ends = (count["finish"], count["abort"], count["preempt"])
        assert (stats.finished, stats.aborted, stats.preempted) == ends
        assert stats.waits == self.waits
        hits = (count["lookups"], count["joint"], count["token_hit"])
        assert (stats.lookups, stats.joint_hit_tokens, stats.token_hit_tokens) == hits
        for lease, tokens in self.tokens.items():
            assert lease.tokens == tokens, f"known: {lease.tokens}, must be {tokens}"
            at = self.computed.get(lease, lease.hit.joint)
            assert lease.computed == at, f"says {lease.computed} are computed, must be {at}"
            assert lease.remaining == len(tokens) - lease.computed

    @checked
    def clear(self) -> None:
        self.cache.clear()
        for pool in self.storage:
            free = pool.allocator.free_order()
            assert free == tuple(range(1, pool.size + 1)), f"cleared, yet free are {free}"

    def whole_step(self, want: int, token: int, left: int) -> None:
        """Who was preempted comes back, every lease gets on by one piece, as far as storage goes;
        one state is left short of its end."""
        self.begin_step()
        for _ in range(len(self.gone)):
            self.readmit(0)
        for lease in self.can_plan:
            self.plan(self.can_plan.index(lease), want)
        if self.to_run:
            self.run([left])
        while self.flying:
            self.commit(0, [token])
        self.end_step()

    @checked
    def drain(self) -> None:
        """End everything: then nobody holds anything, and a cleared cache is as good as new."""
        if not self.in_step:
            self.begin_step()
        while self.to_run:
            self.cancel(0)
        while self.flying:
            self.commit(0, ())
        self.end_step()
        for how in ("finish", "abort", "preempt") * len(self.tokens):
            if self.tokens:
                self.end(0, how)
        for pool in self.storage:
            private = [pool.allocator.count(state) for state in PRIVATE]
            assert not any(private), f"{private} {pool.unit}s are private, and nobody is there"
        self.clear()
