"""Random life under the contract. Every manager goes through the same machine: add it to CACHES."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from cache.plain import PlainCache
from cache.radix.manager import RadixCache
from cache.radix.sglang import SGLangCache
from tests.cache.driving import KINDS
from tests.cache.machine import QUICK, ContractMachine, machine_of, tiny
from tests.cache.memory import Shape


class Case(NamedTuple):
    """examples: of the default run, and of the slow one. least: how often each kind of call must
    have happened in that."""

    make: Callable
    shapes: st.SearchStrategy[Shape]
    reuses: bool
    examples: tuple[int, int] = (15, 300)
    least: int = 10

    def machine(self) -> type[ContractMachine]:
        return machine_of(self.make, self.shapes, self.reuses)


def one_of_each(slots: int, *pages: int) -> st.SearchStrategy[Shape]:
    """Pools of at least so many slots, with pages of such sizes."""
    page = st.tuples(st.sampled_from([6, 8, 12, 16]), st.sampled_from(pages))
    return st.builds(Shape, st.tuples(page), st.tuples(st.integers(slots, slots + 5)))


def reusing(make: Callable, shapes: st.SearchStrategy[Shape], **options) -> Case:
    return Case(partial(make, state_chunk=4, **options), shapes, reuses=True)


CACHES = {
    "plain": Case(PlainCache, tiny(), reuses=False, examples=(100, 3000), least=100),
    "radix": reusing(RadixCache, one_of_each(1, 1, 3, 4)),
    "radix, coarse exports": reusing(RadixCache, one_of_each(1, 1, 3), export_alignment=4),
    "radix, lazy, capped": reusing(
        RadixCache, one_of_each(1, 1, 2, 4), strategy="extra_buffer_lazy", path_cap=2
    ),
    "radix, no buffer": reusing(RadixCache, one_of_each(1, 1), strategy="no_buffer"),
    "sglang, capped": reusing(SGLangCache, one_of_each(3, 1, 2, 4), interval=4, path_cap=2),
    "sglang, one track": reusing(SGLangCache, one_of_each(2, 1, 4), interval=8, two_tracks=False),
    "sglang, lazy": reusing(
        SGLangCache, one_of_each(2, 1, 2), interval=4, strategy="extra_buffer_lazy"
    ),
    "sglang, no buffer": reusing(SGLangCache, one_of_each(1, 1), strategy="no_buffer"),
}
LONG = settings(QUICK, stateful_step_count=100, derandomize=False)


def assert_reuse(machine: type[ContractMachine], least: int) -> None:
    """Hits and evictions have happened, so that the run has said something about them."""
    happened = machine.happened
    assert happened["joint"] >= least and happened["token_hit"] > happened["joint"], happened
    for kind in ("evicted tokens", "evicted states"):
        assert happened[kind] >= least, happened


@pytest.mark.parametrize("name", CACHES)
def test_whatever_is_called_in_whatever_order_the_books_are_right_after_every_call(name):
    case = CACHES[name]
    machine = case.machine()
    run_state_machine_as_test(machine, settings=settings(QUICK, max_examples=case.examples[0]))
    if case.reuses:
        assert_reuse(machine, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", CACHES)
def test_the_same_for_minutes(name):
    case = CACHES[name]
    machine = case.machine()
    run_state_machine_as_test(machine, settings=settings(LONG, max_examples=case.examples[1]))
    rare = {kind for kind in KINDS if machine.happened[kind] < case.least}
    assert not rare, f"these minutes have proved little: {rare} of {machine.happened}"
    if case.reuses:
        assert_reuse(machine, 500)
