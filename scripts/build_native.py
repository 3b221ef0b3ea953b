#!/usr/bin/env python3
"""Compile the native KDA operators ahead of their first use.

    python scripts/build_native.py
    CXX=g++-13 python scripts/build_native.py

One library per set of sources, torch version and CPU level, kept under XDG_CACHE_HOME or ~/.cache.
Exit code 1 and the reason where it cannot be built; everything then runs on the torch kernels.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from collections.abc import Sequence

from kernels.native import library
from kernels.native.build import NotBuilt, build
from kimi_mini.cli import Parser, run


def main(argv: Sequence[str] | None = None) -> int:
    Parser(__doc__).parse_args(argv)
    try:
        built = build()
    except NotBuilt as error:
        print(f"native operators are not available: {error}", file=sys.stderr)
        return 1
    reason = library.missing()
    if reason is not None:
        print(f"native operators are not available: {reason}", file=sys.stderr)
        return 1
    what = f"compiled in {built.seconds:.0f} s" if built.seconds else "compiled already"
    print(f"native operators for {built.level}, {what}: {built.path}")
    return 0


if __name__ == "__main__":
    run(main)
