"""Keys as bytes."""

from hypothesis import given
from hypothesis import strategies as st

from cache.radix import key as keys

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=9)


@given(tokens)
def test_a_key_is_its_tokens(tokens):
    key = keys.encode(tokens)
    assert keys.decode(key) == tokens
    assert keys.length(key) == len(tokens)


def test_a_slice_of_a_key_does_not_keep_the_rest_alive():
    key = keys.encode(range(1000))
    assert type(key[:8]) is bytes


few = st.lists(st.integers(0, 1), max_size=12)


@given(few, few, few, st.integers(1, 4))
def test_whole_pages_in_common_are_counted_from_the_beginning(both, a, b, page):
    """As a loop over pages would count them; also where a later page happens to be equal."""
    a, b = both + a, both + b
    count = 0
    while (count + 1) * page <= min(len(a), len(b)) and (
        a[count * page : (count + 1) * page] == b[count * page : (count + 1) * page]
    ):
        count += 1
    assert keys.common_pages(keys.encode(a), keys.encode(b), page * keys.WIDTH) == count
