"""Faults that users of such software have met (bug_reports.md), as recipes against the real model:
rows of other classes in which a prefix cache has a part, with a tree or with hashed blocks.
"""

import sys

import pytest
import torch

from cache.leases import CacheRequest
from kimi_mini import Engine, SamplingParams
from kimi_mini.serving.outputs import FinishReason
from tests.kimi_mini.serving.alone import oracle_engine
from tests.kimi_mini.serving.interrupts import Interrupt
from tests.kimi_mini.serving.reuse import (
    OURS,
    VLLM,
    a_few_of,
    assert_all_comes_back,
    by_our_rules,
    checkpoints,
    greedy,
    run,
)
from tests.kimi_mini.serving.toy import P, Served, X, fresh, out_of_memory


@by_our_rules
def test_br20_what_is_published_behind_a_stop_token_is_what_was_said(rules):
    """Of those it ends at the third, and the next turn resumes from what is left of it."""
    dense = dict(retention="none") if rules.blocks else dict(track_interval=16)
    served = Served(rules, grid=16, **dense)
    prompt = fresh(3, 46)
    free = served.ask(prompt, 8, skip_read=True)
    stop = free.token_ids[2]
    assert stop not in free.token_ids[:2]
    params = greedy(8, stop_token_ids=[stop])
    (own,) = run(served.engine, served.engine.add_request(prompt, params))
    assert (own.token_ids, own.finish_reason) == (free.token_ids[:3], FinishReason.STOP)
    assert served.reuse([*prompt, *own.token_ids, *X]) == 48


@by_our_rules
def test_br32_what_is_kept_and_restored_knows_nothing_of_gradients(rules):
    served = Served(rules, grid=16)
    assert all(parameter.requires_grad for parameter in served.truth.model.parameters())
    for inside in (False, True):
        with torch.inference_mode(inside):
            served.reuse(P, 20)
    assert served.witness.restored
    for pool in served.cache.storage:
        assert not any(t.requires_grad or t.grad_fn or t.is_inference() for t in pool.tensors)


@pytest.mark.parametrize("rules, length", a_few_of(2, OURS, [33, 65, 97]), ids=str)
def test_br35_a_last_piece_of_one_token_goes_on_from_what_was_found(rules, length):
    """Beside one that decodes, and one of one token that starts from zeros."""
    served = Served(rules, prefill_chunk=32, grid=32, running=True)
    prompt = fresh(length, length)
    assert served.reuse(prompt, 1) == 0
    neighbour = served.add(fresh(1, 9), 12)
    served.engine.step()
    requests = [served.add(prompt), served.add([5])]
    owns = served.run(neighbour, *requests)
    assert [own.cached_tokens for own in owns] == [0, length - 1, 0]
    assert served.witness.pieces[requests[0].sequences[0].name][0] == (length - 1, length)


@by_our_rules
def test_br50_each_row_of_a_step_keeps_its_own_state(rules):
    """130, 200 and 300 tokens in one step; the witness compares what they leave."""
    served = Served(
        rules, backend="torch", kernel_chunk=64, prefill_chunk=512, max_batch_tokens=700,
        kv_pages=100, state_slots=40,
    )  # fmt: skip
    prompts = {128: fresh(1, 130), 192: fresh(2, 200), 256: fresh(3, 300)}
    requests = [served.add(prompt, 1) for prompt in prompts.values()]
    served.engine.step()
    assert {*prompts} <= {*checkpoints(served.engine)}
    served.run(*requests)
    for boundary, prompt in prompts.items():
        assert served.reuse([*prompt[:boundary], *X]) == boundary


@pytest.mark.parametrize(
    "rules, cut, rows", a_few_of(7, OURS, [16, 32, 64, 100, 128], [1, 2, 7]), ids=str
)
def test_br61_where_a_prompt_was_resumed_and_who_runs_beside_it_changes_nothing(rules, cut, rows):
    """In float64 within rounding (decision 9); in float32 bit by bit in test_prefix_hits."""
    served = Served(rules, page=1, kv_pages=600)
    prompt = fresh(1, 200)
    named = {} if rules is VLLM else dict(checkpoint_at=[cut])
    served.reuse(prompt[: cut + 1], 1, **named)
    requests = [served.add(prompt), *(served.add(fresh(10 + i, 30 + i)) for i in range(rows - 1))]
    assert [own.cached_tokens for own in served.run(*requests)] == [cut] + [0] * (rows - 1)


ONE = SamplingParams(max_tokens=1)


def _lines(engine: Engine, text: list[int], look: bool = False) -> int:
    """Of all that lies below the engine, to look a prompt up or to serve it."""
    cache = [module for name, module in sys.modules.items() if name.startswith("cache.")]
    counter = Interrupt(-1, cache)
    with counter.watching():
        if look:
            engine.cache.lookup(CacheRequest("seen", text))
        else:
            engine.generate([text], ONE)
    return counter.lines


@by_our_rules
@pytest.mark.parametrize("full", [False, True])
def test_br70_a_request_costs_the_same_however_much_is_cached(rules, full):
    """Lines of any part of the cache that run for a look-up, for a request that resumes and for one
    that does not: after thirty prompts and after three hundred, in pools with room for them all,
    and in such as hold about half."""
    costs = []
    for count in (30, 300):
        blocks = 2 * count if full else 4 * count + 40
        engine = oracle_engine(**rules.engine(state_slots=blocks, kv_pages=blocks))
        texts = [fresh(seed, 33) for seed in range(count + 1)]
        for text in texts[:-1]:
            engine.generate([text], ONE)
        evicted = engine.cache.stats().evictions
        assert (evicted.tokens + evicted.states > 0) == full
        costs.append(
            [_lines(engine, texts[-2], look=True), *(_lines(engine, t) for t in texts[-2:])]
        )
        assert engine.cache.stats().joint_hit_tokens == 32
    for few, many in zip(*costs, strict=True):
        assert many == few or (full and many < 1.2 * few), costs


@by_our_rules
def test_br78_calls_of_one_engine_know_nothing_of_each_other(rules):
    served = Served(rules, state_slots=3)
    a, b = fresh(1, 40), fresh(2, 40)
    first, _, again = served.ask(a, 9), served.ask(b, 9), served.ask(a, 9)
    assert first.token_ids == again.token_ids
    executor = served.engine.executor
    run_plans, executor.run = executor.run, out_of_memory
    request = served.add(a, 9)
    with pytest.raises(MemoryError):
        served.engine.step()
    executor.run = run_plans
    (own,) = served.run(request)
    assert own.token_ids == first.token_ids
    assert_all_comes_back(served.engine)
