"""tiktoken.model in Kimi's layout."""

import base64

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_mini.serving.text.tiktoken_bpe import TiktokenTokenizer, read_ranks
from tests.kimi_mini.serving.text import small_tokenizers as small

ZHONG, WEN = "中".encode(), "文".encode()
# merges that would join what the cutting rule keeps apart, in front of those they compete with
MORE = [
    b"a" + ZHONG[:1], b"!" + ZHONG[:1], b"a" + WEN[:1],
    b"\xe4\xb8", ZHONG, b"\xe6\x96", WEN, ZHONG + WEN, ZHONG + b"a", b"12", b"123", b"34",
    b"1234", b"'s", b"as", b"a'", b"a's", b" a", b"a ", b"  ", b"\n\n", b"aA", b"Aa", b" !",
    b" !\n", b"\na", b"aa",
]  # fmt: skip
FIRST = 256 + len(MORE)
ID = {token: 256 + i for i, token in enumerate(MORE)}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    return made(folder, MORE)


def made(folder, more=(), config=None):
    pytest.importorskip("tiktoken", reason="extra 'tiktoken' is not installed")
    small.write_ranks(folder, more)
    if config is not None:
        small.write_json(folder, "tokenizer_config.json", config)
    return TiktokenTokenizer(folder)


def with_specials(folder, **config):
    decoder = {
        FIRST: {"content": "[BOS]", "special": True},
        FIRST + 1: {"content": "[EOS]", "special": True},
        FIRST + 2: {"content": "<think>", "special": False},
    }
    config = {"bos_token": "[BOS]", "added_tokens_decoder": decoder} | config
    return made(folder, MORE, config)


@pytest.mark.parametrize(
    "text, pieces",
    [
        ("a中", [b"a", ZHONG]),
        ("中a文", [ZHONG, b"a", WEN]),
        ("中文", [ZHONG + WEN]),
        ("中中文", [ZHONG, ZHONG + WEN]),
        ("!中", [b"!", ZHONG]),
        ("1234", [b"123", b"4"]),
        ("a's", [b"a's"]),
        ("aa", [b"aa"]),
        ("aA", [b"a", b"A"]),
        ("Aa", [b"Aa"]),
        ("a a", [b"a", b" a"]),
        ("a   a", [b"a", b"  ", b" a"]),
        ("a \n\n a", [b"a", b" ", b"\n\n", b" a"]),
        ("\n\na", [b"\n\n", b"a"]),
        ("a !\na", [b"a", b" !\n", b"a"]),
        ("!a", [b"!", b"a"]),
    ],
)
def test_text_is_cut_where_kimi_cuts_it(tokenizer, text, pieces):
    want = [ID[piece] if piece in ID else piece[0] for piece in pieces]
    assert tokenizer.encode(text) == want


@settings(deadline=None, max_examples=60)
@given(text=st.text() | st.text("a中文🙂 1\n'sA<|"))
def test_any_text_survives_the_round_trip_without_a_bos(tokenizer, text):
    ids = tokenizer.encode(text)
    assert max(ids, default=0) < FIRST
    assert tokenizer.decode(ids) == text


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, FIRST + 300)), st.booleans())
def test_any_ids_stream_to_their_bytes_as_text(tokenizer, ids, skip):
    data = b""
    for i in ids:
        if i < 256:
            data += bytes([i])
        elif i < FIRST:
            data += MORE[i - 256]
        elif i >= FIRST + 256:
            data += "\ufffd".encode()
        elif not skip:
            data += f"<|reserved_token_{i}|>".encode()
    stream = tokenizer.stream(skip)
    pushed, rest = "".join(map(stream.push, ids)), stream.finish()
    assert rest in ("", "\ufffd") and "\ufffd" not in pushed[len(data.decode("utf-8", "replace")) :]
    assert pushed + rest == tokenizer.decode(ids, skip) == data.decode("utf-8", "replace")


def test_no_part_of_a_character_is_emitted(tokenizer):
    """BR-53."""
    ids = tokenizer.encode("中🙂")
    assert len(ids) == 5  # one merged character, and the four bytes of the other
    stream = tokenizer.stream()
    assert [stream.push(i) for i in ids] == ["中", "", "", "", "🙂"]
    assert tokenizer.decode(ids[:-1]) == "中\ufffd"


def test_without_a_config_the_256_specials_have_the_reserved_names(tokenizer):
    assert tokenizer.vocab_size == FIRST + 256
    assert tokenizer.special_ids == set(range(FIRST, FIRST + 256))
    assert tokenizer.encode(f"a<|reserved_token_{FIRST}|>") == [ord("a"), FIRST]
    beyond = tokenizer.encode(f"<|reserved_token_{FIRST + 256}|>")
    assert len(beyond) > 1 and max(beyond) < FIRST


def test_specials_are_named_by_the_config_and_known_in_text(tmp_path):
    tokenizer = with_specials(tmp_path)
    ids = tokenizer.encode("[BOS]a<think>中[EOS]")
    assert ids == [FIRST, ord("a"), FIRST + 2, ID[ZHONG], FIRST + 1]
    assert tokenizer.decode(ids) == "a<think>中"
    assert tokenizer.decode(ids, skip_special=False) == "[BOS]a<think>中[EOS]"
    assert tokenizer.special_ids == set(range(FIRST, FIRST + 256)) - {FIRST + 2}
    assert len(tokenizer.encode(f"<|reserved_token_{FIRST}|>")) > 1  # that id has another name


@pytest.mark.parametrize("asked, first", [(True, [FIRST]), (False, []), (None, [])])
def test_bos_is_added_only_where_the_config_asks(tmp_path, asked, first):
    tokenizer = with_specials(tmp_path, add_bos_token=asked)
    assert tokenizer.encode("a") == [*first, ord("a")]
    assert tokenizer.encode("") == first


@pytest.mark.parametrize(
    "config, says",
    [
        ({"add_bos_token": True, "bos_token": None}, "add_bos_token without a bos_token"),
        (
            {"add_bos_token": True, "bos_token": "</s>"},
            "bos_token is '</s>', which is no special token",
        ),
        ({"add_bos_token": True, "bos_token": "a"}, "bos_token is 'a', which is no special token"),
        ({"added_tokens_decoder": {"255": {"content": "x"}}}, "names [255], but ids below 283"),
        (
            {"added_tokens_decoder": {"290": {"content": "x"}, "291": {"content": "x"}}},
            "ids 290 and 291 are both 'x'",
        ),
        ("{", "not JSON text"),
    ],
)
def test_a_config_that_contradicts_the_file_is_one_line(tmp_path, config, says):
    pytest.importorskip("tiktoken", reason="extra 'tiktoken' is not installed")
    small.write_ranks(tmp_path, MORE)
    path = tmp_path / "tokenizer_config.json"
    if isinstance(config, str):
        path.write_text(config)
    else:
        base = {"added_tokens_decoder": {}}
        small.write_json(tmp_path, path.name, base | config)
    with pytest.raises(ValueError) as caught:
        TiktokenTokenizer(tmp_path)
    assert says in str(caught.value) and str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_specials_beyond_the_block_are_taken_too(tmp_path):
    more = {"added_tokens_decoder": {FIRST + 300: {"content": "<far>", "special": True}}}
    tokenizer = made(tmp_path, MORE, more)
    assert tokenizer.vocab_size == FIRST + 301
    assert tokenizer.encode("<far>") == [FIRST + 300]
    assert tokenizer.decode([FIRST + 299]) == "\ufffd"


@pytest.mark.parametrize("text", ["a" * 60_000, " " * 450_000])
def test_very_long_texts_survive(tokenizer, text):
    """A run of 450,000 spaces alone makes the library's regex give up."""
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_run_is_cut_after_25000_characters_and_a_text_after_400000(tokenizer):
    """As Moonshot's code does: a merge across these places does not happen."""
    for before, end in ((24_998, [ID[b"Aa"]]), (24_999, [ord("A"), ord("a")])):
        assert tokenizer.encode("b" * before + "Aa") == [ord("b")] * before + end
        assert tokenizer.encode("b " + "b" * before + "Aa")[2:] == [ord("b")] * before + end
    for before, end in ((399_998, [ID[b"Aa"]]), (399_999, [ord("A"), ord("a")])):
        assert tokenizer.encode(("b " * 200_000)[:before] + "Aa")[before:] == end


def test_text_that_is_no_unicode_is_refused(tokenizer):
    """The library would encode a replacement character instead."""
    with pytest.raises(ValueError, match="at character 1, which is no Unicode character"):
        tokenizer.encode("a\udcff")


def test_a_file_changed_in_place_is_read_anew(tmp_path):
    """The library's own loader keeps a copy by path."""
    assert made(tmp_path, MORE).encode("中文") == [ID[ZHONG + WEN]]
    assert made(tmp_path, MORE[: MORE.index(WEN) + 1]).encode("中文") == [ID[ZHONG], ID[WEN]]


def test_ranks_are_read_in_any_order_with_blank_lines(tmp_path):
    small.write_ranks(tmp_path, [b"ab"])
    path = tmp_path / "tiktoken.model"
    lines = path.read_text().splitlines()
    path.write_text("\n\n".join(reversed(lines)))
    ranks = read_ranks(path)
    assert (len(ranks), ranks[b"ab"], ranks[b"\x00"]) == (257, 256, 0)


def line(token, rank):
    return f"{base64.b64encode(token).decode()} {rank}"


@pytest.mark.parametrize(
    "last, says",
    [
        ("YWI=", "line 257 is not base64 and a rank"),
        ("YWI= x", "line 257 is not base64 and a rank"),
        ("YWI= 2_5", "line 257 is not base64 and a rank"),
        ("YWI= -1", "line 257 is not base64 and a rank"),
        ("YWI 256", "line 257 is not base64 and a rank"),
        ("Y*I= 256", "line 257 is not base64 and a rank"),
        ("YWI= 256 7", "line 257 is not base64 and a rank"),
        ("= 256", "line 257 is not base64 and a rank"),
        (line(b"a", 256), "line 257 gives b'a' a second time"),
        (line(b"ab", 255), "ranks are not 0..256"),
        (line(b"ab", 257), "ranks are not 0..256"),
    ],
)
def test_a_damaged_line_is_named(tmp_path, last, says):
    small.write_ranks(tmp_path)
    path = tmp_path / "tiktoken.model"
    path.write_text(path.read_text() + last)
    with pytest.raises(ValueError) as caught:
        read_ranks(path)
    assert says in str(caught.value) and str(path) in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"\n", b"YQ== 0\n"])
def test_a_file_without_all_bytes_is_refused(tmp_path, data):
    """The library would panic at the first text with such a byte."""
    path = tmp_path / "tiktoken.model"
    path.write_bytes(data)
    with pytest.raises(ValueError, match="of the 256 bytes have no token"):
        read_ranks(path)


def test_a_folder_in_place_of_the_file_is_one_line(tmp_path):
    with pytest.raises(ValueError, match="Is a directory"):
        read_ranks(tmp_path)
