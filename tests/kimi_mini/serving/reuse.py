"""Engines that reuse prefixes: by whose rules, over which model, and that all comes back."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch

from cache.blocks.manager import BlockCache
from kimi_mini import Engine, KimiForCausalLM, SamplingParams
from kimi_mini.serving.caches import CacheOptions
from kimi_mini.serving.control import CacheControl
from kimi_mini.serving.outputs import CompletionOutput
from kimi_mini.serving.request import Request
from tests.kimi_mini.serving.alone import small_config
from tests.kimi_mini.serving.holdings import EVERYTHING, holdings_of


class Rules(NamedTuple):
    """Whose rules: "blocks", or the strategy of a tree; ours, or under the engine's own."""

    name: str
    compat: str | None = None

    def __str__(self) -> str:
        return f"{self.compat or 'ours'}-{self.name}"

    @property
    def blocks(self) -> bool:
        return self.name == "blocks"

    @property
    def page(self) -> int:
        """Where nothing else is said: the product's, or the only one that there is."""
        return 1 if self.name == "no_buffer" else 16

    @property
    def least_slots(self) -> int:
        """What one request must have. One list of blocks needs more for other reasons: `spare`."""
        names = {"extra_buffer": 3, "extra_buffer_lazy": 2}
        return names.get(self.name, 1) if self.compat else 1

    @property
    def spare(self) -> int:
        """Blocks beside its rows that a request may need where one list counts them all: states
        that are read and written, and copies."""
        return 7 if self.compat == "vllm" else 0

    def engine(self, **options) -> dict[str, object]:
        """Arguments of an engine; options: its own and the cache's. grid: of a tree's states, or
        tokens of a state block. One list counts pages and slots by the rules of vLLM: both get the
        larger number."""
        if "grid" in options:
            options["state_block" if self.blocks else "state_chunk"] = options.pop("grid")
        names = {field.name for field in dataclasses.fields(CacheOptions)}
        own = {name: options.pop(name) for name in names & options.keys()}
        if not self.blocks:
            own = {"strategy": self.name} | own
        counts = {"state_slots", "kv_pages"} & options.keys()
        if self.compat == "vllm" and counts:
            options |= dict.fromkeys(counts, max(options[name] for name in counts))
        return (
            dict(
                prefix_cache="blocks" if self.blocks else "radix",
                cache_options=CacheOptions(**{"compat": self.compat} | own),
                page=self.page,
            )
            | options
        )


def a_few(cases: Sequence, every: int) -> list:
    """All of them for the slow run, in the default run one of so many."""
    slow = pytest.mark.slow
    return [pytest.param(c, marks=slow) if i % every else c for i, c in enumerate(cases)]


def a_few_of(every: int, *parameters: Sequence) -> list:
    """The same of all combinations. `every` without a divisor in common with how many there are of
    the last parameters, so that the few meet every value."""
    slow = pytest.mark.slow
    combined = enumerate(itertools.product(*parameters))
    return [pytest.param(*case, marks=slow if i % every else ()) for i, case in combined]


STRATEGIES = ("no_buffer", "extra_buffer", "extra_buffer_lazy")
TREES = [Rules(strategy, compat) for compat in (None, "sglang") for strategy in STRATEGIES]
TREE = Rules("extra_buffer")  # the product's
HASHED, VLLM = Rules("blocks"), Rules("blocks", "vllm")
BLOCKS = [HASHED, VLLM]
RULES = [*TREES, *BLOCKS]
OURS = [TREE, *BLOCKS]  # and vLLM's
ALL_OURS = [*TREES[:3], *BLOCKS]
BACKENDS = ("native", "torch")
by_our_rules = pytest.mark.parametrize("rules", OURS, ids=str)
by_all_our_rules = pytest.mark.parametrize("rules", ALL_OURS, ids=str)


@functools.cache
def hybrid_model(
    dtype: torch.dtype = torch.float64,
    context: int = 1024,
    backend: str = "auto",
    kernel_chunk: int = 16,
) -> KimiForCausalLM:
    """KDA, MLA, KDA, the last with experts; 2 heads of 12, no divisor of a page or a grid. The
    first never forgets, so that a state of somebody else cannot fade; the last has gates as they
    come."""
    config = small_config(context)
    kda = dataclasses.replace(
        config.linear_attn_config, kda_layers=(1, 3), full_attn_layers=(2,), head_dim=12
    )
    config = dataclasses.replace(
        config, num_hidden_layers=3, first_k_dense_replace=2, linear_attn_config=kda
    )
    model = KimiForCausalLM.from_config(
        config, seed=1, dtype=dtype, backend=backend, kernel_chunk=kernel_chunk
    )
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        attention.A_log.zero_()
        attention.dt_bias.fill_(-6.0)
    return model


def reusing(model: KimiForCausalLM | None = None, rules: Rules = TREE, **options) -> Engine:
    """A poisoned, audited engine with a prefix cache; options: the engine's and the cache's."""
    return Engine(model or hybrid_model(), poison=True, audit=True, **rules.engine(**options))


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


def unit_of(engine: Engine) -> int:
    """What hits are multiples of, by our rules."""
    cache = engine.cache
    return cache.sizes.hits if isinstance(cache, BlockCache) else cache.unit


def checkpoints(engine: Engine) -> list[int]:
    """Boundaries of all states in the cache, ascending."""
    return holdings_of(engine).checkpoints()


def assert_idle(engine: Engine) -> None:
    """Nobody runs, all that is held is the cache's, nothing is locked."""
    assert not engine.has_unfinished
    assert not engine.scheduler.running and not engine.scheduler.waiting
    engine.cache.audit()
    stats = engine.cache.stats()
    assert stats.leases == 0
    for pool in stats.pools:
        assert pool.free + pool.cached == pool.size, pool
    holdings_of(engine).assert_unlocked()


def assert_all_comes_back(engine: Engine) -> None:
    """Idle, and evicting everything leaves every pool full and nothing in the books."""
    assert_idle(engine)
    holdings = holdings_of(engine)
    holdings.evict_kv(EVERYTHING)
    holdings.evict_states(EVERYTHING)
    engine.cache.audit()
    assert all(pool.free_count == pool.size for pool in engine.cache.storage)
    holdings.assert_empty()
    engine.cache.clear()
    engine.cache.audit()
