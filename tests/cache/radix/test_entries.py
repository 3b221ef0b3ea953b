"""Records of what the tree holds (decision 27): enough to check a resume without the tree."""

from dataclasses import replace

import pytest

from cache.entry import StateKind, completes, joint_of
from cache.identity import Identity, extended, prefix_hashes
from cache.pools.allocator import OwnershipError
from cache.radix.entries import audit_entries, checkpoints
from tests.cache.radix.planting import Garden

ME = Identity("weights", "tokenizer", "chunks of 64")
PROMPT = [*range(100, 112)]


def planted():
    """States at 4, 8 and 12; the one at 8 is lost; a branch leaves at 8."""
    garden = Garden(page=2, pages=32)
    for n in (4, 8, 12):
        garden.insert(PROMPT[:n], salt="s")
    garden.insert([*PROMPT[:8], 7, 7], salt="s")
    garden.tree._drop_state(garden.node(PROMPT[:8], "s"))
    return garden


def records(garden, depth):
    return next(
        (hashes, entries)
        for node, hashes, entries in checkpoints(garden.tree, ME)
        if node.depth == depth
    )


def test_a_checkpoint_has_a_record_of_each_page_and_of_both_states():
    garden = planted()
    hashes, entries = records(garden, 12)
    chain = [*prefix_hashes(ME.origin("s"), PROMPT, 2)]
    assert hashes == dict(zip(range(2, 14, 2), chain, strict=True))
    rows, points = entries[:-2], entries[-2:]
    assert [(e.start, e.end) for e in rows] == [(n, n + 2) for n in range(0, 12, 2)]
    assert [e.prefix_hash for e in rows] == chain
    assert [h.index for e in rows for h in e.where] == garden.match(PROMPT, "s").pages
    assert [e.kind for e in points] == [StateKind.RECURRENT, StateKind.CONV]
    for point in points:
        assert (point.start, point.end, point.prefix_hash) == (12, 12, chain[-1])
        assert point.where == (garden.slots.allocator.handle(garden.node(PROMPT, "s").state),)
    assert {(e.identity, e.salt, e.writable) for e in entries} == {(ME, "s", False)}


def test_the_parent_is_the_nearest_state_above():
    garden = planted()
    hashes, entries = records(garden, 12)
    assert {e.parent for e in entries[-2:]} == {hashes[4]}
    assert records(garden, 10)[1][-1].parent == hashes[4]
    assert records(garden, 4)[1][-1].parent is None


def test_the_chain_goes_on_after_a_branch():
    garden = planted()
    hashes, _ = records(garden, 10)
    assert hashes[10] == extended(records(garden, 12)[0][8], [7, 7])


def test_a_record_goes_stale_with_what_it_stands_for():
    garden = planted()
    _, entries = records(garden, 12)
    live = garden.pages.allocator.is_live
    assert all(live(handle) for e in entries[:-2] for handle in e.where)
    garden.evict(tokens=99)
    garden.insert(PROMPT, salt="s")
    assert not any(live(handle) for e in entries[:-2] for handle in e.where)


def test_each_checkpoint_allows_a_resume_there_and_at_no_other_boundary():
    garden = planted()
    found = {}
    for node, hashes, entries in checkpoints(garden.tree, ME):
        assert joint_of(entries, ME, "s", hashes, 99) == node.depth
        found[node.depth] = [n for n in range(1, 14) if completes(entries, ME, "s", hashes, n)]
    assert found == {4: [4], 10: [10], 12: [12]}


@pytest.mark.parametrize(
    "change",
    [
        dict(identity=replace(ME, model="other")),
        dict(identity=replace(ME, tokenizer="other")),
        dict(identity=replace(ME, numerics="other")),
        dict(salt=None),
        dict(prefix_hash=bytes(32)),
    ],
    ids=lambda change: next(iter(change)),
)
@pytest.mark.parametrize("which", [0, 2, -2, -1])
def test_one_record_of_another_producer_or_prefix_is_one_too_few(which, change):
    """J06, J07, J09"""
    hashes, entries = records(planted(), 12)
    entries[which] = replace(entries[which], **change)
    assert not completes(entries, ME, "s", hashes, 12)


def test_the_audit_passes_what_is_sound_and_names_what_is_not_there():
    garden = planted()
    assert audit_entries(garden.tree, ME) == []
    node = garden.node(PROMPT, "s")
    garden.pages.allocator.evict([node.pages[-1]])
    assert audit_entries(garden.tree, ME) == [
        f"I-01: the tree holds what is not there: page {node.pages[-1]} is free: nothing to hold"
    ]
    with pytest.raises(OwnershipError):
        [*checkpoints(garden.tree, ME)]


def test_the_audit_finds_an_edge_with_too_few_pages():
    garden = planted()
    garden.node(PROMPT[:4], "s").pages.pop()
    faults = audit_entries(garden.tree, ME)
    assert len(faults) == 3
    assert faults[0] == "I-01: the records of the node at 4 do not allow a resume there"
