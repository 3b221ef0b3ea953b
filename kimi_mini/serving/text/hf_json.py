"""A checkpoint's `tokenizer.json`, through the `tokenizers` library (an extra; imported on use).

Two families are streamed: byte-level BPE, whose tokens are bytes written as letters (utf8.py), and
tokenizers of pieces, such as Metaspace, byte fallback and WordPiece (pieces.py). Text is what the
library's own decode gives, except that broken byte fallback runs keep their sound characters and an
unfinished one at the end is one U+FFFD; an id without a token is U+FFFD, where the library is
silent.

Encoding adds special tokens as the file's post-processor says, and recognises them in the text.
The file's truncation and padding, settings of somebody's training run, are switched off.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from cache.identity import digest_of
from kimi_mini.serving.text.pieces import Pieces, PieceStream
from kimi_mini.serving.text.tokenizer import (
    REPLACEMENT,
    TextStream,
    TokenizerUnavailable,
    check_text,
    decode_all,
)
from kimi_mini.serving.text.utf8 import ByteStream

TOKENIZER_JSON = "tokenizer.json"
OF_PIECES = ("Metaspace", "Replace", "ByteFallback", "Fuse", "Strip", "WordPiece")
BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


class JsonTokenizer:
    """The Tokenizer of a folder with a tokenizer.json.

    Raises ValueError in one line for damaged files, TokenizerUnavailable if the library is missing
    or the decoder is of a kind that cannot be streamed.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / TOKENIZER_JSON
        self._library = _load(path)
        added = self._library.get_added_tokens_decoder()
        self._tokens = {i: token for token, i in self._library.get_vocab().items()}
        self._tokens |= {i: token.content for i, token in added.items()}
        self.vocab_size: int = max(self._tokens, default=-1) + 1
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.fingerprint = digest_of([self._library.to_str().encode()], b"tokenizer.json").hex()
        self._pieces: Pieces | None = None
        self._bytes: dict[int, bytes] = {}
        kinds = [*_parts(self._library.decoder)]
        names = {kind["type"] for kind in kinds}
        if "ByteLevel" in names and names <= {"ByteLevel", "Fuse"}:
            table = _byte_of_letter()
            self._bytes = {i: _as_bytes(token, table) for i, token in self._tokens.items()}
        elif fault := _unstreamable(kinds):
            raise TokenizerUnavailable(f"{path}: {fault}")
        else:
            self._pieces = self._as_pieces(path, "ByteFallback" in names)

    def encode(self, text: str) -> list[int]:
        """Ids, special tokens as the file says. ValueError for lone surrogates, and for characters
        that the vocabulary lacks if it has no token for the unknown either."""
        check_text(text)
        try:
            return self._library.encode(text).ids
        except Exception as error:  # the library raises the bare class
            raise ValueError(f"this tokenizer cannot encode the text ({_line(error)})") from error

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of ids."""
        return decode_all(self.stream(skip_special), ids)

    def stream(self, skip_special: bool = True) -> TextStream:
        """Incremental decoding."""
        silent = self.special_ids if skip_special else frozenset()
        if self._pieces is not None:
            return PieceStream(self._pieces, silent)
        return ByteStream(partial(self._bytes_of, silent))

    def _bytes_of(self, silent: frozenset[int], token: int) -> bytes:
        return b"" if token in silent else self._bytes.get(token, REPLACEMENT.encode())

    def _as_pieces(self, path: Path, byte_fallback: bool) -> Pieces:
        found = {i: BYTE_TOKEN.fullmatch(t) for i, t in self._tokens.items() if byte_fallback}
        byte_of = {i: int(match[1], 16) for i, match in found.items() if match}
        decode = partial(self._library.decode, skip_special_tokens=False)
        ids = sorted(self._tokens.keys() - byte_of.keys())
        anchor = next((i for i in ids if decode([i]).strip()), None)
        if anchor is None:
            raise ValueError(f"{path}: no token has text of its own")
        return Pieces(decode, anchor, byte_of, self._tokens)


def _load(path: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise TokenizerUnavailable(
            f"{path} needs the tokenizers library: pip install -e '.[tokenizers]'"
        ) from None
    try:
        library = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises the bare class
        raise ValueError(f"{path}: not a tokenizer ({_line(error)})") from error
    library.no_truncation()
    library.no_padding()
    return library


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _parts(decoder: Any) -> Iterator[Mapping[str, Any]]:
    """The steps of a decoder as they stand in the file; none for one that joins with spaces."""

    def walk(step: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        if step["type"] == "Sequence":
            for inner in step["decoders"]:
                yield from walk(inner)
        else:
            yield step

    if decoder is not None:
        yield from walk(json.loads(decoder.__getstate__()))


def _unstreamable(kinds: list[Mapping[str, Any]]) -> str | None:
    """Why a piece's text depends on more than whether it opens the text; None if it does not."""
    fused = False
    for kind in kinds:
        name = kind["type"]
        if name not in OF_PIECES:
            return f"its decoder {name} cannot be streamed, only ByteLevel, {', '.join(OF_PIECES)}"
        if name == "Strip" and kind["stop"]:
            return f"its decoder Strip takes {kind['stop']} from the end, which a stream cannot"
        if name == "Replace" and fused and len(kind["pattern"].get("String", "")) != 1:
            return "its decoder replaces after Fuse what may span tokens, which a stream cannot"
        fused |= name == "Fuse"
    return None


def _byte_of_letter() -> dict[str, int]:
    """Byte-level BPE writes bytes as letters: a printable one as itself (Latin-1), the others, in
    order, as the letters from U+0100 on."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    themselves = [ord(letter) for letter in letters if ord(letter) < 256]
    others = sorted(set(range(256)).difference(themselves))
    return dict(zip(letters, themselves + others, strict=True))


def _as_bytes(token: str, table: Mapping[str, int]) -> bytes:
    """A token with any letter outside of the table (an added one) stands for its own text."""
    if all(letter in table for letter in token):
        return bytes(table[letter] for letter in token)
    return token.encode("utf-8")
