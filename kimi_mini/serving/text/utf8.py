"""Bytes to text as they come, never half a character.

Broken bytes become one U+FFFD for each longest piece that could have begun a character (Unicode
standard 3.9, "substitution of maximal subparts"), as in `bytes.decode(errors="replace")` and in the
tokenizers library.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable


class Utf8Decoder:
    """Incremental: whatever the cuts, the parts add up to what the whole would give."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    @property
    def held(self) -> bytes:
        """The bytes, at most three, of a character that is begun and may still be finished."""
        return self._decoder.getstate()[0]

    def push(self, data: bytes) -> str:
        """Text that is certain now."""
        text = self._decoder.decode(data)
        held = self.held
        # CPython waits for a third byte after the first two of a surrogate's encoding, but none
        # would make it a character: in the whole these two are broken bytes already.
        if held[:1] == b"\xed" and held[1:] >= b"\xa0":
            text += self.finish()
        return text

    def finish(self) -> str:
        """One U+FFFD if bytes are held, else nothing; as new afterwards."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


class ByteStream:
    """The TextStream of a tokenizer whose every token is a fixed string of bytes.

    bytes_of: token -> its bytes, none for a token that is silent.
    """

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._decoder = Utf8Decoder()

    def push(self, token: int) -> str:
        """Text that is certain now."""
        return self._decoder.push(self._bytes_of(token))

    def finish(self) -> str:
        """One U+FFFD for an unfinished character, else nothing."""
        return self._decoder.finish()
