"""CacheEntry: what a record may say. What records allow is in test_joint."""

from dataclasses import replace

import pytest

from cache.entry import POINTS, CacheEntry, Form, Shard, StateKind, Tier
from cache.identity import Identity
from cache.pools.allocator import Handle

FORM = Form("float32", "head,v,k", (4, 8, 8))


def entry(kind, start, end, **fields):
    where = (Handle(1, 0),)
    return CacheEntry(
        kind, Identity("m"), None, b"h", start, end, (0, 1, 2), FORM, "pool", where, **fields
    )


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


def test_kinds_and_tiers_have_the_names_that_go_into_manifests():
    assert [*map(str, StateKind)] == ["mla_kv", "kda_recurrent", "kda_conv"]
    assert {*POINTS} == {StateKind.RECURRENT, StateKind.CONV}
    assert [*map(str, Tier)] == ["device", "host", "store"]


def test_a_record_is_of_a_whole_read_only_object_on_the_device_until_it_is_said_otherwise():
    made = entry(StateKind.CONV, 8, 8)
    assert (made.writable, made.parent, made.tier, made.form.shard) == (
        (False, None, Tier.DEVICE, None)
    )
    with pytest.raises(AttributeError):
        made.end = 9


def test_what_is_kept_as_a_book_is_not_what_makes_two_records_equal():
    made, used = entry(StateKind.CONV, 8, 8), entry(StateKind.CONV, 8, 8, refs=2, last_access=7)
    assert (made == used, hash(made) == hash(used)) == (True, True)
    assert (used.refs, used.last_access) == (2, 7)
    assert replace(made, layers=(0, 1)) != made


def test_forms_are_equal_in_every_respect_or_not_at_all():
    assert replace(FORM) == FORM
    for other in (
        dict(dtype="bfloat16"),
        dict(layout="head,k,v"),
        dict(shape=(4, 8, 4)),
        dict(shard=Shard("head", 1, 2, 0)),
    ):
        assert replace(FORM, **other) != FORM
