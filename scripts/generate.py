#!/usr/bin/env python3
"""Generate tokens: with no arguments, the mini preset with random weights and a sample prompt.

    python scripts/generate.py --model nano --prompt "KDA keeps a state" --max-tokens 32
    python scripts/generate.py --prompt one --prompt two --n 2 --temperature 0.8 --stop "."
    python scripts/generate.py --model path/to/checkpoint --prompt-ids 5,17,9 --json

Several prompts, and n samples of each, run at once over the same pools. Random weights speak no
language: the text shows that tokens flow, not that they mean anything.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import json
from collections.abc import Sequence

from kimi_mini.cli import run
from kimi_mini.serving import options
from kimi_mini.serving.engine import Engine
from kimi_mini.serving.report import closing_line, report
from kimi_mini.serving.request import Request

SAMPLE_PROMPT = "A prefix is pages you can cut and a state you cannot. "


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_prompt_options(parser)
    options.add_sampling_options(parser)
    options.add_model_options(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    return parser.parse_args(argv)


def show(engine: Engine, requests: list[Request]) -> None:
    """Run and print: one sample as it comes, several when all have ended."""
    alone = sum(len(request.sequences) for request in requests) == 1
    show_progress = sys.stderr.isatty()
    for delta in engine.run(requests):
        if show_progress and 0 < delta.prefilled < delta.prompt_tokens:
            print(f"\rprefill {delta.prefilled:,}/{delta.prompt_tokens:,}", end="", file=sys.stderr)
        if alone:
            ids = "".join(f"{token} " for token in delta.token_ids)
            print(delta.text if engine.tokenizer else ids, end="", flush=True)
    if alone:
        print()
        return
    for number, request in enumerate(requests, start=1):
        for own in request.output().outputs:
            print(f"[prompt {number}, sample {own.index + 1}, {own.finish_reason}]")
            print(own.text if engine.tokenizer else " ".join(map(str, own.token_ids)))


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    prompts = [given.read() for given in args.prompts or ()] or [SAMPLE_PROMPT]
    params = options.sampling_params(args)
    engine = options.open_engine(args)
    requests = engine.prepare(prompts, params)
    if args.json:
        for _ in engine.run(requests):
            pass
        outputs = [request.output() for request in requests]
        print(json.dumps({"model": args.model} | report(engine, outputs)))
        return 0
    print(*engine.opened.notes, sep="\n", file=sys.stderr)
    show(engine, requests)
    print(closing_line(engine))
    return 0


if __name__ == "__main__":
    run(main)
