"""Stop strings over text that comes in parts.

The answer is a property of the whole text, whatever the parts: of all places where a stop string
stands, the one that starts first; of those that start there, the one that is complete first, so the
shortest. With stops ("abcd", "bc") the text "abc" is not decided yet: "d" would make it "abcd".
A text may begin with a part within which none may end (`watched`); such places do not count.
"""

from __future__ import annotations

import re


class StopStrings:
    """Watches one text.

    stops: strings that end it, none for no limit. include: the stop string is part of the text.
    Raises ValueError for an empty stop string, which would end every text at once.
    """

    def __init__(self, stops: tuple[str, ...], include: bool = False) -> None:
        if isinstance(stops, str) or not all(isinstance(stop, str) for stop in stops):
            raise ValueError(f"stops must be a tuple of strings, got {stops!r}")
        if not all(stops):
            raise ValueError(f"a stop string must not be empty, got {stops!r}")
        self._stops = sorted(set(stops), key=len)
        # alternatives are tried in order: the shortest of those that start at the same place
        self._any = re.compile("|".join(map(re.escape, self._stops))) if self._stops else None
        self._longest = max(map(len, self._stops), default=0)
        self._include = include
        self._held = ""
        self._border = 0  # in the held text: a stop string ends behind it
        self.matched: str | None = None

    def push(self, text: str, watched: bool = True) -> str:
        """The text that is certain to stand before any stop string.

        Held back is the longest end that may still become one, and no more. The push that finds one
        sets `matched` and returns what is left of the text, later pushes return nothing. watched:
        False for text, at the beginning, in which stop strings may begin but not end.
        """
        if self.matched is not None:
            return ""
        self._held += text
        if not watched:
            self._border = len(self._held)
        found = self._find()
        begun = self._begun()
        if found and found[0] <= begun:
            return self._end(*found)
        certain, self._held = self._held[:begun], self._held[begun:]
        self._border = max(0, self._border - begun)
        return certain

    def finish(self) -> str:
        """No more text comes: what was held back, up to a stop string if it holds one."""
        if found := self._find():
            return self._end(*found)
        rest, self._held = self._held, ""
        return rest

    def _find(self) -> tuple[int, str] | None:
        """The first stop string that counts, and where it starts."""
        at = max(0, self._border - self._longest + 1)
        while self._any and (found := self._any.search(self._held, at)):
            for stop in self._stops:
                ends = found.start() + len(stop)
                if ends > self._border and self._held.startswith(stop, found.start()):
                    return found.start(), stop
            at = found.start() + 1
        return None

    def _begun(self) -> int:
        """Where the longest end of the held text that begins a longer stop string starts."""
        size = len(self._held)
        for start in range(max(0, size - self._longest + 1), size):
            end = self._held[start:]
            if any(len(stop) > len(end) and stop.startswith(end) for stop in self._stops):
                return start
        return size

    def _end(self, start: int, stop: str) -> str:
        text = self._held[: start + len(stop) if self._include else start]
        self.matched, self._held = stop, ""
        return text
