"""Greedy and random draws."""

import math

import pytest
import torch

from kimi_mini.serving.sampling import check_temperature, sample


def draw(logits, temperature, seed=0):
    return sample(torch.tensor(logits), temperature, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("temperature", [0, -0.0, 1e-40, 1e-38, 1e-6])
def test_zero_and_tiny_temperatures_are_greedy_with_ties_to_the_lowest_id(temperature):
    """BR-19."""
    assert draw([1.0, 3.0, 3.0, 2.0], temperature) == 1
    assert draw([1e30, 3e38, -math.inf], temperature) == 1


@pytest.mark.parametrize("temperature", [math.nan, math.inf, -1.0, -math.inf])
def test_impossible_temperatures_are_refused(temperature):
    with pytest.raises(ValueError, match="temperature must be 0"):
        check_temperature(temperature)


def test_draws_follow_the_distribution_and_the_seed():
    logits = torch.tensor([0.5, 0.3, 0.2, 0.0]).log()
    generator = torch.Generator().manual_seed(1)
    counts = torch.zeros(4)
    for _ in range(4000):
        counts[sample(logits, 1.0, generator)] += 1
    assert (counts / 4000 - torch.tensor([0.5, 0.3, 0.2, 0.0])).abs().max() < 0.03
    assert [draw([0.1, 0.2, 0.3], 1.0, 7) for _ in range(3)] == [draw([0.1, 0.2, 0.3], 1.0, 7)] * 3


def test_large_logits_do_not_overflow():
    assert draw([3e38, -3e38], 0.5) == 0


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_refused(temperature, bad):
    with pytest.raises(ValueError, match="not finite"):
        draw([1.0, bad, 2.0], temperature)
    with pytest.raises(ValueError, match="not finite"):
        draw([-math.inf, -math.inf], temperature)


def test_a_huge_temperature_is_nearly_uniform():
    assert {draw([5.0, 1.0, -9.0], 1e300, seed) for seed in range(30)} == {0, 1, 2}
