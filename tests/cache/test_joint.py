"""The one rule of what may be resumed (serving.md 9.1; I-01 to I-04)."""

from dataclasses import replace
from itertools import product

import pytest

from cache.entry import CacheEntry, Form, Required, Shard, StateKind, Tier, completes, joint_of
from cache.identity import Identity, extended, prefix_hashes
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
KV, RECURRENT, CONV = StateKind
REQUIRED = {  # a model of layers 0..5, of which 2 and 5 attend
    KV: Required((2, 5), Form("bfloat16", "latent_rope", (24,))),
    RECURRENT: Required((0, 1, 3, 4), Form("float32", "head,v,k", (4, 8, 8))),
    CONV: Required((0, 1, 3, 4), Form("bfloat16", "time,qkv_channel", (3, 96))),
}


def chain(tokens=PROMPT, unit=4, identity=ME, salt=None):
    hashes = prefix_hashes(identity.origin(salt), tokens, unit)
    return {unit * i: h for i, h in enumerate(hashes, 1)}


def record(kind, start, end, hashes, *, identity=ME, salt=None, required=REQUIRED, **fields):
    made = CacheEntry(
        kind, identity, salt, hashes[end], start, end, *required[kind], "pool", (Handle(1, 0),)
    )
    return replace(made, **fields)


def entries(identity=ME, salt=None, tokens=PROMPT, rows=16, points=(4, 8), unit=4):
    """Pages of `unit` rows up to `rows`, both kinds of state at `points`. points: of recurrent and
    of conv state, if they differ."""
    hashes, whose = chain(tokens, unit, identity, salt), dict(identity=identity, salt=salt)
    each = points if isinstance(points, dict) else {RECURRENT: points, CONV: points}
    found = [record(KV, n - unit, n, hashes, **whose) for n in range(unit, rows + 1, unit)]
    return found + [record(kind, n, n, hashes, **whose) for kind in each for n in each[kind]]


def joint(found, cap=15, salt=None, identity=ME, hashes=None, required=REQUIRED):
    return joint_of(found, identity, salt, hashes or chain(), cap, required)


LONG = [n % 1000 for n in range(8192)]
TWO_AND_ONE = {RECURRENT: (4096, 8192), CONV: (4096,)}


@pytest.mark.parametrize(
    "rows, points, prompt, boundary, replayed, to_run",
    [
        pytest.param(4096, (3968,), 5000, 3968, 128, 1032, id="J01"),
        pytest.param(6000, (4096, 8192), 6001, 4096, 1904, 1905, id="J02"),
        pytest.param(8192, TWO_AND_ONE, 8192, 4096, 4095, 4096, id="J03"),
        pytest.param(4096, (3968, 4480), 8192, 3968, 128, 4224, id="J04"),
        pytest.param(8, (8,), 8, 0, 7, 8, id="J05"),
        pytest.param(8, (4, 8), 8, 4, 3, 4, id="J05, a shallower state"),
        pytest.param(8, {RECURRENT: (4, 8), CONV: (4,)}, 9, 4, 4, 5, id="J07"),
        pytest.param(0, (), 9, 0, 0, 9, id="J10"),
    ],
)
def test_rows_of_the_table_as_records(rows, points, prompt, boundary, replayed, to_run):
    """replayed: tokens that have rows and are computed again for want of a state (I-05)."""
    unit = 4 if rows <= 8 else 16
    found = entries(tokens=LONG, rows=rows, points=points, unit=unit)
    assert joint(found, cap=prompt - 1, hashes=chain(LONG, unit)) == boundary
    assert min(rows, prompt - 1) - boundary == replayed
    assert prompt - boundary == to_run


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
def test_j08_a_boundary_that_lacks_one_layer_is_none(kind):
    """And the layers of several records make a whole."""
    found, (layers, _) = entries(), REQUIRED[kind]
    whole = [e for e in found if not (e.kind is kind and e.end == 8)]
    part = [replace(e, layers=layers[:-1]) for e in found if e.kind is kind and e.end == 8]
    rest = [replace(e, layers=layers[-1:]) for e in part]
    assert joint([*whole, *part]) == 4
    assert joint([*rest, *whole]) == 4
    assert joint([*rest, *whole, *part]) == 8


def test_j08_of_69_layers_68_are_not_enough():
    count = 69
    required = REQUIRED | {RECURRENT: REQUIRED[RECURRENT]._replace(layers=tuple(range(count)))}
    rest = [e for e in entries(points=(8,)) if e.kind is not RECURRENT]
    for covered, boundary in ((count - 1, 0), (count, 8)):
        state = record(RECURRENT, 8, 8, chain(), layers=tuple(range(covered)))
        assert joint([*rest, state], required=required) == boundary


def test_rows_reach_as_far_as_those_of_the_layer_that_has_the_fewest():
    """Gaps of two layers at different places are both gaps."""
    found = [e for e in entries(points=(4, 8, 12, 16)) if e.kind is not KV]
    for layer, ends in ((2, (4, 8, 12)), (5, (4, 8, 16))):
        found += [record(KV, n - 4, n, chain(), layers=(layer,)) for n in ends]
    assert joint(found, cap=16) == 8


def test_a_layer_that_the_model_does_not_have_makes_up_for_none():
    found = [e if e.kind is KV else replace(e, layers=(0, 1, 3, 7)) for e in entries()]
    assert joint(found) == 0


@pytest.mark.parametrize("kind", StateKind)
@pytest.mark.parametrize(
    "other",
    [
        dict(dtype="float16"),
        dict(layout="k,v,head"),
        dict(shape=(1, 2)),
        dict(shard=Shard("head", 1, 2, 0)),
    ],
    ids=lambda other: next(iter(other)),
)
def test_an_object_of_another_form_does_not_count(kind, other):
    found = [
        replace(e, form=replace(e.form, **other)) if e.kind is kind and e.end == 8 else e
        for e in entries()
    ]
    assert joint(found) == 4
    assert not completes(found, ME, None, chain(), 8, REQUIRED)


def test_where_an_object_is_and_who_uses_it_is_no_matter():
    found = [replace(e, tier=Tier.HOST, refs=1, last_access=9) for e in entries()]
    assert joint(found) == 8


def test_a_model_without_layers_of_a_kind_needs_none_of_it():
    rows_only, states_only = {KV: REQUIRED[KV]}, {k: REQUIRED[k] for k in (RECURRENT, CONV)}
    assert joint(entries(points=()), cap=9, required=rows_only) == 9
    assert joint(entries(rows=0), required=states_only) == 8
    assert joint(entries(rows=0), required=REQUIRED | {KV: REQUIRED[KV]._replace(layers=())}) == 8


@pytest.mark.parametrize("kind", StateKind)
def test_j09_another_key_space_or_another_prompt_shares_nothing(kind):
    rest = [e for e in entries() if e.kind is not kind]
    for foreign in (entries(salt="s"), entries(salt=""), entries(tokens=[9, *PROMPT[1:]])):
        assert joint(foreign) == 0
        assert joint([*rest, *(e for e in foreign if e.kind is kind)]) == 0


def test_j09_another_picture_at_the_same_place_shares_what_is_before_it():
    """The picture is in the second unit of the prompt."""
    start = chain()[4]
    cat, dog = ({4: start, 8: extended(start, PROMPT[4:8], what)} for what in (b"cat", b"dog"))
    found = [record(kind, n - 4 if kind is KV else n, n, cat) for kind in StateKind for n in (4, 8)]
    assert [joint(found, hashes=hashes) for hashes in (cat, dog, chain())] == [8, 4, 4]


def test_rows_of_another_prompt_count_as_far_as_it_is_the_same():
    other = entries(tokens=[*PROMPT[:8], *[99] * 8], points=(12,))
    assert joint([*entries(rows=0), *other]) == 8


@pytest.mark.parametrize("gap, boundary", [(0, 0), (1, 4), (2, 8), (3, 8)])
def test_rows_count_up_to_the_first_gap(gap, boundary):
    found = entries()
    del found[gap]
    assert joint(found[::-1]) == boundary


def test_j07_one_kind_of_state_alone_is_no_boundary():
    found = [e for e in entries() if not (e.kind is CONV and e.end == 8)]
    assert joint(found) == 4
