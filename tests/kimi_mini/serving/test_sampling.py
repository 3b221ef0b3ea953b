"""Masks, penalties, truncation and draws, against the obvious way of computing them."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kimi_mini.serving.logprobs import token_logprobs
from kimi_mini.serving.sampling import (
    TokenSampler,
    apply_count_penalties,
    apply_min_p,
    apply_repetition_penalty,
    apply_temperature,
    apply_top_k,
    apply_top_p,
    draw,
)
from kimi_mini.serving.sampling_params import SamplingParams

INF = math.inf
TABLE = [0.5, 0.3, 0.15, 0.05]


def kept(logits):
    """Ids that may still be drawn."""
    return logits.isfinite().nonzero()[:, 0].tolist()


def sampler(vocab_size, prompt=(), end_ids=(), sample_below=None, **params):
    return TokenSampler(
        SamplingParams(**params),
        prompt,
        vocab_size=vocab_size,
        end_ids=end_ids,
        sample_below=sample_below,
    )


def uniform(generator):
    """The number that a draw takes from the generator."""
    return float(torch.rand((), dtype=torch.float64, generator=generator))


# The obvious way: lists, loops, math.


def obvious_scores(row, params, prompt, output, end_ids, below):
    """Logits after masks and penalties."""
    row = list(row[:below])
    if len(output) < params.min_tokens:
        eos = [] if params.ignore_eos else end_ids
        for i in {*eos, *params.stop_token_ids}:
            if i < below:
                row[i] = -INF
    for i in {*prompt, *output}:
        if i < below:
            row[i] = (
                row[i] / params.repetition_penalty
                if row[i] > 0
                else row[i] * params.repetition_penalty
            )
    for i, count in Counter(output).items():
        row[i] -= params.frequency_penalty * count + params.presence_penalty
    return row


def obvious_distribution(row, params):
    """{id: probability} of what may be drawn, in order of id."""

    def probabilities(ids):
        best = max(row[i] for i in ids)
        weights = {i: math.exp((row[i] - best) / params.temperature) for i in ids}
        total = math.fsum(weights.values())
        return {i: weight / total for i, weight in weights.items()}

    def order(ids):
        return sorted(ids, key=lambda i: (-row[i], i))

    ids = [i for i, logit in enumerate(row) if logit > -INF]
    p = probabilities(ids)
    ids = [i for i in ids if p[i] >= params.min_p * max(p.values()) * (1 - 1e-14)]
    if params.top_k > 0:
        ids = order(ids)[: params.top_k]
    if params.top_p < 1:
        p = probabilities(ids)
        ids, rest = [], order(ids)
        for i in rest:
            mass = math.fsum(p[j] for j in ids)
            # between equal to p and clearly beside it lies what rounding decides
            assume(not 1e-12 < abs(mass - params.top_p) < 1e-3)
            if ids and mass > params.top_p - 1e-12:
                break
            ids.append(i)
    return probabilities(sorted(ids))


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-6, 0.2, 0.7, 1.0, 5.0]),
    top_p=st.sampled_from([0.0, 1e-9, 0.25, 0.5, 0.777, 1.0]),
    top_k=st.integers(-1, 9),
    min_p=st.sampled_from([0.0, 0.123, 1.0]),
    presence_penalty=st.sampled_from([0.0, 0.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25, 2.0, -1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.5, 0.5]),
    ignore_eos=st.booleans(),
    stop_token_ids=st.lists(st.integers(0, 4), max_size=2),
    min_tokens=st.integers(0, 3),
    seed=st.integers(0, 2**63 - 1),
    logprobs=st.sampled_from([None, 0, 2]),
)
# multiples of a half, so that ties are common and penalties exact; one id stays finite everywhere
ROWS = st.lists(
    st.lists(
        st.one_of(st.integers(-8, 8).map(lambda i: i / 2), st.just(-INF)), min_size=8, max_size=8
    ).map(lambda row: [*row[:5], 0.5, *row[6:]]),
    min_size=1,
    max_size=5,
)


@given(PARAMS, ROWS, st.lists(st.integers(0, 7), max_size=4), st.sampled_from([None, 6, 7, 99]))
@settings(max_examples=120, deadline=None)
def test_a_sample_is_what_the_obvious_way_gives(params, rows, prompt, below):
    own = TokenSampler(params, prompt, vocab_size=8, end_ids=[1, 7], sample_below=below)
    twin = torch.Generator().manual_seed(params.seed)
    output = []
    for row in rows:
        logits = torch.tensor(row)
        before = logits.clone()
        scores = obvious_scores(row, params, prompt, output, [1, 7], min(below or 8, 8))
        processed = own.process(logits)
        if params.greedy:
            want = scores.index(max(scores))
        else:
            distribution = obvious_distribution(scores, params)
            assert kept(processed) == list(distribution)
            got = processed.softmax(-1)
            for i, p in distribution.items():
                assert float(got[i]) == pytest.approx(p, abs=1e-12)  # both in float64
            share, want = 1 - uniform(twin), None
            for i, p in distribution.items():
                share -= p
                if share <= 0 and want is None:
                    want = i
        sampled = own.sample(logits)
        assert sampled.token == want
        assert torch.equal(logits, before)
        assert sampled.logprobs == (
            None
            if params.logprobs is None
            else token_logprobs(logits, sampled.token, params.logprobs)
        )
        output.append(want)
        assert own.num_sampled == len(output)
    assert torch.equal(own.generator.get_state(), twin.get_state())


# Top-p, top-k, min-p


@pytest.mark.parametrize(
    ("p", "count"), [(0.6, 2), (0.5, 1), (0.81, 3), (1.0, 4), (0, 1), (1e-9, 1)]
)
@pytest.mark.parametrize("shift", [0, 1000, -1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("places", [(0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 1, 0)])
def test_top_p_keeps_the_token_that_crosses_the_threshold(p, count, shift, dtype, places):
    """BR-18. A float32 of 1000 is exact to 3e-5 only, and yet p = 0.5 keeps one."""
    logits = torch.empty(4, dtype=dtype)
    logits[list(places)] = torch.tensor(TABLE, dtype=dtype).log() + shift
    result = apply_top_p(logits, p)
    assert kept(result) == sorted(places[:count])
    mass = sum(TABLE[:count])
    exact = [TABLE[i] / mass for i in range(count)]
    tolerance = 1e-4 if shift and dtype == torch.float32 else 1e-6
    assert result.softmax(-1)[list(places[:count])].tolist() == pytest.approx(exact, abs=tolerance)
    own = sampler(4, top_p=p, seed=0)
    assert {own.sample(logits).token for _ in range(20)} <= set(places[:count])


@pytest.mark.parametrize("shift", [0.0, 1e3, 1e38, -1e38])
def test_ties_at_the_border_of_top_p_go_to_the_lowest_ids(shift):
    logits = torch.tensor([-INF, 0, 0, -INF, 0, 0]) + shift
    assert kept(apply_top_p(logits, 0.5)) == [1, 2]
    assert kept(apply_top_p(logits, 0.51)) == [1, 2, 4]
    assert kept(apply_top_p(logits, 0.25)) == [1]


def test_top_p_close_to_one_still_keeps_a_rare_token():
    logits = torch.tensor([1 - 1e-7, 1e-7], dtype=torch.float64).log()
    assert kept(apply_top_p(logits, 1 - 1e-8)) == [0, 1]
    assert kept(apply_top_p(logits, 1 - 1e-6)) == [0]
    far = torch.tensor([0.0, -1.0, -60.0, -700.0])  # the last move no sum of the others
    assert kept(apply_top_p(far, 1.0)) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("k", "count"), [(0, 97), (-1, 97), (1, 1), (97, 97), (98, 97), (1000, 97)]
)
def test_top_k_beyond_the_vocabulary_is_off_as_are_zero_and_minus_one(k, count):
    """BR-55."""
    logits = torch.randn(97, generator=torch.Generator().manual_seed(0))
    result = apply_top_k(logits, k)
    assert len(kept(result)) == count
    assert int(result.argmax()) == int(logits.argmax())
    assert sampler(97, top_k=k, seed=0).sample(logits).token in kept(result)


def test_top_k_keeps_exactly_k_and_the_lowest_ids_among_equals():
    """BR-55: a threshold would keep four of these for k = 3."""
    logits = torch.tensor([1.0, 2.0, 2.0, 2.0, 3.0])
    assert [kept(apply_top_k(logits, k)) for k in (1, 2, 3, 4)] == [
        [4],
        [1, 4],
        [1, 2, 4],
        [1, 2, 3, 4],
    ]
    equal = torch.zeros(97)
    assert all(kept(apply_top_k(equal, k)) == list(range(k)) for k in (1, 50, 96))


def test_top_k_acts_before_top_p_on_what_is_left():
    """[.5, .3, .15, .05] cut to two is [.625, .375]: p = .6 keeps one, where p alone keeps two."""
    logits = torch.tensor(TABLE).log()
    assert kept(sampler(4, top_k=2, top_p=0.6).process(logits)) == [0]
    assert kept(sampler(4, top_p=0.6).process(logits)) == [0, 1]
    assert kept(sampler(4, top_k=2, top_p=0.63).process(logits)) == [0, 1]


@pytest.mark.parametrize("truncation", [dict(top_k=3), dict(top_p=0.9), dict(min_p=0.5), dict()])
def test_a_lone_finite_logit_is_always_drawn(truncation):
    logits = torch.full((97,), -INF)
    logits[40] = -1e30
    own = sampler(97, seed=0, **truncation)
    assert [own.sample(logits).token for _ in range(20)] == [40] * 20


def test_min_p_is_relative_to_the_likeliest():
    logits = torch.tensor([0.5, 0.26, 0.24, 0.0]).log()
    assert kept(apply_min_p(logits, 0.0)) == [0, 1, 2]
    assert kept(apply_min_p(logits, 0.5)) == [0, 1]
    assert kept(apply_min_p(logits + 1e3, 0.5)) == [0, 1]
    assert kept(apply_min_p(torch.tensor([7.0, 3.0, 7.0]), 1.0)) == [0, 2]


@pytest.mark.parametrize("shift", [0, 1000, -1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_id_just_likely_enough_for_min_p_is_kept_whatever_rounding_says(dtype, shift):
    logits = torch.tensor([0.5, 0.25, 0.2, 0.05], dtype=dtype).log() + shift
    assert kept(apply_min_p(logits, 0.5)) == [0, 1]
    assert kept(apply_min_p(logits, 0.4)) == [0, 1, 2]
    assert kept(apply_min_p(logits, 0.1)) == [0, 1, 2, 3]


def test_truncation_sees_the_distribution_after_temperature():
    logits = torch.tensor(TABLE).log()
    assert kept(sampler(4, temperature=100.0, min_p=0.9).process(logits)) == [0, 1, 2, 3]
    assert kept(sampler(4, temperature=0.1, min_p=0.1).process(logits)) == [0]
    assert kept(sampler(4, temperature=0.1, top_p=0.99).process(logits)) == [0]


# Penalties


def test_the_repetition_penalty_pushes_logits_of_both_signs_down():
    logits = torch.tensor([2.0, -2.0, 0.0, 2.0, -2.0, -INF])
    seen = torch.tensor([True, True, True, False, False, True])
    assert apply_repetition_penalty(logits, seen, 2.0).tolist() == [1, -4, 0, 2, -2, -INF]
    assert apply_repetition_penalty(logits, seen, 0.5).tolist() == [4, -1, 0, 2, -2, -INF]


def test_count_penalties_are_linear_in_the_count_and_once_for_presence():
    logits = torch.zeros(4)
    counts = torch.tensor([0, 1, 3, 0])
    assert apply_count_penalties(logits, counts, 0.5, 1.0).tolist() == [0, -1.5, -2.5, 0]
    assert apply_count_penalties(logits, counts, -0.5, 0.0).tolist() == [0, 0.5, 1.5, 0]


def test_prompt_tokens_are_repetitions_but_not_counted():
    logits = torch.tensor([3.0, 2.0])
    assert sampler(2, [0], temperature=0, repetition_penalty=2.0).sample(logits).token == 1
    own = sampler(2, [0, 0, 0], temperature=0, presence_penalty=2.0, frequency_penalty=2.0)
    assert [own.sample(logits).token for _ in range(4)] == [0, 1, 0, 1]


def test_greedy_sampling_feels_the_penalties():
    logits = torch.tensor([1.0, 0.75, 0.5, -INF])
    own = sampler(4, temperature=0, frequency_penalty=0.5)
    assert [own.sample(logits).token for _ in range(5)] == [0, 1, 0, 2, 1]
    own = sampler(4, temperature=0, repetition_penalty=4.0)
    assert [own.sample(logits).token for _ in range(4)] == [0, 1, 2, 0]


@pytest.mark.parametrize("temperature", [0, 1e-5, 1.0])
@pytest.mark.parametrize("penalty", [5e-324, 1.7e308])
def test_an_extreme_penalty_never_makes_a_logit_infinite(temperature, penalty):
    own = sampler(3, [0, 1], temperature=temperature, repetition_penalty=penalty, seed=0)
    logits = torch.tensor([1e30, -1e30, -INF])
    assert own.sample(logits).token == 0
    assert own.sample(torch.tensor([-INF, -1e30, -INF])).token == 1


# Masks


def test_before_min_tokens_no_end_token_is_drawn_and_then_it_may_be():
    logits = torch.tensor([0.0, 9.0, 8.0, 7.0, 1.0])
    asked = dict(temperature=0, min_tokens=2)
    own = sampler(5, end_ids=[1, 2], stop_token_ids=[3], **asked)
    assert own.end_ids == {1, 2, 3}
    assert [own.sample(logits).token for _ in range(4)] == [4, 4, 1, 1]
    own = sampler(5, end_ids=[1, 2], stop_token_ids=[3], ignore_eos=True, **asked)
    assert own.sample(logits).token == 1
    own = sampler(5, end_ids=[1], temperature=0)
    assert own.sample(logits).token == 1


def test_an_end_id_that_is_no_token_masks_nothing():
    own = sampler(3, end_ids=[-1, 3], temperature=0, min_tokens=1)
    assert own.sample(torch.tensor([0.0, 1.0, 2.0])).token == 2


@pytest.mark.parametrize("temperature", [0, 1e-5, 1.0, 1e300])
def test_ids_from_sample_below_on_are_never_drawn(temperature):
    logits = torch.tensor([0.0, 0.0, -5.0, 50.0, 60.0])
    own = sampler(5, sample_below=3, temperature=temperature, seed=0)
    assert {own.sample(logits).token for _ in range(200)} <= {0, 1, 2}


def test_masks_that_leave_nothing_are_an_error_that_changes_nothing():
    logits = torch.tensor([1.0, 2.0, -INF, 3.0])
    for masks in (
        dict(end_ids=[0, 1], sample_below=3, min_tokens=1),
        dict(end_ids=[0, 1, 3], min_tokens=1),
    ):
        for temperature in (0, 1.0):
            own = sampler(4, temperature=temperature, seed=3, **masks)
            state = own.generator.get_state()
            with pytest.raises(ValueError, match="no token can be sampled.*min_tokens"):
                own.sample(logits)
            assert own.num_sampled == 0 and torch.equal(own.generator.get_state(), state)
    with pytest.raises(ValueError, match=r"sample_below \(1\)"):
        sampler(2, sample_below=1).sample(torch.tensor([-INF, 0.0]))


def test_logprobs_are_of_the_logits_before_masks_penalties_and_temperature():
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0])
    own = sampler(
        4,
        [2],
        end_ids=[0],
        min_tokens=1,
        sample_below=2,
        repetition_penalty=1.7,
        temperature=0.2,
        top_k=1,
        logprobs=2,
    )
    token, logprobs = own.sample(logits)
    assert token == 1 and list(logprobs) == [0, 1]
    exact = logits.double().log_softmax(-1)
    for i in (0, 1):
        assert logprobs[i] == (pytest.approx(float(exact[i])), i + 1)


def test_what_penalties_remember_is_not_made_before_the_first_token():
    """A thousand samples that wait would hold a vocabulary each."""
    asked = dict(temperature=0, repetition_penalty=2.0, frequency_penalty=1.0)
    own = sampler(4, [1], **asked)

    def held():
        return [value for value in vars(own).values() if isinstance(value, torch.Tensor)]

    assert held() == []
    assert own.sample(torch.tensor([0.9, 1.0, 0.0, 0.0])).token == 0
    assert len(held()) == 2


def test_arguments_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="params.n must be 1, got 2"):
        sampler(4, n=2)
    with pytest.raises(ValueError, match="sample_below must be None or at least 1, got 0"):
        sampler(4, sample_below=0)
    with pytest.raises(ValueError, match="stop token id 4 is not in this model's vocabulary, 0..3"):
        sampler(4, stop_token_ids=[4])
    with pytest.raises(ValueError, match="prompt token id -1 is not in this model's vocab.*, 0..3"):
        sampler(4, [-1], repetition_penalty=2.0)
    for shape in [(3,), (1, 4), (5,)]:
        with pytest.raises(ValueError, match=r"logits must be \[4\], got"):
            sampler(4).sample(torch.zeros(shape))


# Draws and seeds


def test_draws_follow_the_truncated_and_tempered_distribution():
    logits = torch.tensor([*TABLE, 0.0]).log()
    own = sampler(5, top_p=0.81, temperature=0.5, seed=1)
    counts = Counter(own.sample(logits).token for _ in range(2000))
    squares = [p**2 / sum(q**2 for q in TABLE) for p in TABLE]  # temperature 1/2; .81 keeps two
    total = squares[0] + squares[1]
    assert set(counts) == {0, 1}
    assert counts[0] / 2000 == pytest.approx(squares[0] / total, abs=0.04)  # four sigma


def test_a_draw_takes_one_number_from_the_generator_and_a_greedy_choice_none():
    logits = torch.tensor([-INF, 1.0, 2.0])
    for asked in (dict(), dict(top_k=1), dict(top_p=0.0), dict(min_p=1.0)):
        own = sampler(3, seed=5, **asked)
        twin = torch.Generator().manual_seed(5)
        for _ in range(3):
            own.sample(logits)
            uniform(twin)
            assert torch.equal(own.generator.get_state(), twin.get_state())
    own = sampler(3, seed=5, temperature=0, frequency_penalty=1.0)
    state = own.generator.get_state()
    assert own.sample(logits).token == 2
    assert torch.equal(own.generator.get_state(), state)


@pytest.mark.parametrize("extreme", [0.0, 1 - 2**-53])
def test_no_number_of_the_generator_draws_an_impossible_token(extreme, monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda *a, **k: torch.tensor(extreme, dtype=torch.float64))
    logits = torch.tensor([-INF, -INF, 0.0, -INF, -800.0, 0.0, -INF, -INF])
    assert draw(logits, torch.Generator()) == (5 if extreme == 0 else 2)


@pytest.mark.parametrize("seed", [0, 7, 2**63 - 1])
def test_a_seeded_sample_does_not_depend_on_its_neighbours(seed):
    """BR-79, and seed 0 is a seed (BR-54)."""
    rows = torch.randn(20, 97, generator=torch.Generator().manual_seed(3))
    alone = sampler(97, seed=seed)
    expected = [alone.sample(row).token for row in rows]
    assert len(set(expected)) > 5
    torch.manual_seed(99)
    ours, seeded, unseeded = sampler(97, seed=seed), sampler(97, seed=8), sampler(97)
    got = []
    for step, row in enumerate(rows):
        seeded.sample(row)
        if step < 5:  # a neighbour that ends early
            unseeded.sample(row)
        torch.rand(3)
        got.append(ours.sample(row).token)
    assert got == expected


def test_samples_without_a_seed_differ_whatever_the_global_seed():
    logits = torch.zeros(1000)
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        own = sampler(1000)
        runs.append([own.sample(logits).token for _ in range(10)])
    assert runs[0] != runs[1]


def test_samples_of_one_seeded_request_differ():
    params = SamplingParams(n=2, seed=0)
    first, second = (TokenSampler(params.child(i), (), vocab_size=1000) for i in range(2))
    logits = torch.zeros(1000)
    assert [first.sample(logits).token for _ in range(5)] != [
        second.sample(logits).token for _ in range(5)
    ]


# Greedy, temperatures, large numbers


def choose(logits, temperature, seed=0):
    own = sampler(len(logits), temperature=temperature, seed=seed)
    return own.sample(torch.tensor(logits)).token


@pytest.mark.parametrize("temperature", [0, -0.0, 1e-40, 1e-38, 1e-6])
def test_zero_and_tiny_temperatures_are_greedy_with_ties_to_the_lowest_id(temperature):
    """BR-19."""
    assert choose([1.0, 3.0, 3.0, 2.0], temperature) == 1
    assert choose([1e30, 3e38, -INF], temperature) == 1


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_rows_of_one_step_have_their_own_temperatures(temperature):
    """BR-19: a batch of T = 0, 1, 0.7 is its rows alone."""
    logits = torch.tensor([1.0, 3.0, 3.0, 2.0])
    rows = {t: sampler(4, temperature=t, seed=4) for t in (0.0, 1.0, 0.7)}
    together = [{t: own.sample(logits).token for t, own in rows.items()} for _ in range(20)]
    alone = sampler(4, temperature=temperature, seed=4)
    assert [alone.sample(logits).token for _ in range(20)] == [
        step[temperature] for step in together
    ]


@pytest.mark.parametrize("shift", [0.0, 1e3, -1e3, 1e38, -1e38])
@pytest.mark.parametrize("temperature", [1e-5, 0.5, 1.0])
def test_a_common_shift_of_the_logits_changes_no_draw(shift, temperature):
    pattern = torch.tensor([0.0, 0.0, -INF, 0.0])
    own, moved = (sampler(4, temperature=temperature, top_p=0.9, seed=2) for _ in range(2))
    tokens = [own.sample(pattern).token for _ in range(30)]
    assert tokens == [moved.sample(pattern + shift).token for _ in range(30)]
    assert set(tokens) == {0, 1, 3}


@pytest.mark.parametrize("temperature", [1e-5, 0.5, 1.0])
def test_large_logits_do_not_overflow(temperature):
    assert choose([3e38, -3e38], temperature) == 0
    huge = torch.tensor([-1e308, 1e308, -INF, 1e308], dtype=torch.float64)
    for logits in (huge, torch.where(huge > 0, -INF, huge)):
        scaled = apply_temperature(logits, temperature)
        assert scaled.max().isfinite() and not scaled.isnan().any()
    assert sampler(4, temperature=temperature, top_k=1).sample(huge).token == 1


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("bad", [[1.0, math.nan, 2.0], [1.0, INF, 2.0], [-INF] * 3])
def test_logits_that_are_not_finite_are_refused_even_where_they_are_masked(temperature, bad):
    logits = torch.tensor(bad)
    for masks in (dict(), dict(sample_below=1), dict(end_ids=[1], min_tokens=1)):
        own = sampler(3, temperature=temperature, logprobs=1, **masks)
        with pytest.raises(ValueError, match="not finite"):
            own.sample(logits)
        assert own.num_sampled == 0


def test_a_huge_temperature_is_nearly_uniform():
    assert {choose([5.0, 1.0, -9.0], 1e300, seed) for seed in range(30)} == {0, 1, 2}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_drawn_from_exactly(dtype):
    logits = torch.tensor([1.0, 2.0, 3.0, -INF], dtype=dtype)
    asked = dict(top_k=2, top_p=0.9, min_p=0.1, repetition_penalty=1.5, seed=3)
    got = sampler(4, [1], **asked).process(logits)
    assert torch.equal(got, sampler(4, [1], **asked).process(logits.double()))


def test_a_plain_greedy_choice_works_on_the_logits_themselves():
    logits = torch.tensor([1.0, 3.0, 2.0])
    assert sampler(3, temperature=0, top_k=2, top_p=0.5, min_p=0.5).process(logits) is logits
