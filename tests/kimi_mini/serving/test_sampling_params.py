"""What a request may ask of sampling, and what it is told when it asks wrongly."""

import dataclasses
import math
from fractions import Fraction

import numpy as np
import pytest

from kimi_mini.serving.sampling_params import SamplingParams


def refusal(**given) -> list[str]:
    with pytest.raises(ValueError) as caught:
        SamplingParams(**given)
    message = str(caught.value)
    assert "\n" not in message  # scripts print it as their one line
    return message.split("; ")


def test_defaults_are_those_of_vllm():
    assert dataclasses.asdict(SamplingParams()) == dict(
        n=1,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        seed=None,
        stop=(),
        stop_token_ids=(),
        ignore_eos=False,
        max_tokens=16,
        min_tokens=0,
        logprobs=None,
        prompt_logprobs=None,
        skip_special_tokens=True,
        include_stop_str_in_output=False,
    )


@pytest.mark.parametrize(
    "given",
    [
        dict(seed=0),
        dict(seed=2**63 - 1),
        dict(top_k=0),
        dict(top_k=-1),
        dict(top_k=10**9),
        dict(top_p=0),
        dict(top_p=1),
        dict(min_p=0),
        dict(min_p=1),
        dict(temperature=0),
        dict(temperature=-0.0),
        dict(temperature=1e-40),
        dict(temperature=1e300),
        dict(temperature=0.0, n=3),
        dict(repetition_penalty=5e-324),
        dict(presence_penalty=-2, frequency_penalty=2),
        dict(max_tokens=0),
        dict(max_tokens=None, min_tokens=10**6),
        dict(max_tokens=5, min_tokens=5),
        dict(logprobs=0, prompt_logprobs=0),
        dict(logprobs=-1, prompt_logprobs=-1),
        dict(stop=[], stop_token_ids=[]),
        dict(stop=" "),
    ],
    ids=str,
)
def test_edge_values_are_legal_and_kept(given):
    """BR-54: a falsy value is a value."""
    params = SamplingParams(**given)
    for name, value in given.items():
        kept = getattr(params, name)
        if name.startswith("stop"):
            assert kept == ((value,) if isinstance(value, str) else tuple(value))
        else:
            assert kept == value


@pytest.mark.parametrize(
    ("name", "values", "allowed"),
    [
        ("n", [0, -1, True, 1.0, "1", None, math.nan, 16385, 10**9], "an integer in 1..16384"),
        ("presence_penalty", [-2.001, 2.001, math.nan, math.inf, "0", True, None], "in -2..2"),
        ("frequency_penalty", [-3, 3, math.nan, -math.inf, "0", False, None], "in -2..2"),
        (
            "repetition_penalty",
            [0, -1.0, math.nan, math.inf, 10**400, "1", True, None],
            "a positive number",
        ),
        (
            "temperature",
            [-1.0, -1e-9, math.nan, math.inf, -math.inf, 10**400, "0.7", True, None, 1j, [1.0]],
            "0 (greedy) or a positive number",
        ),
        ("top_p", [-1e-9, 1.0001, 90, math.nan, math.inf, "1", True, None], "a number in 0..1"),
        ("top_k", [-2, 1.0, math.inf, "5", True, None], "0 or -1 (no limit)"),
        ("min_p", [-0.1, 1.1, math.nan, "0", True, None], "a number in 0..1"),
        ("seed", [-1, 2**63, 1.0, "7", True, math.nan], "None or an integer in 0..2**63-1"),
        ("max_tokens", [-1, 1.5, 16.0, "16", True, math.inf], "None (no limit) or an integer"),
        ("min_tokens", [-1, 1.0, "1", True, None], "an integer of at least 0"),
        ("logprobs", [-2, 1.0, "5", True, False], "-1 for the whole vocabulary"),
        ("prompt_logprobs", [-2, 1.0, "5", True, False], "-1 for the whole vocabulary"),
        ("ignore_eos", ["false", 0, 1, None], "True or False"),
        ("skip_special_tokens", ["no", 1, None], "True or False"),
        ("include_stop_str_in_output", ["", 0, None], "True or False"),
        (
            "stop",
            ["", ["a", ""], [1], b"a", 3, {"a"}, ["a", None], False],
            "a string or a list of strings, none of them empty",
        ),
        (
            "stop_token_ids",
            [5, [-1], [1.0], ["1"], [True], "12", [None], {1}],
            "a list of token ids",
        ),
    ],
)
def test_a_wrong_value_is_told_with_its_name_itself_and_what_is_allowed(name, values, allowed):
    for value in values:
        (line,) = refusal(**{name: value})
        assert line.startswith(f"{name} must be ") and line.endswith(f", got {value!r}"), line
        assert allowed in line


def test_min_tokens_above_max_tokens_contradict():
    assert refusal(max_tokens=4, min_tokens=5) == [
        "min_tokens must be at most max_tokens, which is 4, got 5"
    ]
    assert refusal(max_tokens=0, min_tokens=1) == [
        "min_tokens must be at most max_tokens, which is 0, got 1"
    ]
    assert refusal(min_tokens=17) == ["min_tokens must be at most max_tokens, which is 16, got 17"]


def test_all_mistakes_are_told_in_one_line():
    lines = refusal(n=0, temperature=math.nan, stop="", min_tokens=9, max_tokens="8")
    assert [line.split()[0] for line in lines] == ["n", "temperature", "max_tokens", "stop"]


def test_numbers_of_other_libraries_become_pythons_own():
    params = SamplingParams(
        temperature=np.float16(0.5),
        top_p=Fraction(1, 2),
        n=np.int8(3),
        seed=np.uint64(2**63 - 1),
        frequency_penalty=1,
        stop_token_ids=[np.int64(4)],
    )
    assert params == SamplingParams(
        temperature=0.5,
        top_p=0.5,
        n=3,
        seed=2**63 - 1,
        frequency_penalty=1.0,
        stop_token_ids=(4,),
    )
    assert type(params.n) is type(params.seed) is type(params.stop_token_ids[0]) is int
    assert type(params.temperature) is type(params.top_p) is type(params.frequency_penalty) is float


def test_params_are_values_that_share_nothing_with_the_caller():
    stop, ids = ["a", "b"], [7, 3, 7]
    params = SamplingParams(stop=stop, stop_token_ids=ids)
    stop.append("c")
    ids.append(9)
    assert params.stop == ("a", "b") and params.stop_token_ids == (7, 3)
    assert {params: 1}[SamplingParams(stop=("a", "b"), stop_token_ids=(7, 3))] == 1
    assert dataclasses.replace(params, n=2).stop == ("a", "b")
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2


@pytest.mark.parametrize(
    ("temperature", "greedy"), [(0, True), (-0.0, True), (9.9e-6, True), (1e-5, False), (1, False)]
)
def test_temperatures_below_a_hundred_thousandth_are_greedy(temperature, greedy):
    assert SamplingParams(temperature=temperature).greedy is greedy


def test_samples_of_a_seeded_request_have_consecutive_seeds():
    params = SamplingParams(n=3, seed=0, top_k=5)
    assert [params.child(i) for i in range(3)] == [
        SamplingParams(seed=i, top_k=5) for i in range(3)
    ]
    assert SamplingParams(n=2, seed=2**63 - 1).child(1).seed == 0
    assert SamplingParams(n=2).child(1).seed is None
    for index in (-1, 3):
        with pytest.raises(ValueError, match=r"index must be in 0..2 \(n = 3\), got"):
            params.child(index)


def test_a_sample_ends_at_eos_unless_ignored_and_at_its_stop_tokens_always():
    assert SamplingParams().end_ids([2, 5]) == {2, 5}
    assert SamplingParams(stop_token_ids=[7]).end_ids([2]) == {2, 7}
    assert SamplingParams(ignore_eos=True).end_ids([2]) == set()
    assert SamplingParams(ignore_eos=True, stop_token_ids=[2]).end_ids([2]) == {2}
