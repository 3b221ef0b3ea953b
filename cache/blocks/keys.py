"""What a block is found by (serving 4.1).

    H_0 = H(origin(salt), tokens[0:h], extra_0),  H_i = H(H_{i-1}, tokens[ih:(i+1)h], extra_i)
    hash of the first n tokens = H_{n/h - 1}       a block of B = r h tokens has its last unit's
    key = hash ++ group                            36 bytes

The salt is in the origin, and the chain carries it to every block. All who share hashes must use
one unit: a block seen through fine units has another hash than the block taken whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cache.identity import digest_of, extended

Key = bytes


class Image(NamedTuple):
    """An image whose placeholder tokens are [start, start + length)."""

    digest: bytes
    start: int
    length: int


def extra_keys(
    start: int, end: int, *, adapter: str | None = None, images: Sequence[Image] = ()
) -> bytes:
    """What changes the meaning of tokens [start, end) beside their ids: the adapter, and each image
    that overlaps them, with its offset from `start`. Empty if nothing does."""
    fields = [] if adapter is None else [b"adapter", adapter.encode()]
    for image in images:
        if image.start < end and start < image.start + image.length:
            fields += [image.digest, str(image.start - start).encode()]
    return digest_of(fields, b"extra") if fields else b""


def key_of(prefix_hash: bytes, group: int) -> Key:
    """Hash and group number, 4 bytes big endian."""
    return prefix_hash + group.to_bytes(4, "big")


class HashChain:
    """The hashes of a sequence's prefixes, computed when they are first asked for.

    tokens may grow, but not change. adapter, images: see `extra_keys`.
    """

    def __init__(
        self,
        origin: bytes,
        tokens: Sequence[int],
        unit: int,
        *,
        adapter: str | None = None,
        images: Sequence[Image] = (),
    ) -> None:
        self.tokens, self.unit = tokens, unit
        self._adapter, self._images = adapter, images
        self._hashes = [origin]

    @property
    def reach(self) -> int:
        """Tokens in whole units: what follows has no hash yet."""
        return len(self.tokens) // self.unit * self.unit

    def at(self, boundary: int) -> bytes:
        """Hash of the first `boundary` tokens: a multiple of the unit up to `reach`, else
        ValueError."""
        if boundary % self.unit or not 0 <= boundary <= self.reach:
            raise ValueError(
                f"there are hashes of multiples of {self.unit} tokens up to {self.reach}, got "
                f"{boundary}"
            )
        hashes = self._hashes
        while len(hashes) <= boundary // self.unit:
            end = len(hashes) * self.unit
            start = end - self.unit
            extra = extra_keys(start, end, adapter=self._adapter, images=self._images)
            hashes.append(extended(hashes[-1], self.tokens[start:end], extra))
        return hashes[boundary // self.unit]

    def key(self, boundary: int, group: int) -> Key:
        """What a block of this group that stands for the first `boundary` tokens is found by."""
        return key_of(self.at(boundary), group)
