"""The contract between text and token ids, whichever tokenizer a checkpoint brings.

A stream is the incremental form of decode, and decode is the stream run to its end, so for all ids

    decode(ids) = push(ids[0]) + push(ids[1]) + ... + finish()

Specials that are skipped leave no trace: what stood before and after them is decoded as neighbours.
Ids that stand for nothing (a model's vocabulary may be padded) are shown as U+FFFD.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

REPLACEMENT = "\ufffd"


class TokenizerUnavailable(ValueError):
    """A tokenizer that is sound but cannot be used here; token ids can. The message says why."""


class TextStream(Protocol):
    """Incremental decoding of one sequence."""

    def push(self, token: int) -> str:
        """Text that this token makes certain, often none: an unfinished character is held back."""
        ...

    def finish(self) -> str:
        """The end: one U+FFFD if a character is unfinished, else nothing. The stream is as new."""
        ...


class Tokenizer(Protocol):
    """Text <-> token ids. Stateless; streams carry the state."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        ...

    @property
    def fingerprint(self) -> str:
        """What text → ids depends on, in a word: equal fingerprints, equal ids."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that are silent with `skip_special`."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt. ValueError for text that the tokenizer cannot take."""
        ...

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of whole ids."""
        ...

    def stream(self, skip_special: bool = True) -> TextStream:
        """A fresh stream."""
        ...


def decode_all(stream: TextStream, ids: Iterable[int]) -> str:
    """All text of ids by a fresh stream: what every `decode` is."""
    return "".join([*(stream.push(token) for token in ids), stream.finish()])


def check_text(text: str) -> None:
    """ValueError for lone surrogates, which is how bytes that are no text reach a command line."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text holds {text[error.start]!r} at character {error.start}, which is no Unicode "
            "character; this tokenizer takes Unicode text only"
        ) from None
