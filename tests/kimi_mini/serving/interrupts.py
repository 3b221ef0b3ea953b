"""Ctrl-C at a chosen place: before the n-th line that runs in chosen files."""

import contextlib
import sys
from collections.abc import Iterable, Iterator
from types import FrameType, ModuleType


class Interrupt:
    """Counts the lines that run while it watches; raises KeyboardInterrupt before the `at`-th, and,
    if there is a `gap`, once more so many lines later."""

    def __init__(self, at: int, modules: Iterable[ModuleType], gap: int | None = None) -> None:
        self.at, self.lines = at, 0
        self._moments = (at, None if gap is None else at + gap)
        self._files = {module.__file__ for module in modules}
        self.place: tuple[str, int] | None = None
        self.ran: list[tuple[str, int]] = []  # file and line, in order

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(before)

    def _call(self, frame: FrameType, event: str, arg: object):
        return self._line if frame.f_code.co_filename in self._files else None

    def _line(self, frame: FrameType, event: str, arg: object):
        if event == "line":
            self.lines += 1
            self.ran.append((frame.f_code.co_filename, frame.f_lineno))
            if self.lines in self._moments:
                self.place = (frame.f_code.co_name, frame.f_lineno)
                raise KeyboardInterrupt
        return self._line
