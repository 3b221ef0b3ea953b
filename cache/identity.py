"""What makes two prefixes the same: who computed them, in which key space, over which tokens.

    origin = H(model, tokenizer, numerics, salt)          each field with its length, so that no two
                                                          sets of fields run together
    H_i    = H(H_{i-1}, tokens of unit i, extra_i)        a chain: equal hash, equal whole prefix

Collision-safe (I-09): 256-bit BLAKE2b. Everything that changes what tokens mean goes into one of
these fields: weights, adapter, tokenizer files, tenant, image content (`extra`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from cache.tokens import encode

DIGEST = 32  # bytes


@dataclass(frozen=True)
class Identity:
    """Who made the state of one cache (decision 27: one for the whole cache).

    model      digest of weights, config and adapter
    tokenizer  digest of what turns text into ids; empty for bare ids
    numerics   kernel family and chunk: equal or rejected where bits must be equal
    """

    model: str = ""
    tokenizer: str = ""
    numerics: str = ""

    def origin(self, salt: str | None = None) -> bytes:
        """Hash of the empty prefix in a key space. No salt and an empty salt are different."""
        salts = () if salt is None else (salt,)
        fields = (self.model, self.tokenizer, self.numerics, *salts)
        # a salt from a command line may hold bytes that are no text
        return digest_of((text.encode("utf-8", "surrogatepass") for text in fields), b"origin")


def digest_of(fields: Iterable[bytes | memoryview], kind: bytes = b"") -> bytes:
    """Hash of a list of fields, none of which can pass for a part of another, nor a list of one
    kind (at most 16 bytes) for one of another kind."""
    hasher = hashlib.blake2b(digest_size=DIGEST, person=kind)
    for field in fields:
        hasher.update(len(field).to_bytes(8, "little"))
        hasher.update(field)
    return hasher.digest()


def extended(previous: bytes, tokens: Sequence[int], extra: bytes = b"") -> bytes:
    """Hash of a prefix that goes on by some tokens. Ids 0 .. 2^32-1."""
    return digest_of((previous, encode(tokens), extra), b"prefix")


def prefix_hashes(origin: bytes, tokens: Sequence[int], unit: int) -> Iterator[bytes]:
    """H_1, H_2, ... of the whole units of a prompt; an unfinished last unit has none (I-32)."""
    previous = origin
    for start in range(0, len(tokens) - unit + 1, unit):
        previous = extended(previous, tokens[start : start + unit])
        yield previous
