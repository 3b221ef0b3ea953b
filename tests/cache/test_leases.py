"""What passes between the engine and a cache."""

import dataclasses

import pytest

from cache.leases import CacheRequest, Hit, Lease, StepPlan


def test_a_request_does_not_change_with_the_list_it_was_made_from():
    """The engine's list grows with every sample; the identity of a request must not."""
    tokens = [1, 2, 3]
    request = CacheRequest("r", tokens)
    lease = Lease(request, Hit(), ([],), [0])
    tokens.append(4)
    assert request.ids == (1, 2, 3) and lease.tokens == [1, 2, 3]


def test_a_lease_has_a_list_of_its_own():
    request = CacheRequest("r", [1, 2, 3])
    a, b = (Lease(request, Hit(), ([],), [0]) for _ in range(2))
    a.tokens.append(4)
    assert b.tokens == [1, 2, 3] and request.ids == (1, 2, 3)
    assert a != b and len({a, b}) == 2, "two samples of a prompt are two leases"


def test_a_plan_knows_its_tokens_even_after_more_have_become_known():
    lease = Lease(CacheRequest("r", [1, 2, 3, 4]), Hit(), ([1],), [1])
    plan = StepPlan(lease, 1, 3, lease.pages, (1,))
    lease.tokens.append(5)
    assert list(plan.tokens) == [2, 3]
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.end = 4
