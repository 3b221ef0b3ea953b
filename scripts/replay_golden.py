#!/usr/bin/env python3
"""Replay golden scenarios of real engines through our managers, and compare.

    python scripts/replay_golden.py tests/golden/sglang tests/golden/vllm
    python scripts/replay_golden.py FILE FOLDER --level exact --json

Levels: token (hits, chunk ends, statuses), shape (what is cached, counts, trees), exact (physical
ids and orders). by_design: the engine does there what nobody should copy; the line says what. A
file that is no scenario, or cannot be driven, differs. Exit code 1 if any differs.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Sequence

from kimi_mini.cli import Parser, UserError, run
from kimi_mini.workbench import replay_sglang, replay_vllm
from kimi_mini.workbench.replay import Level, Status, Verdict, replay_file

ENGINES = {"sglang": replay_sglang.replay, "vllm": replay_vllm.replay}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    levels = [level.name.lower() for level in Level]
    parser.add_argument("paths", nargs="+", type=Path, help="scenario files, or folders of them")
    parser.add_argument("--level", choices=levels, default="shape", help="how strictly (shape)")
    parser.add_argument("--json", action="store_true", help="a JSON list of verdicts")
    return parser.parse_args(argv)


def files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if not path.exists():
            raise UserError(f"there is no file or folder {path}")
        found = sorted(filter(Path.is_file, path.rglob("*.json"))) if path.is_dir() else [path]
        if not found:
            raise UserError(f"there is no scenario (*.json) in {path}")
        yield from found


def line(verdict: Verdict) -> str:
    text = f"{verdict.name} ({verdict.engine}): {verdict.status}"
    place = "construct" if verdict.event is None else f"event {verdict.event}"
    if verdict.status is Status.DIFFERS:
        return f"{text} at {place}, {verdict.field}: want {verdict.want}, got {verdict.got}"
    if verdict.status is Status.OK:
        return f"{text}, with a remark on {place}: {verdict.field}"
    return f"{text} from {place} on: {verdict.field}"


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    level = Level[args.level.upper()]
    verdicts = [replay_file(file, level, ENGINES) for file in [*files(args.paths)]]
    counts = Counter(verdict.status for verdict in verdicts)
    if args.json:
        print(json.dumps([verdict.as_json() for verdict in verdicts]))
    else:
        for verdict in verdicts:
            if verdict.status is not Status.OK or verdict.field:
                print(line(verdict))
        summary = ", ".join(f"{counts[status]} {status}" for status in Status)
        print(f"{len(verdicts)} scenarios at level {args.level}: {summary}")
    return 1 if counts[Status.DIFFERS] else 0


if __name__ == "__main__":
    run(main)
