"""Who made a state, and over which tokens (BR-84, I-09, I-32)."""

import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.identity import DIGEST, Identity, digest_of, extended, prefix_hashes

texts = st.text(max_size=3)
identities = st.builds(Identity, texts, texts, texts)
salts = st.none() | texts
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=8)


@given(st.tuples(identities, salts), st.tuples(identities, salts))
def test_br84_two_key_spaces_are_one_only_if_every_field_is_the_same(a, b):
    assert (a[0].origin(a[1]) == b[0].origin(b[1])) == (a == b)


def test_br84_fields_do_not_run_together():
    """Separators, lengths and missing parts that a careless join would confuse."""
    cases = [
        (Identity("ab", "c"), None),
        (Identity("a", "bc"), None),
        (Identity("a", "b", "c"), None),
        (Identity("abc"), None),
        (Identity("abc"), ""),
        (Identity("abc"), "\0"),
        (Identity("", "abc"), None),
        (Identity("", "", "abc"), None),
        (Identity(), "abc"),
        (Identity("a|b", "c"), None),
        (Identity("a", "b|c"), None),
        (Identity("\x01" + 7 * "\0" + "a"), None),
    ]
    origins = [identity.origin(salt) for identity, salt in cases]
    for (i, a), (j, b) in combinations(enumerate(origins), 2):
        assert a != b, (cases[i], cases[j])


def test_an_origin_is_never_the_hash_of_a_prefix():
    """Three fields each, which could be chosen to be the same bytes."""
    previous = b"x" * DIGEST
    assert Identity(previous.decode(), "abcd", "").origin() != extended(previous, [0x64636261])


def test_no_salt_and_an_empty_salt_are_two_key_spaces():
    assert Identity().origin(None) != Identity().origin("")


def test_a_salt_may_hold_bytes_that_are_no_text():
    assert Identity().origin("\udcff") != Identity().origin("\udcfe")


@given(st.lists(st.binary(max_size=3), max_size=4), st.lists(st.binary(max_size=3), max_size=4))
def test_lists_of_fields_have_one_hash_only_if_they_are_equal(a, b):
    assert (digest_of(a) == digest_of(b)) == (a == b)


@given(tokens, tokens, st.integers(1, 3))
def test_equal_hashes_are_equal_whole_prefixes(a, b, unit):
    """I-32: only whole units have one."""
    origin = Identity("m").origin()
    one, two = ([*prefix_hashes(origin, t, unit)] for t in (a, b))
    assert (len(one), len(two)) == (len(a) // unit, len(b) // unit)
    for i, (x, y) in enumerate(zip(one, two, strict=False), 1):
        assert (x == y) == (a[: i * unit] == b[: i * unit])


def test_a_chain_goes_on_from_its_last_hash():
    origin, prompt = Identity("m").origin(), [*range(12)]
    chain = [*prefix_hashes(origin, prompt, 4)]
    assert chain[2] == extended(extended(extended(origin, prompt[:4]), prompt[4:8]), prompt[8:])
    assert [*prefix_hashes(chain[0], prompt[4:], 4)] == chain[1:]


def test_what_stands_for_an_image_changes_all_hashes_from_there_on():
    """BR-32 and BR-33: equal placeholder tokens of different pictures."""
    origin = Identity("m").origin()
    one, two = (extended(origin, [7, 7], picture) for picture in (b"cat", b"dog"))
    assert len({one, two, extended(origin, [7, 7])}) == 3
    assert extended(one, [1]) != extended(two, [1])


@pytest.mark.parametrize("token", [-1, 2**32])
def test_what_is_no_token_id_is_refused(token):
    with pytest.raises(OverflowError):
        extended(bytes(DIGEST), [token])


def test_hashes_are_the_same_in_another_process():
    """Unlike Python's own; a store that outlives the process depends on it."""
    code = (
        "from cache.identity import Identity, prefix_hashes;"
        "print([*prefix_hashes(Identity('m').origin('s'), range(8), 4)][-1].hex())"
    )
    here = [*prefix_hashes(Identity("m").origin("s"), range(8), 4)][-1].hex()
    root = Path(__file__).resolve().parent.parent.parent
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert done.stdout.strip() == here
