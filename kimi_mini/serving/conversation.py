"""A conversation as token ids: each turn goes behind all that was said before, answers included.

Ids, not text: what was sampled is sent again as it was, so that the prefix is the same prefix.
"""

from __future__ import annotations

from kimi_mini.serving.open_model import OpenModel
from kimi_mini.serving.outputs import CompletionOutput


class Conversation:
    """Starts empty, or with the ids of a system prompt."""

    def __init__(self, opened: OpenModel, ids: list[int] | None = None) -> None:
        self._opened = opened
        self.ids = list(ids or [])

    def ask(self, text: str) -> list[int]:
        """The prompt of a new turn. What a tokenizer puts before a text (a bos) is only put before
        the first. ValueError if the model cannot be addressed in text."""
        turn = self._opened.encode(text)
        if self.ids:
            silent = self._opened.tokenizer.special_ids
            while turn and turn[0] in silent:
                turn = turn[1:]
        self.ids += turn
        return list(self.ids)

    def hear(self, answer: CompletionOutput) -> None:
        """The answer becomes a part of the conversation."""
        self.ids += answer.token_ids
