"""Token ids as bytes, four a token: what is hashed, compared and sliced at the speed of memory."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

WIDTH = 4
_CODE = next(code for code in "ILQ" if array(code).itemsize == WIDTH)


def encode(tokens: Sequence[int]) -> bytes:
    """Ids 0 .. 2^32-1. OverflowError for others."""
    return array(_CODE, tokens).tobytes()


def decode(encoded: bytes) -> list[int]:
    """The ids that these bytes are."""
    return array(_CODE, encoded).tolist()
