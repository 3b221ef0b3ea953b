"""A radix manager with executors that check what it plans, one call a step."""

from itertools import count

from cache.leases import CacheRequest, Lease, StepPlan, Wait
from cache.null_executor import NullExecutor
from cache.radix import key as keys
from cache.radix.manager import RadixCache
from tests.cache.memory import RealMemory, Shape, make_storage


class Served:
    """make: the manager; other options are its own. Every step is audited."""

    def __init__(self, make=RadixCache, *, pages=32, page=2, slots=8, **options):
        self.storage = make_storage(Shape(((pages, page),), (slots,)))
        self.cache = make(self.storage, **dict(state_chunk=4) | options)
        self.executors = (NullExecutor(self.storage), RealMemory(self.storage))
        self._numbers = count()

    @property
    def free(self) -> list[int]:
        """Pages, slots."""
        return [pool.free_count for pool in self.storage]

    def admit(self, ids, name=None, **options) -> Lease | Wait:
        """name: another one each time, if it does not matter."""
        self.cache.begin_step()
        name = name or f"r{next(self._numbers)}"
        lease = self.cache.admit(CacheRequest(name, ids, **options))
        self.cache.end_step()
        self.cache.audit()
        return lease

    def step(self, lease, want=99, appended=(), *, left=0, last=None, max_chunk=None):
        """The plan, or what it waits for. left: how far from its end the state is left. last: how
        the request ends in this step."""
        return self.steps([lease], want, appended, left=left, last=last, max_chunk=max_chunk)[0]

    def steps(self, leases, want=99, appended=(), *, left=0, last=None, max_chunk=None):
        """One step of several requests, all planned before any is committed."""
        self.cache.begin_step()
        plans = [self.cache.plan(lease, want, max_chunk) for lease in leases]
        there = [plan for plan in plans if isinstance(plan, StepPlan)]
        ends = {plan: plan.end - left for plan in there if left}
        for executor in self.executors:
            executor.run(there, ends)
        for plan in there:
            end = ends.get(plan, plan.end)
            copies = self.cache.commit(plan.lease, end, appended, last=last is not None)
            for executor in self.executors:
                executor.copy(copies)
            if last:
                getattr(self.cache, last)(plan.lease)
        self.cache.audit()
        self.cache.end_step()
        return plans

    def run(self, ids, *, new=0, piece=99, end="finish", **options) -> Lease:
        """A request in pieces, then `new` tokens, all but the last of which are computed. end None:
        it goes on."""
        lease = self.admit(ids, **options)
        assert isinstance(lease, Lease), lease
        while lease.remaining and not lease.decodes:
            last = lease.remaining <= piece
            plan = self.step(lease, piece, [1000] if last and new else ())
            assert isinstance(plan, StepPlan), plan
        for i in range(1, new):
            plan = self.step(lease, 1, [1000 + i])
            assert isinstance(plan, StepPlan), plan
        if end is not None:
            getattr(self.cache, end)(lease)
            self.cache.audit()
        return lease

    def hit(self, ids, **options):
        return self.cache.lookup(CacheRequest("seen", ids, **options))

    def kept(self, ids, salt=None) -> list[int]:
        """Boundaries on this path that have a state."""
        key = keys.encode(list(ids))
        return [
            node.depth
            for node in self.cache.tree.nodes()
            if node.state is not None
            and node.salt == salt
            and key.startswith(b"".join(part.key for part in [*node.path()][::-1]))
        ]
