"""Work counted instead of timed: the same on every machine, however busy."""

from __future__ import annotations

import sys
from collections.abc import Callable


def bytecodes(call: Callable[[], object]) -> int:
    """Bytecodes of Python that a call executes, in all functions on the way."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


class Compared(int):
    """A reading of a clock that counts how often readings are compared."""

    comparisons = 0

    def __eq__(self, other):
        Compared.comparisons += 1
        return int(self) == other

    def __lt__(self, other):
        Compared.comparisons += 1
        return int(self) < other

    __hash__ = int.__hash__


class Read(bytes):
    """A key that counts how many of its bytes are copied, hashed or compared."""

    touched = 0

    def __getitem__(self, part):
        found = bytes(self)[part]
        Read.touched += len(found)
        return found

    def startswith(self, prefix, at):
        Read.touched += len(prefix)
        return bytes(self).startswith(prefix, at)
