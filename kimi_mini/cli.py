"""What every script shares: a user's mistake is one line on stderr and exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence


class UserError(ValueError):
    """A mistake of the person at the command line; the message says what is allowed."""


def run(main: Callable[[Sequence[str] | None], int | None]) -> None:
    """Call main and exit with its code; ValueError and OSError become one line and exit code 2.

    ValueError is what this project raises for bad values (UserError, ConfigError, CheckpointError
    among them); OSError is the file system's. Anything else is our fault and keeps its traceback.
    Ctrl-C exits with 130, a closed pipe with 141.
    """
    try:
        code = main(None) or 0
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone; nothing is left to say
        code = 141
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        code = 2
    sys.exit(code)
