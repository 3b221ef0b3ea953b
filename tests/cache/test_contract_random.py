"""Random life under the contract. Every manager goes through the same machine: add it to CACHES."""

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from cache.plain import PlainCache
from tests.cache.driving import KINDS
from tests.cache.machine import QUICK, machine_of

CACHES = {"plain": PlainCache}
LONG = settings(QUICK, max_examples=3000, stateful_step_count=100, derandomize=False)


@pytest.mark.parametrize("name", CACHES)
def test_whatever_is_called_in_whatever_order_the_books_are_right_after_every_call(name):
    run_state_machine_as_test(machine_of(CACHES[name]), settings=QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("name", CACHES)
def test_the_same_for_minutes(name):
    machine = machine_of(CACHES[name])
    run_state_machine_as_test(machine, settings=LONG)
    rare = {kind for kind in KINDS if machine.happened[kind] < 100}
    assert not rare, f"these minutes have proved little: {rare} of {machine.happened}"
