"""Bytes to text, in parts."""

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_mini.serving.text.utf8 import ByteStream, Utf8Decoder

# one byte of every kind that UTF-8 treats differently: ASCII, continuations at the borders of
# overlong, surrogate and too large, leads of 2, 3 and 4, and bytes that never stand in UTF-8
KINDS = bytes.fromhex("41 80 8f 90 9f a0 bf c0 c3 e0 e4 ed f0 f4 ff")


def parts(pieces):
    decoder = Utf8Decoder()
    return [*(decoder.push(piece) for piece in pieces), decoder.finish()]


def test_byte_by_byte_gives_what_the_whole_gives_whatever_is_broken():
    """All strings of four kinds of bytes; an unfinished end is one U+FFFD or nothing."""
    for kinds in product(KINDS, repeat=4):
        data = bytes(kinds)
        got = parts(bytes([byte]) for byte in data)
        assert "".join(got) == data.decode("utf-8", "replace"), data.hex()
        assert got[-1] in ("", "\ufffd"), data.hex()


@settings(deadline=None, max_examples=200)
@given(st.lists(st.binary(max_size=6) | st.text(max_size=4).map(str.encode)))
def test_parts_of_any_size_add_up(pieces):
    assert "".join(parts(pieces)) == b"".join(pieces).decode("utf-8", "replace")


def test_half_a_surrogate_is_broken_at_once_and_does_not_wait():
    """CPython's own incremental decoder keeps both bytes back and ends with two U+FFFD."""
    assert parts([b"a\xed", b"\xa0", b"b"]) == ["a", "\ufffd\ufffd", "b", ""]
    assert parts([b"\xed", b"\x9f", b"\xbf"]) == ["", "", "\ud7ff", ""]


def test_a_replacement_character_in_the_text_is_not_held_back():
    assert parts(["\ufffd".encode(), b"a"]) == ["\ufffd", "a", ""]


def test_what_is_held_is_what_a_character_has_begun_with():
    decoder = Utf8Decoder()
    assert (decoder.push("a🙂".encode()[:-1]), decoder.held) == ("a", "🙂".encode()[:-1])
    assert (decoder.finish(), decoder.held, decoder.finish()) == ("\ufffd", b"", "")


def test_a_token_may_hold_several_characters_and_parts_of_two():
    tokens = {1: b"a\xe4\xb8", 2: b"\xad\xf0", 3: b"\x9f\x99\x82b", 4: b""}
    stream = ByteStream(tokens.__getitem__)
    assert [stream.push(t) for t in (1, 4, 2, 3)] == ["a", "", "中", "🙂b"]
    assert stream.finish() == ""
