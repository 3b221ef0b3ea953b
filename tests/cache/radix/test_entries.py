"""Records of what the tree holds (decision 27): enough to check a resume without the tree."""

from dataclasses import replace

import pytest
import torch

from cache.entry import Form, Required, StateKind, Tier, completes, joint_of
from cache.identity import Identity, extended, prefix_hashes
from cache.pools.allocator import OwnershipError
from cache.pools.pool import Pool
from cache.radix.entries import audit_entries, checkpoints, required_by
from cache.radix.tree import RadixTree
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


def found_in(garden):
    return checkpoints(garden.tree, ME, required_by(garden.tree))


def records(garden, depth):
    return next((hashes, made) for node, hashes, made in found_in(garden) if node.depth == depth)


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
    assert {(e.identity, e.salt, e.tier, e.writable) for e in entries} == (
        {(ME, "s", Tier.DEVICE, False)}
    )
    assert [e.pool for e in entries] == ["page"] * 6 + ["slot"] * 2


def test_records_say_who_uses_what_they_stand_for():
    garden = planted()
    garden.lock(garden.node(PROMPT[:8], "s"))
    garden.lock(garden.node(PROMPT, "s"))
    _, entries = records(garden, 12)
    assert [e.refs for e in entries] == [2, 2, 2, 2, 1, 1, 1, 1]
    before = entries[-1].last_access
    garden.match(PROMPT, "s")
    _, entries = records(garden, 12)
    assert entries[-1].last_access == entries[-2].last_access > before
    assert entries[-3].last_access > entries[0].last_access > before


def planted_on(dtype=torch.float32, kda=3, mla=2):
    """A tree over memory of the model's own shape: a head of 4 x 8 and rows of 6."""
    latent = torch.zeros(mla, 9, 2, 6, dtype=dtype)
    states = [torch.zeros(kda, 5, 1, 4, 8), torch.zeros(kda, 5, 3, 12, dtype=dtype)]
    pages = Pool(8, "page", latent[:, :1].nbytes, [latent])
    slots = Pool(4, "slot", sum(t[:, :1].nbytes for t in states), states)
    tree = RadixTree(pages, 2, slots)
    tree.insert(PROMPT[:4], pages.alloc(2), slots.alloc(1)[0])
    return tree


def test_layers_and_forms_are_those_of_the_memory():
    tree = planted_on(torch.bfloat16)
    assert required_by(tree) == {
        StateKind.MLA_KV: Required((0, 1), Form("bfloat16", "latent_rope", (6,))),
        StateKind.RECURRENT: Required((0, 1, 2), Form("float32", "head,v,k", (1, 4, 8))),
        StateKind.CONV: Required((0, 1, 2), Form("bfloat16", "time,qkv_channel", (3, 12))),
    }
    ((_, _, entries),) = checkpoints(tree, ME, required_by(tree))
    assert {e.kind: (e.layers, e.form) for e in entries} == required_by(tree)


def test_a_layer_may_be_called_what_the_model_calls_it():
    tree = planted_on()
    kda, mla = (0, 1, 3), (2, 4)
    names = {StateKind.MLA_KV: mla, StateKind.RECURRENT: kda, StateKind.CONV: kda}
    ours = required_by(tree, names)
    ((_, hashes, entries),) = checkpoints(tree, ME, ours)
    assert [e.layers for e in entries] == [mla, mla, kda, kda]
    assert completes(entries, ME, None, hashes, 4, ours)
    assert not completes(entries, ME, None, hashes, 4, required_by(tree))


@pytest.mark.parametrize("ids", [(0,), (0, 1, 2), (3, 3)])
def test_memory_of_two_layers_is_not_of_another_number(ids):
    with pytest.raises(ValueError, match="mla_kv is stored for 2 layers, got the ids"):
        required_by(planted_on(), {StateKind.MLA_KV: ids})


def test_another_precision_is_another_object():
    theirs, ours = planted_on(torch.bfloat16), planted_on()
    ((_, hashes, entries),) = checkpoints(theirs, ME, required_by(theirs))
    assert completes(entries, ME, None, hashes, 4, required_by(theirs))
    assert not completes(entries, ME, None, hashes, 4, required_by(ours))


@pytest.mark.parametrize("layers", [dict(kda=0), dict(mla=0)], ids=str)
def test_a_model_without_layers_of_a_kind_has_sound_records(layers):
    assert audit_entries(planted_on(**layers), ME) == []


def test_memory_that_is_only_accounted_stands_for_one_layer():
    required = required_by(planted().tree)
    assert {(need.layers, need.form.dtype, need.form.shape) for need in required.values()} == (
        {((0,), None, ())}
    )


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
    required, found = required_by(garden.tree), {}
    for node, hashes, entries in found_in(garden):
        assert joint_of(entries, ME, "s", hashes, 99, required) == node.depth
        found[node.depth] = [
            n for n in range(1, 14) if completes(entries, ME, "s", hashes, n, required)
        ]
    assert found == {4: [4], 10: [10], 12: [12]}


@pytest.mark.parametrize(
    "change",
    [
        dict(identity=replace(ME, model="other")),
        dict(identity=replace(ME, tokenizer="other")),
        dict(identity=replace(ME, numerics="other")),
        dict(salt=None),
        dict(prefix_hash=bytes(32)),
        dict(layers=()),
        dict(form=Form("float16", "other", ())),
    ],
    ids=lambda change: next(iter(change)),
)
@pytest.mark.parametrize("which", [0, 2, -2, -1])
def test_one_record_of_another_producer_or_prefix_is_one_too_few(which, change):
    """J06 to J09"""
    garden = planted()
    hashes, entries = records(garden, 12)
    entries[which] = replace(entries[which], **change)
    assert not completes(entries, ME, "s", hashes, 12, required_by(garden.tree))


def test_the_audit_passes_what_is_sound_and_names_what_is_not_there():
    garden = planted()
    assert audit_entries(garden.tree, ME) == []
    node = garden.node(PROMPT, "s")
    garden.pages.allocator.evict([node.pages[-1]])
    assert audit_entries(garden.tree, ME) == [
        f"I-01: the tree holds what is not there: page {node.pages[-1]} is free: nothing to hold"
    ]
    with pytest.raises(OwnershipError):
        [*found_in(garden)]


def test_the_audit_finds_an_edge_with_too_few_pages():
    garden = planted()
    garden.node(PROMPT[:4], "s").pages.pop()
    faults = audit_entries(garden.tree, ME)
    assert len(faults) == 3
    assert faults[0] == "I-01: the records of the node at 4 do not allow a resume there"
