"""Faults that users of such software have met (bug_reports.md), as recipes against the real model:
prefix caches that are wrong (class PFX), whether with a tree or with hashed blocks.

The product defaults, but for the page and the grid that a row names; of a tree's states, or tokens
of a state block. What runs and what is kept is the model's own state, or the witness says so.
"""

import pytest

from cache.blocks.keys import HashChain
from cache.identity import Identity
from cache.leases import Lower, WaitReason
from tests.kimi_mini.serving.reuse import (
    BLOCKS,
    HASHED,
    OURS,
    TREE,
    VLLM,
    Rules,
    a_few_of,
    assert_all_comes_back,
    by_all_our_rules,
    by_our_rules,
    checkpoints,
    greedy,
    run,
    unit_of,
)
from tests.kimi_mini.serving.toy import P, Served, X, Y, Z, fresh, out_of_memory


@by_our_rules
@pytest.mark.parametrize("length, reused", [(32, 16), (33, 32), (47, 32), (48, 32)])
def test_br01_the_last_token_never_runs_on_a_state_that_holds_it(rules, length, reused):
    served = Served(rules, grid=16, running=True)
    prompt = fresh(1, length)
    assert [served.reuse(ids, 1) for ids in (prompt, fresh(9, 40), prompt)] == [0, 0, reused]
    assert served.reuse(prompt, 3) == reused
    assert served.witness.restored == [reused, reused]


@pytest.mark.parametrize(
    "rules, page, backend, reused",
    [
        *((rules, 16, "auto", 48) for rules in (TREE, *BLOCKS)),
        (TREE, 1, "torch", 48),
        (TREE, 1, "native", 63),
    ],
    ids=str,
)
def test_br04_a_prompt_that_is_repeated_hits_at_the_latest_the_third_time(
    rules, page, backend, reused
):
    """Who parts from it at 48 hits what was kept there, which is nothing if the end was kept."""
    served = Served(rules, page=page, backend=backend)
    hits = [served.reuse(ids) for ids in (P, P, [*P[:48], *X], P)]
    assert hits == [0, reused, 48 if reused == 48 else 0, reused]


@pytest.mark.parametrize(
    "rules, options, reused",
    [
        (TREE, {}, 64),
        *((rules, dict(retention=0), 48) for rules in BLOCKS),
        *((rules, dict(retention="none"), 64) for rules in BLOCKS),
    ],
    ids=str,
)
def test_br06_what_is_kept_stays_what_it_was_whatever_its_writer_does(rules, options, reused):
    """The end of the prompt is on the grid, so that the next token could be written where the state
    is kept. Two others resume meanwhile, the second, at the latest, at that end."""
    served = Served(rules, **dict(kv_pages=90, state_slots=60) | options)
    writer = served.add(P, 30)
    while len(writer.sequences[0].output_ids) < 2:
        served.engine.step()
    readers = [served.add([*P, *X], 20), served.add([*P, *Y], 20)]
    served.run(writer, *readers)
    assert served.reuse(P) == 48 and served.reuse([*P, *Z]) == 64
    assert served.witness.restored == [reused, 64, 48, 64]
    assert_all_comes_back(served.engine)


@pytest.mark.parametrize(
    "rules, piece, reused",
    [(TREE, 32, 0), (TREE, 128, 0), *((r, *case) for r in BLOCKS for case in [(32, 0), (128, 64)])],
    ids=str,
)
def test_br11_the_second_of_one_step_reads_nothing_that_the_first_is_still_writing(
    rules, piece, reused
):
    """A tree publishes what has run. A hash is given out when a piece is planned, and who finds it
    waits until its bytes are there; in pieces of 32 there is no state to wait for."""
    served = Served(rules, prefill_chunk=piece)
    twins = [served.add(fresh(1, 80)), served.add(fresh(1, 80))]
    assert [own.cached_tokens for own in served.run(*twins)] == [0, reused]
    assert served.cache.stats().waits.get(WaitReason.SAME_STEP, 0) == (reused > 0)
    assert served.reuse(fresh(1, 80)) == 64
    assert_all_comes_back(served.engine)


@by_all_our_rules
def test_br11_nothing_is_found_of_what_was_never_computed(rules):
    served = Served(rules, prefill_chunk=32)
    prompt = fresh(1, 80)
    first = served.add(prompt)
    served.engine.step()
    served.engine.abort(first.request_id)
    own = served.ask(prompt)
    assert own.cached_tokens <= own.hit.token_hit <= 32
    assert served.reuse(prompt) >= 64


@by_all_our_rules
@pytest.mark.parametrize("part", ["run", "copy"])
def test_br11_what_a_failed_step_would_have_left_is_not_found(rules, part):
    """Of a tree without a buffer the bytes come after the entry, by a copy within the step."""
    served = Served(rules, prefill_chunk=32)
    executor = served.engine.executor
    works = getattr(executor, part)
    setattr(executor, part, out_of_memory)
    request = served.add(P)
    failed = 0
    for _ in range(2):
        try:
            served.engine.step()
        except MemoryError:
            failed += 1
            assert checkpoints(served.engine) == []
    assert failed == 2 or part == "copy"
    setattr(executor, part, works)
    served.run(request)
    assert served.reuse([*P[:48], *X]) >= 32
    assert_all_comes_back(served.engine)


def states_of_p(rules: Rules) -> Served:
    """Checkpoints of P at 32 and 64, the latter older than the former, and one above them."""
    dense = dict(retention="none") if rules.blocks else {}
    served = Served(rules, grid=32, prefill_chunk=32, state_slots=40, kv_pages=60, **dense)
    assert served.reuse([*P, *fresh(8, 30)], 1) == 0
    assert served.reuse([*P[:32], *Z], 1) == 32
    assert set(checkpoints(served.engine)) == {32, 64, 80}
    return served


@by_our_rules
def test_br13_the_hit_is_where_rows_and_state_both_are(rules):
    served = states_of_p(rules)
    while 64 in checkpoints(served.engine):
        assert served.holdings.evict_states(1) == 1
    own = served.ask([*P, *X])
    assert (own.hit.joint, own.hit.token_hit) == (32, 64)
    assert own.hit.lower is Lower.EVICTED
    assert served.reuse([*P, *Y]) == 64


@by_our_rules
def test_br13_without_a_state_nothing_is_reused_whatever_rows_there_are(rules):
    served = states_of_p(rules)
    served.reuse([*P, *fresh(8, 30)], 1)  # the one above is the newest
    assert served.holdings.evict_states(2) == 2
    assert set(checkpoints(served.engine)) == {80}
    own = served.ask([*P, *X])
    assert (own.hit.joint, own.hit.token_hit) == (0, 64)
    assert own.hit.lower is Lower.EVICTED


@by_our_rules
def test_br13_a_state_without_its_rows_is_out_of_reach(rules):
    dense = dict(retention="none") if rules.blocks else {}
    served = Served(rules, grid=32, prefill_chunk=32, **dense)
    served.reuse([*P, 5], 1)
    assert checkpoints(served.engine) == [32, 64]
    assert served.holdings.evict_kv(32) == 32
    own = served.ask([*P, *X])
    assert (own.hit.joint, own.hit.token_hit, own.hit.junction) == (32, 32, None)


@pytest.mark.parametrize(
    "rules, sizes, new", a_few_of(5, OURS, [(16, 64), (64, 16), (48, 64)], [17, 0, 1]), ids=str
)
def test_br16_every_checkpoint_is_the_state_of_its_boundary(rules, sizes, new):
    """The witness compares each with the model's own."""
    page, grid = sizes
    dense = dict(retention="none") if rules.blocks else {}
    served = Served(rules, page=page, grid=grid, state_slots=60, kv_pages=4000 // page, **dense)
    unit = unit_of(served.engine)
    for length in (100, 150, 192, 200):
        prompt = fresh(length + new, length)
        params = greedy(new, prompt_logprobs=None if new else 0)
        (own,) = run(served.engine, served.engine.add_request(prompt, params))
        hit = served.reuse([*prompt, *own.token_ids, *fresh(7, 5)], 1)
        assert hit >= (length - 1) // unit * unit > 0
    assert all(boundary % unit == 0 for boundary in checkpoints(served.engine))
    assert_all_comes_back(served.engine)


@pytest.mark.parametrize(
    "rules, options, shared",
    [(TREE, {}, 16), *((rules, dict(hash_unit=4), 20) for rules in BLOCKS)],
    ids=str,
)
def test_br36_a_partly_filled_page_is_shared_by_copy_or_not_at_all(rules, options, shared):
    """20 tokens are a page and a quarter, which hashes of 4 find in whole: two readers and the
    writer go on in second pages of their own."""
    served = Served(rules, **dict(grid=16) | options)
    writer = served.add(P[:21], 30)
    while len(writer.sequences[0].output_ids) < 2:
        served.engine.step()
    readers = [served.add([*P[:20], *X], 20), served.add([*P[:20], *Y], 20)]
    served.engine.step()
    tables = [request.sequences[0].lease.pages[0] for request in (writer, *readers)]
    assert len({table[0] for table in tables}) == 1
    assert len({table[1] for table in tables}) == 3
    assert [own.cached_tokens for own in served.run(writer, *readers)] == [0, shared, shared]
    assert_all_comes_back(served.engine)


def spaced(rules: Rules, backend: str, kernel_chunk: int) -> Served:
    """Page 16, grid 48, pieces of 40; answers are kept on the grid, too."""
    own = dict(backend=backend, kernel_chunk=kernel_chunk)
    own |= dict(retention=48) if rules.blocks else dict(track_interval=48)
    return Served(rules, grid=48, prefill_chunk=40, state_slots=99, **own)


@pytest.mark.parametrize(
    "rules, backend, kernel_chunk",
    [
        (TREE, "torch", 64),
        *((rules, "native", 16) for rules in OURS),
        *(pytest.param(rules, "torch", 64, marks=pytest.mark.slow) for rules in BLOCKS),
        *(pytest.param(rules, "torch", 16, marks=pytest.mark.slow) for rules in OURS),
    ],
    ids=str,
)
def test_br37_a_conversation_is_kept_at_absolute_boundaries(rules, backend, kernel_chunk):
    """And, for the ends of prompts, on what hits are multiples of: 16, or, with a tree, what the
    kernel can export at."""
    served = spaced(rules, backend, kernel_chunk)
    talk, hits = fresh(1, 200), []
    for more, new in ((20, 9), (30, 17), (21, 40), (3, 1)):
        own = served.ask(talk, new)
        hits.append(own.cached_tokens)
        talk = [*talk, *own.token_ids, *fresh(more, more)]
    coarse = not rules.blocks and served.cache.export_alignment == 64
    assert hits == ([0, 192, 192, 256] if coarse else [0, 192, 240, 288])
    kept, unit = set(checkpoints(served.engine)), unit_of(served.engine)
    if rules.blocks:
        assert kept >= {*range(48, 337, 48)}
    assert all(boundary % 48 == 0 or boundary % unit == 0 for boundary in kept)


EVERYWHERE = [48, 96, 144, 160, 192, 192, 192, 208, 240, 288]


@pytest.mark.parametrize(
    "rules, backend, kernel_chunk, kept",
    [
        (TREE, "torch", 64, [96, 144, 160, 192, 192, 192]),
        (HASHED, "torch", 64, EVERYWHERE),  # pieces end there
        (TREE, "native", 16, EVERYWHERE),
        *(
            pytest.param(*case, EVERYWHERE, marks=pytest.mark.slow)
            for case in [(HASHED, "native", 16), (TREE, "torch", 16), (HASHED, "torch", 16)]
        ),
    ],
    ids=str,
)
def test_br37_nothing_is_counted_from_where_a_request_has_resumed(
    rules, backend, kernel_chunk, kept
):
    """At 144, no multiple of the kernel's 64, then at 160, no multiple of the grid's 48: but for
    160 and prompt ends all that is kept is on the grid."""
    served = spaced(rules, backend, kernel_chunk)
    prompt = fresh(1, 200)
    assert served.reuse(prompt, checkpoint_at=(144, 160)) == 0
    assert served.reuse([*prompt[:150], *fresh(2, 70)]) == 144
    assert served.reuse([*prompt[:165], *fresh(3, 90)], 60) == 160
    assert checkpoints(served.engine) == kept


@by_all_our_rules
@pytest.mark.parametrize("slots", [1, 3])
def test_br75_progress_does_not_hang_on_publication(rules, slots):
    """One slot: nothing can be published, unless slots and pages are of one list. Then without
    reading, then as usual."""
    served = Served(rules, state_slots=slots, prefill_chunk=32)
    prompt = fresh(1, 100)
    for control in ({}, {"skip_read": True}, {}):
        before = dict(served.witness.pieces)
        reused = served.reuse(prompt, 1, **control)
        (pieces,) = (p for name, p in served.witness.pieces.items() if name not in before)
        assert pieces == [(n, min(n + 32, 100)) for n in range(reused, 100, 32)]
        if (slots == 1 and rules is not VLLM) or control:
            assert reused == 0 and len(pieces) == 4
    assert_all_comes_back(served.engine)


@by_all_our_rules
def test_br75_neither_does_it_where_others_hold_all_slots(rules):
    served = Served(rules, state_slots=2, prefill_chunk=32)
    neighbour = served.add([5, 6], 30)
    served.engine.step()
    request = served.add(fresh(1, 100), 1)
    served.run(neighbour, request)
    pieces = served.witness.pieces[request.sequences[0].name]
    assert pieces == [(0, 32), (32, 64), (64, 96), (96, 100)]
    assert_all_comes_back(served.engine)


SALTS = (None, "", "a", "b", "ab")


@pytest.mark.parametrize("rules, salt", a_few_of(3, OURS, SALTS), ids=str)
def test_br84_a_prefix_is_found_under_its_own_salt_alone(rules, salt):
    served = Served(rules, state_slots=40)
    assert served.reuse(P, 1, cache_salt=salt) == 0
    others = [other for other in SALTS if other != salt]
    for other in others:
        own = served.ask(P, 1, cache_salt=other)
        assert (own.hit.joint, own.hit.token_hit) == (0, 0), (salt, other)
    assert [served.reuse(P, 1, cache_salt=own) for own in (salt, *others)] == [48] * 5


# adapter and salt: an adapter is a part of the model, which a cache is of (decision 27), or of each
# link of a chain of hashes
NAMESPACES = [
    ("a", None),
    (None, "a"),
    ("a", "b"),
    ("ab", ""),
    ("ab", None),
    ("", None),
    (None, ""),
]


def test_br84_no_two_producers_share_an_origin():
    origins = {Identity(model=f"m{adapter!r}").origin(salt) for adapter, salt in NAMESPACES}
    assert len(origins) == len(NAMESPACES)


def test_br84_no_adapter_is_taken_for_a_salt():
    chains = [HashChain(Identity().origin(salt), P, 16, adapter=name) for name, salt in NAMESPACES]
    assert len({chain.key(64, 0) for chain in chains}) == len(NAMESPACES)


@pytest.mark.parametrize(
    "rules, total", a_few_of(8, OURS, [128, 100, 127, 129, 200, 255, 256, 257, 300]), ids=str
)
def test_br90_five_equal_requests_give_five_equal_answers(rules, total):
    served = Served(rules)
    a, b, c = (fresh(total + seed, total - 5) for seed in (1, 2, 3))
    owns = [served.ask(prompt, 5) for prompt in (a, b, a, c, a, c, a, b, a)]
    mine = [own for own, prompt in zip(owns, "abacacaba", strict=True) if prompt == "a"]
    assert len({own.token_ids for own in mine}) == 1
    assert [own.cached_tokens for own in mine] == [0] + [(total - 6) // 16 * 16] * 4
