"""What is reported of a token and of the likeliest alternatives."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_mini.serving.logprobs import Logprob, prompt_logprobs, token_logprobs, top_ids

INF = math.inf
LOGITS = st.lists(
    st.one_of(st.just(-INF), st.integers(-6, 6).map(lambda i: i / 2)), min_size=1, max_size=12
).filter(lambda row: max(row) > -INF)


def in_order(row):
    """Ids, larger logits first and lower ids first among equals; the obvious way."""
    return sorted(range(len(row)), key=lambda i: (-row[i], i))


def expected(row, token, count):
    best = max(row)
    total = best + math.log(math.fsum(math.exp(x - best) for x in row))
    order = in_order(row)
    shown = order if count < 0 else order[:count]
    ids = shown if token in shown else [token, *shown]
    return {i: (row[i] - total, order.index(i) + 1) for i in ids}


@given(LOGITS, st.integers(0, 11), st.integers(-1, 14))
@settings(max_examples=80, deadline=None)
def test_ids_ranks_and_values_are_those_of_the_obvious_way(row, token, count):
    token %= len(row)
    got = token_logprobs(torch.tensor(row), token, count)
    want = expected(row, token, count)
    assert list(got) == list(want)
    for i, (logprob, rank) in want.items():
        assert got[i].rank == rank
        assert got[i].logprob == pytest.approx(logprob, abs=1e-12)  # float64 inside


@given(LOGITS, st.integers(0, 14))
@settings(max_examples=80, deadline=None)
def test_the_first_ids_are_exactly_so_many_and_the_lowest_among_equals(row, count):
    assert top_ids(torch.tensor(row), count).tolist() == in_order(row)[:count]


def test_a_token_outside_the_alternatives_stands_first_and_one_among_them_in_its_place():
    logits = torch.tensor([0.0, 3.0, 2.0, 1.0])
    assert list(token_logprobs(logits, 0, 2)) == [0, 1, 2]
    assert list(token_logprobs(logits, 2, 2)) == [1, 2]
    assert list(token_logprobs(logits, 0, 0)) == [0]
    assert token_logprobs(logits, 0, 0)[0].rank == 4


def test_a_rank_does_not_depend_on_how_many_are_shown():
    logits = torch.tensor([1.0, 2.0, 2.0, 2.0, 0.0])
    for token, rank in enumerate([4, 1, 2, 3, 5]):
        assert {token_logprobs(logits, token, k)[token].rank for k in (-1, 0, 1, 2, 4, 9)} == {rank}


@pytest.mark.parametrize("shift", [0.0, 1e3, -1e3, 1e38, -1e38])
def test_a_common_shift_of_the_logits_changes_nothing(shift):
    got = token_logprobs(torch.tensor([0.0, 0.0, 0.0, -INF]) + shift, 3, 2)
    assert got == {
        3: Logprob(-INF, 4),
        0: Logprob(pytest.approx(-math.log(3)), 1),
        1: Logprob(pytest.approx(-math.log(3)), 2),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_float_type_gives_plain_numbers_computed_in_float64(dtype):
    got = token_logprobs(torch.tensor([4.0, 0.0, 2.0], dtype=dtype), 0, 0)[0]
    assert type(got.logprob) is float and type(got.rank) is int
    assert got.logprob == pytest.approx(-math.log1p(math.exp(-4) + math.exp(-2)), abs=1e-12)


def test_prompt_rows_tell_of_the_token_that_came_next_however_they_are_cut():
    logits = torch.randn(7, 11, generator=torch.Generator().manual_seed(0))
    tokens = [3, 0, 10, 3, 5, 1, 2]
    whole = prompt_logprobs(logits, torch.tensor(tokens), 2)
    assert whole == [
        token_logprobs(row, token, 2) for row, token in zip(logits, tokens, strict=True)
    ]
    for cut in (0, 1, 4, 7):
        pieces = prompt_logprobs(logits[:cut], tokens[:cut], 2)
        assert pieces + prompt_logprobs(logits[cut:], tokens[cut:], 2) == whole
    assert [list(row) for row in prompt_logprobs(logits, tokens, 0)] == [[t] for t in tokens]
    assert {len(row) for row in prompt_logprobs(logits, tokens, -1)} == {11}


def test_rows_and_tokens_that_do_not_fit_are_refused():
    logits = torch.zeros(2, 5)
    with pytest.raises(ValueError, match=r"row for each of the 3 next tokens, got \[2, 5\]"):
        prompt_logprobs(logits, [0, 1, 2], 1)
    with pytest.raises(ValueError, match=r"got \[5\]"):
        prompt_logprobs(logits[0], [0], 1)
    with pytest.raises(ValueError, match="next_tokens must be integers"):
        prompt_logprobs(logits, [0, 1.5], 1)
    for token in (-1, 5):
        with pytest.raises(ValueError, match=f"token must be in the vocabulary, 0..4, got {token}"):
            token_logprobs(logits[0], token, 1)


@pytest.mark.parametrize("bad", [[math.nan, 0.0], [0.0, INF], [-INF, -INF]])
def test_logits_that_are_not_finite_are_refused(bad):
    with pytest.raises(ValueError, match="not finite"):
        prompt_logprobs(torch.tensor([[0.0, 1.0], bad]), [0, 0], 0)
