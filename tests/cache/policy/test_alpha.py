"""An alpha that is learnt from the requests (serving.md 4.11)."""

import pytest

from cache.policy.alpha import ALPHAS, LearntAlpha
from cache.policy.cost_model import PrefixFlops
from cache.policy.eviction import Evictable, FlopAware

ANY = [Evictable(0, 8, 1)]


class Rehearsals:
    """Says which alpha is best, and remembers what it was asked."""

    def __init__(self, *best):
        self.best, self.asked = best, []

    def __call__(self, policy, requests):
        self.asked.append((policy.alpha, requests))
        return float(policy.alpha in self.best)


def learner(rehearse, **options):
    return LearntAlpha(FlopAware(PrefixFlops(1, 0), 1, 1), rehearse, **options)


def serve(policy, requests):
    for request in requests:
        policy.saw(request)


def test_alpha_is_0_until_a_window_after_the_first_eviction_is_full():
    rehearse = Rehearsals(0.7)
    policy = learner(rehearse, window=6)
    serve(policy, "abc")
    policy.victim(ANY, 2)
    serve(policy, range(17))
    policy.victim(ANY, 2)  # a later eviction does not open another window
    assert (policy.alpha, policy.learnt, rehearse.asked) == (0, False, [])
    serve(policy, range(17, 17 + 20))
    assert (policy.alpha, policy.learnt) == (0, False)
    policy.saw(37)
    assert (policy.alpha, policy.learnt) == (0.7, True)


def test_one_alpha_is_tried_with_each_request_once_the_window_is_full():
    rehearse = Rehearsals()
    policy = learner(rehearse)
    policy.victim(ANY, 2)
    serve(policy, range(4))
    for tried in range(1, len(ALPHAS) + 1):
        policy.saw(object())
        assert len(rehearse.asked) == tried


def test_every_alpha_is_rehearsed_with_all_that_was_recorded():
    rehearse = Rehearsals()
    policy = learner(rehearse)
    serve(policy, "ab")
    policy.victim(ANY, 2)
    serve(policy, range(10))
    serve(policy, "these are not recorded any more")
    assert rehearse.asked == [(alpha, [*"ab", *range(10)]) for alpha in ALPHAS]
    assert ALPHAS[0] == 0 and ALPHAS[-1] == 2 and len(ALPHAS) == 21


def test_of_equally_good_alphas_the_smallest_is_taken():
    policy = learner(Rehearsals(0.3, 1.2))
    policy.victim(ANY, 2)
    serve(policy, range(5 + 20))
    assert policy.alpha == 0.3


def test_it_learns_once():
    rehearse = Rehearsals(0.3)
    policy = learner(rehearse)
    policy.victim(ANY, 2)
    serve(policy, range(50))
    assert len(rehearse.asked) == len(ALPHAS)


def test_nothing_is_learnt_without_an_eviction_and_the_record_stays_small():
    rehearse = Rehearsals(0.3)
    policy = learner(rehearse, most=4)
    serve(policy, range(100))
    assert policy.alpha == 0
    policy.victim(ANY, 2)
    serve(policy, range(100, 600))
    assert rehearse.asked[0] == (0, [596, 597, 598, 599])


@pytest.mark.parametrize("window", [4, 16])
def test_a_window_outside_the_papers_is_refused(window):
    with pytest.raises(ValueError, match=f"must be 5 to 15, got {window}"):
        learner(Rehearsals(), window=window)


def test_a_record_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        learner(Rehearsals(), most=0)
