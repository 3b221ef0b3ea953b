"""Any mix of requests gives each request what it gets alone.

Alone means without the engine: the model's stateless door on the whole known sequence, in float64
(decision 10). Pools are as tiny as can be and full of NaN wherever nothing was written.
"""

import contextlib
import random

import pytest
import torch

from kimi_mini import Engine, KimiForCausalLM, SamplingParams, preset
from kimi_mini.workbench.expert_choices import mixtures
from tests.kimi_mini.serving.alone import (
    alone,
    assert_all_free,
    assert_same,
    oracle_engine,
    prefix_hash,
    small_model,
    stateless,
)
from tests.kimi_mini.serving.mixes import (
    LENGTHS,
    MOST_TOKENS,
    arrivals,
    assert_as_alone,
    drive,
    tight_options,
    with_stops,
)

EOS = (2, *range(40, 50))  # so many that some end by themselves
on_both = pytest.mark.parametrize("backend", ["native", "torch"])


def mix_of_a_model(seed: int, count: int, backend: str) -> Engine:
    rng = random.Random(seed)
    model = small_model(eos=EOS, backend=backend)
    engine = Engine(model, poison=True, audit=True, **tight_options(rng))
    requests = drive(engine, arrivals(rng, count))
    assert_as_alone(engine, requests, lambda known: stateless(model, known))
    return engine


def mix_of_an_oracle(seed: int, count: int, audit: bool = True) -> Engine:
    rng = random.Random(seed)
    engine = oracle_engine(eos=EOS, audit=audit, **tight_options(rng))
    requests = drive(engine, arrivals(rng, count, with_stops(rng, prefix_hash, engine)))
    assert_as_alone(engine, requests, lambda known: prefix_hash)
    return engine


@on_both
def test_any_mix_gives_each_request_the_tokens_it_gets_alone(backend):
    engines = [mix_of_a_model(seed, 6, backend) for seed in range(5)]
    assert sum(engine.cache.stats().preempted for engine in engines) >= 3


def test_book_keeping_of_any_mix_without_a_model():
    """Texts, stop strings and stop tokens too."""
    engines = [mix_of_an_oracle(seed, 8) for seed in range(100, 124)]
    assert sum(engine.cache.stats().preempted for engine in engines) >= 10


@pytest.mark.slow
@on_both
def test_any_mix_of_hundreds_of_requests(backend):
    for seed in range(1000, 1012):
        mix_of_a_model(seed, 60, backend)


@pytest.mark.slow
def test_book_keeping_of_thousands_of_requests():
    for seed in range(2000, 2400):
        mix_of_an_oracle(seed, 12)
    for seed in range(3000, 3003):
        mix_of_an_oracle(seed, 700, audit=False)


def test_the_reference_asks_the_model_for_each_token_anew():
    """The other tests answer from one call what agrees with a guess; here nothing is guessed."""
    model = small_model()
    prompts = [[5], [7] * 17, [9, 9, 9]]
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=6, logprobs=2)
    engine = Engine(model, state_slots=2, kv_pages=24, page=1, prefill_chunk=4, poison=True)
    for prompt, output in zip(prompts, engine.generate(prompts, params), strict=True):
        assert_same(output.outputs[0], alone(stateless(model), model, prompt, params))


@pytest.mark.parametrize("seed, backend", [(0, "native"), (1, "torch")])
def test_float32_tokens_differ_only_where_two_are_equally_likely(seed, backend):
    """Decision 10: nano in float32, no expert is forced. Each token is judged after those that the
    engine itself gave, up to where a router was undecided."""
    rng = random.Random(seed)
    model = KimiForCausalLM.from_config(preset("nano"), seed=4, backend=backend)
    engine = Engine(model, poison=True, audit=True, **tight_options(rng))
    prompts = [[rng.randrange(320) for _ in range(rng.choice(LENGTHS))] for _ in range(5)]
    params = SamplingParams(temperature=0, max_tokens=MOST_TOKENS, logprobs=0, ignore_eos=True)
    judged = 0
    for prompt, output in zip(prompts, engine.generate(prompts, params), strict=True):
        own, first = output.outputs[0], len(prompt) - 1
        with router_margins(model) as margins, torch.no_grad():
            logits = model(torch.tensor([[*prompt, *own.token_ids]]))[0, first:-1]
        decided = torch.stack(margins).amin(0).cummin(0).values[first:] >= 1e-5
        rows = zip(own.token_ids, logits, own.logprobs, decided[:-1], strict=True)
        for token, scores, reported, sure in rows:
            if not sure:
                break
            judged += 1
            slack = 1e-4 * scores.abs().max()
            assert scores[: engine.opened.sample_below].max() - scores[token] <= slack
            assert abs(reported[token].logprob - scores.log_softmax(-1)[token]) <= slack
    assert judged >= 50  # of 60: else it has judged nothing
    assert_all_free(engine)


@contextlib.contextmanager
def router_margins(model):
    """A list, to be filled layer by layer: by how much the last chosen expert was ahead, [N]."""
    margins = []

    def keep(moe, args):
        router, k = moe.gate, moe.gate.rule.top_k
        scores = torch.sigmoid(router.proj(args[0])) + router.e_score_correction_bias
        best = scores.sort(-1, descending=True).values
        margins.append(best[:, k - 1] - best[:, k])

    handles = [moe.register_forward_pre_hook(keep) for moe in mixtures(model)]
    yield margins
    for handle in handles:
        handle.remove()
