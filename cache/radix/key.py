"""Keys of the tree: token ids as bytes (`cache.tokens`), compared page by page.

A slice of bytes owns its bytes, so a small edge never keeps a large prompt alive.
"""

from __future__ import annotations

from cache.tokens import WIDTH, decode, encode

__all__ = ["WIDTH", "common_pages", "decode", "encode", "length"]


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
