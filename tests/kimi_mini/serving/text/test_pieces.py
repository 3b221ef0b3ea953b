"""Streaming of pieces, against a decoder of the Llama kind written out here: no library needed.

Its steps: "▁" to space, runs of byte tokens to text (or one U+FFFD a byte if the run is broken
anywhere), all joined, one leading space taken away.
"""

import re
from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_mini.serving.text.pieces import Pieces, PieceStream

WORDS = ["<s>", "</s>", "▁", "▁the", "a", "▁▁", "é", "\ufffd"]
BYTES = [*b" A\xe4\xb8\xad\xf0\x9f\x99\x82\xed\xa0\xff"]
VOCABULARY = [*WORDS, *(f"<0x{byte:02X}>" for byte in BYTES)]
BYTE_OF = {len(WORDS) + n: byte for n, byte in enumerate(BYTES)}
S, END, SPACE, THE, A = 0, 1, 2, 3, 4
ZHONG = [VOCABULARY.index(f"<0x{byte:02X}>") for byte in "中".encode()]
SMILE = [VOCABULARY.index(f"<0x{byte:02X}>") for byte in "🙂".encode()]


def llama_decode(ids):
    text = ""
    for is_byte, run in groupby(ids, key=BYTE_OF.__contains__):
        run = list(run)
        data = bytes(BYTE_OF[i] for i in run if is_byte)
        try:
            text += data.decode() if is_byte else "".join(VOCABULARY[i] for i in run)
        except UnicodeDecodeError:
            text += "\ufffd" * len(run)
    return text.replace("▁", " ").removeprefix(" ")


def pieces(decode=llama_decode):
    return Pieces(decode, anchor=S, byte_of=BYTE_OF, known=range(len(VOCABULARY)))


def push_all(ids, silent=frozenset({S, END})):
    stream = PieceStream(pieces(), silent)
    return [*map(stream.push, ids), stream.finish()]


def damage_kept_apart(ids, silent):
    """What the text must be: all bytes joined, broken ones replaced, one leading space less."""
    tokens = [VOCABULARY[i] for i in ids if i not in silent]
    data = b"".join(
        bytes([int(match[1], 16)])
        if (match := re.fullmatch("<0x(..)>", token))
        else token.replace("▁", " ").encode()
        for token in tokens
    )
    return data.decode("utf-8", "replace").removeprefix(" ")


@settings(deadline=None, max_examples=300)
@given(st.lists(st.integers(0, len(VOCABULARY) - 1)), st.sampled_from([{S, END}, {S}, set()]))
def test_any_ids_add_up_to_their_text(ids, silent):
    *pushed, rest = push_all(ids, frozenset(silent))
    assert rest in ("", "\ufffd")
    assert "".join(pushed) + rest == damage_kept_apart(ids, silent)
    whole = llama_decode([i for i in ids if i not in silent])
    if "\ufffd" not in whole:
        assert "".join(pushed) == whole


def test_the_leading_space_is_dropped_at_the_start_only():
    assert push_all([THE, A, THE, SPACE, A]) == ["the", "a", " the", " ", "a", ""]


def test_the_start_lasts_until_there_is_text():
    assert push_all([S, SPACE, THE, A]) == ["", "", " the", "a", ""]
    assert push_all([SPACE, *ZHONG]) == ["", "", "", "中", ""]


def test_shown_specials_are_text_and_hidden_ones_are_not():
    assert push_all([S, THE, END]) == ["", "the", "", ""]
    assert push_all([S, THE, END], frozenset()) == ["<s>", " the", "</s>", ""]


def test_characters_of_byte_tokens_come_whole():
    assert push_all([A, *ZHONG, *SMILE, A]) == ["a", "", "", "中", "", "", "", "🙂", "a", ""]


def test_a_silent_special_inside_a_character_leaves_no_trace():
    assert push_all([ZHONG[0], END, *ZHONG[1:]]) == ["", "", "", "中", ""]


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_stop_inside_a_character_gives_one_replacement(cut):
    assert push_all([*ZHONG, *SMILE[:cut]])[-1] == "\ufffd"


def test_a_broken_byte_takes_no_sound_character_with_it():
    """The library would turn the whole run into seven U+FFFD, six of them already streamed."""
    broken = [*ZHONG, *ZHONG, VOCABULARY.index("<0xFF>")]
    assert llama_decode(broken) == "\ufffd" * 7
    assert "".join(push_all(broken)) == "中中\ufffd"


def test_a_character_that_breaks_off_is_one_replacement_before_what_follows():
    assert push_all([*SMILE[:3], A]) == ["", "", "", "\ufffda", ""]
    assert push_all([*SMILE[:3], *ZHONG]) == ["", "", "", "\ufffd", "", "中", ""]


def test_ids_beyond_the_vocabulary_are_replacements():
    assert push_all([99, THE, ZHONG[0], 99, A]) == ["\ufffd", " the", "", "\ufffd\ufffd", "a", ""]


def test_after_finish_a_stream_starts_anew():
    stream = PieceStream(pieces(), frozenset())
    assert [stream.push(A), stream.push(ZHONG[0]), stream.finish()] == ["a", "", "\ufffd"]
    assert [stream.push(THE), *map(stream.push, ZHONG)] == ["the", "", "", "中"]


@pytest.mark.parametrize("ids", [[THE, A], ZHONG, [99], [SPACE, END]])
def test_a_token_costs_the_same_however_long_the_text_is(ids):
    longest = []
    stream = PieceStream(pieces(lambda i: longest.append(len(i)) or llama_decode(i)), {END})
    for _ in range(300):
        for token in ids:
            stream.push(token)
    assert len(longest) <= 2 * 300 * len(ids)
    assert max(longest, default=0) <= 4  # the anchor and the bytes of a character
