"""Random life under the contract. Every manager goes through the same machine: add it to CACHES."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from cache.blocks.manager import BlockCache
from cache.blocks.vllm import VLLMCache
from cache.plain import PlainCache
from cache.policy.admission import Marconi, SecondHit
from cache.policy.cost_model import PrefixFlops
from cache.policy.eviction import FlopAware
from cache.pools.storage import Storage
from cache.radix.manager import RadixCache
from cache.radix.sglang import SGLangCache
from cache.state_cache import StateCache
from tests.cache.driving import KINDS
from tests.cache.machine import QUICK, ContractMachine, machine_of, tiny
from tests.cache.memory import Shape

BOTH = ("tokens", "states")


class Case(NamedTuple):
    """kinds: what is reused, "tokens" and "states", if anything is. examples: of the default run,
    and of the slow one. least: how often each kind of call must have happened in that."""

    make: Callable
    shapes: st.SearchStrategy[Shape]
    kinds: tuple[str, ...] = ()
    examples: tuple[int, int] = (10, 300)
    least: int = 10

    def machine(self) -> type[ContractMachine]:
        return machine_of(self.make, self.shapes, bool(self.kinds))


def one_of_each(slots: int, *pages: int) -> st.SearchStrategy[Shape]:
    """Pools of at least so many slots, with pages of such sizes."""
    page = st.tuples(st.sampled_from([6, 8, 12, 16]), st.sampled_from(pages))
    return st.builds(Shape, st.tuples(page), st.tuples(st.integers(slots, slots + 5)))


def reusing(make: Callable, shapes: st.SearchStrategy[Shape], **options) -> Case:
    return Case(partial(make, state_chunk=4, **options), shapes, BOTH)


@st.composite
def groups(draw: st.DrawFn, attention: range, states: range) -> Shape:
    """So many groups of each kind, of unequal blocks and sizes."""
    page = st.tuples(st.sampled_from([4, 6, 8, 12]), st.sampled_from([2, 3, 4, 8]))
    pages = draw(st.lists(page, min_size=attention[0], max_size=attention[-1]))
    slots = draw(st.lists(st.integers(1, 6), min_size=states[0], max_size=states[-1]))
    return Shape(tuple(pages), tuple(slots))


@st.composite
def shared(draw: st.DrawFn, attention: range, states: range) -> Shape:
    """The same with one size for all pools, as the engine's one free list has it."""
    size = draw(st.integers(18, 30))
    page = st.tuples(st.just(size), st.sampled_from([2, 4, 8]))
    pages = draw(st.lists(page, min_size=attention[0], max_size=attention[-1]))
    return Shape(tuple(pages), (size,) * draw(st.sampled_from(states)))


def blocks(
    make: Callable,
    shapes: st.SearchStrategy[Shape],
    *state_blocks: int,
    kinds: tuple[str, ...] = BOTH,
    **options,
) -> Case:
    """state_blocks: of the state groups there may be."""

    def cache(storage: Storage) -> BlockCache:
        return make(storage, state_block=state_blocks[: len(storage.states)], **options)

    return Case(cache, shapes, kinds)


def choosy(make: Callable, admission: Callable) -> Callable:
    """Under policies, which are each cache's own."""

    def cache(storage: Storage, **options) -> StateCache:
        eviction = FlopAware(PrefixFlops(1000, 1), state_bytes=4096, row_bytes=32, alpha=1.0)
        return make(storage, admission=admission(), eviction=eviction, **options)

    return cache


CACHES = {
    "plain": Case(PlainCache, tiny(), examples=(40, 3000), least=100),
    "radix": reusing(RadixCache, one_of_each(1, 1, 3, 4)),
    "radix, coarse exports": reusing(RadixCache, one_of_each(1, 1, 3), export_alignment=4),
    "radix, lazy, capped": reusing(
        RadixCache, one_of_each(1, 1, 2, 4), strategy="extra_buffer_lazy", path_cap=2
    ),
    "radix, no buffer": reusing(RadixCache, one_of_each(1, 1), strategy="no_buffer"),
    "radix, second hit": reusing(choosy(RadixCache, SecondHit), one_of_each(2, 1, 3)),
    "radix, marconi": reusing(choosy(RadixCache, Marconi), one_of_each(1, 1, 4)),
    "sglang, capped": reusing(SGLangCache, one_of_each(3, 1, 2, 4), interval=4, path_cap=2),
    "sglang, one track": reusing(SGLangCache, one_of_each(2, 1, 4), interval=8, two_tracks=False),
    "sglang, lazy": reusing(
        SGLangCache, one_of_each(2, 1, 2), interval=4, strategy="extra_buffer_lazy"
    ),
    "sglang, no buffer": reusing(SGLangCache, one_of_each(1, 1), strategy="no_buffer"),
    "blocks": blocks(BlockCache, one_of_each(1, 2, 4, 8), 8, hash_unit=2),
    "blocks, coarse exports": blocks(BlockCache, one_of_each(1, 2, 4), 8, export_alignment=4),
    "blocks, dense": blocks(BlockCache, one_of_each(1, 4), 4, retention=None),
    "blocks, interval": blocks(BlockCache, one_of_each(1, 2, 4), 4, retention=8),
    "blocks, many groups": blocks(BlockCache, groups(range(1, 3), range(1, 4)), 4, 8, 6),
    "blocks, second hit": blocks(choosy(BlockCache, SecondHit), one_of_each(2, 2, 4), 4),
    "blocks, marconi": blocks(choosy(BlockCache, Marconi), one_of_each(1, 1, 4), 8, hash_unit=1),
    "blocks, many groups, marconi": blocks(
        choosy(BlockCache, Marconi), groups(range(1, 3), range(1, 3)), 4, 8
    ),
    "blocks, one kind": blocks(BlockCache, groups(range(2), range(1, 3)), 4, 8),
    "blocks, rows alone": blocks(BlockCache, groups(range(1, 3), range(1)), kinds=BOTH[:1]),
    "vllm": blocks(VLLMCache, shared(range(1, 2), range(1, 2)), 8, hash_unit=2),
    "vllm, dense": blocks(VLLMCache, shared(range(1, 2), range(1, 2)), 8, retention=None),
    "vllm, inner checkpoints": blocks(
        VLLMCache, shared(range(1, 2), range(1, 3)), 4, 4, inner_checkpoint=2, hash_unit=2
    ),
    "vllm, many groups": blocks(VLLMCache, shared(range(1, 3), range(1, 4)), 4, 8, 4),
    "vllm, states alone": blocks(VLLMCache, shared(range(1), range(1, 3)), 4, 8, kinds=BOTH[1:]),
    "vllm, rows alone": blocks(VLLMCache, shared(range(1, 2), range(1)), kinds=BOTH[:1]),
}
SAMPLE = [
    "plain", "radix", "radix, coarse exports", "radix, no buffer", "sglang, one track",
    "sglang, lazy", "blocks", "blocks, interval", "blocks, many groups", "vllm",
    "vllm, inner checkpoints", "vllm, rows alone",
]  # fmt: skip
LONG = settings(QUICK, stateful_step_count=100, derandomize=False)


def assert_reuse(machine: type[ContractMachine], kinds: tuple[str, ...], least: int) -> None:
    """Hits and evictions have happened, so that the run has said something about them."""
    happened = machine.happened
    if kinds:
        assert happened["joint"] >= least, happened
    if kinds == BOTH:
        assert happened["token_hit"] > happened["joint"], happened
    for kind in kinds:
        assert happened[f"evicted {kind}"] >= least, happened


@pytest.mark.parametrize("name", SAMPLE)
def test_whatever_is_called_in_whatever_order_the_books_are_right_after_every_call(name):
    case = CACHES[name]
    machine = case.machine()
    run_state_machine_as_test(machine, settings=settings(QUICK, max_examples=case.examples[0]))
    assert_reuse(machine, case.kinds, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", CACHES)
def test_the_same_for_minutes(name):
    case = CACHES[name]
    machine = case.machine()
    run_state_machine_as_test(machine, settings=settings(LONG, max_examples=case.examples[1]))
    rare = {kind for kind in KINDS if machine.happened[kind] < case.least}
    assert not rare, f"these minutes have proved little: {rare} of {machine.happened}"
    assert_reuse(machine, case.kinds, 500)
