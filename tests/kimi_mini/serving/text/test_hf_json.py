"""tokenizer.json, against the library's own decode of the whole."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_mini.serving.text.hf_json import JsonTokenizer
from kimi_mini.serving.text.tokenizer import TokenizerUnavailable
from tests.kimi_mini.serving.text import small_tokenizers as small

pytest.importorskip("tokenizers", reason="extra 'tokenizers' is not installed")

KINDS = {
    "byte-level": small.byte_level_bpe,
    "llama": small.llama,
    "metaspace-always": small.metaspace,
    "metaspace-first": lambda folder: small.metaspace(folder, "first"),
    "metaspace-never": lambda folder: small.metaspace(folder, "never"),
    "wordpiece": small.word_piece,
    "no-decoder": small.words_without_decoder,
}
TEXTS = ["", " ", "  the state", "中🙂", "a 中文\n\tb ", "é\u0301\ufffd", "\x00"]


@pytest.fixture(scope="module", params=KINDS)
def both(request, tmp_path_factory):
    """Ours and the library's object for one kind."""
    folder = tmp_path_factory.mktemp(request.param)
    library = KINDS[request.param](folder)
    return JsonTokenizer(folder), library


def byte_level(tmp_path):
    library = small.byte_level_bpe(tmp_path)
    return JsonTokenizer(tmp_path), library


def streamed(tokenizer, ids, skip):
    stream = tokenizer.stream(skip)
    parts = [*map(stream.push, ids), stream.finish()]
    assert parts[-1] in ("", "\ufffd")
    return "".join(parts)


@settings(deadline=None, max_examples=80)
@given(data=st.data(), skip=st.booleans())
def test_any_ids_stream_to_the_librarys_own_decode(both, data, skip):
    """A broken byte fallback run is the library's own matter; test_pieces.py has ours."""
    ours, library = both
    ids = data.draw(st.lists(st.integers(0, ours.vocab_size - 1), max_size=20))
    got, whole = streamed(ours, ids, skip), library.decode(ids, skip_special_tokens=skip)
    assert ours.decode(ids, skip) == got
    if "ByteFallback" not in repr(library.decoder) or "\ufffd" not in whole:
        assert got == whole


@pytest.mark.parametrize("both", ["byte-level", "llama"], indirect=True)
@settings(deadline=None, max_examples=40)
@given(text=st.text(max_size=20) | st.sampled_from(TEXTS))
def test_any_text_comes_back_and_encodes_as_the_library_says(both, text):
    ours, library = both
    ids = ours.encode(text)
    assert ids == library.encode(text).ids
    marks = any(mark in text for mark in ("<", "▁"))  # a special token, or the letter for a space
    assert marks or streamed(ours, ids, True) == text


def test_no_part_of_a_character_is_emitted(tmp_path):
    """BR-53: byte-level tokens, among them ones that hold the end of a character or its middle."""
    ours, _ = byte_level(tmp_path)
    ids = ours.encode("中🙂é")
    assert len(ids) > 3
    stream = ours.stream()
    parts = [stream.push(token) for token in ids]
    assert "".join(parts) == "中🙂é" and "\ufffd" not in "".join(parts) and "" in parts
    for cut in range(1, len(ids)):
        assert ours.decode(ids[:cut]).count("\ufffd") <= 1


def test_leading_spaces_of_pieces_survive_streaming(tmp_path):
    library = small.llama(tmp_path)
    ours = JsonTokenizer(tmp_path)
    the, state = map(library.token_to_id, ("▁the", "▁state"))
    stream = ours.stream()
    assert [stream.push(i) for i in (0, the, state, the)] == ["", "the", " state", " the"]
    stream = ours.stream(skip_special=False)
    assert [stream.push(i) for i in (0, the, state, 1)] == ["<s>", " the", " state", "</s>"]


def test_special_tokens_are_added_as_the_file_says_and_known_in_text(tmp_path):
    small.llama(tmp_path)
    ours = JsonTokenizer(tmp_path)
    assert ours.encode("a</s>")[0] == 0 and ours.encode("a</s>")[-1] == 1
    assert ours.special_ids == {0, 1, 2}
    other, _ = byte_level(tmp_path / "other")
    think = other.encode("<think>")
    assert len(think) == 1 and other.decode(think) == "<think>"
    assert other.encode("") == []


def test_added_tokens_are_shown_as_written_where_the_library_does_so(tmp_path):
    """One with a letter outside of the byte letters is its own text; the letters of any other are
    taken for bytes, even if it was added."""
    ours, library = byte_level(tmp_path)
    for token, shown in (("<a special>", "<a special>"), ("<ü>", "<\ufffd>")):
        ids = ours.encode(token)
        assert ours.decode(ids, skip_special=False) == shown
        assert library.decode(ids, skip_special_tokens=False) == shown
        assert ours.decode(ids) == ""


def test_ids_without_a_token_are_replacements_at_any_size(tmp_path):
    ours, library = byte_level(tmp_path)
    size = library.get_vocab_size()
    assert ours.vocab_size == size
    assert ours.decode([size, -1, 2**40]) == "\ufffd" * 3
    small.llama(tmp_path / "pieces")
    assert JsonTokenizer(tmp_path / "pieces").decode([size, -1, 2**40]) == "\ufffd" * 3


def test_truncation_and_padding_of_the_file_do_not_touch_prompts(tmp_path):
    library = small.byte_level_bpe(tmp_path)
    plain = library.encode("the state of a prefix").ids
    library.enable_truncation(3)
    library.enable_padding(length=40)
    small.saved(library, tmp_path)
    assert len(library.encode("the state of a prefix").ids) == 40
    assert JsonTokenizer(tmp_path).encode("the state of a prefix") == plain


def test_text_that_is_no_unicode_is_refused(tmp_path):
    ours, _ = byte_level(tmp_path)
    with pytest.raises(ValueError, match="at character 1, which is no Unicode character"):
        ours.encode("a\udcff")


def test_a_character_without_any_token_is_refused_in_one_line(tmp_path):
    lib = small.library()
    small.saved(lib.Tokenizer(lib.models.Unigram([("a", 0.0)])), tmp_path)
    with pytest.raises(ValueError, match="cannot encode the text"):
        JsonTokenizer(tmp_path).encode("b")


@pytest.mark.parametrize("kept", [0, 1, 100, -1])
def test_a_damaged_file_is_one_line_that_names_it(tmp_path, kept):
    small.byte_level_bpe(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_bytes(path.read_bytes()[:kept])
    refused(tmp_path, "tokenizer.json: not a tokenizer")


@pytest.mark.parametrize("data", [b"\xff\xfe", b"[]", b"{}", b'{"model": {}}'])
def test_a_file_of_something_else_is_one_line_too(tmp_path, data):
    (tmp_path / "tokenizer.json").write_bytes(data)
    refused(tmp_path, "tokenizer.json: not a tokenizer")


def test_a_vocabulary_of_bytes_and_nothing_else_is_refused(tmp_path):
    lib = small.library()
    made = lib.Tokenizer(lib.models.BPE({"<0x41>": 0}, [], byte_fallback=True))
    made.decoder = lib.decoders.ByteFallback()
    small.saved(made, tmp_path)
    refused(tmp_path, "no token has text of its own")


def refused(folder, says):
    with pytest.raises(ValueError) as caught:
        JsonTokenizer(folder)
    assert says in str(caught.value) and "\n" not in str(caught.value)
    assert not isinstance(caught.value, TokenizerUnavailable)


@pytest.mark.parametrize(
    "decoder, says",
    [
        (lambda d: d.CTC(), "decoder CTC"),
        (lambda d: d.BPEDecoder(), "decoder BPEDecoder"),
        (lambda d: d.Sequence([d.ByteLevel(), d.Strip(" ", 1, 0)]), "decoder ByteLevel"),
        (lambda d: d.Sequence([d.Fuse(), d.Strip(" ", 0, 1)]), "Strip takes 1 from the end"),
        (lambda d: d.Sequence([d.Fuse(), d.Replace("ab", "c")]), "may span tokens"),
    ],
)
def test_a_decoder_that_needs_the_end_of_the_text_is_not_streamed_wrongly(tmp_path, decoder, says):
    made = small.byte_level_bpe(tmp_path)
    made.decoder = decoder(small.library().decoders)
    small.saved(made, tmp_path)
    with pytest.raises(TokenizerUnavailable, match=says):
        JsonTokenizer(tmp_path)


def test_one_letter_may_be_replaced_after_joining(tmp_path):
    made = small.metaspace(tmp_path)
    d = small.library().decoders
    made.decoder = d.Sequence([d.Fuse(), d.Replace("▁", " "), d.Strip(" ", 1, 0)])
    small.saved(made, tmp_path)
    ids = [2, 1, 3, 4, 5]
    assert JsonTokenizer(tmp_path).decode(ids) == made.decode(ids) == " thea  b中"
