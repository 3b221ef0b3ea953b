"""Engines that reuse prefixes, and a witness of all that they publish and restore.

The witness holds deep copies: a checkpoint or page must stay what it was when it was published,
until it is evicted, and what is restored must be that, bit by bit (I-12, I-14). In float64 it also
asks the model itself what each published state and row should be (I-01, I-23).
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cache.leases import CopyKind, StepPlan
from cache.pools.allocator import Handle
from cache.pools.pool import Pool
from cache.radix import key as keys
from cache.radix.node import Node
from kimi_mini import Engine, KimiForCausalLM, SamplingParams
from kimi_mini.batch import ForwardBatch, allocate_state
from kimi_mini.serving.caches import CacheOptions
from kimi_mini.serving.control import CacheControl
from kimi_mini.serving.outputs import CompletionOutput
from kimi_mini.serving.request import Request
from tests.kimi_mini.serving.alone import alone, assert_same, small_config, stateless

EXACT = 1e-10  # of the largest, float64 (decision 9)


class Rules(NamedTuple):
    """Whose rules: a strategy under ours, or under the engine's own."""

    strategy: str
    compat: str | None = None

    def __str__(self) -> str:
        return f"{self.compat or 'ours'}-{self.strategy}"


STRATEGIES = ("no_buffer", "extra_buffer", "extra_buffer_lazy")
RULES = [Rules(strategy, compat) for compat in (None, "sglang") for strategy in STRATEGIES]
DEFAULT = Rules("extra_buffer")


@functools.cache
def hybrid_model(
    dtype: torch.dtype = torch.float64, context: int = 1024, kernel_chunk: int = 16
) -> KimiForCausalLM:
    """KDA, MLA, KDA; 2 heads of 12, no divisor of a page or a grid. The first never forgets, so
    that a state of somebody else cannot fade; the last has gates as they come."""
    config = small_config(context)
    kda = dataclasses.replace(
        config.linear_attn_config, kda_layers=(1, 3), full_attn_layers=(2,), head_dim=12
    )
    config = dataclasses.replace(config, num_hidden_layers=3, linear_attn_config=kda)
    model = KimiForCausalLM.from_config(config, seed=1, dtype=dtype, kernel_chunk=kernel_chunk)
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        attention.A_log.zero_()
        attention.dt_bias.fill_(-6.0)
    return model


def reusing(model: KimiForCausalLM | None = None, rules: Rules = DEFAULT, **options) -> Engine:
    """A poisoned, audited engine with a radix cache; options: the engine's and the cache's."""
    names = {field.name for field in dataclasses.fields(CacheOptions)}
    own = {name: options.pop(name) for name in names & options.keys()}
    cache_options = CacheOptions(**{"strategy": rules.strategy, "compat": rules.compat} | own)
    if rules.strategy == "no_buffer":
        options.setdefault("page", 1)
    return Engine(
        model or hybrid_model(), prefix_cache="radix", cache_options=cache_options,
        poison=True, audit=True, **options,
    )  # fmt: skip


def greedy(max_tokens: int, **values) -> SamplingParams:
    """The likeliest tokens, so many of them, with the logprob of each."""
    return SamplingParams(
        **dict(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=0) | values
    )


def run(engine: Engine, *requests: Request) -> list[CompletionOutput]:
    """Step until nothing is left; the first sample of each of these."""
    while engine.has_unfinished:
        engine.step()
    return [request.output().outputs[0] for request in requests]


def ask(
    engine: Engine, prompt: Sequence[int], params: SamplingParams, **control
) -> CompletionOutput:
    """One request, alone, to its end."""
    (own,) = run(engine, engine.add_request(prompt, params, control=CacheControl(**control)))
    return own


def nodes(engine: Engine) -> dict[tuple[int, ...], Node]:
    """Nodes of the tree by the tokens of their paths; salts are to differ from none."""
    return {tokens_to(node): node for node in engine.cache.tree.nodes()}


def tokens_to(node: Node) -> tuple[int, ...]:
    """The tokens from the root to the end of a node."""
    edges = [keys.decode(part.key) for part in node.path()]
    return tuple(token for edge in reversed(edges) for token in edge)


def checkpoints(engine: Engine) -> list[int]:
    """Boundaries of all states in the tree, ascending."""
    return sorted(node.depth for node in engine.cache.tree.nodes() if node.state is not None)


def assert_idle(engine: Engine) -> None:
    """Nobody runs, all that is held is the tree's, nothing is locked; and cleared, all is free."""
    assert not engine.has_unfinished
    assert not engine.scheduler.running and not engine.scheduler.waiting
    engine.cache.audit()
    stats = engine.cache.stats()
    assert stats.leases == 0
    for pool in stats.pools:
        assert pool.free + pool.cached == pool.size, pool
    ledger = engine.cache.tree.ledger()
    assert (ledger.kv_protected, ledger.state_protected) == (0, 0)
    assert not engine.cache.tree.receipts


def assert_all_comes_back(engine: Engine) -> None:
    """Idle, and evicting everything leaves every pool full and no node behind."""
    assert_idle(engine)
    tree = engine.cache.tree
    tree.evict_kv(1 << 30)
    engine.cache.audit()
    assert all(pool.free_count == pool.size for pool in engine.cache.storage)
    assert not tree.root.children and not list(tree.nodes())
    engine.cache.clear()
    engine.cache.audit()


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
        self._faults: list[str] = []
        self._kept: dict[tuple[str, int], tuple[Handle, list[Tensor], int]] = {}
        executor, cache = engine.executor, engine.cache
        self._run, executor.run = executor.run, self._watched_run
        self._copy, executor.copy = executor.copy, self._watched_copy
        self._audit, cache.audit = cache.audit, self._watched_audit
        for pool in cache.storage:
            pool.evict = functools.partial(self._watched_evict, pool, pool.evict)

    def look(self) -> None:
        """Take copies of what is new in the tree, compare what is not."""
        if not self.engine.reuses:
            return
        held: dict[tuple[str, int], tuple[Pool, int, int, Node]] = {}
        pages, states = self.engine.cache.storage
        page = self.engine.cache.page
        # deepest states first: the truth of one has the rows of its whole path
        for node in sorted(self.engine.cache.tree.nodes(), key=lambda node: -node.depth):
            if node.state is not None:
                held[states.unit, node.state] = states, node.state, node.depth, node
        for node in self.engine.cache.tree.nodes():
            first = node.depth - len(node.pages) * page
            for i, index in enumerate(node.pages):
                held[pages.unit, index] = pages, index, first + i * page, node
        for name, (pool, index, boundary, node) in held.items():
            if self._known(pool, index):
                self._compare(pool, index)
                continue
            handle = pool.allocator.handle(index)
            self._kept[name] = handle, [t[:, index].clone() for t in pool.tensors], boundary
            self.published += 1
            if self.truth is not None:
                self._ask(pool, index, boundary, node)
        for name in self._kept.keys() - held.keys():
            del self._kept[name]

    def _known(self, pool: Pool, index: int) -> bool:
        kept = self._kept.get((pool.unit, index))
        return kept is not None and pool.allocator.is_live(kept[0])

    def _compare(self, pool: Pool, index: int) -> None:
        _, copies, boundary = self._kept[pool.unit, index]
        for tensor, copy in zip(pool.tensors, copies, strict=True):
            if not torch.equal(tensor[:, index], copy):
                self._faults.append(f"I-12: {pool.unit} {index} of {boundary} has changed")

    def _ask(self, pool: Pool, index: int, boundary: int, node: Node) -> None:
        tokens = tokens_to(node)
        if pool.unit == "page":
            rows = self.truth.latent(tokens)[:, boundary : boundary + self.engine.cache.page]
            expected = (rows,)
        else:
            expected = self.truth.of(tokens)[:2]
        for tensor, own in zip(pool.tensors, expected, strict=True):
            if (far := distance(tensor[:, index], own)) > EXACT:
                self._faults.append(f"I-01: {pool.unit} {index} of {boundary} is off by {far:.1e}")

    def _watched_run(self, plans: Sequence, wanted: Sequence[range]) -> list[Tensor]:
        logits = self._run(plans, wanted)
        for plan, rows, positions in zip(plans, logits, wanted, strict=True):
            name = plan.lease.request.name
            self.pieces[name].append((plan.start, plan.end))
            for position, row in zip(positions, rows, strict=True):
                self.logits[name][position] = row.clone()
            if self.running:
                self._ask_running(plan)
        return logits

    def _ask_running(self, plan: StepPlan) -> None:
        truth = self.truth.of(plan.lease.tokens[: plan.end])
        states = self.engine.cache.storage.states[0]
        for tensor, own in zip(states.tensors, truth, strict=False):
            if (far := distance(tensor[:, plan.slots[0]], own)) > EXACT:
                name = plan.lease.request.name
                self._faults.append(f"I-04: the state of {name} at {plan.end} is off by {far:.1e}")

    def _watched_copy(self, copies: Iterable) -> None:
        for copy in copies:
            self._copy([copy])
            kind, group, source, destination = copy
            assert kind is CopyKind.STATE
            pool = self.engine.cache.storage.states[group]
            if not self._known(pool, source):
                continue  # a snapshot of a running state
            _, kept, boundary = self._kept[pool.unit, source]
            self.restored.append(boundary)
            for tensor, own in zip(pool.tensors, kept, strict=True):
                if not torch.equal(tensor[:, destination], own):
                    self._faults.append(f"I-14: not restored whole at {boundary}")

    def _watched_evict(self, pool: Pool, evict, indices: Iterable[int]) -> None:
        indices = list(indices)
        for index in indices:
            if self._known(pool, index):
                self._compare(pool, index)
        evict(indices)

    def _watched_audit(self) -> None:
        self._audit()
        self.look()
        assert not (self.strict and self._faults), self._faults


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
