"""Hypothesis chooses the calls of a `Driver`.

run_state_machine_as_test(machine_of(PlainCache), settings=QUICK)
"""

from collections import Counter
from collections.abc import Callable

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from cache.leases import CacheRequest, Lease, StepPlan, Wait
from cache.pools.storage import Storage
from cache.state_cache import StateCache
from tests.cache.driving import Driver
from tests.cache.memory import Shape

TEXTS = ([1, 2, 0, 1, 2, 2] * 8, [1, 2, 0, 1, 0, 0] * 8)
few = st.integers(0, 5)
QUICK = settings(
    max_examples=100,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@st.composite
def tiny(draw: st.DrawFn) -> Shape:
    """Tiny pools; several groups of a kind, or none, but not none of both."""
    page = st.tuples(st.sampled_from([3, 4, 5, 6, 8, 12]), st.sampled_from([1, 3, 4, 16]))
    pages = draw(st.lists(page, max_size=3))
    slots = draw(st.lists(st.integers(1, 4), min_size=not pages, max_size=2))
    return Shape(tuple(pages), tuple(slots))


@st.composite
def wishes(draw: st.DrawFn, hopeful: bool = False) -> tuple[int, int, list[int], int, dict]:
    """(text that it begins with: one of TEXTS or what somebody left; tokens, those at the end that
    are its own, tokens to come, options). hopeful: what keeps a request from a hit is rare."""
    rarely = 5 if hopeful else 1
    options = dict(
        salt=draw(st.sampled_from([None] * rarely + ["tenant"])),
        skip_read=draw(st.sampled_from([False] * rarely + [True])),
        must_fit=draw(st.booleans()),
        checkpoint_at=tuple(draw(st.lists(st.integers(1, 20), max_size=2))),
        key_cap=draw(st.one_of(*[st.none()] * rarely, st.integers(0, 20))),
    )
    own = draw(st.lists(st.integers(0, 2), max_size=3))
    return draw(st.integers(0, 2)), draw(st.integers(1, 40)), own, draw(few), options


class ContractMachine(RuleBasedStateMachine):
    """Calls in any order that the contract allows; `happened` counts over all runs of a class."""

    make_cache: Callable[[Storage], StateCache]
    happened: Counter[str]
    shapes: st.SearchStrategy[Shape]
    wish: st.SearchStrategy
    serves: bool

    @initialize(data=st.data())
    def make(self, data: st.DataObject) -> None:
        shape = data.draw(type(self).shapes)
        self.longest = min(shape.longest, len(TEXTS[0]))
        self.driver = Driver(type(self).make_cache, shape)
        self.admitted = self.misused = 0

    @property
    def rarely(self) -> bool:
        """For calls that undo: were they as likely as others, nothing would ever get far."""
        return self.driver.calls % 4 == 0

    @precondition(lambda self: not self.driver.in_step)
    @rule(cleared=st.booleans())
    def begin_step(self, cleared: bool) -> None:
        if cleared and not self.driver.tokens:
            self.driver.clear()
        self.driver.begin_step()

    @precondition(lambda self: self.driver.in_step and not self.driver.flying)
    @rule()
    def end_step(self) -> None:
        self.driver.end_step()

    @precondition(lambda self: self.driver.in_step and len(self.driver.tokens) < 6)
    @rule(data=st.data(), want=st.sampled_from([0, 1, 3, 5, 40]))
    def admit(self, data: st.DataObject, want: int) -> None:
        self._admit(data.draw(type(self).wish), want)

    def _admit(self, wish: tuple, want: int) -> Lease | Wait | None:
        text, length, own, more, options = wish
        length = 1 + (length - 1) % self.longest
        texts = (*TEXTS, [*self.driver.ended[-1].tokens, *TEXTS[0]]) if self.driver.ended else TEXTS
        ids = [*texts[text % len(texts)][: max(0, length - len(own))], *own][:length]
        self.admitted += 1
        name = f"r{self.admitted // 2}"  # names are for messages, so two may have the same
        final = min(length + more, self.longest)
        lease = self.driver.admit(CacheRequest(name, ids, **options), final)
        if want and isinstance(lease, Lease):
            self.driver.plan(self.driver.can_plan.index(lease), want)
        return lease

    @precondition(
        lambda self: self.serves and not self.driver.in_step and len(self.driver.tokens) < 6
    )
    @rule(
        data=st.data(),
        want=st.sampled_from([3, 5, 9, 40]),
        how=st.sampled_from(["finish", "finish", "abort"]),
    )
    def serve(self, data: st.DataObject, want: int, how: str) -> None:
        """A request from its beginning to its end, if it has nothing to wait for."""
        driver = self.driver
        driver.begin_step()
        lease = self._admit(data.draw(type(self).wish), 0)
        driver.end_step()
        while lease in driver.tokens and lease.remaining:
            driver.begin_step()
            plan = driver.plan(driver.can_plan.index(lease), want)
            if isinstance(plan, StepPlan):
                driver.run()
                driver.commit(0, [1])
            driver.end_step()
            if not isinstance(plan, StepPlan):
                return
        if lease in driver.tokens:
            driver.end(driver.idle.index(lease), how)

    @precondition(lambda self: self.driver.in_step and self.driver.gone)
    @rule(i=few)
    def readmit(self, i: int) -> None:
        self.driver.readmit(i)

    @precondition(lambda self: self.driver.in_step and self.driver.can_plan)
    @rule(i=few, want=st.integers(1, 20), max_chunk=st.none() | st.integers(1, 9))
    def plan(self, i: int, want: int, max_chunk: int | None) -> None:
        self.driver.plan(i, want, max_chunk)

    @precondition(lambda self: self.driver.in_step and self.driver.can_plan and self.rarely)
    @rule(i=few, want=st.integers(1, 20))
    def plan_in_vain(self, i: int, want: int) -> None:
        self.driver.plan_in_vain(i, want)

    @precondition(lambda self: self.driver.to_run and self.rarely)
    @rule(i=few)
    def cancel(self, i: int) -> None:
        self.driver.cancel(i)

    @precondition(lambda self: self.driver.to_run)
    @rule(left=st.lists(st.integers(0, 3), max_size=4), committed=st.booleans())
    def run(self, left: list[int], committed: bool) -> None:
        self.driver.run(left)
        while committed and self.driver.ends:
            self.driver.commit(0, [1])

    @precondition(lambda self: self.driver.ends)
    @rule(
        i=few,
        appended=st.lists(st.integers(0, 2), max_size=2),
        last=st.sampled_from([None, None, None, "finish", "abort"]),
    )
    def commit(self, i: int, appended: list[int], last: str | None) -> None:
        self.driver.commit(i, appended, last)

    @precondition(lambda self: self.driver.idle and self.rarely)
    @rule(i=few, how=st.sampled_from(["finish", "abort", "preempt"]))
    def end(self, i: int, how: str) -> None:
        self.driver.end(i, how)

    @precondition(lambda self: self.driver.flying and self.rarely)
    @rule(i=few)
    def fail(self, i: int) -> None:
        self.driver.fail(i)

    @precondition(lambda self: not self.driver.in_step and self.driver.can_plan)
    @rule(times=st.integers(1, 4), want=st.integers(1, 9), token=st.integers(0, 2), left=few)
    def whole_steps(self, times: int, want: int, token: int, left: int) -> None:
        """As an engine makes them: who was preempted comes back, all rows get on by one piece."""
        for _ in range(times):
            self.driver.whole_step(want, token, left)

    @precondition(lambda self: self.driver.calls >= self.misused + 6)
    @rule()
    def misuse(self) -> None:
        self.driver.misuse()
        self.misused = self.driver.calls

    def teardown(self) -> None:
        driver = getattr(self, "driver", None)
        if driver is not None and driver.sound:
            driver.drain()
            happened = type(self).happened
            happened.update(driver.counts + driver.waits)
            tokens, states, _ = driver.cache.stats().evictions
            happened.update({"evicted tokens": tokens, "evicted states": states})


def machine_of(
    make: Callable[[Storage], StateCache],
    of: st.SearchStrategy[Shape] | None = None,
    hopeful: bool = False,
) -> type[ContractMachine]:
    """The machine for caches made by `make` over pools of such shapes, `tiny` ones for None.
    hopeful: for caches with reuse; requests are served from beginning to end, too, and most may
    hit."""

    class Machine(ContractMachine):
        make_cache = staticmethod(make)
        shapes = tiny() if of is None else of
        wish = wishes(hopeful)
        serves = hopeful
        happened: Counter[str] = Counter()  # noqa: RUF012 (one for all runs of this class)

    return Machine
