"""Requests over the block manager get the tokens of a cold run, in poisoned and audited pools."""

import random

import pytest

from kimi_mini import Engine
from kimi_mini.serving.caches import CacheOptions
from tests.kimi_mini.serving.reuse import greedy, hybrid_model

RULES = {
    "ours": CacheOptions(),
    "ours, dense": CacheOptions(retention="none"),
    "ours, milestones, fine": CacheOptions(state_block=32, hash_unit=8, retention=64),
    "vllm": CacheOptions(compat="vllm"),
    "vllm, dense": CacheOptions(compat="vllm", retention="none", state_block=32),
}


def prompts(rng: random.Random) -> list[list[int]]:
    """Some begin alike, up to anywhere; some are sent again."""
    text = [rng.randrange(3, 300) for _ in range(220)]
    mixed = [
        [*text[: rng.randrange(220)], *(rng.randrange(3, 300) for _ in range(rng.randrange(1, 60)))]
        for _ in range(8)
    ]
    return [*mixed, *mixed[:3], [*mixed[0], *text[:40]]]


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("at_once", [False, True], ids=["one by one", "at once"])
def test_hits_and_cold_runs_give_the_same_tokens(rules, seed, at_once):
    rng = random.Random(seed)
    room = dict(state_slots=40, kv_pages=40, prefill_chunk=rng.choice([48, 100, 512]))
    options = dict(poison=True, audit=True, **room)
    warm = Engine(hybrid_model(), prefix_cache="blocks", cache_options=RULES[rules], **options)
    cold = Engine(hybrid_model(), **room)
    sent = prompts(rng)
    for batch in [sent] if at_once else [[prompt] for prompt in sent]:
        got, want = (engine.generate(batch, greedy(6)) for engine in (warm, cold))
        for mine, other in zip(got, want, strict=True):
            assert mine.outputs[0].token_ids == other.outputs[0].token_ids
            assert mine.outputs[0].finish_reason == other.outputs[0].finish_reason == "length"
    stats = warm.cache.stats()
    assert stats.joint_hit_tokens > 0 or at_once
    assert stats.leases == 0 and all(pool.free + pool.cached == pool.size for pool in stats.pools)
    warm.cache.clear()
    assert all(pool.free == pool.size for pool in warm.cache.stats().pools)
