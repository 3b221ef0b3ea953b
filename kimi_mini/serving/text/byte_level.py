"""The miniature's byte tokenizer.

    pad 0 · bos 1 · eos 2 · byte b → b + 3                 (decision 15)

Ids of 259 and above stand for no byte; they decode to U+FFFD. A model of any vocabulary of at least
259 can be driven with it, which makes no sense of a trained checkpoint but moves its tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

from kimi_mini.serving.text.tokenizer import REPLACEMENT, decode_all
from kimi_mini.serving.text.utf8 import ByteStream

PAD, BOS, EOS = 0, 1, 2
FIRST_BYTE = 3
VOCABULARY = FIRST_BYTE + 256

_SHOWN = {PAD: b"<pad>", BOS: b"<bos>", EOS: b"<eos>"}


class ByteTokenizer:
    """UTF-8 bytes as tokens. Stateless."""

    vocab_size = VOCABULARY
    fingerprint = f"bytes from {FIRST_BYTE}, bos {BOS}"
    special_ids = frozenset(_SHOWN)

    def encode(self, text: str) -> list[int]:
        """bos, then one token a byte; bytes smuggled in as surrogates (a command line's) too."""
        return [BOS, *(byte + FIRST_BYTE for byte in text.encode("utf-8", "surrogateescape"))]

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of ids; broken UTF-8 and ids of no byte give U+FFFD."""
        return decode_all(self.stream(skip_special), ids)

    def stream(self, skip_special: bool = True) -> ByteStream:
        """Incremental decoding; with skip_special=False as <pad>, <bos>, <eos>."""
        return ByteStream(_silent if skip_special else _shown)


def _silent(token: int) -> bytes:
    return b"" if token in _SHOWN else _shown(token)


def _shown(token: int) -> bytes:
    if FIRST_BYTE <= token < VOCABULARY:
        return bytes([token - FIRST_BYTE])
    return _SHOWN.get(token) or REPLACEMENT.encode()
