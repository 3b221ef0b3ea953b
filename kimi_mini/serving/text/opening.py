"""Which tokenizer a checkpoint folder asks for, and which ids end its sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from kimi_mini.config_file import ConfigError, read_json_object, shown
from kimi_mini.serving.text.byte_level import VOCABULARY, ByteTokenizer
from kimi_mini.serving.text.hf_json import TOKENIZER_JSON, JsonTokenizer
from kimi_mini.serving.text.tiktoken_bpe import TIKTOKEN_MODEL, TiktokenTokenizer
from kimi_mini.serving.text.tokenizer import Tokenizer, TokenizerUnavailable
from kimi_mini.weights.folder import GENERATION_CONFIG


class TextAccess(NamedTuple):
    """A tokenizer, or None: token ids only. note: why there is none, or what to know of it."""

    tokenizer: Tokenizer | None
    note: str | None = None


def open_tokenizer(folder: Path, vocab_size: int) -> TextAccess:
    """tokenizer.json, else tiktoken.model, else bytes if the model has an id for each, else none.

    A folder's own tokenizer is never replaced by another: if its library is missing there is none,
    with a note, and the model still runs on ids. Damaged files are a ValueError in one line.
    """
    for file, kind in ((TOKENIZER_JSON, JsonTokenizer), (TIKTOKEN_MODEL, TiktokenTokenizer)):
        if (folder / file).exists():
            try:
                own: Tokenizer = kind(folder)
            except TokenizerUnavailable as error:
                return TextAccess(None, str(error))
            return TextAccess(own, _beyond(file, own.vocab_size, vocab_size))
    return bytes_for(vocab_size)


def bytes_for(vocab_size: int) -> TextAccess:
    """The byte tokenizer, if the model has an id for each of its tokens."""
    if vocab_size >= VOCABULARY:
        return TextAccess(ByteTokenizer())
    return TextAccess(
        None, f"its {vocab_size} ids are too few for the byte tokenizer, which needs {VOCABULARY}"
    )


def _beyond(file: str, ids: int, vocab_size: int) -> str | None:
    if ids <= vocab_size:
        return None
    return (
        f"{file} has ids up to {ids - 1}, the model's end at {vocab_size - 1}: "
        "a text that needs the others is refused"
    )


def end_ids(folder: Path, config_eos: tuple[int, ...]) -> frozenset[int]:
    """The ids that end a sequence: the union of config.json's (given) and generation_config.json's.

    The two disagree in published checkpoints, and a chat that runs past its end marker is worse
    than one that also knows another. What tokenizer files declare is not among them: it marks the
    end of documents in training as often as the end of an answer. A missing file or field, null and
    [] add nothing. ValueError in one line for a damaged file or an id that is no whole number.
    """
    found = _whole_numbers("eos_token_id", list(config_eos))
    path = folder / GENERATION_CONFIG
    if path.exists():
        try:
            value = read_json_object(path).get("eos_token_id")
            found |= _whole_numbers("eos_token_id", [] if value is None else value)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
    return found


def _whole_numbers(name: str, value: Any) -> frozenset[int]:
    ids = value if isinstance(value, list) else [value]
    if any(type(i) is not int or i < 0 for i in ids):
        raise ConfigError(
            f"{name} is {shown(value)}, allowed: an integer >= 0, a list of them, or null"
        )
    return frozenset(ids)
