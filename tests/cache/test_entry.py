"""CacheEntry: what a record may say. What records allow is in test_joint."""

import pytest

from cache.entry import POINTS, CacheEntry, StateKind
from cache.identity import Identity
from cache.pools.allocator import Handle


def entry(kind, start, end):
    return CacheEntry(kind, Identity("m"), None, b"h", start, end, "pool", (Handle(1, 0),))


@pytest.mark.parametrize("kind", POINTS)
def test_a_state_is_at_one_boundary(kind):
    assert entry(kind, 8, 8).end == 8
    for start, end in ((0, 8), (8, 4)):
        with pytest.raises(ValueError, match=f"{kind} cannot be at {start}..{end}"):
            entry(kind, start, end)


def test_rows_are_an_interval():
    assert entry(StateKind.MLA_KV, 4, 8).start == 4
    for start, end in ((8, 4), (-4, 4)):
        with pytest.raises(ValueError, match=f"mla_kv cannot be at {start}..{end}"):
            entry(StateKind.MLA_KV, start, end)


def test_kinds_have_the_names_that_go_into_manifests():
    assert [*map(str, StateKind)] == ["mla_kv", "kda_recurrent", "kda_conv"]
    assert {*POINTS} == {StateKind.RECURRENT, StateKind.CONV}


def test_a_record_is_read_only_until_it_is_said_otherwise():
    made = entry(StateKind.CONV, 8, 8)
    assert (made.writable, made.parent) == (False, None)
    with pytest.raises(AttributeError):
        made.end = 9
    assert made == entry(StateKind.CONV, 8, 8) and hash(made) == hash(entry(StateKind.CONV, 8, 8))
