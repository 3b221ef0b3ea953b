"""The engine: many requests at once over fixed pools.

    engine = Engine(model)
    outputs = engine.generate(["first prompt", "second"], SamplingParams(max_tokens=32))
    for delta in engine.stream("a prompt"):
        print(delta.text, end="")

Underneath, `add_request`, `step` and `abort`, for whoever drives requests that come and go. One
caller at a time: not for several threads.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Iterator
from collections.abc import Sequence as Series
from dataclasses import dataclass
from numbers import Integral

from torch import Tensor

from cache.identity import Identity
from cache.leases import Copy, StepPlan
from kimi_mini.costs import prefix_flops
from kimi_mini.model import KimiForCausalLM
from kimi_mini.serving import memory
from kimi_mini.serving.caches import CacheOptions, build_cache, check_prefix_cache
from kimi_mini.serving.checks import check_count
from kimi_mini.serving.control import CacheControl
from kimi_mini.serving.executor import ModelExecutor
from kimi_mini.serving.identity import identity_of
from kimi_mini.serving.open_model import OpenModel, around, open_model
from kimi_mini.serving.outputs import Delta, FinishReason, RequestOutput, rate
from kimi_mini.serving.request import Inbox, Prompt, Request, make_request
from kimi_mini.serving.sampling_params import SamplingParams
from kimi_mini.serving.scheduler import PASSING, Row, Scheduler
from kimi_mini.serving.sequence import Sequence

PATIENCE = 3  # steps in which nothing runs and nothing is on its way, before the head is refused


@dataclass
class Totals:
    """Of all steps since the engine was made.

    Tokens of preempted requests count again when they run again. A step with any row in prefill
    counts as prefill time; mixed_decode_tokens are the decode tokens of such steps.
    """

    steps: int = 0
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    mixed_decode_tokens: int = 0

    @property
    def prefill_rate(self) -> float:
        """Tokens a second."""
        return rate(self.prefill_tokens, self.prefill_seconds)

    @property
    def decode_rate(self) -> float:
        """Tokens a second of all rows together, in steps that only decode."""
        return rate(self.decode_tokens - self.mixed_decode_tokens, self.decode_seconds)


class Engine:
    """Serves one model.

    model: a model, or one with its tokenizer as `open_model` gives it. A bare one takes the
    tokenizer of the folder that it was loaded from; with random weights it speaks bytes.
    max_batch_tokens: tokens of one step over all rows; prefill_chunk: of one row. prefix_cache,
    cache_options: see `caches`.
    page, state_slots, kv_pages, cache_bytes, poison: see `memory.allocate`. audit: check every
    invariant after each step (slow; for tests).
    Raises ValueError for options that are out of range or contradict each other.
    """

    def __init__(
        self,
        model: KimiForCausalLM | OpenModel,
        *,
        max_batch_tokens: int = 2048,
        prefill_chunk: int = 512,
        prefix_cache: str = "none",
        cache_options: CacheOptions | None = None,
        page: int = 16,
        state_slots: int | None = None,
        kv_pages: int | None = None,
        cache_bytes: int | None = None,
        poison: bool = False,
        audit: bool = False,
    ) -> None:
        max_batch_tokens = check_count("max_batch_tokens", max_batch_tokens)
        prefill_chunk = check_count("prefill_chunk", prefill_chunk)
        cache_options = cache_options or CacheOptions()
        check_prefix_cache(prefix_cache, cache_options)
        self.opened = model if isinstance(model, OpenModel) else around(model)
        self.model, self.tokenizer = self.opened.model, self.opened.tokenizer
        self.memory = memory.allocate(
            self.model,
            page=page,
            state_slots=state_slots,
            kv_pages=kv_pages,
            cache_bytes=cache_bytes,
            poison=poison,
            one_count=cache_options.compat == "vllm",
        )
        self.cache = build_cache(
            prefix_cache,
            cache_options,
            self.memory.storage,
            self.model.dispatcher.export_alignment,
            min(prefill_chunk, max_batch_tokens),
            Identity() if prefix_cache == "none" else identity_of(self.opened),
            prefix_flops(self.model.config),
        )
        self.executor = ModelExecutor(self.model, self.memory)
        self.scheduler = Scheduler(self.cache, max_batch_tokens, prefill_chunk)
        self.totals = Totals()
        self.prefix_cache, self._compat = prefix_cache, cache_options.compat
        self._audit = audit
        self._requests: dict[str, Request] = {}  # unfinished ones
        self._news: list[Delta] = []  # what the next `step` returns
        self._cancelled: list[Request] = []  # to be ended when the books are nobody else's
        self._section: Generator[None] | None = None  # see `_exclusively`
        self._torn = False  # the books may be; see `_change`
        self._numbers = itertools.count()
        self._idle_steps = 0

    @classmethod
    def from_pretrained(
        cls, name: str, *, dtype: str = "float32", seed: int = 0, backend: str = "auto", **options
    ) -> Engine:
        """An engine for a checkpoint folder with its own tokenizer, or for a preset with random
        weights of this seed. options: as the constructor's."""
        return cls(open_model(name, dtype, seed, backend), **options)

    def generate(
        self,
        prompts: Prompt | Series[Prompt],
        params: SamplingParams | Series[SamplingParams] | None = None,
        control: CacheControl | None = None,
    ) -> list[RequestOutput]:
        """Run prompts (texts or lists of ids) to their ends; outputs in the order of the prompts.

        params: one for all, or one each; None: `SamplingParams()`. control: what the requests may
        read and should leave in the prefix cache. Whatever ends the call early, an
        error or Ctrl-C, takes its requests with it and leaves those of others alone. A sample that
        goes wrong by itself (no usable logits, storage that never comes) has finish_reason "error"
        and says why in `error`; the others are as ever. Raises ValueError if a request is refused,
        before any runs.
        """
        requests = self.prepare(prompts, params, control)
        for _ in self.run(requests):
            pass
        return [request.output() for request in requests]

    def stream(
        self,
        prompts: Prompt | Series[Prompt],
        params: SamplingParams | Series[SamplingParams] | None = None,
        control: CacheControl | None = None,
    ) -> Iterator[Delta]:
        """As `generate`, yielding what each step brings, progress of long prefills included. Other
        requests run along. Refusals are raised at once; closing the iterator cancels."""
        return self.run(self.prepare(prompts, params, control))

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        control: CacheControl | None = None,
    ) -> Request:
        """Queue a request for whoever calls `step`. ValueError if it can never run, with the
        reason, or if the id is in use."""
        request = self._make(prompt, params or SamplingParams(), control, request_id)
        self._queue(request)
        return request

    def step(self) -> list[Delta]:
        """Run one step and return what is new of the requests of `add_request` (those of streams
        have readers of their own), nothing if there is nothing to do.

        If it fails (out of memory, Ctrl-C), running rows go back to the queue with all of their
        tokens, and the next step computes their state anew; what it brought before it failed is
        returned by the next. A sequence whose token was being chosen just then ends with an error:
        its random stream and its text are no longer what they would be.
        """
        self._advance()
        news, self._news = self._news, []
        return news

    def abort(self, request_id: str) -> None:
        """Cancel a request, whatever state it is in; its storage is free at once, or after the step
        if one is running (a forgotten iterator is closed at any time). An id that is unknown or
        finished is no error: it may just have ended."""
        if request_id in self._requests:
            self._cancel(self._requests[request_id])

    @property
    def reuses(self) -> bool:
        """Whether there is a prefix cache."""
        return self.prefix_cache != "none"

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has anything to run or to tell."""
        return bool(self._requests or self._news)

    def prepare(
        self,
        prompts: Prompt | Series[Prompt],
        params: SamplingParams | Series[SamplingParams] | None = None,
        control: CacheControl | None = None,
    ) -> list[Request]:
        """Checked requests, not yet queued; arguments and errors as `generate`."""
        array = hasattr(prompts, "ndim")  # one prompt, and refused if it has more axes
        if isinstance(prompts, str) or array or (prompts and isinstance(prompts[0], Integral)):
            prompts = [prompts]
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if not isinstance(params, list | tuple):
            raise TypeError(
                f"params must be SamplingParams or a list of them, got {type(params).__name__}"
            )
        if len(params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts need as many params, got {len(params)}")
        return [self._make(*pair, control) for pair in zip(prompts, params, strict=True)]

    def _make(
        self,
        prompt: Prompt,
        params: SamplingParams,
        control: CacheControl | None,
        request_id: str | None = None,
    ) -> Request:
        if request_id is None:
            names = (f"request-{number}" for number in self._numbers)
            request_id = next(name for name in names if name not in self._requests)
        self._check_unused(request_id)
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params must be SamplingParams, got {params!r}")
        if not isinstance(control, CacheControl | None):
            raise TypeError(f"control must be CacheControl or None, got {control!r}")
        if control and control.checkpoint_at and self._compat:
            raise ValueError(
                f"checkpoint_at is given, but the rules of compat {self._compat!r} know no "
                "boundaries that a caller names"
            )
        request = make_request(request_id, prompt, params, self.opened, control)
        refusal = self.cache.refusal(request.longest)
        if refusal:
            raise ValueError(
                f"{request_id} can never run: with its prompt of {len(request.prompt_ids):,} and "
                f"up to {request.room:,} new tokens, {refusal}"
            )
        return request

    def _check_unused(self, request_id: str) -> None:
        if request_id in self._requests:
            raise ValueError(f"request id {request_id!r} is in use")

    def _queue(self, request: Request, inbox: Inbox | None = None) -> None:
        self._check_unused(request.request_id)
        if request.finished:
            raise ValueError(f"{request.request_id} has run: a request runs once")
        request.inbox = inbox
        if inbox is not None:
            inbox.unfinished.add(request)
        now = time.perf_counter()
        try:
            self._requests[request.request_id] = request
            for sequence in request.sequences:
                sequence.arrival = now
                self.scheduler.add(sequence)
            for sequence in request.sequences:
                if sequence.room == 0 and not sequence.scores_prompt:
                    self._end(sequence, FinishReason.LENGTH)
        except BaseException:
            if self._requests.get(request.request_id) is request:
                self._cancel(request)
            raise

    def run(self, requests: list[Request]) -> Iterator[Delta]:
        """Queue prepared requests and run them to their ends, yielding what each step brings them.

        Nothing is queued before the first delta is asked for, so an iterator that is never started
        leaves nothing behind; one that is closed cancels what is unfinished of what it has queued.
        """
        inbox = Inbox()
        try:
            for request in requests:
                self._queue(request, inbox)
            while True:
                while inbox.deltas:
                    yield inbox.deltas.popleft()
                if not inbox.unfinished:
                    return
                self._advance()
        finally:
            for request in requests:
                ours = request.inbox is inbox  # else another call runs it
                if ours and self._requests.get(request.request_id) is request:
                    self._cancel(request)

    def _advance(self) -> None:
        """Run one step, if there is anything to run, and let everybody know."""
        if self._busy:
            raise RuntimeError("a step was asked for from within a step")
        if self._requests or self._torn:
            self._exclusively(self._step)
            if self._audit:
                self.cache.audit()

    @property
    def _busy(self) -> bool:
        return self._section is not None and self._section.gi_running

    def _exclusively(self, work: Callable[[], None]) -> None:
        """Change the books, which nobody else does meanwhile: who comes from within (a forgotten
        iterator is closed at any time, by the collector) asks `_busy`.

        Inside of a generator, for the interpreter alone knows for sure whether one is running: a
        flag of ours would stay up for ever if Ctrl-C came where it is to be taken down.
        """
        self._section = self._change(work)
        for _ in self._section:
            pass

    def _change(self, work: Callable[[], None]) -> Generator[None]:
        """All of `work`, or else nothing is left in flight. If the repair is cut short too, `_torn`
        stays up, and whoever changes anything next repairs first."""
        self._repair()
        self._torn = True
        try:
            work()
            self._end_cancelled()
        except BaseException:
            self._repair()
            raise
        self._torn = False
        yield

    def _step(self) -> None:
        if not self._requests:
            return
        began = time.perf_counter()
        self.cache.begin_step()
        rows = self.scheduler.schedule()
        if rows:
            self._run_rows(rows)
        self.cache.end_step()
        self._account(rows, began)
        self._refuse_if_stuck(rows)

    def _run_rows(self, rows: list[Row]) -> None:
        """Run the plans of a step and hand every row what it wanted."""
        wanted = [sequence.logits_wanted(plan.start, plan.end) for sequence, plan in rows]
        logits = self.executor.run([plan for _, plan in rows], wanted)
        for (sequence, plan), own, positions in zip(rows, logits, wanted, strict=True):
            self._deliver(sequence, plan, own, positions)

    def _deliver(
        self, sequence: Sequence, plan: StepPlan, logits: Tensor, positions: range
    ) -> None:
        """Commit one row: its sample, its news, its boundary."""
        known = len(sequence.tokens)
        sequence.torn = True
        self._tell(sequence.receive(logits, positions, plan.end))
        sequence.torn = False
        if sequence.finish_reason is FinishReason.ERROR:  # nothing of it is worth publishing
            self.cache.cancel(plan)
            self.cache.abort(sequence.lease)
            self._forget(sequence)
            return
        self.executor.copy(self._commit(sequence, plan, sequence.tokens[known:]))
        if sequence.finish_reason is not None:
            self.cache.finish(sequence.lease)
            self._forget(sequence)

    def _commit(self, sequence: Sequence, plan: StepPlan, appended: list[int]) -> tuple[Copy, ...]:
        last = sequence.finish_reason is not None
        copies = self.cache.commit(sequence.lease, plan.end, appended, last=last)
        sequence.keeps(sequence.lease)
        return copies

    def _cancel(self, request: Request) -> None:
        self._cancelled.append(request)
        if not self._busy:
            self._exclusively(lambda: None)

    def _end_cancelled(self) -> None:
        while self._cancelled:
            request = self._cancelled[-1]
            for sequence in request.sequences:
                if sequence.finish_reason is None:
                    self._end(sequence, FinishReason.ABORT)
                self._forget(sequence)  # also one whose end was cut short
            self._cancelled.remove(request)  # now: what is cut short above is to be done again

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence that is not in a step, before its time."""
        delta = sequence.end(reason)
        if sequence.lease is not None:
            self.cache.abort(sequence.lease)
        self._tell(delta)
        self._forget(sequence)

    def _tell(self, delta: Delta) -> None:
        inbox = self._requests[delta.request_id].inbox
        (self._news if inbox is None else inbox.deltas).append(delta)

    def _forget(self, sequence: Sequence) -> None:
        self.scheduler.drop(sequence)
        sequence.lease = None
        request = self._requests.get(sequence.request_id)
        if request is not None and request.finished:
            if request.inbox is not None:
                request.inbox.unfinished.discard(request)
            del self._requests[sequence.request_id]

    def _repair(self) -> None:
        """After a change that was cut short: nothing is in flight, nothing is held by mistake."""
        if not self._torn:
            return
        self.scheduler.retreat()
        sequences = [s for request in self._requests.values() for s in request.sequences]
        for sequence in sequences:
            sequence.lease = None
        for sequence in (s for s in sequences if s.torn):
            if sequence.finish_reason is not FinishReason.ERROR:
                sequence.error = "the step failed while its token was being chosen"
                self._end(sequence, FinishReason.ERROR)
            sequence.torn = False
        for sequence in (s for s in sequences if s.finish_reason is not None):
            self._forget(sequence)
        self.cache.abandon()
        self._end_cancelled()
        self._torn = False

    def _refuse_if_stuck(self, rows: list[Row]) -> None:
        """Steps in which nothing runs would be a silent loop: who waited first is refused with what
        it waited for."""
        sequence, wait = self.scheduler.stuck or (None, None)
        if rows or sequence is None or sequence.finish_reason is not None:
            self._idle_steps = 0
            return
        self._idle_steps = 0 if wait.reason in PASSING else self._idle_steps + 1
        if self._idle_steps >= PATIENCE:
            sequence.error = (
                f"cannot be scheduled: it waits for {wait.reason}, needs {wait.needed:,}, there "
                f"are {wait.free:,}, and nothing is running that could give more"
            )
            self._end(sequence, FinishReason.ERROR)

    def _account(self, rows: list[Row], began: float) -> None:
        """Tokens and seconds of a step, for each row in it and in all."""
        now = time.perf_counter()
        seconds, decoded, prefilled = now - began, 0, 0
        for sequence, plan in rows:
            timings, count = sequence.timings, plan.end - plan.start
            if timings.queue is None:
                timings.queue = began - sequence.arrival
            if timings.first_token is None and sequence.output_ids:
                timings.first_token = now - sequence.arrival
            # prefill gives the first new token; each later one comes from running the one before it
            if plan.start >= sequence.prompt_tokens and count == 1:
                timings.decode += seconds
                timings.decode_tokens += 1
                decoded += 1
            else:
                timings.prefill += seconds
                timings.prefill_tokens += count
                prefilled += count
        totals = self.totals
        totals.steps += 1
        totals.prefill_tokens += prefilled
        totals.decode_tokens += decoded
        if prefilled:
            totals.prefill_seconds += seconds
            totals.mixed_decode_tokens += decoded
        elif decoded:
            totals.decode_seconds += seconds
