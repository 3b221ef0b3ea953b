"""The one rule of what may be resumed (serving.md 9.1; I-01 to I-04)."""

from itertools import product

import pytest

from cache.entry import CacheEntry, StateKind, joint_of
from cache.identity import Identity, prefix_hashes
from cache.joint import joint_boundary
from cache.pools.allocator import Handle

CASES = {
    "J01": ([4096], [{3968}, {3968}], 4999, 3968),
    "J02": ([6000], [{4096, 8192}, {4096, 8192}], 6000, 4096),
    "J03": ([8192], [{4096, 8192}, {4096}], 9000, 4096),
    "J04, not the smallest of the best": ([4096], [{3968, 4480}, {3968, 4480}], 9000, 3968),
    "J05, one token must run": ([8], [{8}, {8}], 7, 0),
    "J05 with a shallower state": ([8], [{4, 8}, {4, 8}], 7, 4),
    "J07": ([8], [{4, 8}, {4}], 8, 4),
    "J08, a group of layers lacks it": ([8], [{8}, {8}, set()], 8, 0),
    "J10": ([0], [set(), set()], 8, 0),
    "no state at all": ([8], [set(), set()], 8, 0),
    "no rows": ([0], [{8}, {8}], 8, 0),
    "two attention groups": ([16, 9], [{4, 8, 12}], 99, 8),
    "no attention group": ([], [{4, 8}], 7, 4),
    "no state group": ([8, 6], [], 99, 6),
    "a state at 0 is none": ([8], [{0}], 8, 0),
    "nothing may be read": ([8], [{8}], 0, 0),
    "a prompt of one token": ([8], [], 0, 0),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_of_the_table(name):
    reaches, states, cap, joint = CASES[name]
    assert joint_boundary(reaches, states, cap) == joint


def test_it_is_the_largest_boundary_that_all_kinds_allow_in_whatever_order_they_come():
    """All small cases, against the definition."""
    subsets = [{n for n in range(1, 4) if bits >> n & 1} for bits in range(0, 16, 2)]
    for reach, cap, a, b in product(range(4), range(4), subsets, subsets):
        legal = [n for n in range(min(cap, 3) + 1) if n == 0 or (n <= reach and n in a and n in b)]
        assert joint_boundary([reach], [a, b], cap) == max(legal)
        assert joint_boundary([reach], [b, a], cap) == max(legal)


ME, PROMPT = Identity("weights", "tokenizer", "chunks"), [*range(16)]


def entries(identity=ME, salt=None, tokens=PROMPT, rows=16, points=(4, 8)):
    """Pages of 4 rows up to `rows`, both kinds of state at `points`."""
    chain = {4 * i: h for i, h in enumerate(prefix_hashes(identity.origin(salt), tokens, 4), 1)}
    made = [
        CacheEntry(StateKind.MLA_KV, identity, salt, chain[n], n - 4, n, "page", (Handle(n, 0),))
        for n in range(4, rows + 1, 4)
    ]
    return made + [
        CacheEntry(kind, identity, salt, chain[n], n, n, "slot", (Handle(n, 0),))
        for n in points
        for kind in (StateKind.RECURRENT, StateKind.CONV)
    ]


HASHES = {4 * i: h for i, h in enumerate(prefix_hashes(ME.origin(), PROMPT, 4), 1)}


def joint(found, cap=15, salt=None, identity=ME, hashes=HASHES):
    return joint_of(found, identity, salt, hashes, cap)


def test_records_of_one_producer_and_prefix_join():
    assert joint(entries()) == 8
    assert joint(entries(), cap=7) == 4
    assert joint(entries(rows=4)) == 4
    assert joint([]) == 0


@pytest.mark.parametrize("kind", StateKind)
@pytest.mark.parametrize("field", ["model", "tokenizer", "numerics"])
def test_j06_an_object_of_another_producer_does_not_count(kind, field):
    other = Identity(**vars(ME) | {field: "other"})
    foreign = [e for e in entries(other) if e.kind is kind]
    assert joint([e for e in entries() if e.kind is not kind] + foreign) == 0


@pytest.mark.parametrize("kind", StateKind)
def test_j09_another_key_space_or_another_prompt_shares_nothing(kind):
    rest = [e for e in entries() if e.kind is not kind]
    for foreign in (entries(salt="s"), entries(salt=""), entries(tokens=[9, *PROMPT[1:]])):
        assert joint(foreign) == 0
        assert joint([*rest, *(e for e in foreign if e.kind is kind)]) == 0


def test_rows_of_another_prompt_count_as_far_as_it_is_the_same():
    other = entries(tokens=[*PROMPT[:8], *[99] * 8], points=(12,))
    assert joint([*entries(rows=0), *other]) == 8


@pytest.mark.parametrize("gap, boundary", [(0, 0), (1, 4), (2, 8), (3, 8)])
def test_rows_count_up_to_the_first_gap(gap, boundary):
    found = entries()
    del found[gap]
    assert joint(found[::-1]) == boundary


def test_j07_one_kind_of_state_alone_is_no_boundary():
    found = [e for e in entries() if not (e.kind is StateKind.CONV and e.end == 8)]
    assert joint(found) == 4
