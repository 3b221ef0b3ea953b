"""`tokenizer_config.json`: what a checkpoint declares of its special tokens.

    {"bos_token": {"content": "[BOS]", ...}, "add_bos_token": false,
     "added_tokens_decoder": {"163586": {"content": "<|im_end|>", "special": true, ...}, ...}}

The format is transformers'. Only these fields are read; the rest (chat template, class names) is
not a tokenizer's business here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kimi_mini.config_file import ConfigError, read_json_object, shown

TOKENIZER_CONFIG = "tokenizer_config.json"


@dataclass(frozen=True)
class Added:
    """A token beside the vocabulary. special: silent with `skip_special`."""

    content: str
    special: bool


@dataclass(frozen=True)
class TokenizerConfig:
    """The declarations; None, false and empty where the file says nothing."""

    bos_token: str | None = None
    add_bos_token: bool = False
    added: Mapping[int, Added] = field(default_factory=dict)


def read_tokenizer_config(folder: Path) -> TokenizerConfig:
    """The file of a folder, all defaults if there is none. ValueError in one line if damaged."""
    path = folder / TOKENIZER_CONFIG
    if not path.exists():
        return TokenizerConfig()
    try:
        raw = read_json_object(path)
        return TokenizerConfig(
            bos_token=_token(raw, "bos_token"),
            add_bos_token=_flag(raw, "add_bos_token", False),
            added=_added(raw.get("added_tokens_decoder")),
        )
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _token(raw: Mapping[str, Any], name: str) -> str | None:
    value = raw.get(name)
    text = value.get("content") if isinstance(value, dict) else value
    if value is not None and (not isinstance(text, str) or not text):
        raise ConfigError(f"{name} is {shown(value)}, allowed: text, {{content: text}} or null")
    return text


def _flag(raw: Mapping[str, Any], name: str, default: bool) -> bool:
    value = raw.get(name)
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"{name} is {shown(value)}, allowed: true, false or null")
    return default if value is None else value


def _added(raw: Any) -> dict[int, Added]:
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise ConfigError(f"added_tokens_decoder is {shown(raw)}, allowed: an object")
    added: dict[int, Added] = {}
    for key, value in raw.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise ConfigError(f"added_tokens_decoder has the key {shown(key)}, allowed: token ids")
        content = value.get("content") if isinstance(value, dict) else None
        if not isinstance(content, str) or not content:
            raise ConfigError(
                f"added_tokens_decoder.{key} is {shown(value)}, allowed: an object with content"
            )
        added[int(key)] = Added(content, _flag(value, "special", True))
    return added
