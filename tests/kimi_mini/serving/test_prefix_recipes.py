"""Faults that users of such software have met (bug_reports.md), as recipes against the real model:
prefix caches that are wrong (class PFX); and rows of other classes in which a prefix cache has a
part.
"""

import pytest
import torch

from cache.identity import Identity
from cache.leases import Lower
from tests.cache.radix.planting import Garden
from tests.kimi_mini.serving.reuse import (
    STRATEGIES,
    Rules,
    assert_all_comes_back,
    checkpoints,
    greedy,
    run,
)
from tests.kimi_mini.serving.toy import P, Served, X, Y, Z, fresh, out_of_memory


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
    copy, executor.copy = executor.copy, out_of_memory
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
    for length in (100, 150, 192, 200):
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


def test_br37_a_conversation_is_kept_at_absolute_boundaries():
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


@pytest.mark.parametrize(
    "kernel_chunk, kept",
    [
        (16, [48, 96, 144, 160, 192, 192, 192, 208, 240, 288]),
        (64, [96, 144, 160, 192, 192, 192]),
    ],
)
def test_br37_nothing_is_counted_from_where_a_request_has_resumed(kernel_chunk, kept):
    """At 144, no multiple of the kernel's 64, then at 160, no multiple of the grid's 48: but for
    160 and prompt ends all that is kept is on the grid."""
    served = Served(kernel_chunk=kernel_chunk, state_chunk=48, prefill_chunk=40, track_interval=48)
    prompt = fresh(1, 200)
    assert served.reuse(prompt, checkpoint_at=(144, 160)) == 0
    assert served.reuse([*prompt[:150], *fresh(2, 70)]) == 144
    assert served.reuse([*prompt[:165], *fresh(3, 90)], 60) == 160
    assert checkpoints(served.engine) == kept


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


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_br75_neither_does_it_where_others_hold_all_slots(strategy):
    page = 1 if strategy == "no_buffer" else 16
    served = Served(Rules(strategy), state_slots=2, prefill_chunk=32, page=page)
    neighbour = served.add([5, 6], 30)
    served.engine.step()
    request = served.add(fresh(1, 100), 1)
    served.run(neighbour, request)
    pieces = served.witness.pieces[request.sequences[0].name]
    assert pieces == [(0, 32), (32, 64), (64, 96), (96, 100)]
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


# --- rows of other classes ------------------------------------------------------------------------


def test_br32_what_is_kept_and_restored_knows_nothing_of_gradients():
    served = Served(state_chunk=16)
    assert all(parameter.requires_grad for parameter in served.truth.model.parameters())
    for inside in (False, True):
        with torch.inference_mode(inside):
            served.reuse(P, 20)
    assert served.witness.restored
    for pool in served.cache.storage:
        assert not any(t.requires_grad or t.grad_fn or t.is_inference() for t in pool.tensors)


def test_br50_each_row_of_a_step_keeps_its_own_state():
    """130, 200 and 300 tokens in one step; the witness compares what they leave."""
    served = Served(kernel_chunk=64, prefill_chunk=512, max_batch_tokens=700)
    prompts = {128: fresh(1, 130), 192: fresh(2, 200), 256: fresh(3, 300)}
    requests = [served.add(prompt, 1) for prompt in prompts.values()]
    served.engine.step()
    assert checkpoints(served.engine) == [*prompts]
    served.run(*requests)
    for boundary, prompt in prompts.items():
        assert served.reuse([*prompt[:boundary], *X]) == boundary


@pytest.mark.parametrize("rows", [1, 2, 7])
@pytest.mark.parametrize("cut", [16, 32, 64, 100, 128])
def test_br61_where_a_prompt_was_resumed_and_who_runs_beside_it_changes_nothing(cut, rows):
    """In float64 within rounding (decision 9); in float32 bit by bit in test_prefix_hits."""
    served = Served(page=1)
    prompt = fresh(1, 200)
    served.reuse(prompt[: cut + 1], 1, checkpoint_at=[cut])
    requests = [served.add(prompt), *(served.add(fresh(10 + i, 30 + i)) for i in range(rows - 1))]
    assert [own.cached_tokens for own in served.run(*requests)] == [cut] + [0] * (rows - 1)


def test_br73_a_split_is_floored_to_the_page():
    garden = Garden(page=16)
    garden.insert(P)
    garden.match([*P[:20], *X])
    assert [len(edge) for edge, _ in garden.edges()] == [16, 48]


def test_br78_calls_of_one_engine_know_nothing_of_each_other():
    served = Served(state_slots=3)
    a, b = fresh(1, 40), fresh(2, 40)
    first, _, again = served.ask(a, 9), served.ask(b, 9), served.ask(a, 9)
    assert first.token_ids == again.token_ids
    executor = served.engine.executor
    run_plans, executor.run = executor.run, out_of_memory
    request = served.add(a, 9)
    with pytest.raises(MemoryError):
        served.engine.step()
    executor.run = run_plans
    (own,) = served.run(request)
    assert own.token_ids == first.token_ids
