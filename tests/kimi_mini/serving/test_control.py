"""What a caller may say about the prefix cache, request by request."""

import numpy as np
import pytest
import torch

from cache.leases import Lower
from kimi_mini import Engine, SamplingParams
from kimi_mini.serving.caches import CacheOptions
from kimi_mini.serving.control import CacheControl
from tests.kimi_mini.serving.alone import oracle_engine
from tests.kimi_mini.serving.reuse import checkpoints

ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
PROMPT = [5, 6, 7, 8] * 25


by_both = pytest.mark.parametrize("cache", ["radix", "blocks"])


def engine(cache):
    return oracle_engine(prefix_cache=cache, state_slots=12, kv_pages=60, audit=True)


def hit_of(engine, prompt=PROMPT, **control):
    (output,) = engine.generate([prompt], ONE, CacheControl(**control))
    return output.outputs[0].hit


@pytest.mark.parametrize("boundaries", [(3, 40), [3, 40], np.array([3, 40]), torch.tensor([3, 40])])
def test_boundaries_of_any_kind_become_a_tuple_of_ints(boundaries):
    control = CacheControl(checkpoint_at=boundaries)
    assert control.checkpoint_at == (3, 40)
    assert {type(boundary) for boundary in control.checkpoint_at} == {int}
    assert control == CacheControl(None, False, (3, 40)) and hash(control)


@pytest.mark.parametrize(
    "values, message",
    [
        (dict(checkpoint_at=[16, 0]), "checkpoint_at must be 1 or more tokens, got 0"),
        (dict(checkpoint_at=[-5, -16]), "checkpoint_at must be 1 or more tokens, got -16"),
        (dict(checkpoint_at=5), "checkpoint_at must be integers"),
        (dict(checkpoint_at=[2.5]), "checkpoint_at must be integers"),
        (dict(checkpoint_at="16"), "checkpoint_at must be integers"),
        (dict(cache_salt=5), "cache_salt must be a string or None, got 5"),
        (dict(cache_salt=b"a"), "cache_salt must be a string or None, got b'a'"),
        (dict(skip_read="no"), "skip_read must be true or false, got 'no'"),
        (dict(skip_read=1), "skip_read must be true or false, got 1"),
    ],
)
def test_what_a_control_cannot_say_is_named(values, message):
    with pytest.raises(ValueError, match=message):
        CacheControl(**values)


@by_both
def test_a_salt_shares_with_its_like_alone(cache):
    served = engine(cache)
    for salt in (None, "", "a", "b", "\udcff"):
        assert hit_of(served, cache_salt=salt).joint == 0, salt
    for salt in (None, "", "a", "b", "\udcff"):
        assert hit_of(served, cache_salt=salt).joint == 96, salt


@by_both
def test_who_skips_reading_leaves_as_much_as_others(cache):
    served = engine(cache)
    for _ in range(2):
        hit = hit_of(served, skip_read=True)
        assert (hit.joint, hit.token_hit, hit.lower) == (0, 0, Lower.NO_REUSE)
    assert served.totals.prefill_tokens == 200
    assert hit_of(served).joint == 96


@by_both
@pytest.mark.parametrize(
    "named, kept",
    [
        ([], [64, 96]),
        ([37], [32, 64, 96]),
        ([16, 31, 48], [16, 48, 64, 96]),
        ([64, 96], [64, 96]),
        ([15], [64, 96]),  # less than a page
        ([100, 5000], [64, 96]),  # 96, and none beyond the prompt
    ],
)
def test_a_named_boundary_is_floored_to_the_page_and_kept(cache, named, kept):
    served = engine(cache)
    hit_of(served, checkpoint_at=named)
    assert checkpoints(served) == kept
    for boundary in kept:
        hit = hit_of(served, [*PROMPT[:boundary], 9])
        assert hit.joint == boundary


@by_both
def test_where_a_named_boundary_is_kept_is_told(cache):
    """Decision 31. Below a hit nothing is computed, so nothing is kept that is not there."""
    served = engine(cache)
    named = CacheControl(checkpoint_at=[37, 15, 5000, 64])

    def told(control=named):
        (output,) = served.generate([PROMPT], SamplingParams(max_tokens=1), control)
        return output.outputs[0].checkpoint_at

    assert told(None) == {}
    assert told() == {37: None, 15: None, 5000: None, 64: 64}
    served.cache.clear()
    assert told() == {37: 32, 15: None, 5000: None, 64: 64}
    assert told() == {37: 32, 15: None, 5000: None, 64: 64}


@pytest.mark.parametrize("cache, compat", [("radix", "sglang"), ("blocks", "vllm")])
def test_rules_without_named_boundaries_refuse_them(cache, compat):
    rules = dict(prefix_cache=cache, cache_options=CacheOptions(compat=compat))
    served = oracle_engine(state_slots=60, kv_pages=60, **rules)
    with pytest.raises(
        ValueError, match=f"checkpoint_at is given, but the rules of compat '{compat}'"
    ):
        served.generate([PROMPT], None, CacheControl(checkpoint_at=[32]))


@by_both
def test_a_boundary_named_in_what_is_read_already_is_no_trouble(cache):
    """It lies below the resume: the next to compute it keeps it."""
    served = engine(cache)
    hit_of(served)
    assert hit_of(served, checkpoint_at=[32]).joint == 96
    assert checkpoints(served) == [64, 96]
    assert hit_of(served, checkpoint_at=[32], skip_read=True).joint == 0
    assert checkpoints(served) == [32, 64, 96]


@by_both
def test_every_sample_of_a_request_is_under_its_control(cache):
    served = engine(cache)
    params = SamplingParams(n=3, max_tokens=1, temperature=1.0, seed=1, ignore_eos=True)
    served.generate([PROMPT], params, CacheControl(cache_salt="a"))
    assert hit_of(served).token_hit == 0
    (output,) = served.generate([PROMPT], params, CacheControl(cache_salt="a"))
    assert [own.cached_tokens for own in output.outputs] == [96] * 3


def test_without_a_prefix_cache_it_has_no_effect():
    served = oracle_engine(state_slots=2, kv_pages=20)
    for _ in range(2):
        hit = hit_of(served, cache_salt="a", checkpoint_at=[32])
        assert (hit.joint, hit.lower) == (0, Lower.NO_REUSE)


@pytest.mark.parametrize("manager", ["radix", "blocks"])
def test_a_named_boundary_is_said_to_be_kept_only_if_it_is(manager):
    def ask(engine, ids, *named):
        control = CacheControl(checkpoint_at=named)
        (own,) = engine.generate([ids], SamplingParams(temperature=0, max_tokens=1), control)
        return own.outputs[0]

    prompt = list(range(3, 103))
    roomy = Engine.from_pretrained("nano", prefix_cache=manager, state_slots=8, kv_pages=40)
    ask(roomy, prompt)
    late = ask(roomy, prompt, 32)  # inside of what it reads, where nobody has kept a state
    assert (late.cached_tokens, late.checkpoint_at) == (96, {32: None})
    assert ask(roomy, prompt[:40]).cached_tokens == 0
    assert ask(roomy, prompt[:40], 32).checkpoint_at == {32: 32}
    tight = Engine.from_pretrained("nano", prefix_cache=manager, state_slots=1, kv_pages=40)
    assert ask(tight, prompt, 32).checkpoint_at == {32: None}
    assert ask(tight, prompt[:40]).cached_tokens == 0
