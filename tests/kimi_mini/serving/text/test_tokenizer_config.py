"""What is read from tokenizer_config.json."""

import json

import pytest

from kimi_mini.serving.text.tokenizer_config import Added, TokenizerConfig, read_tokenizer_config


def test_no_file_declares_nothing(tmp_path):
    assert read_tokenizer_config(tmp_path) == TokenizerConfig(None, False, {})


@pytest.mark.parametrize(
    "bos", ["[BOS]", {"content": "[BOS]", "lstrip": False, "__type": "AddedToken"}]
)
def test_both_forms_of_a_token_are_read(tmp_path, bos):
    raw = {
        "bos_token": bos,
        "eos_token": "[EOS]",
        "add_bos_token": None,
        "chat_template": "{{ x }}",
        "added_tokens_decoder": {
            "7": {"content": "[EOS]", "special": True},
            "9": {"content": "<think>", "special": False},
            "10": {"content": "?"},
        },
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(raw))
    added = {7: Added("[EOS]", True), 9: Added("<think>", False), 10: Added("?", True)}
    assert read_tokenizer_config(tmp_path) == TokenizerConfig("[BOS]", False, added)


@pytest.mark.parametrize(
    "text, says",
    [
        ("", "not JSON text"),
        ("[]", "holds a list"),
        ('{"bos_token": 5}', "bos_token is 5, allowed: text"),
        ('{"bos_token": ""}', 'bos_token is "", allowed: text'),
        ('{"bos_token": {"special": true}}', "bos_token is"),
        ('{"add_bos_token": 1}', "add_bos_token is 1, allowed: true, false or null"),
        ('{"added_tokens_decoder": []}', "added_tokens_decoder is [], allowed: an object"),
        ('{"added_tokens_decoder": {"-1": {"content": "a"}}}', 'has the key "-1"'),
        ('{"added_tokens_decoder": {"²": {"content": "a"}}}', "has the key"),
        ('{"added_tokens_decoder": {"99999999999": {"content": "a"}}}', "has the key"),
        ('{"added_tokens_decoder": {"5": "a"}}', "added_tokens_decoder.5 is"),
        ('{"added_tokens_decoder": {"5": {"content": ""}}}', "added_tokens_decoder.5 is"),
        ('{"added_tokens_decoder": {"5": {"content": "a", "special": 1}}}', "special is 1"),
    ],
)
def test_damage_is_one_line_that_names_file_and_field(tmp_path, text, says):
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(ValueError) as caught:
        read_tokenizer_config(tmp_path)
    message = str(caught.value)
    assert says in message and "tokenizer_config.json: " in message and "\n" not in message
