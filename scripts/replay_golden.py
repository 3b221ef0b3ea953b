#!/usr/bin/env python3
"""Replay golden scenarios of real engines through our managers, and compare.

    python scripts/replay_golden.py tests/golden/sglang
    python scripts/replay_golden.py FILE FOLDER --level exact --json

Levels: token (hits, chunk ends, statuses), shape (what is cached, counts, trees), exact (physical
ids and orders). by_design: the engine does there what nobody should copy; the line says what. Exit
code 1 if any scenario differs.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Sequence

from kimi_mini.cli import Parser, UserError, run
from kimi_mini.workbench import replay_sglang
from kimi_mini.workbench.replay import Level, Status, Verdict

ENGINES = {"sglang": replay_sglang.replay}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    levels = [level.name.lower() for level in Level]
    parser.add_argument("paths", nargs="+", type=Path, help="scenario files, or folders of them")
    parser.add_argument("--level", choices=levels, default="shape", help="how strictly (shape)")
    parser.add_argument("--json", action="store_true", help="a JSON list of verdicts")
    return parser.parse_args(argv)


def scenarios(paths: Sequence[Path]) -> Iterator[tuple[Path, dict]]:
    for path in paths:
        files = sorted(path.rglob("*.json")) if path.is_dir() else [path]
        if not files:
            raise UserError(f"there is no scenario (*.json) in {path}")
        for file in files:
            try:
                scenario = json.loads(file.read_text("utf-8"))
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise UserError(f"{file} is not JSON: {error}") from None
            missing = {"name", "engine", "config", "construct", "events", "observed"} - set(
                scenario if isinstance(scenario, dict) else ()
            )
            if missing:
                raise UserError(f"{file} is no scenario: it lacks {', '.join(sorted(missing))}")
            yield file, scenario


def judge(file: Path, scenario: dict, level: Level) -> Verdict:
    engine = str(scenario["engine"]).partition(" ")[0]
    if engine not in ENGINES:
        raise UserError(f"{file} is of engine {engine!r}; there are {', '.join(ENGINES)}")
    return ENGINES[engine](scenario, level)


def line(verdict: Verdict) -> str:
    text = f"{verdict.name} ({verdict.engine}): {verdict.status}"
    if verdict.status is Status.DIFFERS:
        place = "construct" if verdict.event is None else f"event {verdict.event}"
        return f"{text} at {place}, {verdict.field}: want {verdict.want}, got {verdict.got}"
    return f"{text}: {verdict.field}"


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    level = Level[args.level.upper()]
    verdicts = [judge(file, scenario, level) for file, scenario in scenarios(args.paths)]
    counts = Counter(verdict.status for verdict in verdicts)
    if args.json:
        print(json.dumps([verdict.as_json() for verdict in verdicts]))
    else:
        for verdict in verdicts:
            if verdict.status is not Status.OK:
                print(line(verdict))
        summary = ", ".join(f"{counts[status]} {status}" for status in Status)
        print(f"{len(verdicts)} scenarios at level {args.level}: {summary}")
    return 1 if counts[Status.DIFFERS] else 0


if __name__ == "__main__":
    run(main)
