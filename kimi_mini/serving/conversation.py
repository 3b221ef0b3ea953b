"""A conversation as token ids: each turn goes behind all that was said before, answers included.

Ids, not text: what was sampled is sent again as it was, so that the prefix is the same prefix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from kimi_mini.serving.control import CacheControl
from kimi_mini.serving.engine import Engine
from kimi_mini.serving.open_model import OpenModel
from kimi_mini.serving.outputs import CompletionOutput
from kimi_mini.serving.request import Prompt, Request
from kimi_mini.serving.sampling_params import SamplingParams


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


def read_turns(path: Path) -> list[str]:
    """The user turns of a file: a line each, blank ones left out. A line ends at a line feed, which
    a carriage return may precede, and nowhere else; bytes that are no UTF-8 are kept as surrogates.
    ValueError for a file without a turn, OSError for one that cannot be read."""
    lines = path.read_bytes().decode("utf-8", "surrogateescape").split("\n")
    turns = [line.removesuffix("\r") for line in lines if line.strip()]
    if not turns:
        raise ValueError(f"there is no turn in {path}: one a line, blank lines are none")
    return turns


def turn_by_turn(
    engine: Engine,
    prompts: Sequence[Prompt],
    turns: Sequence[str],
    params: SamplingParams,
    control: CacheControl | None = None,
) -> Iterator[list[Request]]:
    """A conversation behind at most one prompt, a request a turn, alone in its list. Each is to be
    run before the next is asked for. ValueError, with the turn's number, for one that does not fit
    behind what was said."""
    start = [engine.opened.encode(p) if isinstance(p, str) else p for p in prompts]
    talk = Conversation(engine.opened, *start)
    for number, turn in enumerate(turns, start=1):
        try:
            (request,) = engine.prepare([talk.ask(turn)], params, control)
        except ValueError as error:
            raise ValueError(f"turn {number}: {error}") from None
        yield [request]
        talk.hear(request.output().outputs[0])
