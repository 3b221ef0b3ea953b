"""Faults that users of such software have met (bug_reports.md), as recipes against the real model:
hit rates (class HIT).
"""

import pytest

from cache.leases import Hit, Lower
from tests.cache.radix.planting import Garden
from tests.kimi_mini.serving.reuse import (
    Rules,
    checkpoints,
    nodes,
)
from tests.kimi_mini.serving.toy import P, Served, X, Z, fresh, out_of_memory


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
    served = Served(Rules("no_buffer"), page=1, state_slots=1)
    talk = P
    for turn in range(10):
        own = served.ask(talk, 3)
        assert own.hit == Hit(lower=Lower.NO_REUSE if turn else Lower.UNKNOWN)
        talk = [*talk, *own.token_ids, turn]
        assert checkpoints(served.engine) == [len(talk) - 2], "nothing to be found"
    stats = served.cache.stats()
    assert (stats.joint_hit_tokens, stats.token_hit_tokens) == (0, 0)
    assert not served.witness.restored


def test_br71_a_restore_counts_once_it_has_succeeded():
    """What lies in a pool has no form of its own that could be wrong; its copy may fail."""
    served = Served(state_chunk=32)
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
