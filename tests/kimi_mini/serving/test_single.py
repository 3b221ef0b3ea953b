"""One request from prompt to last token."""

import dataclasses
import time

import pytest
import torch

from kimi_mini import KimiForCausalLM, preset
from kimi_mini.serving.single import Run
from tests.kimi_mini.golden_cases import NAMES, PROMPTS, golden_model, goldens


@pytest.fixture(scope="module")
def nano():
    return KimiForCausalLM.from_config(preset("nano"), seed=1, dtype=torch.float64)


def limited(nano, context, eos=2):
    """The same weights under another context limit and other end tokens."""
    config = dataclasses.replace(nano.config, max_position_embeddings=context, eos_token_id=eos)
    model = KimiForCausalLM(config, torch.float64)
    model.load_state_dict(nano.state_dict())
    return model


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_tokens_are_the_recorded_ones(name, prompt):
    golden = goldens(name)
    run = Run(
        golden_model(name, torch.float32),
        golden[f"p{prompt}.input_ids"].tolist(),
        max_tokens=16,
        prefill_chunk=50,
    )
    assert list(run.tokens()) == golden[f"p{prompt}.greedy_ids"].tolist()
    assert run.finish_reason == "length"


@pytest.mark.parametrize("chunk", [1, 7, 16, 100])
def test_the_prefill_piece_does_not_change_the_tokens(nano, chunk):
    prompt = list(range(3, 103))
    whole = list(Run(nano, prompt, max_tokens=20).tokens())
    assert list(Run(nano, prompt, max_tokens=20, prefill_chunk=chunk).tokens()) == whole


def test_a_model_serves_one_request_after_the_other(nano):
    """BR-78: A, B, a run given up half way, A."""
    a = list(Run(nano, [5, 6, 7], max_tokens=10).tokens())
    list(Run(nano, [80, 90], max_tokens=4).tokens())
    half = Run(nano, [100], max_tokens=10).tokens()
    next(half)
    half.close()
    assert list(Run(nano, [5, 6, 7], max_tokens=10).tokens()) == a


@pytest.mark.parametrize("eos", [0, 3])
def test_an_end_token_stops_the_run_and_is_not_shown(nano, eos):
    greedy = list(Run(nano, [5, 6, 7], max_tokens=10).tokens())
    end = greedy[eos]
    for ids in (end, [319, end]):
        run = Run(limited(nano, 100, ids), [5, 6, 7], max_tokens=10)
        assert list(run.tokens()) == greedy[: greedy.index(end)]
        assert run.finish_reason == "stop" and run.output_ids[-1] == end


@pytest.mark.parametrize("prompt, asked, given", [(31, 5, 1), (32, 5, 0), (20, 12, 12), (20, 0, 0)])
def test_prompt_and_output_stay_within_the_context(nano, prompt, asked, given):
    """BR-28, limit 32 on a page edge."""
    run = Run(limited(nano, 32, eos=None), [5] * prompt, max_tokens=asked)
    assert len(list(run.tokens())) == given
    assert run.finish_reason == "length"
    assert run.state.latent.shape[1] - 1 == -(-(prompt + given) // 16)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(prompt_ids=[]), "prompt is empty"),
        (dict(prompt_ids=[5, 320]), "token id 320 is not in this model's vocabulary, 0..319"),
        (dict(prompt_ids=[-1]), "token id -1"),
        (dict(prompt_ids=[1.5, 2]), "prompt_ids must be integers"),
        (dict(prompt_ids=[5] * 5000), "5000 tokens; this model's context is 1024"),
        (dict(max_tokens=-1), "max_tokens must not be negative"),
        (dict(prefill_chunk=0), "prefill_chunk must be at least 1"),
        (dict(model="large", max_tokens=10**11), "would take .* GB; there are"),
        (dict(temperature=-1.0), "temperature"),
        (dict(temperature=float("nan")), "temperature"),
    ],
)
def test_impossible_requests_are_refused_at_the_door(nano, changes, message):
    if changes.pop("model", None):
        nano = limited(nano, 10**12)
    with pytest.raises(ValueError, match=message):
        Run(nano, **{"prompt_ids": [5], **changes})


def test_a_run_runs_once_and_one_given_up_has_no_end(nano):
    run = Run(nano, [5], max_tokens=3)
    next(run.tokens())
    assert run.finish_reason is None
    with pytest.raises(ValueError, match="runs once"):
        next(run.tokens())


def test_prompt_zero_is_a_token_and_seed_zero_a_seed(nano):
    """BR-54."""
    assert len(list(Run(nano, [0], max_tokens=3).tokens())) == 3
    texts = [
        list(Run(nano, [5], max_tokens=12, temperature=1.0, seed=seed).tokens())
        for seed in (0, 0, 1)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_ids_beyond_the_vocabulary_in_use_are_never_sampled(nano):
    run = Run(nano, [5], max_tokens=200, temperature=5.0, sample_below=100)
    assert max(run.tokens()) < 100


def test_the_time_of_the_consumer_is_not_counted(nano):
    run = Run(nano, [5], max_tokens=4)
    for _ in run.tokens():
        time.sleep(0.2)
    assert run.decode_seconds < 0.2


def test_state_bytes_are_those_of_the_config(nano):
    """serving 8.1 for nano: 3 layers of 3 heads 32x32, window 3 x 288, 2 x 32 numbers a token."""
    run = Run(KimiForCausalLM.from_config(preset("nano"), seed=0), [5] * 10, max_tokens=4)
    list(run.tokens())
    assert run.state_bytes() == {
        "recurrent": 36_864,
        "conv": 10_368,
        "latent": 13 * 256,
        "latent_per_token": 256,
    }
