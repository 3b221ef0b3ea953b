"""Plain caches, each with one fault of the kind that real engines had: the driver must find all."""

from dataclasses import replace

from cache.leases import Hit, Phase, StepPlan, Wait, WaitReason
from cache.plain import PlainCache


class SlotStaysTakenWhenPagesLack(PlainCache):
    """BR-12: the slot is taken first, and the wait for pages does not give it back."""

    found_by = r"Stats|nobody holds it"

    def _plan(self, lease, want, max_chunk):
        plan = super()._plan(lease, want, max_chunk)
        if isinstance(plan, Wait) and plan.reason is WaitReason.PAGES:
            for pool in self.storage.states:
                pool.alloc(1)
        return plan


class PagesStayTakenWhenALaterGroupLacks(PlainCache):
    found_by = r"first plan waits holds nothing|a wait has changed"

    def _shortage(self, lease, end, first):
        wait = super()._shortage(lease, end, first)
        if wait is not None and len(self.storage.pages) > 1:
            needed = self.storage.pages_for(end)[0] - len(lease.pages[0])
            lease.pages[0].extend(self.storage.pages[0].alloc(max(0, needed)) or ())
        return wait


class CancelForgetsTheSlot(PlainCache):
    found_by = r"nobody holds it|a cancelled plan keeps storage"

    def _cancel(self, plan):
        super()._cancel(plan)
        for pool in self.storage.states:
            if plan.start == 0:
                pool.alloc(1)


class CancelTakesOnePageTooMany(PlainCache):
    found_by = r"pages, needs"

    def _cancel(self, plan):
        super()._cancel(plan)
        for pool, table in zip(self.storage.pages, plan.lease.pages, strict=True):
            if len(table) > 1:
                pool.free([table.pop()])


class CancelLeavesThePages(PlainCache):
    found_by = r"a cancelled plan keeps storage|holds storage before"

    def _cancel(self, plan):
        if plan.start == 0:
            for pool, slot in zip(self.storage.states, plan.slots, strict=True):
                pool.free([slot])
            plan.lease.slots[:] = [0] * len(plan.slots)


class PreemptKeepsAPage(PlainCache):
    found_by = r"nobody holds it"

    def _release(self, lease, publish):
        for table in lease.pages:
            del table[3:]
        super()._release(lease, publish)


class AbortFreesTwice(PlainCache):
    found_by = r"free: slot . is free"

    def _release(self, lease, publish):
        slots = list(lease.slots)
        super()._release(lease, publish)
        for pool, slot in zip(self.storage.states, slots, strict=True):
            if slot and not publish:
                pool.free([slot])


class TwoRequestsShareASlot(PlainCache):
    found_by = r"yet held by"

    def _plan(self, lease, want, max_chunk):
        plan = super()._plan(lease, want, max_chunk)
        others = [x for x in self._leases if x is not lease and any(x.slots)]
        if isinstance(plan, StepPlan) and others:
            lease.slots[:] = others[0].slots
            plan = replace(plan, slots=tuple(lease.slots))
        return plan


class TablesAreCrossed(PlainCache):
    """Nobody holds too much or too little; two requests write to each other's pages."""

    found_by = r"which holds another prefix"

    def _commit(self, lease, plan, last):
        for other in self._leases:
            if other is not lease and not other.plan:
                for a, b in zip(lease.pages, other.pages, strict=True):
                    if a and b:
                        a[0], b[0] = b[0], a[0]
        return ()


class TheLastPageIsMissing(PlainCache):
    found_by = r"planned to . with . pages"

    def _plan(self, lease, want, max_chunk):
        plan = super()._plan(lease, want, max_chunk)
        if isinstance(plan, StepPlan):
            for pool, table, page in zip(
                self.storage.pages, lease.pages, self.storage.page_tokens, strict=True
            ):
                if (plan.end - 1) % page == 0 and len(table) > 1:  # the first row of a new page
                    pool.free([table.pop()])
        return plan


class RunsOnFromAnOldState(PlainCache):
    """BR-39: what comes back with all tokens known is taken for what was computed."""

    found_by = r"must be 0"

    def _admit(self, request):
        lease = super()._admit(request)
        lease.computed = len(request.ids) - 1 if len(request.ids) > 6 else 0
        return lease


class HitsAllTokens(PlainCache):
    """BR-01: nothing is left to run."""

    found_by = r"may be read"

    def _lookup(self, request):
        return Hit(len(request.ids), len(request.ids))


class StartsAgainAtZero(PlainCache):
    found_by = r"planned from 0"

    def _plan(self, lease, want, max_chunk):
        plan = super()._plan(lease, want, max_chunk)
        return replace(plan, start=0) if isinstance(plan, StepPlan) else plan


class CommitsTheWholePlan(PlainCache):
    found_by = r"are computed, must be"

    def _commit(self, lease, plan, last):
        lease.computed = plan.end
        return ()


class ForgetsTheSample(PlainCache):
    found_by = r"known: "

    def _commit(self, lease, plan, last):
        del lease.tokens[lease.computed + 1 :]
        return ()


class MovesTheStateWithoutACopy(PlainCache):
    found_by = r"resumes at . from slot ."

    def _commit(self, lease, plan, last):
        for g, pool in enumerate(self.storage.states):
            new = pool.alloc(1)
            if new:
                pool.free([lease.slots[g]])
                lease.slots[g] = new[0]
        return ()


class WaitsForRoomThatNobodyHolds(PlainCache):
    """BR-76: a silent loop."""

    found_by = r"nobody else holds anything"

    def _shortage(self, lease, end, first):
        pages = zip(self.storage.pages_for(end), self.storage.pages, strict=True)
        if any(needed == pool.size for needed, pool in pages):
            return Wait(WaitReason.PAGES, 1, 0)
        return super()._shortage(lease, end, first)


class WaitsWithoutNeed(PlainCache):
    """BR-46: counts the pages of the whole piece, also those that are held already."""

    found_by = r"open pages would do|nobody else holds anything"

    def _shortage(self, lease, end, first):
        for pool, pages in zip(self.storage.pages, self.storage.pages_for(end), strict=True):
            if pages > pool.free_count:
                return Wait(WaitReason.PAGES, pages, pool.free_count)
        return super()._shortage(lease, end, first)


class DonatesWhatIsStillWritten(PlainCache):
    found_by = r"neither active nor free"

    def _commit(self, lease, plan, last):
        for pool, table in zip(self.storage.pages, lease.pages, strict=True):
            active = [p for p in table if pool.allocator.state_of(p) == "active"]
            pool.allocator.donate(active[-1:])
        return ()


class ClearForgetsThePages(PlainCache):
    """I-19."""

    found_by = r"cleared, yet free are"

    def _clear(self):
        for pool in self.storage.states:
            pool.clear()


class LookUpTakesASlot(PlainCache):
    found_by = r"look-up has changed"

    def _lookup(self, request):
        for pool in self.storage.states:
            for slot in pool.alloc(1) or ():
                pool.free([slot])
        return super()._lookup(request)


class AdmitsInTheWrongPhase(PlainCache):
    found_by = r"admitted as holding"

    def _admit(self, request):
        lease = super()._admit(request)
        lease.phase = Phase.HOLDING
        return lease


FAULTY = [
    fault
    for fault in list(globals().values())
    if isinstance(fault, type) and issubclass(fault, PlainCache) and fault is not PlainCache
]
