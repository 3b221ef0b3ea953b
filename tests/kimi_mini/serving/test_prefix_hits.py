"""A hit gives what a cold run gives: trees and blocks, by our rules and by the engines' own.

float64: tokens, logprobs and raw logits equal those of the stateless model, whatever the pieces.
float32: the same bits, where one request runs alone and the cold run, the hit and the run that
wrote the checkpoint are cut at that boundary and into the same pieces (decision 9).
"""

import functools
import math
import random
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch

from kimi_mini import Engine, KimiForCausalLM
from tests.kimi_mini.serving.reuse import (
    BACKENDS,
    BLOCKS,
    TREES,
    Rules,
    a_few,
    assert_all_comes_back,
    greedy,
    hybrid_model,
    reusing,
    run,
    unit_of,
)
from tests.kimi_mini.serving.witness import Run, Truth, Witness, assert_as_cold, watched


class Case(NamedTuple):
    """grid: of a tree's states, or tokens of a state block. piece: tokens of one step. others: of
    the cache's options."""

    rules: Rules
    page: int
    grid: int
    piece: int
    backend: str
    kernel_chunk: int = 16
    others: tuple[tuple[str, object], ...] = ()

    def __str__(self) -> str:
        kernel = self.backend + ("" if self.kernel_chunk == 16 else str(self.kernel_chunk))
        others = "".join(f"-{name}={value}" for name, value in self.others)
        return f"{kernel}-{self.rules}-page{self.page}-grid{self.grid}-piece{self.piece}{others}"

    def model(self, dtype: torch.dtype = torch.float64) -> KimiForCausalLM:
        return hybrid_model(dtype, backend=self.backend, kernel_chunk=self.kernel_chunk)

    def engine(self, dtype: torch.dtype = torch.float64) -> Engine:
        tracked = {} if self.rules.blocks else dict(track_interval=self.page)
        return reusing(
            self.model(dtype), self.rules, page=self.page, grid=self.grid,
            prefill_chunk=self.piece, state_slots=12, kv_pages=-(-900 // self.page),
            **tracked | dict(self.others),
        )  # fmt: skip

    @property
    def decoded(self) -> bool:
        """Whether states of what is decoded are kept, too."""
        return not self.rules.blocks or dict(self.others).get("retention", 0) != 0


@functools.cache
def truth_of(model: KimiForCausalLM) -> Truth:
    return Truth(model)


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
    Case(rules, page, grid, odd_piece(rules, page, grid), backend)
    for rules in TREES
    for page in pages_of(rules)
    for grid in GRIDS
    for backend in BACKENDS
]
BLOCK_CASES = [
    Case(
        rules, page, block, odd_piece(rules, page, block), backend,
        others=(("retention", retention),),
    )
    for rules in BLOCKS
    for page in pages_of(rules)
    for block in GRIDS
    for retention in (0, "none", math.lcm(page, block))
    for backend in BACKENDS
]  # fmt: skip
# hashes finer than what divides all blocks
FINE_CASES = [
    Case(
        rules, page, block, odd_piece(rules, page, block), backend,
        others=(("hash_unit", unit), kept),
    )
    for rules in BLOCKS
    for page, block, unit in [(16, 64, 8), (48, 64, 4), (16, 48, 2)]
    for kept in [("retention", "none"), ("retention", 0)]
    for backend in BACKENDS
]  # fmt: skip
KERNEL_64 = [
    Case(Rules("extra_buffer"), 16, 48, 40, "torch", 64),
    Case(Rules("extra_buffer_lazy"), 48, 16, 50, "torch", 64),
    Case(Rules("no_buffer"), 1, 64, 33, "torch", 64),
    Case(Rules("blocks"), 16, 48, 40, "torch", 64),
    Case(Rules("blocks", "vllm"), 48, 16, 80, "torch", 64),
]
# steps that meet every backend, page, grid and retention
CASES = [
    *a_few(TREE_CASES, 13),
    *a_few(BLOCK_CASES, 23),
    *a_few(FINE_CASES, 13),
    *a_few(KERNEL_64, 3),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_and_logits_of_a_hit_are_those_of_a_cold_run(case):
    """Prompts of n * page - 1, n * page and n * page + 1 tokens, each the beginning of the next,
    with others in between; then the conversation goes on, and once more from its middle."""
    engine, truth = case.engine(), truth_of(case.model())
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


# --- float32, bit by bit --------------------------------------------------------------------------

# pieces end on every grid there is, so that what is cut alike needs no help
IDENTICAL = [
    Case(rules, page, grid, math.lcm(page, grid, 16), backend)
    for i, rules in enumerate(TREES)
    for page, grid in [(1, GRIDS[i % 3]), (16, 48), (48, 64)]
    if page in pages_of(rules)
    for backend in BACKENDS
]
IDENTICAL += [
    Case(rules, page, block, math.lcm(page, block, 16), backend, others=(("retention", retention),))
    for rules in BLOCKS
    for page, block, retention in [(16, 16, 0), (16, 48, "none"), (48, 16, 48), (48, 64, "none")]
    for backend in BACKENDS
]
# Tokens behind the last cut: the prompt ends on it, off a page, on a page; where hits are finer, on
# the cut, or there would be a later boundary that the cold run knows nothing of.
TAILS = (1, 5, 16)


def cold_engine(case: Case, cuts: Sequence[int] = ()) -> Engine:
    """Without a prefix cache; pieces end at `cuts`, too."""
    engine = Engine(
        case.model(torch.float32), page=case.page, prefill_chunk=case.piece, state_slots=1,
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


@pytest.mark.parametrize("case", a_few(IDENTICAL, 5), ids=str)
def test_a_hit_gives_the_bits_of_a_cold_run_that_is_cut_alike(case):
    """A, B, A without reading, A, and another that parts from A at the boundary."""
    engine = case.engine(torch.float32)
    cut, tail = 2 * case.piece, min(TAILS[IDENTICAL.index(case) % 3], unit_of(engine))
    prompt, other = tokens(1, cut + tail), tokens(2, case.piece + 7)
    branch = [*prompt[:cut], *tokens(3, 9)]
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


@pytest.mark.parametrize("case", a_few([c for c in IDENTICAL if c.decoded], 5), ids=str)
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
