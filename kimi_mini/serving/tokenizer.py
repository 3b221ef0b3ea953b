"""Text and tokens: the miniature's byte tokenizer, and streaming that never splits a character.

    pad 0 · bos 1 · eos 2 · byte b → b + 3                 (decision 15)

Ids of 259 and above stand for no byte; they decode to U+FFFD. A model of any vocabulary of at least
259 can be driven with it, which makes no sense of a trained checkpoint but moves its tokens.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

PAD, BOS, EOS = 0, 1, 2
FIRST_BYTE = 3
VOCABULARY = FIRST_BYTE + 256
REPLACEMENT = "\ufffd"


class ByteTokenizer:
    """UTF-8 bytes as tokens. Stateless."""

    def encode(self, text: str) -> list[int]:
        """bos, then one token a byte; bytes smuggled in as surrogates (a command line's) too."""
        return [BOS, *(byte + FIRST_BYTE for byte in text.encode("utf-8", "surrogateescape"))]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; specials are silent, broken UTF-8 and ids >= 259 give U+FFFD."""
        stream = ByteStream()
        return "".join([*(stream.push(token) for token in ids), stream.finish()])


class ByteStream:
    """Incremental decoding: `push` returns the text that a token completes, often none."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """Text that is certain now. Bytes of an unfinished character are held back."""
        if FIRST_BYTE <= token < VOCABULARY:
            return self._decoder.decode(bytes([token - FIRST_BYTE]))
        if token < FIRST_BYTE:
            return ""
        return self.finish() + REPLACEMENT

    def finish(self) -> str:
        """What is held back: one U+FFFD for an unfinished character, else nothing."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
