"""Engines under every policy, over both managers: the tokens of a cold run, in poisoned pools that
are too small for all that is sent."""

import functools
import random
from itertools import product

import pytest

from kimi_mini import Engine
from kimi_mini.serving.caches import CacheOptions
from tests.kimi_mini.serving.reuse import a_few_of, greedy, hybrid_model

POLICIES = [
    dict(admission="second-hit"),
    dict(admission="marconi"),
    dict(eviction="flop-aware", eviction_alpha=0.5),
    dict(admission="second-hit", eviction="flop-aware", eviction_alpha=2),
    dict(admission="marconi", eviction="auto"),
]
MANAGERS = [
    ("radix", dict(strategy="extra_buffer"), 16),
    ("radix", dict(strategy="no_buffer"), 1),
    ("blocks", {}, 16),
    ("blocks", dict(hash_unit=8, state_block=32, retention=64), 16),
]


@functools.cache
def prompts() -> list[list[int]]:
    """Some begin alike, up to anywhere, some go on from others; all are sent three times over."""
    rng = random.Random(5)

    def fresh(count):
        return [rng.randrange(3, 300) for _ in range(count)]

    text = fresh(160)
    sent = [[*text[: rng.randrange(20, 160)], *fresh(rng.randrange(1, 30))] for _ in range(5)]
    sent += [[*sent[0], *fresh(20)], [*sent[3], *text[:30]]]
    return sent * 3


def answers(engine: Engine, at_once: bool) -> list[list[int]]:
    batches = [prompts()] if at_once else [[prompt] for prompt in prompts()]
    outputs = [output for batch in batches for output in engine.generate(batch, greedy(18))]
    return [output.outputs[0].token_ids for output in outputs]


@functools.cache
def cold() -> list[list[int]]:
    """By torch, whoever is held against it."""
    model = hybrid_model(backend="torch")
    return answers(Engine(model, state_slots=30, kv_pages=500), at_once=True)


CASES = [*product([False, True], MANAGERS, POLICIES)]


@pytest.mark.parametrize("case, backend", a_few_of(17, CASES, ("torch", "native")))
def test_hits_and_cold_runs_give_the_same_tokens(case, backend):
    at_once, (name, rules, page), policies = case
    engine = Engine(
        hybrid_model(backend=backend),
        prefix_cache=name,
        cache_options=CacheOptions(**rules, **policies),
        page=page,
        state_slots=5,
        kv_pages=-(-800 // page),
        prefill_chunk=100,
        poison=True,
        audit=at_once,
    )
    assert answers(engine, at_once) == cold()
    stats = engine.cache.stats()
    assert stats.joint_hit_tokens > 0 and stats.evictions.states > 0
    assert stats.leases == 0 and all(pool.free + pool.cached == pool.size for pool in stats.pools)
    if policies.get("eviction") == "auto" and not at_once:
        while not engine.cache.eviction.learnt:  # after a record, one alpha a request
            assert answers(engine, at_once) == cold()
