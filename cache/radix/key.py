"""Token ids as bytes, four a token: slices copy, compare and hash at the speed of memory.

A slice of bytes owns its bytes, so a small edge never keeps a large prompt alive.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

WIDTH = 4
_CODE = next(code for code in "ILQ" if array(code).itemsize == WIDTH)


def encode(tokens: Sequence[int]) -> bytes:
    """Ids 0 .. 2^32-1. OverflowError for others."""
    return array(_CODE, tokens).tobytes()


def decode(key: bytes) -> list[int]:
    """The ids of a key."""
    return array(_CODE, key).tolist()


def length(key: bytes) -> int:
    """Tokens of a key."""
    return len(key) // WIDTH


def common_pages(a: bytes, b: bytes, page_bytes: int) -> int:
    """Whole pages that two keys share from their beginnings, by bisection: O(length)."""
    low, high = 0, min(len(a), len(b)) // page_bytes
    while low < high:
        middle = (low + high + 1) // 2
        # pages below `low` are known to be equal
        if a[low * page_bytes : middle * page_bytes] == b[low * page_bytes : middle * page_bytes]:
            low = middle
        else:
            high = middle - 1
    return low
