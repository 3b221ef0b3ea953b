"""Faults that users of hashed block caches have met (bug_reports.md: PFX, HIT, LIF), as recipes
against the real model, by our rules and by the engine's own.

The product defaults, but for the blocks that a row names: pages of 16, state blocks of 64, hashes
of 16, retention 0. What runs and what is kept is the model's own state, or the witness says so.
"""

import pytest

from cache.blocks.groups import RowGroup
from cache.blocks.keys import HashChain
from cache.identity import Identity
from cache.leases import WaitReason
from tests.kimi_mini.serving.reuse import (
    BLOCKS,
    a_few,
    assert_all_comes_back,
    checkpoints,
    greedy,
    run,
)
from tests.kimi_mini.serving.toy import P, Served, X, Y, Z, fresh, out_of_memory

OURS, VLLM = BLOCKS
by_both_rules = pytest.mark.parametrize("rules", BLOCKS, ids=str)


# --- wrong state reused ---------------------------------------------------------------------------


@by_both_rules
@pytest.mark.parametrize("length, reused", [(32, 16), (33, 32), (47, 32), (48, 32)])
def test_br01_the_last_token_never_runs_on_a_state_that_holds_it(rules, length, reused):
    served = Served(rules, state_block=16)
    served.witness.running = True
    prompt = fresh(length, length)
    assert [served.reuse(ids, 1) for ids in (prompt, fresh(9, 40), prompt)] == [0, 0, reused]
    assert served.reuse(prompt, 3) == reused
    assert served.witness.restored == [reused, reused]


@by_both_rules
@pytest.mark.parametrize("retention, reused", [(0, 48), ("none", 64)])
def test_br06_what_is_kept_stays_what_it_was_whatever_its_writer_does(rules, retention, reused):
    """The end of the prompt is the end of a state block, so that the next token would be written
    where the state is kept. Two others resume meanwhile, the second where the first has been."""
    served = Served(rules, retention=retention, kv_pages=60, state_slots=60)
    writer = served.add(P, 20)
    while len(writer.sequences[0].output_ids) < 2:
        served.engine.step()
    readers = [served.add([*P, *X], 20), served.add([*P, *Y], 20)]
    served.run(writer, *readers)
    assert served.reuse(P) == 48 and served.reuse([*P, *Z]) == 64
    assert served.witness.restored == [reused, 64, 48, 64]
    assert_all_comes_back(served.engine)


@by_both_rules
@pytest.mark.parametrize("piece, reused", [(32, 0), (128, 64)])
def test_br11_the_second_of_one_step_waits_for_what_the_first_is_writing(rules, piece, reused):
    """A key is given out when a piece is planned, its bytes are there when it has run. In pieces of
    32 there is no state to wait for."""
    served = Served(rules, prefill_chunk=piece)
    twins = [served.add(fresh(1, 80)), served.add(fresh(1, 80))]
    assert [own.cached_tokens for own in served.run(*twins)] == [0, reused]
    assert served.cache.stats().waits.get(WaitReason.SAME_STEP, 0) == (reused > 0)
    assert served.reuse(fresh(1, 80)) == 64
    assert_all_comes_back(served.engine)


@by_both_rules
def test_br11_nothing_is_found_of_what_was_never_computed(rules):
    served = Served(rules, prefill_chunk=32)
    prompt = fresh(1, 80)
    first = served.add(prompt)
    served.engine.step()
    served.engine.abort(first.request_id)
    own = served.ask(prompt)
    assert (own.hit.joint, own.hit.token_hit, own.hit.junction) == (0, 32, 32)
    assert served.reuse(prompt) == 64


@by_both_rules
def test_br11_keys_of_a_step_that_failed_find_nothing(rules):
    served = Served(rules)
    executor = served.engine.executor
    run_plans, executor.run = executor.run, out_of_memory
    request = served.add(P)
    with pytest.raises(MemoryError):
        served.engine.step()
    assert not [entry for pool in served.cache.block_pools for entry in pool.entries()]
    executor.run = run_plans
    served.run(request)
    assert served.reuse([*P[:48], *X]) == 48
    assert_all_comes_back(served.engine)


@by_both_rules
@pytest.mark.parametrize("lost, reused", [((), 64), ((64,), 32), ((32, 64), 0)])
def test_br13_the_hit_is_where_rows_and_state_both_are(rules, lost, reused):
    served = Served(rules, state_block=32, retention="none", prefill_chunk=32)
    served.reuse([*P, 5], 1)
    assert checkpoints(served.engine) == [32, 64]
    served.witness.holdings.forget_states(*lost)
    own = served.ask([*P, *X])
    assert (own.hit.joint, own.hit.token_hit) == (reused, 64)
    assert own.hit.junction == (64 if lost else None)
    assert served.reuse([*P, *Y]) == 64


@by_both_rules
def test_br13_rows_that_are_lost_take_the_state_out_of_reach(rules):
    served = Served(rules, state_block=32, retention="none", prefill_chunk=32)
    served.reuse([*P, 5], 1)
    rows = next(group for group in served.cache.groups if isinstance(group, RowGroup))
    chain = served.cache.chain_of(P)
    for boundary in (48, 64):
        rows.pool.forget(rows.pool.find(chain.key(boundary, rows.number)))
    own = served.ask([*P, *X])
    assert (own.hit.joint, own.hit.token_hit, own.hit.junction) == (32, 32, None)


@by_both_rules
@pytest.mark.parametrize("new", a_few([17, 0, 1], 3))
@pytest.mark.parametrize("page, block", [(16, 64), (64, 16), (48, 64)])
def test_br16_every_checkpoint_is_the_state_of_its_boundary(rules, page, block, new):
    """The witness compares each with the model's own."""
    served = Served(
        rules, page=page, state_block=block, retention="none", state_slots=60, kv_pages=60
    )
    unit = served.cache.sizes.hits
    for length in (100, 150, 192, 200):
        prompt = fresh(length + new, length)
        params = greedy(new, prompt_logprobs=None if new else 0)
        (own,) = run(served.engine, served.engine.add_request(prompt, params))
        hit = served.reuse([*prompt, *own.token_ids, *fresh(7, 5)], 1)
        assert hit >= (length - 1) // unit * unit > 0
    assert all(boundary % unit == 0 for boundary in checkpoints(served.engine))
    assert_all_comes_back(served.engine)


@by_both_rules
def test_br36_a_partly_filled_page_is_shared_by_copy_alone(rules):
    """20 tokens are a page and a quarter, found in whole by hashes of 4: two readers and the writer
    go on in second pages of their own."""
    served = Served(rules, hash_unit=4)
    writer = served.add(P[:21], 30)
    while len(writer.sequences[0].output_ids) < 2:
        served.engine.step()
    readers = [served.add([*P[:20], *X], 20), served.add([*P[:20], *Y], 20)]
    served.engine.step()
    tables = [request.sequences[0].lease.pages[0] for request in (writer, *readers)]
    assert len({table[0] for table in tables}) == 1
    assert len({table[1] for table in tables}) == 3
    assert [own.cached_tokens for own in served.run(writer, *readers)] == [0, 20, 20]
    assert_all_comes_back(served.engine)


@by_both_rules
@pytest.mark.parametrize("kernel_chunk", a_few([64, 16], 2))
def test_br37_milestones_are_absolute_wherever_a_request_has_resumed(rules, kernel_chunk):
    """Page 16, state block 48, kernel chunks of 16 or 64, pieces of 40."""
    served = Served(
        rules, kernel_chunk, state_block=48, retention=48, prefill_chunk=40, state_slots=99
    )
    talk = fresh(1, 200)
    hits = []
    for more, new in ((20, 9), (30, 17), (21, 40), (3, 1)):
        own = served.ask(talk, new)
        hits.append(own.cached_tokens)
        talk = [*talk, *own.token_ids, *fresh(more, more)]
    assert hits == [0, 192, 240, 288]
    kept = set(checkpoints(served.engine))
    assert kept >= {*range(48, 337, 48)} and all(boundary % 16 == 0 for boundary in kept)


SALTS = (None, "", "a", "ab")


@by_both_rules
@pytest.mark.parametrize("salt", SALTS, ids=repr)
def test_br84_a_prefix_is_found_under_its_own_salt_alone(rules, salt):
    served = Served(rules, state_slots=40)
    assert served.reuse(P, 1, cache_salt=salt) == 0
    others = [other for other in SALTS if other != salt]
    for other in others:
        own = served.ask(P, 1, cache_salt=other)
        assert (own.hit.joint, own.hit.token_hit) == (0, 0), (salt, other)
    assert [served.reuse(P, 1, cache_salt=own) for own in (salt, *others)] == [48] * 4


def test_br84_no_adapter_is_taken_for_a_salt():
    """They are in different links of the chain, each with its length."""
    pairs = [("a", None), (None, "a"), ("a", "b"), ("ab", ""), ("ab", None), ("", None), (None, "")]
    chains = [HashChain(Identity().origin(salt), P, 16, adapter=name) for name, salt in pairs]
    assert len({chain.key(64, 0) for chain in chains}) == len(pairs)


@by_both_rules
@pytest.mark.parametrize("total", a_few([128, 129, 100, 127, 200, 257, 255, 256, 300], 5))
def test_br90_five_equal_requests_give_five_equal_answers(rules, total):
    served = Served(rules)
    a, b, c = (fresh(total + seed, total - 5) for seed in (1, 2, 3))
    owns = [served.ask(prompt, 5) for prompt in (a, b, a, c, a, c, a, b, a)]
    mine = [own for own, prompt in zip(owns, "abacacaba", strict=True) if prompt == "a"]
    assert len({own.token_ids for own in mine}) == 1
    assert [own.cached_tokens for own in mine] == [0] + [(total - 6) // 16 * 16] * 4


# --- hit rates ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rules, shared, hits",
    [
        (OURS, 256, [0, 256, 256, 256]),
        (OURS, 250, [0, 0, 240, 240]),
        (VLLM, 256, [0, 0, 256, 256]),
        (VLLM, 250, [0, 0, 192, 192]),
    ],
    ids=str,
)
def test_br03_a_shared_system_prompt_is_reused(rules, shared, hits):
    """At the latest by the third: the second leaves a state where they part, on a hash or, by the
    engine's rules, which end a piece there, on a state block."""
    served = Served(rules)
    prompts = ([*fresh(1, shared), *fresh(10 + i, 40)] for i in range(4))
    assert [served.reuse(prompt) for prompt in prompts] == hits


@by_both_rules
@pytest.mark.parametrize("block", [16, 64])
def test_br17_a_prompt_of_whole_pages_hits(rules, block):
    found = []
    for length in (16, 17, 32, 33, 64):
        served = Served(rules, state_block=block)
        prompt = fresh(length, length)
        served.reuse(prompt, 1)
        found.append(served.reuse(prompt, 1))
    assert found == [0, 16, 16, 32, 48]


def test_br41_a_hit_makes_its_own_state_recent_and_no_other():
    """Seven slots: six states and who runs. Chats of three state blocks leave three each."""
    served = Served(
        OURS, state_slots=7, state_block=16, retention="none", prefill_chunk=16, kv_pages=60
    )
    a, b, c = (fresh(seed, 49) for seed in (1, 2, 3))
    served.reuse(a, 1), served.reuse(b, 1)
    assert checkpoints(served.engine) == [16, 16, 32, 32, 48, 48]
    assert [served.reuse(a, 1) for _ in range(3)] == [48] * 3
    served.reuse(c, 1)
    states = {held.tokens for held in served.witness.holdings.held() if held.is_state}
    kept = [(a, 48), (b, 32), (b, 48), (c, 16), (c, 32), (c, 48)]
    assert states == {tuple(text[:boundary]) for text, boundary in kept}
    assert served.reuse([*b, *X], 1) == 48


@by_both_rules
def test_br47_a_long_prompt_does_not_push_a_hot_prefix_out(rules):
    served = Served(rules, state_slots=8, prefill_chunk=64, kv_pages=90)
    hot, long = fresh(1, 70), fresh(2, 1024)
    assert [served.reuse(hot, 1) for _ in range(6)] == [0] + [64] * 5
    served.reuse(long, 1)
    assert checkpoints(served.engine) == [64, 960, 1008]
    assert served.reuse(hot, 1) == 64
    assert served.reuse(long, 1) == 1008


@by_both_rules
def test_br81_a_chat_whose_last_tokens_change_resumes_from_what_is_before_them(rules):
    served = Served(rules)
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
    assert hits == [0, 0, 16, 48, 64, 80, 96]
