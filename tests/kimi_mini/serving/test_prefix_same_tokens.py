"""The same requests to engines of every kind: with trees, with hashed blocks, without reuse. All
say the same, a hit or not, one after the other or all at once."""

import functools
import random
from collections.abc import Sequence
from typing import NamedTuple

import pytest

from kimi_mini import Engine, SamplingParams
from kimi_mini.serving.control import CacheControl
from kimi_mini.serving.outputs import CompletionOutput
from kimi_mini.serving.request import Request
from tests.kimi_mini.serving.alone import assert_logprobs
from tests.kimi_mini.serving.reuse import (
    BACKENDS,
    HASHED,
    RULES,
    VLLM,
    Rules,
    a_few_of,
    assert_all_comes_back,
    greedy,
    hybrid_model,
    reusing,
    run,
)

ROOM = dict(state_slots=40, kv_pages=60)


class Wish(NamedTuple):
    prompt: list[int]
    params: SamplingParams
    control: CacheControl


@functools.cache
def wishes(seed: int) -> tuple[Wish, ...]:
    """Some begin alike, up to anywhere, some are sent again; greedy or sampled, once or twice; of
    two tenants; a few may not read."""
    rng = random.Random(seed)
    text = fresh(rng, 140)
    prompts = [[*text[: rng.randrange(140)], *fresh(rng, rng.randrange(1, 50))] for _ in range(6)]
    prompts += [*prompts[:3], [*prompts[0], *text[:40]]]
    return tuple(Wish(prompt, _params(rng), _control(rng)) for prompt in prompts)


def fresh(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, 300) for _ in range(count)]


def _params(rng: random.Random) -> SamplingParams:
    sampled = dict(temperature=1.0, seed=rng.randrange(9), n=rng.choice([1, 2]))
    return greedy(6, **rng.choice([{}, sampled]))


def _control(rng: random.Random) -> CacheControl:
    return CacheControl(rng.choice([None] * 4 + ["tenant"]), rng.random() < 0.1)


def answers(engine: Engine, wishes: Sequence[Wish], at_once: bool) -> list[CompletionOutput]:
    """Of every sample, in order; then of a second turn of each, behind its first sample."""
    firsts = _served(engine, wishes, at_once)
    turns = [
        wish._replace(prompt=[*wish.prompt, *request.output().outputs[0].token_ids, 7, 8])
        for wish, request in zip(wishes, firsts, strict=True)
    ]
    requests = [*firsts, *_served(engine, turns, at_once)]
    return [own for request in requests for own in request.output().outputs]


def _served(engine: Engine, wishes: Sequence[Wish], at_once: bool) -> list[Request]:
    requests = []
    for prompt, params, control in wishes:
        requests.append(engine.add_request(prompt, params, control=control))
        if not at_once:
            run(engine)
    run(engine)
    return requests


@functools.cache
def cold(seed: int) -> list[CompletionOutput]:
    """By torch, whoever is held against it."""
    return answers(Engine(hybrid_model(backend="torch"), **ROOM), wishes(seed), at_once=False)


KINDS = [
    *((rules, {}) for rules in RULES),
    (HASHED, dict(retention="none")),
    (HASHED, dict(grid=32, hash_unit=8, retention=64)),
    (HASHED, dict(grid=16, page=48, hash_unit=4)),
    (VLLM, dict(retention="none", grid=32)),
    (VLLM, dict(grid=48, hash_unit=4)),
]
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))]


def named(value: tuple[Rules, dict] | str) -> str:
    if isinstance(value, str):
        return value
    rules, options = value
    return str(rules) + "".join(f"-{name}={value}" for name, value in options.items())


@pytest.mark.parametrize("kind, backend", a_few_of(3, KINDS, BACKENDS), ids=named)
@pytest.mark.parametrize("seed", SEEDS)
def test_hits_and_cold_runs_say_the_same(kind, backend, seed):
    rules, options = kind
    at_once = (KINDS.index(kind) + seed) % 2 > 0
    kv_pages = ROOM["kv_pages"] * 16 // options.get("page", rules.page)
    pieces = dict(prefill_chunk=random.Random(seed).choice([100, 512]), kv_pages=kv_pages)
    engine = reusing(hybrid_model(backend=backend), rules, **ROOM | pieces | options)
    for own, other in zip(answers(engine, wishes(seed), at_once), cold(seed), strict=True):
        assert (own.token_ids, own.text) == (other.token_ids, other.text)
        assert own.finish_reason is other.finish_reason
        for mine, its in zip(own.logprobs, other.logprobs, strict=True):
            assert_logprobs(mine, its)
    assert engine.cache.stats().joint_hit_tokens > 0
    assert_all_comes_back(engine)
