"""Which states are worth storing (serving.md 4.11, 9.12)."""

import pytest

from cache.policy.admission import Candidate, Marconi, Occasion, SecondHit


def state(prefix="p", visitor=1, occasion=Occasion.PERIODIC, boundary=64):
    return Candidate(boundary, occasion, prefix, visitor)


def test_m07_the_second_visitor_of_a_prefix_stores_it():
    policy = SecondHit()
    assert [policy.worth_keeping(state(visitor=n)) for n in (1, 2, 3)] == [False, True, True]


def test_who_asks_again_is_no_second_visitor():
    """A plan may wait and be made again."""
    policy = SecondHit()
    assert [policy.worth_keeping(state(visitor=n)) for n in (1, 1, 1)] == [False] * 3
    assert [policy.worth_keeping(state(visitor=n)) for n in (2, 2)] == [True] * 2


def test_prefixes_do_not_vouch_for_each_other():
    policy = SecondHit()
    assert not policy.worth_keeping(state("p", 1))
    assert not policy.worth_keeping(state("q", 2))


def test_a_junction_is_a_second_hit_by_itself():
    policy = SecondHit()
    assert policy.worth_keeping(state(occasion=Occasion.JUNCTION))
    assert policy.worth_keeping(state(visitor=2))


def test_only_so_many_prefixes_are_remembered_the_latest_met():
    policy = SecondHit(memory=2)
    for prefix in "abab":
        policy.worth_keeping(state(prefix, visitor=1))
    policy.worth_keeping(state("a", visitor=1))
    policy.worth_keeping(state("c", visitor=1))  # b goes
    assert len(policy) == 2
    assert policy.worth_keeping(state("a", visitor=2))
    assert not policy.worth_keeping(state("b", visitor=2))


def test_a_memory_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        SecondHit(memory=0)


def test_m06_marconi_stores_the_branch_point_and_the_last_token():
    kept = {o for o in Occasion if Marconi().worth_keeping(state(occasion=o))}
    assert kept == {Occasion.JUNCTION, Occasion.LAST}
