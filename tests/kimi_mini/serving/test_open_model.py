"""A model by name: its text and its ends."""

import json
import sys
from dataclasses import replace

import pytest
import torch

from kimi_mini import KimiForCausalLM, preset
from kimi_mini.serving.open_model import around, open_model


@pytest.fixture
def folder(tmp_path):
    KimiForCausalLM.from_config(preset("nano"), seed=0).save_pretrained(tmp_path / "nano")
    return tmp_path / "nano"


def test_a_preset_speaks_bytes_and_ends_where_its_config_says():
    opened = open_model("nano")
    assert opened.encode("a") == [1, 100]
    assert opened.tokenizer.decode([100]) == "a"
    assert opened.end_ids == {2} and opened.sample_below == 259


def test_a_bare_model_too_small_for_bytes_takes_ids_only():
    small = replace(preset("nano"), vocab_size=258)
    opened = around(KimiForCausalLM.from_config(small, seed=0))
    assert opened.tokenizer is None and opened.sample_below is None
    with pytest.raises(ValueError, match="use token ids: its 258 ids are too few"):
        opened.encode("a")


def test_a_folder_without_tokenizer_files_speaks_bytes_and_may_sample_all_ids(folder):
    opened = open_model(str(folder))
    assert opened.tokenizer and opened.sample_below is None and opened.no_text is None


@pytest.mark.parametrize(
    "config, generation, ends",
    [(5, [9], {5, 9}), ((5, 9), None, {5, 9}), ((), 9, {9}), (None, [], set())],
)
def test_the_ends_of_a_folder_are_the_union_of_both_configs(tmp_path, config, generation, ends):
    """BR-27."""
    nano = replace(preset("nano"), eos_token_id=config)
    KimiForCausalLM.from_config(nano, seed=0).save_pretrained(tmp_path / "nano")
    written = {"bos_token_id": 1, "eos_token_id": generation}
    (tmp_path / "nano" / "generation_config.json").write_text(json.dumps(written))
    assert open_model(str(tmp_path / "nano")).end_ids == ends


def test_with_its_tokenizers_library_missing_a_model_runs_on_ids_only(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    (folder / "tokenizer.json").write_text("{}")
    opened = open_model(str(folder))
    assert opened.tokenizer is None
    assert sum("token ids only" in note for note in opened.notes) == 1
    assert opened.model(torch.tensor([[0, 319]])).shape == (1, 2, 320)
    with pytest.raises(ValueError) as caught:
        opened.encode("a")
    message = str(caught.value)
    assert "use token ids" in message and "pip install -e '.[tokenizers]'" in message
    assert "\n" not in message


def test_a_folders_own_tokenizer_is_used(folder):
    pytest.importorskip("tokenizers", reason="extra 'tokenizers' is not installed")
    from tests.kimi_mini.serving.text import small_tokenizers as small

    library = small.byte_level_bpe(folder)
    opened = open_model(str(folder))
    assert opened.encode("the state") == library.encode("the state").ids
    assert opened.no_text is None and not any("ids" in note for note in opened.notes)


def test_a_bare_model_that_was_loaded_takes_the_tokenizer_and_ends_of_its_folder(tmp_path):
    """An engine around it must not speak bytes to a model that was trained on something else."""
    KimiForCausalLM.from_config(preset("nano"), seed=0).save_pretrained(tmp_path / "m")
    (tmp_path / "m" / "tokenizer.json").write_text("{damaged")
    model = KimiForCausalLM.from_pretrained(tmp_path / "m")
    with pytest.raises(ValueError, match=r"tokenizer\.json|tokenizers"):
        around(model).encode("a")
    (tmp_path / "m" / "tokenizer.json").unlink()
    (tmp_path / "m" / "generation_config.json").write_text('{"eos_token_id": [9]}')
    opened = around(KimiForCausalLM.from_pretrained(tmp_path / "m"))
    assert opened.end_ids == {2, 9} and opened.sample_below is None
