"""What every script shares: a user's mistake is one line on stderr and exit code 2."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch

from kernels.dispatcher import BACKENDS


class UserError(ValueError):
    """A mistake of the person at the command line; the message says what is allowed."""


class Parser(argparse.ArgumentParser):
    """Describes a script by its own docstring; a mistake is a UserError, not a page of usage."""

    def __init__(self, description: str | None) -> None:
        super().__init__(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (--help shows all options)")


def run(main: Callable[[Sequence[str] | None], int | None]) -> None:
    """Call main and exit with its code; ValueError and OSError become one line and exit code 2.

    ValueError is what this project raises for bad values (UserError, ConfigError, CheckpointError
    among them); OSError is the file system's. Anything else is our fault and keeps its traceback.
    Ctrl-C exits with 130, a closed pipe with 141. Warnings are one line too. Characters that the
    terminal cannot show are replaced.
    """
    warnings.showwarning = _say
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        code = main(None) or 0
        if sys.stdout is not None:
            sys.stdout.flush()
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone; nothing is left to say
        code = 141
    except (ValueError, OSError) as error:
        print(f"error: {_one_line(error)}", file=sys.stderr)
        code = 2
    sys.exit(code)


def add_backend(parser: argparse.ArgumentParser) -> None:
    """--backend, as `kernels.dispatcher` knows them."""
    text = "kernels (auto: native if they compile, else torch)"
    parser.add_argument("--backend", choices=BACKENDS, default="auto", help=text)


def check_seed(seed: int) -> None:
    """UserError unless a seed is one that every generator takes."""
    if not 0 <= seed < 2**63:
        raise UserError(f"--seed must be 0..{2**63 - 1}, got {seed}")


def set_threads(threads: int | None) -> None:
    """Use this many torch threads; None leaves torch's own choice. UserError if it cannot be."""
    if threads is not None:
        check_threads(threads)
        torch.set_num_threads(threads)


def check_threads(threads: int) -> None:
    """UserError unless 1 <= threads <= 4 per processor: far beyond that the runtime crashes."""
    most = 4 * processors()
    if not 1 <= threads <= most:
        raise UserError(f"--threads must be 1..{most} on this machine, got {threads}")


def processors() -> int:
    """Processors that this process may use: fewer than there are, in a container."""
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return os.cpu_count() or 1


def _one_line(message: object) -> str:
    return " ".join(str(message).split())


def _say(message: Warning | str, *_: object) -> None:
    print(f"warning: {_one_line(message)}", file=sys.stderr)
