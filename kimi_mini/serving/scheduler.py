"""Which rows run in a step, and who gives way when storage is short.

One budget of tokens a step. Running rows first: those with one token left to run (decode), then
those in prefill, each oldest first; then waiting ones enter, in order of arrival. When a running
row lacks pages, the youngest gives its storage up and comes back later with all of its tokens
known: the oldest always gets on, so everything ends. After that nobody enters until a row has left:
else those who gave way would come straight back and compute their prompts for nothing.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from cache.leases import StepPlan, Wait, WaitReason
from cache.state_cache import StateCache
from kimi_mini.serving.sequence import Sequence

PASSING = (WaitReason.SAME_STEP, WaitReason.LOADING)  # over by themselves, no cause to hold others


class Row(NamedTuple):
    """A sequence and what it does in this step."""

    sequence: Sequence
    plan: StepPlan


class Scheduler:
    """max_batch_tokens: tokens of one step, and so rows too. prefill_chunk: tokens that one row may
    take in one step."""

    def __init__(self, cache: StateCache, max_batch_tokens: int, prefill_chunk: int) -> None:
        for name, number in (
            ("max_batch_tokens", max_batch_tokens),
            ("prefill_chunk", prefill_chunk),
        ):
            if number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}")
        self.cache = cache
        self.max_batch_tokens = max_batch_tokens
        self.max_chunk = min(prefill_chunk, max_batch_tokens)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first
        self.stuck: tuple[Sequence, Wait] | None = None  # who waited first in the last step
        self._closed = False  # somebody gave way, and no row has left since

    def add(self, sequence: Sequence) -> None:
        """At the end of the queue."""
        self.waiting.append(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence whose lease has ended or that never had one, if it is here."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._closed = False
        if sequence in self.waiting:
            self.waiting.remove(sequence)

    def schedule(self) -> list[Row]:
        """Plans of this step, each to be committed or cancelled. Sum of tokens <= budget."""
        planned: dict[Sequence, StepPlan] = {}
        self.stuck = None
        for sequence in sorted(self.running, key=lambda s: s.lease.remaining > 1):
            left = self.max_batch_tokens - _tokens(planned)
            if sequence in self.running and left:
                self._plan_running(sequence, left, planned)
        if not self._closed:
            self._admit(planned)
        return [Row(sequence, plan) for sequence, plan in planned.items()]

    def retreat(self) -> None:
        """After a step that failed, wherever it did: states and books may be torn, so everybody
        gives their storage up and waits again in the same order, nothing lost but time."""
        for lease in self.cache.live_leases:
            if lease.plan is not None:
                self.cache.cancel(lease.plan)
            self.cache.preempt(lease)
        everybody = dict.fromkeys((*self.running, *self.waiting))
        for sequence in everybody:
            sequence.timings.preemptions += sequence in self.running
            sequence.lease, sequence.computed = None, 0
        self.waiting = deque(everybody)
        self.running.clear()
        self._closed = False

    def _plan_running(
        self, sequence: Sequence, left: int, planned: dict[Sequence, StepPlan]
    ) -> None:
        """Plan one running row, if need be at the cost of younger ones, or of itself."""
        while True:
            plan = self.cache.plan(sequence.lease, left, self.max_chunk)
            if isinstance(plan, StepPlan):
                planned[sequence] = plan
                return
            if plan.reason not in (WaitReason.PAGES, WaitReason.SLOTS):
                self.stuck = self.stuck or (sequence, plan)
                return
            youngest = self.running[-1]
            if youngest in planned:
                self.cache.cancel(planned.pop(youngest))
            self._preempt(youngest)
            self._closed = bool(self.running)
            if youngest is sequence:
                return

    def _preempt(self, sequence: Sequence) -> None:
        self.cache.preempt(sequence.lease)
        sequence.lease, sequence.computed = None, 0
        sequence.timings.preemptions += 1
        self.waiting.appendleft(sequence)  # at no time in neither: Ctrl-C comes at any
        self.running.remove(sequence)

    def _admit(self, planned: dict[Sequence, StepPlan]) -> None:
        """Waiting sequences enter in order. One that lacks storage holds those behind it back."""
        for sequence in list(self.waiting):
            left = self.max_batch_tokens - _tokens(planned)
            if not left or len(self.running) == self.max_batch_tokens:
                return
            plan = self._first_plan(sequence, left)
            if isinstance(plan, Wait):
                self.stuck = self.stuck or (sequence, plan)
                if plan.reason not in PASSING:
                    return
                continue
            planned[sequence] = plan
            sequence.hit = sequence.hit or sequence.lease.hit
            self.running.append(sequence)
            self.waiting.remove(sequence)

    def _first_plan(self, sequence: Sequence, left: int) -> StepPlan | Wait:
        if sequence.lease is None:
            lease = self.cache.admit(sequence.storage_request())
            if isinstance(lease, Wait):
                return lease
            sequence.lease = lease
        return self.cache.plan(sequence.lease, left, self.max_chunk)


def _tokens(planned: dict[Sequence, StepPlan]) -> int:
    return sum(plan.end - plan.start for plan in planned.values())
