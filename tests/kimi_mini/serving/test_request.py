"""Requests at the door: what is taken, what is refused, what is cut."""

import dataclasses

import pytest
import torch

from kimi_mini import SamplingParams
from kimi_mini.serving.open_model import around
from kimi_mini.serving.request import make_request
from tests.kimi_mini.serving.alone import small_model


def opened(**changes):
    ours = around(small_model(torch.float32, context=32))
    return dataclasses.replace(ours, **changes)


def made(prompt, model=None, **params):
    return make_request("r", prompt, SamplingParams(**params), model or opened())


@pytest.mark.parametrize(
    "prompt, params, message",
    [
        ("", {}, "the prompt is empty: give at least one token"),
        ([], {}, "the prompt is empty"),
        (torch.tensor([]), {}, "the prompt is empty"),
        ([5, 320], {}, "token id 320 is not in this model's vocabulary, 0..319"),
        ([-1], {}, "token id -1"),
        ([1.0], {}, "prompt token ids must be integers"),
        (None, {}, "prompt token ids must be integers"),
        ([[1, 2]], {}, "prompt token ids must be integers"),
        (torch.tensor([[1, 2]]), {}, "prompt token ids must be integers along 1 axis"),
        ([5] * 33, {}, "the prompt has 33 tokens; this model's context is 32"),
        ("x" * 32, {}, "the prompt has 33 tokens"),  # bos
        ([5], dict(stop_token_ids=[320]), "stop token id 320 is not in this model's vocabulary"),
    ],
)
def test_what_no_request_can_be_is_refused_with_the_value_and_what_is_allowed(
    prompt, params, message
):
    with pytest.raises(ValueError, match=message):
        made(prompt, **params)


def test_a_model_without_a_tokenizer_takes_ids_and_refuses_all_that_needs_text():
    ids_only = opened(tokenizer=None, no_text="its files are in Latin")
    assert made([5], ids_only).sequences[0].output().text == ""
    with pytest.raises(ValueError, match="use token ids: its files are in Latin"):
        made("a", ids_only)
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        made([5], ids_only, stop=["."])


@pytest.mark.parametrize("prompt, text", [("é", "é"), ([1, 198, 172], None)])
def test_text_and_ids_lead_to_the_same_request(prompt, text):
    request = made(prompt)
    assert (request.prompt, request.prompt_ids) == (text, [1, 198, 172])
    assert request.output().prompt_token_ids == (1, 198, 172)


@pytest.mark.parametrize(
    "prompt, asked, room, longest",
    [
        (30, 5, 2, 31),
        (30, None, 2, 31),
        (30, 1, 1, 30),
        (32, 5, 0, 0),
        (30, 0, 0, 0),
        (1, None, 31, 31),
    ],
)
def test_room_is_what_the_context_leaves_and_the_last_token_never_runs(
    prompt, asked, room, longest
):
    request = made([5] * prompt, max_tokens=asked)
    assert (request.room, request.longest) == (room, longest)
    assert all(sequence.room == room for sequence in request.sequences)


@pytest.mark.parametrize("prompt, longest", [(1, 0), (2, 2), (32, 32)])
def test_scoring_alone_runs_the_whole_prompt(prompt, longest):
    assert made([5] * prompt, max_tokens=0, prompt_logprobs=0).longest == longest


def test_each_sample_has_a_random_stream_and_tokens_of_its_own():
    request = made([5, 6], n=3, seed=2**63 - 2, temperature=1.0)
    assert [s.params.seed for s in request.sequences] == [2**63 - 2, 2**63 - 1, 0]
    assert [(s.name, s.params.n) for s in request.sequences] == [
        ("r.0", 1), ("r.1", 1), ("r.2", 1),
    ]  # fmt: skip
    assert len({id(s.sampler.generator) for s in request.sequences}) == 3
    request.sequences[0].tokens.append(9)
    assert request.sequences[1].tokens == request.prompt_ids == [5, 6]


def test_ignored_end_tokens_end_nothing_but_stop_tokens_do():
    ours = opened(end_ids=frozenset({2, 7}))
    (heeding,) = made([5], ours).sequences
    (ignoring,) = made([5], ours, ignore_eos=True, stop_token_ids=[7]).sequences
    assert (heeding.end_ids, ignoring.end_ids) == ({2, 7}, frozenset())
    assert (heeding.sampler.end_ids, ignoring.sampler.end_ids) == ({2, 7}, {7})


def test_a_request_is_finished_when_all_of_its_samples_are():
    request = made([5], n=2)
    request.sequences[0].end("length")
    assert not request.finished and not request.output().finished
    request.sequences[1].end("length")
    assert request.finished and request.output().finished
