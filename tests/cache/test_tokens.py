"""Token ids as bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.tokens import WIDTH, decode, encode

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=9)


@given(tokens, st.integers(0, 9))
def test_bytes_are_their_tokens_and_slices_slices(ids, cut):
    encoded = encode(ids)
    assert decode(encoded) == ids and len(encoded) == WIDTH * len(ids)
    assert encoded[: WIDTH * cut] == encode(ids[:cut])


@pytest.mark.parametrize("token", [-1, 2**32])
def test_what_is_no_token_id_is_refused(token):
    with pytest.raises(OverflowError):
        encode([1, token])
