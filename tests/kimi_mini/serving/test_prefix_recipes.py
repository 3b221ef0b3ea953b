"""Faults that users of such software have met (bug_reports.md): prefix caches that are wrong (PFX),
hit rates (HIT), life cycles of pools (LIF), as recipes against the real model.

TOY of the recipes in float64, where COLD is exact: what the model itself gives, from zeros and in
one piece. Ours are the product defaults with the page and the grid that a row names.
"""

import dataclasses
import functools
import random
import sys
from collections.abc import Sequence

import pytest
import torch

from cache.identity import Identity
from cache.leases import Lower, WaitReason
from cache.pools.allocator import Ownership, OwnershipError
from kimi_mini import KimiForCausalLM, SamplingParams, preset
from kimi_mini.serving.caches import CacheOptions
from kimi_mini.serving.control import CacheControl
from kimi_mini.serving.outputs import CompletionOutput
from kimi_mini.serving.request import Request
from tests.cache.radix.planting import Garden
from tests.kimi_mini.serving.alone import oracle_engine
from tests.kimi_mini.serving.reuse import (
    DEFAULT,
    EXACT,
    STRATEGIES,
    Rules,
    Truth,
    Witness,
    assert_all_comes_back,
    assert_idle,
    checkpoints,
    distance,
    greedy,
    nodes,
    reusing,
    run,
)


@functools.cache
def toy(kernel_chunk: int = 16) -> KimiForCausalLM:
    """KDA, KDA, KDA, MLA; hidden 64; 2 heads of 16; convolutions of 4; vocabulary 97. The first two
    never forget."""
    nano = preset("nano")
    kda = dataclasses.replace(
        nano.linear_attn_config,
        kda_layers=(1, 2, 3),
        full_attn_layers=(4,),
        num_heads=2,
        head_dim=16,
        short_conv_kernel_size=4,
    )
    config = dataclasses.replace(
        nano,
        num_hidden_layers=4,
        linear_attn_config=kda,
        hidden_size=64,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=97,
        max_position_embeddings=1200,
        eos_token_id=None,
        pad_token_id=0,
        bos_token_id=1,
    )
    model = KimiForCausalLM.from_config(
        config, seed=3, dtype=torch.float64, kernel_chunk=kernel_chunk
    )
    with torch.no_grad():
        for layer in model.model.layers[:2]:
            layer.self_attn.A_log.zero_()
            layer.self_attn.dt_bias.fill_(-6.0)
    return model


TRUTH = {kernel_chunk: Truth(toy(kernel_chunk)) for kernel_chunk in (16, 64)}


class Served:
    """TOY behind an engine; whatever is asked is held against COLD."""

    def __init__(self, rules: Rules = DEFAULT, kernel_chunk: int = 16, **options) -> None:
        self.truth = TRUTH[kernel_chunk]
        roomy = dict(state_slots=12, kv_pages=-(-1100 // options.get("page", 16)))
        self.engine = reusing(self.truth.model, rules, **roomy | options)
        self.witness = Witness(self.engine, truth=self.truth)
        self.cache, self.tree = self.engine.cache, self.engine.cache.tree

    def add(self, prompt: Sequence[int], new: int = 4, **control) -> Request:
        return self.engine.add_request(prompt, greedy(new), control=CacheControl(**control))

    def run(self, *requests: Request) -> list[CompletionOutput]:
        """To the end of everything; each of these = COLD."""
        own = run(self.engine, *requests)
        for request in requests:
            self.assert_cold(request)
        return own

    def ask(self, prompt: Sequence[int], new: int = 4, **control) -> CompletionOutput:
        (own,) = self.run(self.add(prompt, new, **control))
        return own

    def reuse(self, prompt: Sequence[int], new: int = 4, **control) -> int:
        return self.ask(prompt, new, **control).cached_tokens

    def assert_cold(self, request: Request) -> None:
        (own,) = request.output().outputs
        known = [*request.prompt_ids, *own.token_ids]
        logits = self.truth.of(known)[3]
        first = len(request.prompt_ids) - 1
        assert own.finish_reason == "length"
        assert own.token_ids == tuple(logits[first:-1].argmax(-1).tolist())
        seen = self.witness.logits[request.sequences[0].name]
        assert set(range(first, len(known) - 1)) <= seen.keys()
        for position, row in seen.items():
            assert distance(row, logits[position]) < EXACT
        hit = own.hit.joint
        assert hit <= len(request.prompt_ids) - 1


def fresh(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(97) for _ in range(count)]


P, X, Y, Z = fresh(1, 64), fresh(2, 9), fresh(3, 11), fresh(4, 13)


# --- wrong state reused ---------------------------------------------------------------------------


@pytest.mark.parametrize("length, reused", [(32, 16), (33, 32), (47, 32), (48, 32)])
def test_br01_the_last_token_never_runs_on_a_state_that_holds_it(length, reused):
    served = Served(state_chunk=16)
    served.witness.running = True
    prompt = fresh(1, length)
    assert [served.reuse(ids, 1) for ids in (prompt, fresh(9, 40), prompt)] == [0, 0, reused]
    assert served.reuse(prompt, 3) == reused
    assert served.witness.restored == [reused, reused]


@pytest.mark.parametrize("page", [1, 16])
def test_br04_a_split_leaves_the_checkpoint_at_its_depth(page):
    """The audit has it that no edge is empty and that edges add up to what was inserted."""
    garden = Garden(page=page, pages=200)
    branch = [*P[:48], *fresh(5, 16)]
    garden.insert(P)
    assert garden.match(P[:63]).depth == 0
    assert garden.match(P).depth == garden.match([*P, *X]).depth == 64
    assert garden.insert(branch).already == 48
    assert garden.match([*P[:48], *Y]).depth == 0
    assert garden.match([*P, *X]).depth == garden.match([*branch, 3]).depth == 64
    assert {sum(map(len, path)) for path, state in garden.shape().items() if state} == {64}


@pytest.mark.parametrize("page", [1, 16])
def test_br04_a_prompt_that_is_repeated_hits_at_the_latest_the_third_time(page):
    served = Served(page=page, state_chunk=64)
    hits = [served.reuse(ids) for ids in (P, P, [*P[:48], *X], P)]
    assert hits == [0, 48, 48, 48]


@pytest.mark.parametrize("new", [20, 30])
def test_br06_a_published_checkpoint_stays_what_it_was(new):
    """The witness compares it after every step."""
    served = Served(state_chunk=64)
    writer = served.add(P, new)
    while len(writer.sequences[0].output_ids) < 2:
        served.engine.step()
    assert checkpoints(served.engine) == [48, 64]
    readers = [served.add([*P, *X], 20), served.add([*P, *Y], 20)]
    served.run(writer, *readers)
    assert served.reuse(P) == 48 and served.reuse([*P, *Z]) == 64
    assert served.witness.restored == [64, 64, 48, 64]


def test_br11_equal_prompts_of_one_step_are_both_right():
    served = Served(prefill_chunk=32)
    prompt = fresh(1, 80)
    twins = [served.add(prompt), served.add(prompt)]
    assert [own.cached_tokens for own in served.run(*twins)] == [0, 0]
    assert served.reuse(prompt) == 64
    assert_all_comes_back(served.engine)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_br11_nothing_is_found_of_what_was_never_computed(strategy):
    page = 1 if strategy == "no_buffer" else 16
    served = Served(Rules(strategy), prefill_chunk=32, page=page, state_chunk=16)
    prompt = fresh(1, 80)
    first = served.add(prompt)
    served.engine.step()
    served.engine.abort(first.request_id)
    own = served.ask(prompt)
    assert own.cached_tokens <= own.hit.token_hit <= 32
    assert served.reuse(prompt) >= 64


def test_br11_a_state_whose_copy_has_failed_is_not_found():
    """Without a buffer the bytes come after the entry, within the step."""
    served = Served(Rules("no_buffer"), page=1, prefill_chunk=32)
    executor = served.engine.executor
    copy = executor.copy

    def fail(copies):
        if list(copies):
            raise MemoryError

    executor.copy = fail
    request = served.add(P)
    with pytest.raises(MemoryError):
        served.engine.step()
    assert checkpoints(served.engine) == []
    executor.copy = copy
    served.run(request)
    assert served.reuse([*P[:32], *X]) == 32
    assert_all_comes_back(served.engine)


def states_of_p() -> Served:
    """Checkpoints of P at 32 and 64, the latter the older, and more below it."""
    served = Served(state_chunk=32, prefill_chunk=32)
    assert served.reuse([*P, *fresh(8, 30)], 1) == 0
    assert served.reuse([*P[:32], *Z], 1) == 32
    assert checkpoints(served.engine) == [32, 64, 80]
    return served


def test_br13_the_hit_is_where_rows_and_state_both_are():
    served = states_of_p()
    assert served.tree.evict_states(1) == (0, 1)
    own = served.ask([*P, *X])
    assert (own.hit.joint, own.hit.token_hit, own.hit.lower) == (32, 64, Lower.EVICTED)


def test_br13_without_a_state_nothing_is_reused_whatever_rows_there_are():
    served = states_of_p()
    served.reuse([*P, *fresh(8, 30)], 1)  # the one below is the newest
    served.tree.evict_states(2)
    assert checkpoints(served.engine) == [80]
    own = served.ask([*P, *X])
    assert (own.hit.joint, own.hit.token_hit, own.hit.lower) == (0, 64, Lower.EVICTED)


def test_br13_a_state_goes_with_its_rows():
    """Rows of the end alone: the state at 64 cannot stay without them."""
    served = Served(state_chunk=32, prefill_chunk=32)
    served.reuse(P, 1, checkpoint_at=[64])
    assert checkpoints(served.engine) == [32, 48, 64]
    served.tree.evict_kv(16)
    assert checkpoints(served.engine) == [32, 48]
    served.tree.evict_kv(16)
    assert served.reuse([*P, *X]) == 32


@pytest.mark.parametrize("page, grid", [(16, 64), (64, 16), (48, 64)])
@pytest.mark.parametrize("new", [0, 1, 17])
def test_br16_every_checkpoint_is_the_state_of_its_depth(page, grid, new):
    """The witness compares each with the model's own."""
    served = Served(page=page, state_chunk=grid, state_slots=40, kv_pages=4000 // page)
    unit = served.cache.unit
    for length in (100, 150, 192, 200) if new == 1 else (100, 192):
        prompt = fresh(length + new, length)
        params = greedy(new, prompt_logprobs=None if new else 0)
        (own,) = run(served.engine, served.engine.add_request(prompt, params))
        hit = served.reuse([*prompt, *own.token_ids, *fresh(7, 5)], 1)
        assert hit >= (length - 1) // unit * unit > 0
    assert all(depth % page == 0 for depth in checkpoints(served.engine))
    assert_all_comes_back(served.engine)


def test_br36_a_partly_filled_page_is_never_shared():
    """20 tokens are a page and a quarter: two readers and the writer each fill their own second."""
    served = Served(state_chunk=16)
    p20 = P[:20]
    writer = served.add(p20, 30)
    while len(writer.sequences[0].output_ids) < 2:
        served.engine.step()
    readers = [served.add([*p20, *X], 20), served.add([*p20, *Y], 20)]
    served.engine.step()
    tables = [request.sequences[0].lease.pages[0] for request in (writer, *readers)]
    assert len({table[0] for table in tables}) == 1
    assert len({table[1] for table in tables}) == 3
    assert [own.cached_tokens for own in served.run(writer, *readers)] == [0, 16, 16]
    assert_all_comes_back(served.engine)


def test_br37_boundaries_are_absolute_whatever_was_resumed_from():
    """Page 16, grid 48, kernel chunks of 64, pieces of 40: prompt ends and decode are kept where
    the kernel can (64), pieces where they end on the grid."""
    served = Served(kernel_chunk=64, state_chunk=48, prefill_chunk=40, track_interval=48)
    talk = fresh(1, 200)
    for more, new in ((20, 9), (30, 17), (21, 40), (3, 1)):
        own = served.ask(talk, new)
        talk = [*talk, *own.token_ids, *fresh(more, more)]
    own = served.ask(talk)
    assert own.cached_tokens > 200
    assert served.witness.restored and served.witness.restored[0] >= 192
    assert all(depth % 48 == 0 or depth % 64 == 0 for depth in checkpoints(served.engine))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("slots", [1, 3])
def test_br75_progress_does_not_hang_on_publication(strategy, slots):
    """One slot: nothing can be published. Then without reading, then as usual."""
    page = 1 if strategy == "no_buffer" else 16
    served = Served(Rules(strategy), state_slots=slots, prefill_chunk=32, page=page)
    prompt = fresh(1, 100)
    for control in ({}, {"skip_read": True}, {}):
        before = dict(served.witness.pieces)
        reused = served.reuse(prompt, 1, **control)
        (pieces,) = (p for name, p in served.witness.pieces.items() if name not in before)
        assert pieces == [(n, min(n + 32, 100)) for n in range(reused, 100, 32)]
        if slots == 1 or control:
            assert reused == 0 and len(pieces) == 4
    assert_all_comes_back(served.engine)


SALTS = (None, "", "a", "b", "ab")


@pytest.mark.parametrize("salt", SALTS, ids=repr)
def test_br84_a_prefix_is_found_under_its_own_salt_alone(salt):
    served = Served(state_slots=20)
    assert served.reuse(P, 1, cache_salt=salt) == 0
    others = [other for other in SALTS if other != salt]
    for other in others:
        own = served.ask(P, 1, cache_salt=other)
        assert (own.hit.joint, own.hit.token_hit) == (0, 0), (salt, other)
    assert served.reuse(P, 1, cache_salt=salt) == 48
    assert [served.reuse(P, 1, cache_salt=other) for other in others] == [48] * 4


def test_br84_no_two_producers_share_an_origin():
    """An adapter is a part of the model, the cache is of one model (decision 27)."""
    pairs = [("a", None), ("", "a"), ("a", "b"), ("ab", ""), ("", None), ("ab", None), ("a", "")]
    assert len({Identity(model=adapter).origin(salt) for adapter, salt in pairs}) == len(pairs)


@pytest.mark.parametrize("total", [100, 127, 128, 129, 200, 255, 256, 257, 300])
def test_br90_five_equal_requests_give_five_equal_answers(total):
    served = Served()
    a, b, c = (fresh(total + seed, total - 5) for seed in (1, 2, 3))
    owns = [served.ask(prompt, 5) for prompt in (a, b, a, c, a, c, a, b, a)]
    mine = [own for own, prompt in zip(owns, "abacacaba", strict=True) if prompt == "a"]
    assert len({own.token_ids for own in mine}) == 1
    assert [own.cached_tokens for own in mine] == [0] + [(total - 6) // 16 * 16] * 4


# --- hit rates ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared, first", [(256, 1), (250, 2)])
def test_br03_a_shared_system_prompt_is_reused(shared, first):
    """By the second request, or, where they do not part on the grid, by the third: the second has
    left a state where they do."""
    served = Served(state_chunk=64)
    hits = [served.reuse([*fresh(1, shared), *fresh(10 + i, 40)]) for i in range(4)]
    assert hits == [0] * first + [shared // 16 * 16] * (4 - first)


def test_br17_a_prompt_of_whole_pages_hits():
    lengths = (16, 17, 32, 33, 64)
    found = []
    for length in lengths:
        served = Served(state_chunk=16)
        prompt = fresh(length, length)
        served.reuse(prompt, 1)
        found.append(served.reuse(prompt, 1))
    assert found == [0, 16, 16, 32, 48]


def test_br41_a_hit_makes_its_own_state_recent_and_no_other():
    """Seven slots: six checkpoints and who runs. Chats of three pages leave three each; those of C
    are named, since the grid's would push nobody out (BR-47)."""
    served = Served(state_slots=7, state_chunk=16, prefill_chunk=16)
    a, b, c = (fresh(seed, 49) for seed in (1, 2, 3))
    served.reuse(a, 1), served.reuse(b, 1)
    assert checkpoints(served.engine) == [16, 16, 32, 32, 48, 48]
    assert [served.reuse(a, 1) for _ in range(3)] == [48] * 3
    served.reuse(c, 1, checkpoint_at=(16, 32))
    left = {path: node.state is not None for path, node in nodes(served.engine).items()}
    kept = {(("a", "b", "c")[[a[0], b[0], c[0]].index(t[0])], len(t)) for t in left if left[t]}
    assert kept == {("a", 48), ("b", 32), ("b", 48), ("c", 16), ("c", 32), ("c", 48)}
    assert served.reuse([*b, *X], 1) == 48


def test_br41_a_split_leaves_the_times_of_states_alone():
    """Of rows it refreshes the part below the split, as the engine does (decision 25)."""
    garden = Garden(page=16)
    older, newer = garden.insert(P).node, garden.insert(fresh(8, 64)).node
    garden.match([*P[:32], *Z])
    assert list(garden.tree.state_order) == [older, newer]


def test_br47_a_long_prompt_does_not_push_a_hot_prefix_out():
    """Where slots are short its own oldest checkpoints go, and a spaced few stay."""
    served = Served(state_slots=8, state_chunk=64, prefill_chunk=64)
    hot, long = fresh(1, 70), fresh(2, 1024)
    assert [served.reuse(hot, 1) for _ in range(6)] == [0] + [64] * 5
    served.reuse(long, 1)
    assert checkpoints(served.engine) == [64, 768, 832, 896, 960, 1008, 1024]
    assert served.reuse(hot, 1) == 64
    assert served.reuse(long, 1) == 1008


def test_br47_answers_do_not_push_a_hot_prefix_out_either():
    """Snapshots of decode: one that evicts a request, a second one only into what is free."""
    served = Served(state_slots=16)
    hot = fresh(1, 70)
    assert [served.reuse(hot, 1) for _ in range(2)] == [0, 64]
    served.run(*(served.add(fresh(10 + i, 10), 40) for i in range(6)))
    assert served.reuse(hot, 1) == 64


def test_br71_what_was_found_and_not_used_counts_as_a_miss():
    """The pool has room for the request alone, not for what it would resume from beside it."""
    served = Served(state_slots=1, kv_pages=8)
    for _ in range(10):
        own = served.ask(P, 3)
        assert (own.hit.joint, own.hit.lower) in ((0, Lower.UNKNOWN), (0, Lower.NO_REUSE))
    stats = served.cache.stats()
    assert (stats.joint_hit_tokens, stats.token_hit_tokens) == (0, 0)
    assert not served.witness.restored


def test_br81_a_chat_whose_last_tokens_change_resumes_from_what_is_before_them():
    served = Served(state_chunk=64)
    talk: list[int] = []
    hits = []
    for turn, length in enumerate((10, 12, 15, 10, 12, 15, 10)):
        kept = talk[:-3]
        prompt = [*kept, *fresh(100 + turn, 3 + length)]
        expected = max((d for d in checkpoints(served.engine) if d <= len(kept)), default=0)
        own = served.ask(prompt, 6)
        hits.append(own.cached_tokens)
        assert own.cached_tokens == expected
        talk = [*prompt, *own.token_ids]
    assert hits[0] == 0 and min(hits[1:]) >= 16 and hits[-1] >= 80


# --- life cycles ----------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("aborted", [False, True])
def test_br08_the_next_owner_of_the_only_slot_starts_from_zeros(strategy, aborted):
    page = 1 if strategy == "no_buffer" else 16
    served = Served(Rules(strategy), page=page, state_slots=1, state_chunk=16)
    served.witness.running = True
    first = served.add(fresh(1, 50), 8)
    while len(first.sequences[0].output_ids) < 3:
        served.engine.step()
    if aborted:
        served.engine.abort(first.request_id)
    run(served.engine)
    for prompt in ([5, 6], fresh(2, 20), fresh(1, 50), [5, 6]):
        served.reuse(prompt, 8)
    assert_all_comes_back(served.engine)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("slots", [3, 6])
def test_br12_who_matches_and_never_gets_in_leaves_nothing_behind(strategy, slots):
    """Fifty times: one fills the pages, one that matches P waits for some and is cancelled."""
    page = 1 if strategy == "no_buffer" else 16
    options = CacheOptions(strategy=strategy)
    engine = oracle_engine(
        prefix_cache="radix", cache_options=options, audit=True, page=page, state_slots=slots,
        kv_pages=144 // page,
    )  # fmt: skip
    few = SamplingParams(max_tokens=2, ignore_eos=True)
    engine.generate([P], few)
    for _ in range(50):
        engine.add_request(fresh(2, 70), few)
        engine.step()
        late = engine.add_request([*P, *fresh(3, 75)], few)
        engine.step()
        assert not (lease := late.sequences[0].lease) or not any(lease.slots)
        engine.abort(late.request_id)
        assert len(engine.generate([[7]], few)[0].outputs[0].token_ids) == 2
        run(engine)
        assert_idle(engine)
    waits = engine.cache.stats().waits
    assert sum(waits.values()) >= 50 and (slots == 3 or waits[WaitReason.PAGES] >= 50)
    assert_all_comes_back(engine)


def test_br24_what_is_left_of_a_long_prompt_holds_no_more_than_its_own():
    garden = Garden(page=16, pages=300)
    tokens, rng = fresh(1, 4096), random.Random(0)
    garden.insert(tokens)
    for _ in range(100):
        garden.match([*tokens[: rng.randrange(16, 4096)], 99])
    while len(left := list(garden.tree.nodes())) > 1:
        garden.evict(tokens=1)
    (node,) = left
    assert type(node.key) is bytes and type(node.pages) is list, "a view"
    assert node.depth < 500
    assert sys.getsizeof(node.key) <= 4 * node.depth + 64
    assert sys.getsizeof(node.pages) <= 8 * node.depth // 16 + 128
    assert garden.pages.allocator.count(Ownership.CACHED) == len(node.pages) == node.depth // 16


def test_br24_checkpoints_are_no_slices_of_what_was_computed():
    """All memory is that of the pools, whatever has been published."""
    served = Served(state_chunk=16)
    served.reuse(fresh(1, 300), 20)
    for pool in served.cache.storage:
        held = sum(tensor.untyped_storage().nbytes() for tensor in pool.tensors)
        assert held == (pool.size + 1) * pool.unit_bytes


def test_br38_locks_are_undone_once_and_hold_the_whole_path():
    garden = Garden(page=16)
    tree, branch = garden.tree, [*P[:32], *fresh(5, 32)]
    left, right = garden.insert(P).node, garden.insert(branch).node
    assert tree.ledger() == (96, 0, 2, 0)
    one, other = garden.lock(left), garden.lock(right)
    assert tree.ledger() == (0, 96, 0, 2)
    garden.match(P[:48])  # splits a locked edge
    assert garden.evict(tokens=1000, states=9) == (0, 0)
    garden.unlock(one)
    assert tree.ledger() == (32, 64, 1, 1)
    with pytest.raises(OwnershipError, match="undone before"):
        tree.unlock(one)
    assert garden.evict(tokens=1000) == (32, 1)
    assert garden.match(branch).depth == 64
    garden.unlock(other)
    assert tree.ledger() == (64, 0, 1, 0)
    assert garden.evict(tokens=1000) == (64, 1)


@pytest.mark.parametrize(
    "b_prompt, a_prompt, pages, chunk",
    [
        pytest.param(3, 50, 76, 99, id="decode"),
        pytest.param(3, 50, 56, 20, id="third piece"),
        pytest.param(60, 6, 64, 4, id="planned already"),
    ],
)
def test_br39_who_gave_way_comes_back_as_if_nothing_had_been(b_prompt, a_prompt, pages, chunk):
    """B is older; pages of one token."""
    served = Served(page=1, kv_pages=pages, state_slots=6, prefill_chunk=chunk, state_chunk=16)
    served.witness.running = True
    b = served.add([9] * b_prompt, 5 if b_prompt > 9 else 30)
    for _ in range(2):
        served.engine.step()
    a = served.add(fresh(4, a_prompt), min(16, pages + 1 - a_prompt))
    served.run(a, b)
    assert a.output().outputs[0].timings.preemptions >= 1
    assert_all_comes_back(served.engine)


def test_br40_requests_shorter_than_a_page_leave_no_trace():
    engine = oracle_engine(prefix_cache="radix", state_slots=2, page=16, kv_pages=2)
    tree = engine.cache.tree
    for i in range(500):
        engine.add_request([5] * (1 + 14 * (i % 2)), SamplingParams(max_tokens=1))
        early = engine.add_request([6] * 15, SamplingParams(max_tokens=1))
        engine.abort(early.request_id)
        run(engine)
    for i in range(1000):
        assert tree.match([i] * 40).depth == 0
    assert not tree.root.children and tree.root.kv_locks == tree.root.state_locks == 0
    assert all(pool.free == pool.size for pool in engine.cache.stats().pools)
    assert_all_comes_back(engine)


def test_br45_the_third_of_two_slots_waits_and_checkpoints_are_left_out():
    """10 tokens and 20 more pass a boundary while both slots are taken."""
    served = Served(state_slots=2, state_chunk=16)
    requests = [served.add(fresh(seed, 10), 20) for seed in (1, 2, 3)]
    for _ in range(10):
        served.engine.step()
    assert len(served.engine.scheduler.running) == 2
    served.run(*requests)
    stats = served.cache.stats()
    assert stats.waits[WaitReason.SLOTS] >= 10 and stats.preempted == 0
    assert_all_comes_back(served.engine)


def test_br46_what_is_evicted_is_what_a_piece_needs():
    """Pools are apart here: pages make room for pages, one leaf of three; a token that fits the
    open page takes nothing, and one that does not takes the page that is free."""
    served = Served(state_slots=12, kv_pages=12, state_chunk=16)
    for seed in range(3):
        served.reuse(fresh(seed, 49), 1)
    assert served.cache.stats().pools[0].cached == 9
    request = served.add(fresh(9, 75), 10)  # five pages, then a sixth
    free = []
    while not request.finished:
        served.engine.step()
        free.append(served.cache.stats().pools[0].free)
    assert free[:-1] == [1] * 6 + [0] * 3
    served.run(request)
    assert [served.reuse(fresh(seed, 49), 1) for seed in (2, 1, 0)] == [48, 48, 0]
    assert_all_comes_back(served.engine)


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("budget", [5, 32])
def test_br76_a_pool_of_exactly_the_request_with_its_own_prefix_in_it(slots, budget):
    """Budget 32 below a grid of 64."""
    served = Served(
        state_slots=slots, kv_pages=7, max_batch_tokens=budget, prefill_chunk=64, state_chunk=64
    )
    prompt = fresh(1, 100)
    for _ in range(3):
        served.ask(prompt, 13)
    assert served.engine.totals.steps <= 3 * (100 // min(budget, 16) + 7 + 13)
    assert_all_comes_back(served.engine)


def test_br78_calls_of_one_engine_know_nothing_of_each_other():
    served = Served(state_slots=3)
    a, b = fresh(1, 40), fresh(2, 40)
    first, _, again = served.ask(a, 9), served.ask(b, 9), served.ask(a, 9)
    assert first.token_ids == again.token_ids
    executor = served.engine.executor
    run_plans = executor.run

    def fail(*_):
        raise MemoryError

    executor.run = fail
    request = served.add(a, 9)
    with pytest.raises(MemoryError):
        served.engine.step()
    executor.run = run_plans
    (own,) = served.run(request)
    assert own.token_ids == first.token_ids


def test_br92_a_lost_inner_state_is_made_up_for_by_the_one_before_it():
    served = Served(state_chunk=16)
    for length in (17, 33, 49, 65):
        served.reuse([*P, 5][:length], 1)
    assert checkpoints(served.engine) == [16, 32, 48, 64]
    served.reuse([*P[:16], *X], 1)  # now the inner two are the oldest
    assert served.tree.evict_states(2) == (0, 2)
    assert checkpoints(served.engine) == [16, 64]
    for length in range(2, 70):
        prompt = [*P, *fresh(6, 6)][:length]
        request = served.add(prompt, 1)
        hit = served.cache.lookup(request.sequences[0].storage_request())
        served.engine.abort(request.request_id)
        assert hit.joint == (64 if length > 64 else 16 if length > 16 else 0)
        evicted = 16 < length - 1 < 64 and (length - 1) // 16 > 1
        assert (hit.lower is Lower.EVICTED) == evicted
    assert [served.reuse(P[:n], 1) for n in (40, 40)] == [16, 32]
    assert_all_comes_back(served.engine)
