"""Which tokenizer a folder asks for, and which ids end its sequences."""

import json
import sys

import pytest

from kimi_mini.serving.text.byte_level import ByteTokenizer
from kimi_mini.serving.text.hf_json import JsonTokenizer
from kimi_mini.serving.text.opening import end_ids, open_tokenizer
from kimi_mini.serving.text.tiktoken_bpe import TiktokenTokenizer
from tests.kimi_mini.serving.text import small_tokenizers as small


def without(monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, None)  # import then fails as if it were not there


@pytest.mark.parametrize("vocab_size, fits", [(258, False), (259, True), (163840, True)])
def test_a_folder_without_tokenizer_files_is_spoken_to_in_bytes_if_they_fit(
    tmp_path, vocab_size, fits
):
    found = open_tokenizer(tmp_path, vocab_size)
    if fits:
        assert isinstance(found.tokenizer, ByteTokenizer) and found.note is None
    else:
        assert found.tokenizer is None
        assert "258 ids are too few" in found.note and "259" in found.note


@pytest.mark.parametrize(
    "file, library, extra",
    [
        ("tokenizer.json", "tokenizers", "pip install -e '.[tokenizers]'"),
        ("tiktoken.model", "tiktoken", "pip install -e '.[tiktoken]'"),
    ],
)
def test_a_missing_library_is_a_note_and_never_another_tokenizer(
    tmp_path, monkeypatch, file, library, extra
):
    without(monkeypatch, library)
    small.write_ranks(tmp_path)
    (tmp_path / file).touch()
    found = open_tokenizer(tmp_path, 1024)
    assert found.tokenizer is None
    assert file in found.note and extra in found.note and "\n" not in found.note


def test_tokenizer_json_comes_before_tiktoken_model(tmp_path):
    small.byte_level_bpe(tmp_path)
    small.write_ranks(tmp_path)
    assert isinstance(open_tokenizer(tmp_path, 1024).tokenizer, JsonTokenizer)


def test_tiktoken_model_comes_before_bytes(tmp_path):
    pytest.importorskip("tiktoken", reason="extra 'tiktoken' is not installed")
    small.write_ranks(tmp_path)
    assert isinstance(open_tokenizer(tmp_path, 1024).tokenizer, TiktokenTokenizer)


def test_a_tokenizer_with_more_ids_than_the_model_is_noted(tmp_path):
    pytest.importorskip("tiktoken", reason="extra 'tiktoken' is not installed")
    small.write_ranks(tmp_path)
    assert open_tokenizer(tmp_path, 512).note is None
    found = open_tokenizer(tmp_path, 511)
    assert found.tokenizer is not None
    assert "tiktoken.model has ids up to 511, the model's end at 510" in found.note


def test_a_decoder_that_cannot_be_streamed_leaves_token_ids(tmp_path):
    made = small.byte_level_bpe(tmp_path)
    made.decoder = small.library().decoders.CTC()
    small.saved(made, tmp_path)
    found = open_tokenizer(tmp_path, 1024)
    assert found.tokenizer is None and "decoder CTC cannot be streamed" in found.note


@pytest.mark.parametrize("file", ["tokenizer.json", "tiktoken.model"])
def test_damage_is_refused_rather_than_passed_over(tmp_path, file):
    library = "tokenizers" if file == "tokenizer.json" else "tiktoken"
    pytest.importorskip(library, reason=f"extra {library!r} is not installed")
    (tmp_path / file).write_text("neither json nor ranks")
    with pytest.raises(ValueError, match=file):
        open_tokenizer(tmp_path, 1024)


CONFIG = {"5": (5,), "[5,9]": (5, 9), "[]": (), "missing": ()}
GENERATION = {
    "no file": (None, set()),
    "missing": ({"bos_token_id": 7}, set()),
    "null": ({"eos_token_id": None}, set()),
    "[]": ({"eos_token_id": []}, set()),
    "0": ({"eos_token_id": 0}, {0}),
    "9": ({"eos_token_id": 9}, {9}),
    "[9]": ({"eos_token_id": [9]}, {9}),
    "[9,5,0]": ({"eos_token_id": [9, 5, 0]}, {9, 5, 0}),
}


@pytest.mark.parametrize("config", CONFIG)
@pytest.mark.parametrize("generation", GENERATION)
def test_the_ends_are_the_union_of_config_and_generation_config(tmp_path, config, generation):
    """BR-27."""
    raw, more = GENERATION[generation]
    if raw is not None:
        small.write_json(tmp_path, "generation_config.json", raw)
    assert end_ids(tmp_path, CONFIG[config]) == {*CONFIG[config], *more}


def test_what_the_tokenizer_declares_is_no_end(tmp_path):
    small.write_json(tmp_path, "tokenizer_config.json", {"eos_token": "</s>", "eos_token_id": 3})
    assert end_ids(tmp_path, (5,)) == {5}


@pytest.mark.parametrize("value", [True, 1.0, -1, "9", {}, [9, None], [[9]], [True]])
def test_ends_that_are_no_whole_numbers_are_refused(tmp_path, value):
    small.write_json(tmp_path, "generation_config.json", {"eos_token_id": value})
    with pytest.raises(ValueError) as caught:
        end_ids(tmp_path, (5,))
    message = str(caught.value)
    assert "generation_config.json: eos_token_id is " in message and json.dumps(value) in message


@pytest.mark.parametrize("ids", [(5, True), (-1,), (1.5,), ("5",)])
def test_the_configs_own_ids_are_held_to_the_same_rule(tmp_path, ids):
    with pytest.raises(ValueError, match="eos_token_id is"):
        end_ids(tmp_path, ids)


@pytest.mark.parametrize("text", ["", "{", "[9]", '{"eos_token_id": 9', "\x00"])
def test_a_damaged_generation_config_is_one_line_that_names_it(tmp_path, text):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError) as caught:
        end_ids(tmp_path, (5,))
    assert "generation_config.json: " in str(caught.value) and "\n" not in str(caught.value)
