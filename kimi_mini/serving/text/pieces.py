"""Streaming for tokenizers whose tokens are pieces of text rather than bytes.

A piece's text depends on what stands before it in one way only: whether anything does. (A leading
"▁" is no space at the start; WordPiece puts a space in front of words but not of the first.) So

    text of a piece in the middle = decode([anchor, piece]) without its beginning, decode([anchor])

for one anchor, any token that has text of its own. The cost of a token does not grow with the
sequence, and no window slides. What opens the text is decoded as it is, until it says something.

Byte fallback tokens (<0xE4>) are gathered into characters first. The tokenizers library turns every
byte of a run into U+FFFD when one of them is broken, which takes back the characters in front of
it; a stream cannot, so here broken bytes are replaced as utf8.py says, and sound ones stay.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass

from kimi_mini.serving.text.tokenizer import REPLACEMENT
from kimi_mini.serving.text.utf8 import Utf8Decoder


@dataclass(frozen=True)
class Pieces:
    """What a stream has to know of a tokenizer.

    decode: ids → text, nothing skipped. anchor: an id with text of its own, not one of `byte_of`.
    byte_of: the byte of each byte fallback token. known: the ids that stand for something.
    """

    decode: Callable[[list[int]], str]
    anchor: int
    byte_of: Mapping[int, int]
    known: Container[int]

    def opening(self, ids: list[int]) -> str:
        """Text of ids at the very start."""
        return self.decode(ids)

    def inside(self, ids: list[int]) -> str:
        """Text of ids that follow others."""
        before = self.decode([self.anchor])
        return self.decode([self.anchor, *ids])[len(before) :]


class PieceStream:
    """A TextStream over pieces. silent: ids that leave no trace."""

    def __init__(self, pieces: Pieces, silent: frozenset[int]) -> None:
        self._pieces = pieces
        self._silent = silent
        self._utf8 = Utf8Decoder()
        self._fresh()

    def _fresh(self) -> None:
        self._opened = False  # whether any text has been made
        self._opening: list[int] = []  # ids so far, while not
        self._character: list[int] = []  # byte tokens of the character that is begun

    def push(self, token: int) -> str:
        """Text that is certain now."""
        if token in self._silent:
            return ""
        if token in self._pieces.byte_of:
            return self._push_byte(token)
        broken = self._literal(self._utf8.finish())
        self._character = []
        if token not in self._pieces.known:
            return broken + self._literal(REPLACEMENT)
        return broken + self._text([token])

    def finish(self) -> str:
        """One U+FFFD for an unfinished character, else nothing."""
        rest = self._utf8.finish()
        self._fresh()
        return rest

    def _push_byte(self, token: int) -> str:
        data = bytes([self._pieces.byte_of[token]])
        so_far = self._utf8.held + data
        text = self._utf8.push(data)
        if text.encode() == so_far:
            ids, self._character = [*self._character, token], []
            return self._text(ids)
        if text:  # what was begun is broken; this byte may begin another
            self._character = []
        if self._utf8.held:
            self._character.append(token)
        return self._literal(text)

    def _text(self, ids: list[int]) -> str:
        if self._opened:
            return self._pieces.inside(ids)
        self._opening += ids
        return self._literal(self._pieces.opening(self._opening))

    def _literal(self, text: str) -> str:
        if text:
            self._opened, self._opening = True, []
        return text
