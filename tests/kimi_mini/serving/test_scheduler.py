"""Which rows run, who gives way, who waits: over pools without tensors and no model."""

import random
from typing import NamedTuple

import pytest
import torch

from cache.leases import Wait, WaitReason
from cache.null_executor import NullExecutor
from cache.plain import PlainCache
from cache.pools.storage import Sizes, one_of_each
from kimi_mini import SamplingParams
from kimi_mini.serving import engine as engine_module
from kimi_mini.serving import request as request_module
from kimi_mini.serving import scheduler as scheduler_module
from kimi_mini.serving.engine import PATIENCE
from kimi_mini.serving.sampling import Sampled
from kimi_mini.serving.scheduler import Scheduler
from kimi_mini.serving.sequence import Sequence
from tests.kimi_mini.serving.alone import (
    alone,
    assert_all_free,
    assert_same,
    oracle_engine,
    prefix_hash,
)
from tests.kimi_mini.serving.interrupts import Interrupt


class Says65:
    """A sampler that always takes the same token."""

    def sample(self, logits):
        return Sampled(65, None)


class Ran(NamedTuple):
    """A row of a step."""

    name: str
    start: int
    end: int


class Loop:
    """Steps as the engine makes them, with nothing but books behind. Sequences are named by single
    letters."""

    def __init__(self, *, slots, pages, page=1, budget=100, chunk=100, cache=PlainCache):
        storage = one_of_each(Sizes(page, 8, 64), slots, pages)
        self.cache, self.executor = cache(storage), NullExecutor(storage)
        self.scheduler = Scheduler(self.cache, budget, chunk)

    def add(self, name, prompt, new):
        params = SamplingParams(max_tokens=new)
        sequence = Sequence(name, 0, [ord(name)] * prompt, params, Says65(), room=new)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> list[Ran]:
        self.cache.begin_step()
        rows = self.scheduler.schedule()
        assert sum(plan.end - plan.start for _, plan in rows) <= self.scheduler.max_batch_tokens
        self.executor.run(plan for _, plan in rows)
        for sequence, plan in rows:
            known, positions = len(sequence.tokens), sequence.logits_wanted(plan.start, plan.end)
            sequence.receive(torch.empty(len(positions), 1), positions, plan.end)
            self.cache.commit(sequence.lease, plan.end, sequence.tokens[known:])
            if sequence.finish_reason is not None:
                self.cache.finish(sequence.lease)
                self.scheduler.drop(sequence)
        self.cache.end_step()
        self.cache.audit()
        return [Ran(sequence.request_id, plan.start, plan.end) for sequence, plan in rows]

    @property
    def running(self):
        return "".join(sequence.request_id for sequence in self.scheduler.running)

    @property
    def waiting(self):
        return "".join(sequence.request_id for sequence in self.scheduler.waiting)


# --- one step -------------------------------------------------------------------------------------


def test_decode_rows_come_first_then_prefill_then_newcomers():
    loop = Loop(slots=9, pages=400, budget=10, chunk=8)
    loop.add("a", 30, 9)
    loop.add("b", 1, 9)
    assert loop.step() == [("a", 0, 8), ("b", 0, 1)]
    loop.add("c", 20, 9)
    assert loop.step() == [("b", 1, 2), ("a", 8, 16), ("c", 0, 1)]
    assert loop.step() == [("b", 2, 3), ("a", 16, 24), ("c", 1, 2)]
    assert loop.step() == [("b", 3, 4), ("a", 24, 30), ("c", 2, 5)]
    assert loop.step() == [("a", 30, 31), ("b", 4, 5), ("c", 5, 13)]


def test_a_last_prompt_token_counts_as_decode():
    loop = Loop(slots=9, pages=400, budget=6, chunk=5)
    loop.add("a", 11, 9)
    loop.add("b", 6, 9)
    assert loop.step() == [("a", 0, 5), ("b", 0, 1)]
    assert loop.step() == [("a", 5, 10), ("b", 1, 2)]
    assert loop.step() == [("a", 10, 11), ("b", 2, 6)]


def test_no_more_rows_run_than_a_step_has_tokens_so_that_each_of_them_may_decode():
    loop = Loop(slots=9, pages=400, budget=3)
    for name in "abcde":
        loop.add(name, 1, 9)
    loop.step()
    for _ in range(4):
        assert [ran.name for ran in loop.step()] == ["a", "b", "c"]
    assert (loop.running, loop.waiting) == ("abc", "de")


def test_rows_that_wait_count_among_those_that_run():
    loop = Loop(slots=9, pages=400, budget=2, cache=Waits)
    for name in "abc":
        loop.add(name, 1, 9)
    loop.step()
    loop.cache.reasons["a.0"] = WaitReason.LOADING
    assert [ran.name for ran in loop.step()] == ["b"]
    assert (loop.running, loop.waiting) == ("ab", "c")


def test_a_budget_of_one_serves_one_after_the_other():
    loop = Loop(slots=9, pages=400, budget=1)
    for name in "ab":
        loop.add(name, 3, 2)
    ran = [row for _ in range(8) for row in loop.step()]
    assert ran == [(n, i, i + 1) for n in "ab" for i in range(4)]
    assert loop.step() == []


@pytest.mark.parametrize("budget, chunk", [(0, 5), (-1, 5), (5, 0)])
def test_a_step_without_tokens_is_refused(budget, chunk):
    name = "max_batch_tokens" if budget < 1 else "prefill_chunk"
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got {min(budget, chunk)}"):
        Loop(slots=1, pages=1, budget=budget, chunk=chunk)


# --- waiting --------------------------------------------------------------------------------------


def test_newcomers_enter_in_order_and_one_that_lacks_pages_holds_back_those_behind_it():
    loop = Loop(slots=9, pages=20)
    a = loop.add("a", 10, 5)
    loop.add("b", 15, 3)  # does not fit beside a
    loop.add("c", 1, 3)  # would
    while a.finish_reason is None:
        assert [ran.name for ran in loop.step()] == ["a"]
        assert loop.waiting == "bc"
    assert [ran.name for ran in loop.step()] == ["b", "c"]


def test_a_newcomer_enters_only_if_all_that_it_knows_fits_whatever_its_first_piece_needs():
    loop = Loop(slots=9, pages=20, chunk=4)
    loop.add("a", 8, 9)
    loop.add("b", 13, 3)
    assert [ran.name for ran in loop.step()] == ["a", "b"]  # 4 of 8 pages taken, 13 of 16 there
    loop = Loop(slots=9, pages=20, chunk=8)
    loop.add("a", 8, 9)
    loop.add("b", 13, 3)
    assert [ran.name for ran in loop.step()] == ["a"]


def test_slots_are_waited_for():
    loop = Loop(slots=2, pages=100)
    for name in "abc":
        loop.add(name, 2, 3)
    for _ in range(3):
        assert [ran.name for ran in loop.step()] == ["a", "b"]
    assert [ran.name for ran in loop.step()] == ["c"]


class Waits(PlainCache):
    """Answers plans of the sequences in `reasons`, by name, with a wait."""

    def __init__(self, storage, **options):
        super().__init__(storage, **options)
        self.reasons = {}

    def _plan(self, lease, want, max_chunk):
        reason = self.reasons.get(lease.request.name)
        if reason is not None:
            return Wait(reason, 7, 2)
        return super()._plan(lease, want, max_chunk)


@pytest.mark.parametrize("reason", WaitReason)
def test_only_a_wait_that_is_over_by_itself_lets_others_pass(reason):
    loop = Loop(slots=3, pages=100, cache=Waits)
    loop.cache.reasons["a.0"] = reason
    loop.add("a", 2, 3)
    loop.add("b", 2, 3)
    passing = reason in (WaitReason.SAME_STEP, WaitReason.LOADING)
    assert [ran.name for ran in loop.step()] == (["b"] if passing else [])
    assert loop.scheduler.stuck[0].request_id == "a"
    assert loop.scheduler.stuck[1] == (reason, 7, 2)
    del loop.cache.reasons["a.0"]
    assert [ran.name for ran in loop.step()] == (["b", "a"] if passing else ["a", "b"])
    assert loop.scheduler.stuck is None


def test_a_running_row_that_waits_keeps_its_storage_and_others_go_on():
    loop = Loop(slots=3, pages=100, chunk=4, cache=Waits)
    loop.add("a", 9, 3)
    loop.add("b", 2, 6)
    loop.step()
    loop.cache.reasons["a.0"] = WaitReason.LOADING
    for _ in range(2):
        assert [ran.name for ran in loop.step()] == ["b"]
    del loop.cache.reasons["a.0"]
    assert loop.step() == [("b", 4, 5), ("a", 4, 8)]


# --- giving way -----------------------------------------------------------------------------------


def test_the_youngest_gives_way_and_the_oldest_never_stops():
    loop = Loop(slots=3, pages=12)
    a, b, c = (loop.add(name, 3, 8) for name in "abc")
    for _ in range(2):
        assert [ran.name for ran in loop.step()] == ["a", "b", "c"]
    assert [ran.name for ran in loop.step()] == ["a", "b"]  # 5 + 5 of 12, c gave its 4 back
    assert (c.lease, c.computed, c.prefilled, c.timings.preemptions) == (None, 0, 0, 1)
    assert [ran.name for ran in loop.step()] == ["a", "b"]
    assert [ran.name for ran in loop.step()] == ["a"]
    assert (loop.running, loop.waiting) == ("a", "bc")
    while a.finish_reason is None:
        assert [ran.name for ran in loop.step()] == ["a"]
    assert loop.step() == [("b", 0, 7), ("c", 0, 5)]  # what they had sampled is computed again
    assert [s.timings.preemptions for s in (a, b, c)] == [0, 1, 1]


def test_who_gave_way_does_not_come_back_nor_anybody_enter_before_a_row_has_left():
    """There is room for d all the time."""
    loop = Loop(slots=9, pages=13)
    loop.add("a", 2, 9)
    b = loop.add("b", 2, 5)
    c = loop.add("c", 4, 6)
    while not c.timings.preemptions:
        loop.step()
    loop.add("d", 1, 1)
    steps = 0
    while b.finish_reason is None:
        assert [ran.name for ran in loop.step()] == ["a", "b"]
        steps += 1
    assert steps == 2 and c.timings.preemptions == 1
    loop.add("e", 1, 1)
    assert loop.step() == [("a", 6, 7), ("c", 0, 6)]
    assert loop.waiting == "de"


def test_the_cancelled_leave_too():
    loop = Loop(slots=9, pages=9)
    loop.add("a", 2, 8)
    b = loop.add("b", 2, 8)
    c = loop.add("c", 3, 3)
    loop.step()
    loop.step()
    assert (loop.running, loop.waiting, c.timings.preemptions) == ("ab", "c", 1)
    loop.cache.abort(b.lease)
    loop.scheduler.drop(b)
    assert [ran.name for ran in loop.step()] == ["a", "c"]


def test_a_row_that_is_planned_already_is_withdrawn_for_an_older_one():
    """a is in prefill and so planned after b and c, which decode."""
    loop = Loop(slots=9, pages=20, chunk=4)
    loop.add("a", 16, 3)
    loop.add("b", 1, 9)
    loop.add("c", 1, 9)
    for _ in range(3):
        loop.step()
    assert loop.step() == [("b", 3, 4), ("a", 12, 16)]  # 16 + 4 of 20
    assert (loop.running, loop.waiting) == ("ab", "c")


def test_a_row_alone_that_lacks_pages_waits_at_the_head_and_enters_nothing():
    """Such a request is refused at the door; if it comes, it does not spin through its prompt."""
    loop = Loop(slots=2, pages=5)
    a = loop.add("a", 4, 9)
    loop.add("b", 2, 1)
    ran = [loop.step() for _ in range(6)]
    assert ran == [[("a", 0, 4)], [("a", 4, 5)], [], [], [], []]
    assert (loop.running, loop.waiting, a.timings.preemptions) == ("", "ab", 1)
    assert loop.scheduler.stuck == (a, Wait(WaitReason.PAGES, 6, 5))


@pytest.mark.parametrize("seed", range(30))
def test_the_oldest_row_gets_on_in_every_step_and_all_end(seed):
    rng = random.Random(seed)
    page = rng.choice([1, 3, 16])
    loop = Loop(
        slots=rng.randint(1, 5),
        pages=-(-49 // page) + rng.choice([0, 0, 3]),
        page=page,
        budget=rng.choice([1, 2, 5, 20]),
        chunk=rng.choice([1, 4, 16]),
    )
    names = "abcdefghijklmnop"
    sequences = [loop.add(n, rng.randint(1, 30), rng.randint(1, 20)) for n in names]
    entered = []
    for _ in range(3000):
        oldest, was_running = loop.running[:1], set(loop.running)
        ran = loop.step()
        assert len(ran) == len({row.name for row in ran})
        assert all(row.end - row.start <= loop.scheduler.max_chunk for row in ran)
        assert not oldest or oldest in [row.name for row in ran]
        entered += [row.name for row in ran if row.name not in was_running]
        if not loop.running and not loop.waiting:
            break
    assert [sequence.finish_reason for sequence in sequences] == ["length"] * len(names)
    assert [n for i, n in enumerate(entered) if n not in entered[:i]] == list(names), "FIFO"
    stats = loop.cache.stats()
    assert stats.leases == 0 and all(pool.free == pool.size for pool in stats.pools)


class Compared(Sequence):
    """Counts how often it is compared with another: what a search through a list does."""

    compared = 0
    __hash__ = Sequence.__hash__

    def __eq__(self, other):
        Compared.compared += 1
        return self is other


def test_the_work_of_a_step_grows_with_its_rows_and_not_with_their_square():
    """Rows that enter, rows that decode, rows that give way, rows that leave."""

    def work(rows):
        loop = Loop(slots=rows, pages=4 * rows, budget=4 * rows)
        for i in range(rows):
            params = SamplingParams(max_tokens=4)
            loop.scheduler.add(Compared(f"{i}", 0, [5, 6], params, Says65(), room=4))
        lines, compared = [], []
        for _ in range(5):
            Compared.compared, counter = 0, Interrupt(-1, [scheduler_module])
            with counter.watching():
                loop.step()
            lines.append(counter.lines)
            compared.append(Compared.compared)
        assert not loop.running
        return lines, compared

    def tight(rows):
        """Half of the rows give way to the others in the step that opens a page."""
        loop = Loop(slots=rows, pages=2 * rows, budget=4 * rows)
        for i in range(rows):
            params = SamplingParams(max_tokens=4)
            loop.scheduler.add(Compared(f"{i}", 0, [5, 6], params, Says65(), room=4))
        loop.step()
        Compared.compared, counter = 0, Interrupt(-1, [scheduler_module])
        with counter.watching():
            loop.step()
        assert loop.scheduler.waiting
        return [counter.lines], [Compared.compared]

    for measure in (work, tight):
        few, many = measure(16), measure(128)
        for one, other in zip(few[0], many[0], strict=True):
            assert other <= 9 * one + 50, (few, many)
        for one, other in zip(few[1], many[1], strict=True):
            assert other <= 9 * one + 50, (few, many)


def test_the_engine_looks_at_no_request_that_brings_nothing():
    """One row runs, and others wait, few or many."""

    def lines(waiting):
        engine = oracle_engine(state_slots=1)
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        stream = engine.stream([[5]] * (1 + waiting), params)
        for _ in range(3):
            next(stream)
        counter = Interrupt(-1, [engine_module, scheduler_module, request_module])
        with counter.watching():
            next(stream)
        return counter.lines

    assert lines(5) == lines(200)


def test_after_a_retreat_all_wait_in_the_order_in_which_they_would_have_run():
    loop = Loop(slots=3, pages=40, chunk=4)
    sequences = [loop.add(name, 5, 9) for name in "abcde"]
    loop.step()
    loop.cache.begin_step()
    loop.scheduler.schedule()
    loop.scheduler.retreat()
    loop.cache.abandon()
    loop.cache.audit()
    assert (loop.running, loop.waiting) == ("", "abcde")
    assert [s.timings.preemptions for s in sequences] == [1, 1, 1, 0, 0]
    assert loop.cache.stats().leases == 0
    assert [ran.name for ran in loop.step()] == ["a", "b", "c"]


# --- stuck ----------------------------------------------------------------------------------------


def stuck_engine(reasons):
    engine = oracle_engine(state_slots=2, kv_pages=40, prefill_chunk=4)
    cache = Waits(engine.memory.storage)
    cache.reasons = reasons
    engine.cache = engine.scheduler.cache = cache
    return engine


@pytest.mark.parametrize("reason", [WaitReason.PAGES, WaitReason.SLOTS, WaitReason.CHUNK])
def test_br76_a_head_that_waits_although_nothing_runs_is_refused_with_what_it_waits_for(reason):
    engine = stuck_engine({"big.0": reason})
    big = engine.add_request([5], request_id="big")
    params = SamplingParams(temperature=0, max_tokens=3)
    small = engine.add_request([6], params, "small")
    told = [engine.step() for _ in range(PATIENCE)]
    assert told[:-1] == [[]] * (PATIENCE - 1)
    assert [(d.request_id, d.finish_reason) for d in told[-1]] == [("big", "error")]
    assert big.output().outputs[0].error == (
        f"cannot be scheduled: it waits for {reason}, needs 7, there are 2, and nothing is running "
        "that could give more"
    )
    assert engine.totals.steps == PATIENCE
    assert engine.totals.decode_seconds == 0  # idle time is no decode time
    while engine.has_unfinished:
        engine.step()
    assert_same(small.output().outputs[0], alone(prefix_hash, engine.opened, [6], params))
    assert_all_free(engine)


def test_br76_a_running_row_that_gets_no_piece_although_nothing_else_runs_is_refused_too():
    engine = stuck_engine({})
    request = engine.add_request([5] * 9, request_id="big")
    engine.step()
    engine.cache.reasons["big.0"] = WaitReason.CHUNK
    for _ in range(PATIENCE):
        assert engine.has_unfinished
        engine.step()
    assert request.output().outputs[0].finish_reason == "error"
    assert_all_free(engine)


def test_nobody_is_refused_while_something_runs_or_is_on_its_way():
    engine = stuck_engine({"big.0": WaitReason.PAGES, "late.0": WaitReason.LOADING})
    params = SamplingParams(max_tokens=4 * PATIENCE, ignore_eos=True)
    engine.add_request([6], params)
    big = engine.add_request([5], request_id="big")
    for _ in range(3 * PATIENCE):
        engine.step()
    assert not big.finished
    engine.abort("big")
    while engine.has_unfinished:
        engine.step()
    late = engine.add_request([5], request_id="late")
    for _ in range(3 * PATIENCE):
        assert engine.step() == []
    assert not late.finished
    engine.cache.reasons.clear()
    while engine.has_unfinished:
        engine.step()
    assert late.output().outputs[0].finish_reason != "error"


def test_waits_before_and_after_progress_do_not_add_up():
    engine = stuck_engine({"big.0": WaitReason.PAGES})
    big = engine.add_request([5] * 9, request_id="big")
    for _ in range(4):
        for _ in range(PATIENCE - 1):
            engine.step()
        engine.cache.reasons.clear()
        engine.step()
        engine.cache.reasons["big.0"] = WaitReason.CHUNK
    assert not big.finished and big.sequences[0].computed > 8
