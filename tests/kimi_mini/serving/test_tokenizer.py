"""The byte tokenizer and its stream."""

import pytest

from kimi_mini.serving.tokenizer import BOS, EOS, PAD, REPLACEMENT, ByteStream, ByteTokenizer

TEXTS = ["", "a", "KDA keeps a state", "中🙂", "é\n\t ", " leading", "\x00\x7f"]


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_round_trip(text):
    ids = ByteTokenizer().encode(text)
    assert ids[0] == BOS and len(ids) == 1 + len(text.encode())
    assert ByteTokenizer().decode(ids) == text


@pytest.mark.parametrize("text", TEXTS)
def test_the_stream_never_splits_a_character(text):
    """BR-53: seven byte tokens of two characters, nothing emitted for an unfinished one."""
    stream, parts = ByteStream(), []
    for token in ByteTokenizer().encode(text):
        parts.append(stream.push(token))
        assert REPLACEMENT not in parts[-1]
    assert stream.finish() == ""
    assert "".join(parts) == text


def test_a_stop_inside_a_character_gives_one_replacement():
    ids = ByteTokenizer().encode("a中")[:-1]
    stream = ByteStream()
    assert "".join(stream.push(t) for t in ids) == "a"
    assert stream.finish() == REPLACEMENT
    assert stream.finish() == ""
    assert ByteTokenizer().decode(ids) == "a" + REPLACEMENT


def test_specials_are_silent_and_ids_of_no_byte_are_replacements():
    assert ByteTokenizer().decode([PAD, BOS, EOS]) == ""
    assert ByteTokenizer().decode([259, 319, 1023]) == REPLACEMENT * 3
    assert ByteTokenizer().decode([3 + 0xE4, 300, 3 + ord("b")]) == REPLACEMENT * 2 + "b"
