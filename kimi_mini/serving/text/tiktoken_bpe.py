"""A checkpoint's `tiktoken.model` in Kimi's layout, through the `tiktoken` library (an extra).

    tiktoken.model          lines "base64-of-bytes rank"; the rank is the id, 0..n-1
    ids n .. n+255          special tokens, named by tokenizer_config.json's added_tokens_decoder,
                            else <|reserved_token_ID|>

The rule that cuts text before merging, the 256 specials and the cuts of very long texts are those
of Moonshot's tokenization_kimi.py, published with Kimi K2 and K3 (which share the pattern and the
ranks, and name their specials differently). What sets the rule apart is that Han script is taken
out of words and cut by itself.

Special tokens written in a prompt become those tokens: this is the door for rendered chats, so text
of strangers has to be checked before. bos is added only where the config has add_bos_token. The
library's own loader is not used: it keeps copies by path in a cache folder and would serve a stale
one.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from cache.identity import digest_of
from kimi_mini.serving.text.tokenizer import (
    REPLACEMENT,
    TokenizerUnavailable,
    check_text,
    decode_all,
)
from kimi_mini.serving.text.tokenizer_config import (
    TOKENIZER_CONFIG,
    TokenizerConfig,
    read_tokenizer_config,
)
from kimi_mini.serving.text.utf8 import ByteStream

TIKTOKEN_MODEL = "tiktoken.model"
SPECIALS = 256
# beyond these sizes the library's regex and merging can panic (openai/tiktoken issue 195)
MOST_AT_ONCE = 400_000
LONGEST_RUN = 25_000

_NO_HAN = r"&&[^\p{Han}]"
_UPPER = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{_NO_HAN}]"
_LOWER = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{_NO_HAN}]"
_BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        f"{_BEFORE_WORD}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_BEFORE_WORD}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_RUN = re.compile(r"\s+|\S+")


class TiktokenTokenizer:
    """The Tokenizer of a folder with a tiktoken.model.

    Raises ValueError in one line for damaged files, TokenizerUnavailable if the library is missing.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / TIKTOKEN_MODEL
        library = _library(path)
        ranks = read_ranks(path)
        config = read_tokenizer_config(folder)
        self._names, self.special_ids = _specials(folder, len(ranks), config)
        self._library = library.Encoding(
            name=path.name, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=self._names
        )
        self._bytes = {i: token for token, i in ranks.items()}
        self._bytes |= {i: name.encode("utf-8") for name, i in self._names.items()}
        self.vocab_size: int = max(self._bytes) + 1
        self._bos = None
        if config.add_bos_token:
            self._bos = self._id_of(folder, "bos_token", config.bos_token)
            if self._bos is None:
                raise ValueError(f"{folder / TOKENIZER_CONFIG}: add_bos_token without a bos_token")
        told = [PATTERN.encode(), f"{self._names} {self._bos}".encode()]
        told += [self._bytes[i] for i in sorted(self._bytes)]
        self.fingerprint = digest_of(told, b"tiktoken").hex()

    def encode(self, text: str) -> list[int]:
        """Ids; special tokens in the text are recognised. ValueError for lone surrogates."""
        check_text(text)
        ids = [] if self._bos is None else [self._bos]
        for part in _manageable(text):
            ids += self._library.encode(part, allowed_special="all")
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of ids."""
        return decode_all(self.stream(skip_special), ids)

    def stream(self, skip_special: bool = True) -> ByteStream:
        """Incremental decoding."""
        return ByteStream(
            partial(self._bytes_of, self.special_ids if skip_special else frozenset())
        )

    def _bytes_of(self, silent: frozenset[int], token: int) -> bytes:
        return b"" if token in silent else self._bytes.get(token, REPLACEMENT.encode())

    def _id_of(self, folder: Path, field: str, name: str | None) -> int | None:
        if name is None or name in self._names:
            return self._names.get(name)
        raise ValueError(
            f"{folder / TOKENIZER_CONFIG}: {field} is {name!r}, which is no special token"
        )


def read_ranks(path: Path) -> dict[bytes, int]:
    """bytes -> rank. ValueError for a line that is none, ranks other than 0..n-1, a token twice, or
    a byte without a token (merging starts from bytes)."""
    ranks: dict[bytes, int] = {}
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            token = base64.b64decode(token, validate=True)
        except ValueError:
            token = rank = b""
        if not token or not rank.isdigit() or len(rank) > 9:
            raise ValueError(f"{path}: line {number} is not base64 and a rank: {line[:40]!r}")
        if token in ranks:
            raise ValueError(f"{path}: line {number} gives {token!r} a second time")
        ranks[token] = int(rank)
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise ValueError(f"{path}: {len(missing)} of the 256 bytes have no token, {missing[:5]}")
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(f"{path}: the ranks are not 0..{len(ranks) - 1}, each once")
    return ranks


def _library(path: Path) -> Any:
    try:
        import tiktoken
    except ImportError:
        raise TokenizerUnavailable(
            f"{path} needs the tiktoken library: pip install -e '.[tiktoken]'"
        ) from None
    return tiktoken


def _specials(
    folder: Path, first: int, config: TokenizerConfig
) -> tuple[dict[str, int], frozenset[int]]:
    """name -> id of all special tokens, and the ids that are silent. Declared `special: false` are
    those with a meaning in text, such as <think>: recognised in prompts, but shown."""
    names = {i: f"<|reserved_token_{i}|>" for i in range(first, first + SPECIALS)}
    if taken := sorted(i for i in config.added if i < first):
        raise ValueError(
            f"{folder / TOKENIZER_CONFIG}: added_tokens_decoder names {taken[:5]}, but ids below "
            f"{first} are those of {TIKTOKEN_MODEL}"
        )
    names |= {i: added.content for i, added in config.added.items()}
    ids = {name: i for i, name in names.items()}
    if twice := sorted(i for i, name in names.items() if ids[name] != i):
        raise ValueError(
            f"{folder / TOKENIZER_CONFIG}: ids {twice[0]} and {ids[names[twice[0]]]} are both "
            f"{names[twice[0]]!r}"
        )
    shown = {i for i, added in config.added.items() if not added.special}
    return ids, frozenset(names.keys() - shown)


def _manageable(text: str) -> Iterator[str]:
    """The text in parts of at most MOST_AT_ONCE characters, without a run of LONGEST_RUN + 1
    characters that are all space or all not; parts end nowhere else. Ids of very long texts depend
    on these cuts."""
    for start in range(0, len(text), MOST_AT_ONCE):
        block = text[start : start + MOST_AT_ONCE]
        ends = [
            end
            for run in _RUN.finditer(block)
            for end in range(run.start() + LONGEST_RUN, run.end(), LONGEST_RUN)
        ]
        yield from (block[a:b] for a, b in pairwise((0, *ends, len(block))))
