"""Faults that users of such software have met (bug_reports.md), as recipes against the real model:
hit rates (class HIT), whether with a tree or with hashed blocks.
"""

import pytest

from cache.leases import Hit, Lower
from tests.kimi_mini.serving.reuse import (
    BLOCKS,
    HASHED,
    TREE,
    VLLM,
    Rules,
    by_our_rules,
    checkpoints,
)
from tests.kimi_mini.serving.toy import P, Served, X, fresh, out_of_memory


@pytest.mark.parametrize(
    "rules, shared, hits",
    [
        (TREE, 256, [0, 256, 256, 256]),
        (TREE, 250, [0, 0, 240, 240]),
        (HASHED, 256, [0, 256, 256, 256]),
        (HASHED, 250, [0, 0, 240, 240]),
        (VLLM, 256, [0, 0, 256, 256]),
        (VLLM, 250, [0, 0, 192, 192]),
    ],
    ids=str,
)
def test_br03_a_shared_system_prompt_is_reused(rules, shared, hits):
    """At the latest by the third: the second leaves a state where they part, on a page or, by
    vLLM's rules, which end a piece there, on a state block."""
    served = Served(rules)
    prompts = ([*fresh(1, shared), *fresh(10 + i, 40)] for i in range(4))
    assert [served.reuse(prompt) for prompt in prompts] == hits


@by_our_rules
@pytest.mark.parametrize("grid", [16, 64])
def test_br17_a_prompt_of_whole_pages_hits(rules, grid):
    found = []
    for length in (16, 17, 32, 33, 64):
        served = Served(rules, grid=grid)
        prompt = fresh(length, length)
        served.reuse(prompt, 1)
        found.append(served.reuse(prompt, 1))
    assert found == [0, 16, 16, 32, 48]


@pytest.mark.parametrize("rules", [TREE, HASHED], ids=str)
def test_br41_a_hit_makes_its_own_state_recent_and_no_other(rules):
    """Seven slots: six checkpoints and who runs. Chats of three pages leave three each; in a tree
    those of C are named, since the grid's would push nobody out (BR-47)."""
    dense = dict(retention="none") if rules.blocks else {}
    served = Served(rules, state_slots=7, grid=16, prefill_chunk=16, **dense)
    a, b, c = (fresh(seed, 49) for seed in (1, 2, 3))
    served.reuse(a, 1), served.reuse(b, 1)
    assert checkpoints(served.engine) == [16, 16, 32, 32, 48, 48]
    assert [served.reuse(a, 1) for _ in range(3)] == [48] * 3
    served.reuse(c, 1, checkpoint_at=(16, 32))
    states = {held.tokens for held in served.holdings.held() if held.is_state}
    kept = [(a, 48), (b, 32), (b, 48), (c, 16), (c, 32), (c, 48)]
    assert states == {tuple(text[:boundary]) for text, boundary in kept}
    assert served.reuse([*b, *X], 1) == 48


@pytest.mark.parametrize(
    "rules, kept",
    [
        (TREE, [64, 768, 832, 896, 960, 1008, 1024]),
        *((rules, [64, 960, 1008]) for rules in BLOCKS),
    ],
    ids=str,
)
def test_br47_a_long_prompt_does_not_push_a_hot_prefix_out(rules, kept):
    """A tree where slots are short: its own oldest checkpoints go, and a spaced few stay. Blocks
    keep what a resend will want."""
    served = Served(rules, state_slots=8, prefill_chunk=64, kv_pages=90)
    hot, long = fresh(1, 70), fresh(2, 1024)
    assert [served.reuse(hot, 1) for _ in range(6)] == [0] + [64] * 5
    served.reuse(long, 1)
    assert checkpoints(served.engine) == kept
    assert served.reuse(hot, 1) == 64
    assert served.reuse(long, 1) == 1008


@by_our_rules
def test_br47_answers_do_not_push_a_hot_prefix_out_either(rules):
    """Of a tree, snapshots of decode: one that evicts a request, a second one only into what is
    free. Blocks keep none."""
    served = Served(rules, state_slots=16, kv_pages=90)
    hot = fresh(1, 70)
    assert [served.reuse(hot, 1) for _ in range(2)] == [0, 64]
    served.run(*(served.add(fresh(10 + i, 10), 40) for i in range(6)))
    assert served.reuse(hot, 1) == 64


@pytest.mark.parametrize("rules", [Rules("no_buffer"), HASHED], ids=str)
def test_br71_what_was_found_and_not_used_counts_as_a_miss(rules):
    """The pool has room for the request alone, not for what it would resume from beside it."""
    served = Served(rules, state_slots=1)
    talk = P
    for turn in range(10):
        own = served.ask(talk, 1, checkpoint_at=[len(talk)])
        assert own.hit == Hit(lower=Lower.NO_REUSE if turn else Lower.UNKNOWN)
        assert checkpoints(served.engine) == [len(talk)], "nothing to be found"
        talk = [*talk, *fresh(20 + turn, 16)]
    stats = served.cache.stats()
    assert (stats.joint_hit_tokens, stats.token_hit_tokens) == (0, 0)
    assert not served.witness.restored


@by_our_rules
def test_br71_a_restore_counts_once_it_has_succeeded(rules):
    """What lies in a pool has no form of its own that could be wrong; its copy may fail."""
    dense = dict(retention="none") if rules.blocks else {}
    served = Served(rules, grid=32, **dense)
    served.reuse(P, 1)
    executor = served.engine.executor
    copy, executor.copy = executor.copy, out_of_memory
    request = served.add([*P[:50], *X])
    for _ in range(10):
        with pytest.raises(MemoryError):
            served.engine.step()
    stats = served.cache.stats()
    assert (stats.lookups, stats.joint_hit_tokens, stats.token_hit_tokens) == (1, 0, 0)
    executor.copy = copy
    (own,) = served.run(request)
    stats = served.cache.stats()
    assert own.cached_tokens == 48 == stats.joint_hit_tokens == stats.token_hit_tokens


@by_our_rules
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
    first = [0, 0, 16] if rules.blocks else [0, 16, 32]  # a tree keeps answers, too
    assert hits == [*first, 48, 64, 80, 96]
