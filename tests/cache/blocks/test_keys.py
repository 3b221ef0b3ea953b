"""The hash chain: H01 .. H05 of serving 9.6, and what changes the meaning of tokens."""

import pytest

from cache.blocks.keys import HashChain, Image, extra_keys, key_of
from cache.identity import Identity

ORIGIN = Identity().origin()


def chain(tokens, unit=4, salt=None, **options):
    return HashChain(Identity().origin(salt), tokens, unit, **options)


def hashes(chain):
    return [chain.at(n) for n in range(chain.unit, chain.reach + 1, chain.unit)]


def test_h01_only_whole_units_have_a_hash():
    assert [len(hashes(chain(range(n)))) for n in (12, 11, 3)] == [3, 2, 0]


def test_h02_a_hash_is_of_the_whole_prefix():
    one, other = hashes(chain(range(12))), hashes(chain([*range(4), *[9] * 8]))
    assert [a == b for a, b in zip(one, other, strict=True)] == [True, False, False]
    other = hashes(chain([9, 9, 9, 9, *range(4, 12)]))
    assert not set(one) & set(other)


def test_h03_a_salt_changes_all_of_them():
    assert not set(hashes(chain(range(12)))) & set(hashes(chain(range(12), salt="x")))


def test_h04_a_coarse_block_has_the_hash_of_its_last_fine_unit():
    fine, coarse = chain(range(12), 2), chain(range(12), 4)
    assert fine.at(4) == hashes(fine)[1] and fine.at(12) == hashes(fine)[5]
    assert not set(hashes(fine)) & set(hashes(coarse))


def test_h05_a_key_names_the_group():
    key = key_of(chain(range(4)).at(4), 3)
    assert len(key) == 36 and key.endswith(b"\x00\x00\x00\x03")
    assert chain(range(4)).key(4, 3) == key


def test_a_chain_grows_with_its_tokens():
    tokens = [*range(5)]
    growing = chain(tokens)
    assert growing.reach == 4
    growing.at(4)
    tokens += [5, 6, 7]
    assert growing.at(8) == chain(range(8)).at(8)
    assert growing.at(0) == ORIGIN


@pytest.mark.parametrize("boundary", [3, 8, -4])
def test_there_is_no_hash_elsewhere(boundary):
    with pytest.raises(ValueError, match=f"multiples of 4 tokens up to 4, got {boundary}"):
        chain(range(5)).at(boundary)


def test_an_image_changes_the_units_that_its_placeholders_overlap_and_all_after_them():
    plain = hashes(chain(range(16)))
    seen = hashes(chain(range(16), images=[Image(b"one", 5, 4)]))
    assert [a == b for a, b in zip(plain, seen, strict=True)] == [True, False, False, False]
    other = hashes(chain(range(16), images=[Image(b"two", 5, 4)]))
    moved = hashes(chain(range(16), images=[Image(b"one", 6, 4)]))
    assert len({seen[1], other[1], moved[1], plain[1]}) == 4
    assert hashes(chain(range(16), images=[Image(b"one", 5, 4)])) == seen


@pytest.mark.parametrize(
    "image, touches",
    [((0, 4), False), ((0, 5), True), ((7, 1), True), ((8, 4), False), ((2, 20), True)],
)
def test_an_image_counts_where_it_overlaps(image, touches):
    assert bool(extra_keys(4, 8, images=[Image(b"one", *image)])) == touches


def test_an_adapter_is_of_every_unit_and_no_image_passes_for_it():
    assert extra_keys(0, 4) == b""
    adapters = {extra_keys(0, 4, adapter=name) for name in ("a", "b", "adapter")}
    images = {extra_keys(0, 4, images=[Image(b"adapter", 0, 4)])}
    assert len(adapters | images) == 4
    tokens = range(8)
    assert not set(hashes(chain(tokens))) & set(hashes(chain(tokens, adapter="a")))
