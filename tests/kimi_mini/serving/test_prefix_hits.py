"""A hit gives what a cold run gives: trees and blocks, by our rules and by the engines' own.

float64: tokens, logprobs and raw logits equal those of the stateless model, whatever the pieces.
float32: the same bits, where one request runs alone and the cold run, the hit and the run that
wrote the checkpoint are cut at that boundary and into the same pieces (decision 9).
"""

import math
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch

from cache.blocks.groups import StateGroup
from cache.blocks.manager import BlockCache
from cache.pools.allocator import OwnershipError
from kimi_mini import Engine
from tests.kimi_mini.serving.reuse import (
    BLOCKS,
    DEFAULT,
    RULES,
    STRATEGIES,
    TREES,
    Rules,
    Run,
    Truth,
    Witness,
    a_few,
    assert_all_comes_back,
    assert_as_cold,
    checkpoints,
    greedy,
    hybrid_model,
    reusing,
    run,
    watched,
)

TRUTH = {kernel_chunk: Truth(hybrid_model(kernel_chunk=kernel_chunk)) for kernel_chunk in (16, 64)}


class Case(NamedTuple):
    """grid: of a tree's states, or tokens of a state block. piece: tokens of one step. others: of
    the cache's options."""

    rules: Rules
    page: int
    grid: int
    piece: int
    kernel_chunk: int = 16
    others: tuple[tuple[str, object], ...] = ()

    def __str__(self) -> str:
        kernel = "" if self.kernel_chunk == 16 else f"-kernel{self.kernel_chunk}"
        others = "".join(f"-{name}={value}" for name, value in self.others)
        return f"{self.rules}-page{self.page}-grid{self.grid}-piece{self.piece}{kernel}{others}"

    def engine(self, dtype: torch.dtype = torch.float64) -> Engine:
        tree = dict(state_chunk=self.grid, track_interval=self.page)
        own = dict(state_block=self.grid) if self.rules.blocks else tree
        return reusing(
            hybrid_model(dtype, kernel_chunk=self.kernel_chunk), self.rules, page=self.page,
            prefill_chunk=self.piece, state_slots=12, kv_pages=-(-900 // self.page),
            **own | dict(self.others),
        )  # fmt: skip

    @property
    def decoded(self) -> bool:
        """Whether states of what is decoded are kept, too."""
        return not self.rules.blocks or dict(self.others).get("retention", 0) != 0


def pages_of(rules: Rules) -> tuple[int, ...]:
    return (1,) if rules.name == "no_buffer" else (1, 16, 48)


def tokens(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(259) for _ in range(count)]


# --- float64 --------------------------------------------------------------------------------------


def odd_piece(rules: Rules, page: int, grid: int) -> int:
    """Pieces that divide neither page nor grid. The engine's tracked strategies keep nothing of a
    piece that is shorter than their grid."""
    if rules.compat is None or rules.name == "no_buffer":
        return {1: 37, 16: 21, 48: 40}[page]
    return math.lcm(max(grid, page), page) + 5


GRIDS = (16, 48, 64)
TREE_CASES = [
    Case(rules, page, grid, odd_piece(rules, page, grid))
    for rules in TREES
    for page in pages_of(rules)
    for grid in GRIDS
]
BLOCK_CASES = [
    Case(rules, page, block, odd_piece(rules, page, block), others=(("retention", retention),))
    for rules in BLOCKS
    for page in pages_of(rules)
    for block in GRIDS
    for retention in (0, "none", math.lcm(page, block))
]
# hashes finer than what divides all blocks
FINE_CASES = [
    Case(rules, page, block, odd_piece(rules, page, block), others=(("hash_unit", unit), kept))
    for rules in BLOCKS
    for page, block, unit in [(16, 64, 8), (48, 64, 4), (16, 48, 2)]
    for kept in [("retention", "none"), ("retention", 0)]
]
KERNEL_64 = [
    Case(Rules("extra_buffer"), 16, 48, 40, 64),
    Case(Rules("extra_buffer_lazy"), 48, 16, 50, 64),
    Case(Rules("no_buffer"), 1, 64, 33, 64),
    Case(Rules("blocks"), 16, 48, 40, 64),
    Case(Rules("blocks", "vllm"), 48, 16, 80, 64),
]
# steps that meet every page, grid and retention
CASES = [
    *a_few(TREE_CASES, 5),
    *a_few(BLOCK_CASES, 8),
    *a_few(FINE_CASES, 5),
    *a_few(KERNEL_64, 2),
]


def unit_of(engine: Engine) -> int:
    """What hits of our rules are multiples of."""
    cache = engine.cache
    return cache.sizes.hits if isinstance(cache, BlockCache) else cache.unit


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_and_logits_of_a_hit_are_those_of_a_cold_run(case):
    """Prompts of n * page - 1, n * page and n * page + 1 tokens, each the beginning of the next,
    with others in between; then the conversation goes on, and once more from its middle."""
    engine, truth = case.engine(), TRUTH[case.kernel_chunk]
    witness = Witness(engine, truth=truth)
    chunk = max(case.grid, case.page)
    top = max(64, case.page * 2, math.lcm(chunk, case.page) + case.page)
    long, other = tokens(1, top + 1), tokens(2, 70)
    seen = []

    def add(prompt: list[int], count: int = 3) -> list[int]:
        request = engine.add_request(prompt, greedy(count))
        (own,) = run(engine, request)
        assert_as_cold(request, witness, truth)
        assert own.cached_tokens < len(prompt)
        seen.append(own.cached_tokens)
        return [*prompt, *own.token_ids]

    for prompt in (long[: top - 1], other, long[:top], long, long[:top], other[:35] + long[35:60]):
        add(prompt)
    more = [*long, *tokens(6, -len(long) % case.page + case.page - 3)]
    talk = add(more, 6)  # beyond the next boundary
    talk = add([*talk, *tokens(3, 9)], 9)
    talk = add([*talk, *tokens(4, 9)])
    add([*talk[: top + 5], *tokens(5, 30)])
    assert witness.restored == [boundary for boundary in seen if boundary]
    assert sum(boundary > 0 for boundary in seen) >= 3, seen
    if case.rules.compat is None:
        unit = unit_of(engine)
        least = (n // unit * unit for n in (top - 2, top - 1, top - 1))
        assert all(hit >= bound for hit, bound in zip(seen[2:5], least, strict=True)), seen
        assert seen[8] >= seen[7] >= seen[6] >= top // unit * unit
    assert_all_comes_back(engine)


def others_read_while_the_writer_goes_on(engine: Engine, witness: Witness) -> None:
    """A writes and decodes on; meanwhile four resume from what it left, two of them with the same
    prompt at once, sampled; then A's prompt and all that it said, once more."""
    prompt = tokens(1, 100)
    writer = engine.add_request(prompt, greedy(24))
    while engine.has_unfinished and len(writer.sequences[0].output_ids) < 3:
        engine.step()
    assert checkpoints(engine), "nothing to read"
    readers = [
        engine.add_request(prompt, greedy(15, n=2, temperature=1.0, seed=7)),
        engine.add_request([*prompt[:97], *tokens(5, 9)], greedy(12)),
        engine.add_request([*prompt, *tokens(6, 1)], greedy(12)),
    ]
    run(engine, writer, *readers)
    talk = [*prompt, *writer.output().outputs[0].token_ids]
    readers += [engine.add_request(ids, greedy(6)) for ids in (prompt, [*talk, 9], talk[:-1])]
    run(engine)
    for request in (writer, *readers):
        assert_as_cold(request, witness, TRUTH[16])
    hits = [own.cached_tokens for request in readers for own in request.output().outputs]
    assert all(hits), hits
    assert sorted(witness.restored) == sorted(hits)
    assert hits[-2] > 100, "nothing of what was decoded"
    assert_all_comes_back(engine)


def roomy(rules: Rules) -> Engine:
    tree = dict(state_chunk=16, track_interval=16)
    own = dict(state_block=16, hash_unit=8, retention="none") if rules.blocks else tree
    return reusing(
        None, rules, prefill_chunk=80, state_slots=30, kv_pages=1600 // rules.page, **own
    )  # fmt: skip


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_checkpoints_stay_what_they_were_while_many_read_them_and_go_on(rules):
    engine = roomy(rules)
    others_read_while_the_writer_goes_on(engine, Witness(engine, truth=TRUTH[16]))


# --- float32, bit by bit --------------------------------------------------------------------------

# pieces end on every grid there is, so that what is cut alike needs no help
IDENTICAL = [
    Case(rules, page, grid, math.lcm(page, grid, 16))
    for i, rules in enumerate(TREES)
    for page, grid in [(1, GRIDS[i % 3]), (16, 48), (48, 64)]
    if page in pages_of(rules)
]
IDENTICAL += [
    Case(rules, page, block, math.lcm(page, block, 16), others=(("retention", retention),))
    for rules in BLOCKS
    for page, block, retention in [(16, 16, 0), (16, 48, "none"), (48, 16, 48), (48, 64, "none")]
]
TAILS = (1, 5, 16)  # tokens behind the last cut: the prompt ends on it, off a page, on a page


def cold_engine(case: Case, cuts: Sequence[int] = ()) -> Engine:
    """Without a prefix cache; pieces end at `cuts`, too."""
    engine = Engine(
        hybrid_model(torch.float32), page=case.page, prefill_chunk=case.piece, state_slots=1,
        kv_pages=-(-900 // case.page), poison=True, audit=True,
    )  # fmt: skip
    plan = engine.cache.plan

    def up_to_a_cut(lease, want, max_chunk=None):
        room = (cut - lease.computed for cut in cuts if cut > lease.computed)
        return plan(lease, min(want, next(room, want)), max_chunk)

    engine.cache.plan = up_to_a_cut
    return engine


def assert_same_bits(hit: Run, cold: Run) -> None:
    first = hit.own.cached_tokens
    assert hit.pieces == [piece for piece in cold.pieces if piece[0] >= first]
    assert hit.pieces[0][0] == first
    assert hit.own.token_ids == cold.own.token_ids
    assert hit.own.logprobs == cold.own.logprobs
    assert len(hit.logits) == len(hit.own.token_ids)
    for position, row in hit.logits.items():
        assert torch.equal(row, cold.logits[position]), position


@pytest.mark.parametrize("case", a_few(IDENTICAL, 2), ids=str)
def test_a_hit_gives_the_bits_of_a_cold_run_that_is_cut_alike(case):
    """A, B, A without reading, A, and another that parts from A at the boundary."""
    cut, tail = 2 * case.piece, TAILS[IDENTICAL.index(case) % 3]
    prompt, other = tokens(1, cut + tail), tokens(2, case.piece + 7)
    branch = [*prompt[:cut], *tokens(3, 9)]
    engine = case.engine(torch.float32)
    witness = Witness(engine)
    cold = {
        len(ids): watched(Witness(cold_engine(case)), ids, greedy(4))
        for ids in (prompt, other, branch)
    }
    wanted = [
        (prompt, 0, {}), (other, 0, {}), (prompt, 0, {"skip_read": True}), (prompt, cut, {}),
        (branch, cut, {}),
    ]  # fmt: skip
    for ids, hit, control in wanted:
        got = watched(witness, ids, greedy(4), **control)
        assert got.own.cached_tokens == hit
        assert_same_bits(got, cold[len(ids)])
    assert_all_comes_back(engine)


@pytest.mark.parametrize("case", a_few([c for c in IDENTICAL if c.decoded], 3), ids=str)
def test_a_hit_on_what_was_decoded_gives_the_bits_of_a_cold_run_token_by_token(case):
    """What decode wrote one token at a time is prefilled so by the cold run."""
    prompt = tokens(1, 2 * case.piece - 9)
    engine = case.engine(torch.float32)
    witness = Witness(engine)
    writer = watched(witness, prompt, greedy(11))  # beyond the cut
    watched(witness, tokens(2, 40), greedy(3))
    again = [*prompt, *writer.own.token_ids, *tokens(3, 7)]
    hit = watched(witness, again, greedy(5))
    assert hit.own.cached_tokens > len(prompt), "nothing of what was decoded"
    cuts = [end for _, end in writer.pieces if end <= hit.own.cached_tokens]
    cold = watched(Witness(cold_engine(case, cuts)), again, greedy(5))
    assert_same_bits(hit, cold)
    assert_all_comes_back(engine)


# --- what these tests are worth -------------------------------------------------------------------


def no_copy(engine: Engine) -> None:
    engine.cache.storage.states[0].copy = lambda *_: None


def copy_without_conv(engine: Engine) -> None:
    recurrent = engine.memory.state.recurrent

    def copy(source: int, destination: int) -> None:
        recurrent[:, destination] = recurrent[:, source]

    engine.cache.storage.states[0].copy = copy


def copy_of_one_layer(engine: Engine) -> None:
    def copy(source: int, destination: int) -> None:
        for tensor in engine.cache.storage.states[0].tensors:
            tensor[:, destination] = tensor[:1, source]

    engine.cache.storage.states[0].copy = copy


def one_boundary_off(engine: Engine) -> None:
    take_slot = engine.cache._take_slot

    def off(lease):
        take_slot(lease)
        if lease.copies:
            above = (node.state for node in lease.receipt.node.parent.path())
            state = next((state for state in above if state is not None), lease.copies[0].source)
            lease.copies = (lease.copies[0]._replace(source=state),)

    engine.cache._take_slot = off


def live_slot_published(engine: Engine) -> None:
    insert = engine.cache._insert

    def live(lease, boundary, slot):
        if boundary == lease.computed and slot != lease.slots[0]:
            engine.cache.storage.states[0].free([slot])
            slot = lease.slots[0]
        return insert(lease, boundary, slot)

    engine.cache._insert = live


def partly_filled_page_shared(engine: Engine) -> None:
    restore = engine.cache._restore

    def shared(lease):
        wait = restore(lease)
        node = lease.receipt and lease.receipt.node
        if node and node.children:
            lease.pages[0].append(next(iter(node.children.values())).pages[0])
        return wait

    engine.cache._restore = shared


def window_of_another(engine: Engine) -> None:
    """Exports keep the state of their boundary, but the conv state of the end of the piece."""
    run_plans = engine.executor.run

    def run(plans, wanted):
        logits = run_plans(plans, wanted)
        for plan in plans:
            for export in plan.exports:
                conv = engine.memory.state.conv
                conv[:, export.slots[0]] = conv[:, plan.slots[0]]
        return logits

    engine.executor.run = run


def no_copy_of_rows(engine: Engine) -> None:
    engine.cache.storage.pages[0].copy = lambda *_: None


def states_of(engine: Engine) -> StateGroup:
    (states,) = (group for group in engine.cache.groups if isinstance(group, StateGroup))
    return states


def state_of_another_boundary(engine: Engine) -> None:
    find, states = engine.cache.coordinator.find, states_of(engine)

    def off(*args):
        found = find(*args)
        for _, boundary, block in states.pool.entries():
            if found.joint and block.pool.unit == "slot" and boundary != found.joint:
                found.columns[states.number][-1] = block
        return found

    engine.cache.coordinator.find = off


def kept_state_overwritten(engine: Engine) -> None:
    states_of(engine).pool.writable = lambda block: True


ANYWHERE = [no_copy, copy_without_conv, copy_of_one_layer, window_of_another]
FAULTS = [
    *((DEFAULT, fault) for fault in (*ANYWHERE, one_boundary_off)),
    *((BLOCKS[0], fault) for fault in (*ANYWHERE, no_copy_of_rows, state_of_another_boundary)),
]
UNDER_WAY = [
    *((Rules(strategy), live_slot_published) for strategy in STRATEGIES),
    *((Rules(strategy), partly_filled_page_shared) for strategy in STRATEGIES),
    (BLOCKS[0], kept_state_overwritten),
]


def named(value: Rules | Callable) -> str:
    return str(value) if isinstance(value, Rules) else value.__name__


WRONG = [(rules, fault, strict) for strict in (True, False) for rules, fault in FAULTS]


def wrong_id(wrong: tuple[Rules, Callable, bool]) -> str:
    rules, fault, strict = wrong
    return f"{rules}-{fault.__name__}-{'states' if strict else 'answers'}"


@pytest.mark.parametrize("wrong", a_few(WRONG, 2), ids=wrong_id)
def test_a_wrong_restore_shows_in_what_is_compared(wrong):
    """By the witness, and, were it blind, by tokens and logits alone."""
    rules, fault, strict = wrong
    engine = roomy(rules)
    fault(engine)
    with pytest.raises(AssertionError):
        others_read_while_the_writer_goes_on(engine, Witness(engine, strict=strict))


@pytest.mark.parametrize("rules, fault", UNDER_WAY, ids=named)
def test_a_shared_place_that_is_written_shows(rules, fault):
    """In the books where they can tell, else as I-12."""
    engine = roomy(rules)
    fault(engine)
    with pytest.raises((AssertionError, OwnershipError, ValueError)):
        others_read_while_the_writer_goes_on(engine, Witness(engine))
