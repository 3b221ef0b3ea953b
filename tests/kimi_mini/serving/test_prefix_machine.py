"""One random machine and one random mix for trees and for hashed blocks, by our rules and by the
engines' own: each request gets what it gets alone, and the books are right after every call."""

import random
import warnings
from collections import Counter
from itertools import product

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.kimi_mini.serving.alone import oracle_engine, prefix_hash
from tests.kimi_mini.serving.mixes import (
    LENGTHS,
    LONGEST,
    arrivals,
    assert_as_alone,
    drive,
    tight_options,
)
from tests.kimi_mini.serving.prefix_machine import PLACES, PrefixMachine
from tests.kimi_mini.serving.prefix_wishes import EOS, cache_options, random_control
from tests.kimi_mini.serving.reuse import (
    BACKENDS,
    HASHED,
    RULES,
    TREE,
    TREES,
    VLLM,
    Rules,
    assert_all_comes_back,
)


def counts_of(rules: Rules, backend: str, max_examples: int, steps: int) -> Counter[str]:
    """Run the machine under these rules; what happened in all."""

    class Machine(PrefixMachine):
        pass

    Machine.engine_rules, Machine.backend, Machine.happened = rules, backend, Counter()
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    return Machine.happened


SAMPLE = [
    (TREE, "native"), (TREE, "torch"), (HASHED, "native"), (VLLM, "torch"), (TREES[3], "native"),
]  # fmt: skip


@pytest.mark.parametrize("rules, backend", SAMPLE, ids=str)
def test_calls_in_any_order_give_each_request_what_it_gets_alone(rules, backend):
    happened = counts_of(rules, backend, 3, 30)
    assert happened["finished"] >= 30 and happened["restored"] >= 3, happened
    assert min(happened[what] for what in ("hit", "preempted", "closed")) >= 1, happened


@pytest.mark.slow
@pytest.mark.parametrize("rules, backend", [*product(RULES, BACKENDS)], ids=str)
def test_thousands_of_steps(rules, backend):
    happened = counts_of(rules, backend, 60, 80)
    assert happened["steps"] >= 3000 and happened["hit"] >= 60, happened
    assert min(happened[f"failed {place}"] for place in PLACES) >= 3, happened
    assert min(happened[what] for what in ("preempted", "states evicted", "closed")) >= 10, happened


# --- without a model ------------------------------------------------------------------------------


def mix_of_an_oracle(seed: int, count: int) -> tuple[int, int]:
    """Random requests through an executor that knows what every slot and row stands for; how many
    were resumed, and how many gave way."""
    rng = random.Random(seed)
    rules = RULES[seed % len(RULES)]
    options = tight_options(rng)
    if rules.name == "no_buffer":
        options |= dict(page=1, kv_pages=LONGEST + rng.choice([0, 5, 200]))
    options["state_slots"] = max(rng.choice([1, 2, 3, 4, 8, 20]), rules.least_slots)
    options["kv_pages"] += rules.spare
    spacings = (4, 12, 16, 48) if rules.blocks else (16, 48)
    options |= cache_options(rng, rules, options["page"], spacings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = oracle_engine(eos=tuple(EOS), audit=True, **rules.engine(**options))
    coming = arrivals(rng, count)
    text = [rng.randrange(320) for _ in range(LONGEST)]
    for arrival in coming:
        if rng.random() < 0.8:  # most begin alike
            shared = rng.choice([5, 16, 17, 32, 33])
            arrival.prompt = [*text[:shared], *arrival.prompt][: max(LENGTHS)]
    add = engine.add_request
    engine.add_request = lambda *args: add(*args, control=random_control(rng, rules))
    requests = drive(engine, coming)
    assert_as_alone(engine, requests, lambda known: prefix_hash, assert_all_comes_back)
    stats = engine.cache.stats()
    return stats.joint_hit_tokens, stats.preempted


def assert_served(seeds: range, count: int, *, hits: int, preemptions: int) -> None:
    """Random mixes of so many requests, for trees and for blocks: at least so many of the mixes
    have hits, and so many requests gave way."""
    happened = {False: [], True: []}
    for seed in seeds:
        happened[RULES[seed % len(RULES)].blocks].append(mix_of_an_oracle(seed, count))
    for counts in happened.values():
        assert sum(hit > 0 for hit, _ in counts) >= hits, happened
        assert sum(preempted for _, preempted in counts) >= preemptions, happened


def test_book_keeping_of_any_mix_without_a_model():
    assert_served(range(16), 10, hits=3, preemptions=6)


@pytest.mark.slow
def test_book_keeping_of_thousands_of_requests():
    assert_served(range(100, 700), 30, hits=75, preemptions=100)
