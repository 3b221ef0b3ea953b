"""The byte tokenizer and its stream."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_mini.serving.text.byte_level import BOS, EOS, PAD, VOCABULARY, ByteTokenizer
from kimi_mini.serving.text.tokenizer import REPLACEMENT

TOKENIZER = ByteTokenizer()
TEXTS = ["", "a", "KDA keeps a state", "中🙂", "é\n\t ", " leading", "\x00\x7f", "\ufffd"]
IDS = st.lists(st.integers(0, 400))


def test_its_ids_are_those_of_decision_15():
    assert TOKENIZER.encode("a\xff") == [1, 100, 198, 194]
    assert (PAD, BOS, EOS, VOCABULARY) == (0, 1, 2, 259)
    assert TOKENIZER.vocab_size == 259
    assert TOKENIZER.special_ids == {0, 1, 2}


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_round_trip(text):
    ids = TOKENIZER.encode(text)
    assert ids[0] == BOS and len(ids) == 1 + len(text.encode())
    assert TOKENIZER.decode(ids) == text


@settings(deadline=None)
@given(st.text())
def test_any_text_survives_the_round_trip(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_the_stream_never_splits_a_character():
    """BR-53: seven byte tokens of two characters, nothing emitted for an unfinished one."""
    ids = TOKENIZER.encode("中🙂")[1:]
    assert len(ids) == 7
    stream = TOKENIZER.stream()
    assert [stream.push(token) for token in ids] == ["", "", "中", "", "", "", "🙂"]
    assert stream.finish() == ""


@settings(deadline=None)
@given(IDS, st.booleans())
def test_the_stream_adds_up_to_decode_for_any_ids(ids, skip):
    stream = TOKENIZER.stream(skip)
    pushed = [stream.push(token) for token in ids]
    rest = stream.finish()
    assert rest in ("", REPLACEMENT)
    assert "".join(pushed) + rest == TOKENIZER.decode(ids, skip)


@settings(deadline=None)
@given(IDS, st.booleans())
def test_decode_is_the_bytes_of_all_tokens_as_text(ids, skip):
    shown = {PAD: b"<pad>", BOS: b"<bos>", EOS: b"<eos>"}
    data = b"".join(
        (b"" if skip else shown[i]) if i < 3 else bytes([i - 3]) if i < 259 else "\ufffd".encode()
        for i in ids
    )
    assert TOKENIZER.decode(ids, skip) == data.decode("utf-8", "replace")


def test_a_stop_inside_a_character_gives_one_replacement():
    ids = TOKENIZER.encode("a🙂")[:-1]
    stream = TOKENIZER.stream()
    assert "".join(map(stream.push, ids)) == "a"
    assert stream.finish() == REPLACEMENT
    assert stream.finish() == ""
    assert TOKENIZER.decode(ids) == "a" + REPLACEMENT


def test_specials_are_silent_or_shown_by_name():
    ids = [PAD, *TOKENIZER.encode("a"), EOS]
    assert TOKENIZER.decode(ids) == "a"
    assert TOKENIZER.decode(ids, skip_special=False) == "<pad><bos>a<eos>"


def test_a_silent_special_does_not_break_the_character_around_it():
    first, second, third = (byte + 3 for byte in "中".encode())
    ids = [first, EOS, second, PAD, third]
    assert TOKENIZER.decode(ids) == "中"
    assert TOKENIZER.decode(ids, skip_special=False) == "\ufffd<eos>\ufffd<pad>\ufffd"


def test_ids_of_no_byte_are_replacements():
    assert TOKENIZER.decode([259, 319, 1023, -1]) == REPLACEMENT * 4
    assert TOKENIZER.decode([3 + 0xE4, 300, 3 + ord("b")]) == REPLACEMENT * 2 + "b"


def test_two_streams_of_one_tokenizer_share_nothing():
    one, other = TOKENIZER.stream(), TOKENIZER.stream()
    one.push(3 + 0xE4)
    assert other.push(3 + ord("a")) == "a" and other.finish() == ""
