"""A witness of all that a prefix cache publishes and restores.

It holds deep copies: a checkpoint or page must stay what it was when it was published, until it is
evicted, and what is restored must be that, bit by bit (I-12, I-14). In float64 it also asks the
model itself what each published state and row should be (I-01, I-23).
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cache.leases import CopyKind, StepPlan
from cache.pools.allocator import Handle
from cache.pools.pool import Pool
from kimi_mini import Engine, KimiForCausalLM, SamplingParams
from kimi_mini.batch import ForwardBatch, allocate_state
from kimi_mini.serving.outputs import CompletionOutput
from kimi_mini.serving.request import Request
from tests.kimi_mini.serving.alone import alone, assert_same, stateless
from tests.kimi_mini.serving.holdings import Held, holdings_of, part_of
from tests.kimi_mini.serving.reuse import ask

EXACT = 1e-10  # of the largest, float64 (decision 9)


class Truth:
    """What the model itself says of a prefix: recurrent and conv state after it, latent rows of it,
    logits of each place. From zeros, in one piece, in memory of its own."""

    def __init__(self, model: KimiForCausalLM) -> None:
        self.model = model
        self._known: dict[tuple[int, ...], tuple[Tensor, ...]] = {}

    def of(self, tokens: Sequence[int]) -> tuple[Tensor, ...]:
        """recurrent [KDA layers, H, V, K], conv [KDA layers, W-1, D], latent [MLA layers, N, L],
        logits [N, vocab]."""
        tokens = tuple(tokens)
        if tokens not in self._known:
            self._known[tokens] = self._run(tokens)
        return self._known[tokens]

    def latent(self, tokens: Sequence[int]) -> Tensor:
        """Of a prefix, of the whole of which nothing else is asked."""
        tokens = tuple(tokens)
        longer = (known for known in self._known if known[: len(tokens)] == tokens)
        return self.of(next(longer, tokens))[2][:, : len(tokens)]

    def _run(self, tokens: tuple[int, ...]) -> tuple[Tensor, ...]:
        count, model = len(tokens), self.model
        state = allocate_state(
            model.config, num_slots=1, num_pages=count, page=1, dtype=model.dtype
        )
        places = torch.arange(1, count + 1)
        batch = ForwardBatch(
            token_ids=torch.tensor(tokens),
            query_start=torch.tensor([0, count]),
            context_len=torch.tensor([0]),
            slots=torch.tensor([1]),
            page_table=places[None],
            out_rows=places,
            logits_at=places - 1,
        )
        logits = model.forward_batch(batch, state)
        return state.recurrent[:, 1], state.conv[:, 1], state.latent[:, 1:, 0], logits


def distance(one: Tensor, other: Tensor) -> float:
    """Largest difference relative to the largest of `other` (decision 9); inf with a NaN."""
    if not one.isfinite().all():
        return float("inf")
    return float((one - other).abs().max() / other.abs().max())


class Kept(NamedTuple):
    """What was published: where, what it is, and what it was."""

    handle: Handle
    what: Held
    copies: list[Tensor]


class Witness:
    """Watches an engine from its beginning.

    logits     of each request (sequence name), by position, as the model gave them
    pieces     (start, end) of each request, in order
    restored   boundaries that were resumed from, bit for bit what was published there
    published  how many checkpoints and pages have been seen
    truth      compares what is published with the model's own (float64); running: and the states
               of rows that run, after each step
    strict     False: sees all and says nothing
    """

    def __init__(
        self,
        engine: Engine,
        *,
        truth: Truth | None = None,
        running: bool = False,
        strict: bool = True,
    ) -> None:
        self.engine, self.truth, self.running, self.strict = engine, truth, running, strict
        self.logits: dict[str, dict[int, Tensor]] = defaultdict(dict)
        self.pieces: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self.restored: list[int] = []
        self.published = 0
        self.holdings = holdings_of(engine) if engine.reuses else None
        self._faults: list[str] = []
        self._kept: dict[tuple[str, int], Kept] = {}
        executor, cache = engine.executor, engine.cache
        self._run, executor.run = executor.run, self._watched_run
        self._copy, executor.copy = executor.copy, self._watched_copy
        self._audit, cache.audit = cache.audit, self._watched_audit
        for pool in cache.storage:
            pool.evict = functools.partial(self._watched_evict, pool, pool.evict)

    def look(self) -> None:
        """Take copies of what is new in the cache, compare what is not."""
        if self.holdings is None:
            return
        for name, what in self._held().items():
            kept = self._known(what.pool, what.index)
            if kept is not None and what.goes_on(kept.what):
                self._compare(kept)
                if what.boundary == kept.what.boundary:
                    continue
            handle = what.pool.allocator.handle(what.index)
            self._kept[name] = Kept(handle, what, [part.clone() for part in what.content()])
            self.published += 1
            if self.truth is not None:
                self._ask(what)

    def _held(self) -> dict[tuple[str, int], Held]:
        """By place. What is not held any more may change."""
        held = {(what.pool.unit, what.index): what for what in self.holdings.held()}
        for name in self._kept.keys() - held.keys():
            del self._kept[name]
        return held

    def _known(self, pool: Pool, index: int) -> Kept | None:
        kept = self._kept.get((pool.unit, index))
        return kept if kept is not None and pool.allocator.is_live(kept.handle) else None

    def _compare(self, kept: Kept) -> None:
        for part, copy in zip(kept.what.content(), kept.copies, strict=True):
            if not torch.equal(part, copy):
                self._faults.append(f"I-12: {_named(kept.what)} has changed")

    def _ask(self, what: Held) -> None:
        if what.is_state:
            expected = self.truth.of(what.tokens)[:2]
        else:
            expected = (self.truth.latent(what.tokens)[:, what.start :],)
        for part, own in zip(what.content(), expected, strict=True):
            if (far := distance(part, own)) > EXACT:
                self._faults.append(f"I-01: {_named(what)} is off by {far:.1e}")

    def _watched_run(self, plans: Sequence, wanted: Sequence[range]) -> list[Tensor]:
        for plan in plans if self.holdings else ():
            self.holdings.learn(plan)
            if plan.start and not plan.lease.ran:
                self._resumed(plan)
        logits = self._run(plans, wanted)
        if self.holdings:
            self._held()
        for plan, rows, positions in zip(plans, logits, wanted, strict=True):
            name = plan.lease.request.name
            self.pieces[name].append((plan.start, plan.end))
            for position, row in zip(positions, rows, strict=True):
                self.logits[name][position] = row.clone()
            if self.running:
                self._ask_running(plan)
        return logits

    def _resumed(self, plan: StepPlan) -> None:
        """A first piece begins with the state of its boundary, in one copy or by a detour."""
        states, source = self.engine.cache.storage.states[0], plan.slots[0]
        for kind, _, before, after in reversed(plan.copies):
            if kind is CopyKind.STATE and after == source:
                source = before
        kept = self._known(states, source)
        if kept is None or kept.what.boundary != plan.start:
            own = "nothing" if kept is None else _named(kept.what)
            self._faults.append(f"I-14: resumed at {plan.start} from {own}")
        self.restored.append(plan.start)

    def _ask_running(self, plan: StepPlan) -> None:
        truth = self.truth.of(plan.lease.tokens[: plan.end])
        states = self.engine.cache.storage.states[0]
        for tensor, own in zip(states.tensors, truth, strict=False):
            if (far := distance(tensor[:, plan.slots[0]], own)) > EXACT:
                name = plan.lease.request.name
                self._faults.append(f"I-04: the state of {name} at {plan.end} is off by {far:.1e}")

    def _watched_copy(self, copies: Iterable) -> None:
        storage = self.engine.cache.storage
        for copy in copies:
            self._copy([copy])
            kind, group, source, destination = copy
            pool = (storage.states if kind is CopyKind.STATE else storage.pages)[group]
            kept = self._known(pool, source)
            if kept is None:
                continue  # a snapshot of a running state
            for tensor, own in zip(pool.tensors, kept.copies, strict=True):
                if not torch.equal(part_of(tensor, destination, kept.what), own):
                    self._faults.append(f"I-14: {_named(kept.what)} is not restored whole")

    def _watched_evict(self, pool: Pool, evict, indices: Iterable[int]) -> None:
        indices = list(indices)
        for index in indices:
            if (kept := self._known(pool, index)) is not None:
                self._compare(kept)
        evict(indices)

    def _watched_audit(self) -> None:
        self._audit()
        self.look()
        assert not (self.strict and self._faults), self._faults


def _named(what: Held) -> str:
    return f"{what.pool.unit} {what.index}, {what.start} to {what.boundary}"


class Run(NamedTuple):
    """What one request gave, alone: its logits by position, and where it was cut."""

    own: CompletionOutput
    logits: dict[int, Tensor]
    pieces: list[tuple[int, int]]


def watched(witness: Witness, prompt: Sequence[int], params: SamplingParams, **control) -> Run:
    """`ask`, with what the witness saw of it."""
    before = set(witness.pieces)
    own = ask(witness.engine, prompt, params, **control)
    (name,) = witness.pieces.keys() - before
    return Run(own, witness.logits[name], witness.pieces[name])


def assert_as_cold(request: Request, witness: Witness, truth: Truth) -> None:
    """Tokens, logprobs and raw logits of every sample are those of the stateless model, float64."""
    for own, sequence in zip(request.output().outputs, request.sequences, strict=True):
        known = [*request.prompt_ids, *own.token_ids]
        oracle = stateless(truth.model, known)
        expected = alone(oracle, truth.model, request.prompt_ids, request.params, own.index)
        assert_same(own, expected)
        seen = witness.logits[sequence.name]
        assert set(range(len(request.prompt_ids) - 1, len(known) - 1)) <= seen.keys()
        for position, row in seen.items():
            assert distance(row, oracle(known[: position + 1])) < EXACT, (sequence.name, position)
