"""Which rows run in a step, and who gives way when storage is short.

One budget of tokens a step. Running rows first: those with one token left to run (decode), then
those in prefill, each oldest first; then waiting ones enter, in order of arrival. When a running
row lacks pages, the youngest gives its storage up and comes back later with all of its tokens
known: the oldest always gets on, so everything ends. After that nobody enters until a row has left:
else those who gave way would come straight back and compute their prompts for nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from cache.leases import StepPlan, Wait, WaitReason
from cache.state_cache import StateCache
from kimi_mini.serving.checks import check_count
from kimi_mini.serving.sequence import Sequence

PASSING = (WaitReason.SAME_STEP, WaitReason.LOADING)  # over by themselves, no cause to hold others


class Row(NamedTuple):
    """A sequence and what it does in this step."""

    sequence: Sequence
    plan: StepPlan


class Scheduler:
    """max_batch_tokens: tokens of one step, and so rows too. prefill_chunk: tokens that one row may
    take in one step. ValueError unless both are integers of at least 1.

    The work of a step grows with its rows, not with their square: ordered dicts for queues, a
    counter for the budget.
    """

    def __init__(self, cache: StateCache, max_batch_tokens: int, prefill_chunk: int) -> None:
        self.cache = cache
        self.max_batch_tokens = check_count("max_batch_tokens", max_batch_tokens)
        self.max_chunk = min(check_count("prefill_chunk", prefill_chunk), self.max_batch_tokens)
        self.waiting: OrderedDict[Sequence, None] = OrderedDict()
        self.running: OrderedDict[Sequence, None] = OrderedDict()  # oldest first
        self.stuck: tuple[Sequence, Wait] | None = None  # who waited first in the last step
        self._closed = False  # somebody gave way, and no row has left since
        self._left = 0  # tokens of this step that are not planned yet

    def add(self, sequence: Sequence) -> None:
        """At the end of the queue."""
        self.waiting[sequence] = None

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence whose lease has ended or that never had one, if it is here."""
        if sequence in self.running:
            del self.running[sequence]
            self._closed = False
        self.waiting.pop(sequence, None)

    def schedule(self) -> list[Row]:
        """Plans of this step, each to be committed or cancelled. Sum of tokens <= budget."""
        planned: dict[Sequence, StepPlan] = {}
        self.stuck, self._left = None, self.max_batch_tokens
        for sequence in sorted(self.running, key=lambda s: s.lease.remaining > 1):
            if sequence in self.running and self._left:
                self._plan_running(sequence, planned)
        if not self._closed:
            self._admit(planned)
        return [Row(sequence, plan) for sequence, plan in planned.items()]

    def retreat(self) -> None:
        """After a step that was cut short, wherever it was: states and books may be torn, so
        everybody waits again in the same order, nothing lost but time. Their leases are the cache's
        to end (`abandon`). Cut short itself, it is to be called again."""
        everybody = OrderedDict.fromkeys((*self.running, *self.waiting))
        for sequence in everybody:
            sequence.timings.preemptions += sequence in self.running
            sequence.lease, sequence.computed = None, 0
        self.waiting = everybody
        self.running.clear()
        self._closed = False

    def _plan_running(self, sequence: Sequence, planned: dict[Sequence, StepPlan]) -> None:
        """Plan one running row, if need be at the cost of younger ones, or of itself."""
        while True:
            plan = self.cache.plan(sequence.lease, self._left, self.max_chunk)
            if isinstance(plan, StepPlan):
                self._enter(sequence, plan, planned)
                return
            if plan.reason not in (WaitReason.PAGES, WaitReason.SLOTS):
                self.stuck = self.stuck or (sequence, plan)
                return
            youngest = next(reversed(self.running))
            if youngest in planned:
                withdrawn = planned.pop(youngest)
                self._left += withdrawn.end - withdrawn.start
                self.cache.cancel(withdrawn)
            self._preempt(youngest)
            self._closed = bool(self.running)
            if youngest is sequence:
                return

    def _preempt(self, sequence: Sequence) -> None:
        self.cache.preempt(sequence.lease)
        sequence.lease, sequence.computed = None, 0
        sequence.timings.preemptions += 1
        self.waiting[sequence] = None  # at no time in neither: Ctrl-C comes at any
        self.waiting.move_to_end(sequence, last=False)
        del self.running[sequence]

    def _admit(self, planned: dict[Sequence, StepPlan]) -> None:
        """Waiting sequences enter in order. One that lacks storage holds those behind it back."""
        entered = []
        for sequence in self.waiting:
            if not self._left or len(self.running) == self.max_batch_tokens:
                break
            plan = self._first_plan(sequence)
            if isinstance(plan, Wait):
                self.stuck = self.stuck or (sequence, plan)
                if plan.reason not in PASSING:
                    break
                continue
            self._enter(sequence, plan, planned)
            sequence.entered(sequence.lease)
            self.running[sequence] = None
            entered.append(sequence)
        for sequence in entered:
            del self.waiting[sequence]

    def _enter(self, sequence: Sequence, plan: StepPlan, planned: dict[Sequence, StepPlan]) -> None:
        planned[sequence] = plan
        self._left -= plan.end - plan.start

    def _first_plan(self, sequence: Sequence) -> StepPlan | Wait:
        if sequence.lease is None:
            lease = self.cache.admit(sequence.storage_request())
            if isinstance(lease, Wait):
                return lease
            sequence.lease = lease
        return self.cache.plan(sequence.lease, self._left, self.max_chunk)
