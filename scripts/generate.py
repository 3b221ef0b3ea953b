#!/usr/bin/env python3
"""Generate tokens: with no arguments, the mini preset with random weights and a sample prompt.

    python scripts/generate.py --model nano --prompt "KDA keeps a state" --max-tokens 32
    python scripts/generate.py --prompt one --prompt two --n 2 --temperature 0.8 --stop "."
    python scripts/generate.py --model path/to/checkpoint --prompt-ids 5,17,9 --json
    python scripts/generate.py --prefix-cache radix --turns chat.txt
    python scripts/generate.py --prefix-cache radix --prompt-file long.txt --repeat 2

Several prompts, and n samples of each, run at once over the same pools; --repeat runs them again
when all have ended, and --turns asks a file's lines one after the other, each behind all that was
said before: both show what a prefix cache is for. Random weights speak no
language: the text shows that tokens flow, not that they mean anything.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import json
from collections.abc import Iterator, Sequence

from kimi_mini.cli import Parser, UserError, run
from kimi_mini.serving import options
from kimi_mini.serving.conversation import read_turns, turn_by_turn
from kimi_mini.serving.engine import Engine
from kimi_mini.serving.report import Progress, cache_line, closing_line, report
from kimi_mini.serving.request import Prompt, Request

SAMPLE_PROMPT = "A prefix is pages you can cut and a state you cannot. "
Rounds = Iterator[list[Request]]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    options.add_prompt_options(parser)
    options.add_sampling_options(parser)
    options.add_model_options(parser)
    options.add_control_options(parser)
    add = parser.add_argument
    add("--turns", type=Path, help="a file of user turns, one a line, after the prompt if any")
    add("--repeat", type=int, default=1, help="run the same requests so often (1)")
    add("--json", action="store_true", help="one JSON object instead of text")
    args = parser.parse_args(argv)
    if args.repeat < 1:
        raise UserError(f"--repeat must be at least 1, got {args.repeat}")
    if not args.json and (args.logprobs, args.prompt_logprobs) != (None, None):
        raise UserError("--logprobs and --prompt-logprobs are shown with --json only")
    if args.turns and (args.repeat > 1 or len(args.prompts or ()) > 1 or (args.n or 1) > 1):
        raise UserError("--turns is one conversation: no --repeat, one prompt at most, --n 1")
    args.turns = args.turns and read_turns(args.turns)
    return args


def rounds(args: argparse.Namespace, engine: Engine, prompts: list[Prompt]) -> Rounds:
    """Requests that run at once, round after round."""
    params, control = options.sampling_params(args), options.cache_control(args)
    if args.turns:
        return turn_by_turn(engine, prompts, args.turns, params, control)
    return (engine.prepare(prompts or [SAMPLE_PROMPT], params, control) for _ in range(args.repeat))


def show(engine: Engine, requests: list[Request]) -> int:
    """Run and print: one sample as it comes, several when all have ended. 1 if one has failed."""
    alone = sum(len(request.sequences) for request in requests) == 1
    progress = Progress(requests)
    for delta in engine.run(requests):
        progress.show(delta)
        if alone:
            ids = "".join(f"{token} " for token in delta.token_ids)
            print(delta.text if engine.tokenizer else ids, end="", flush=True)
    if alone:
        print()
    failed = 0
    for number, request in enumerate(requests, start=1):
        for own in request.output().outputs:
            name = f"prompt {number}, sample {own.index + 1}"
            if not alone:
                print(f"[{name}, {own.finish_reason}]")
                print(own.text if engine.tokenizer else " ".join(map(str, own.token_ids)))
            if engine.reuses:
                print(cache_line(own))
            if own.error is not None:
                print(f"error: {name}: {own.error}", file=sys.stderr)
                failed = 1
    return failed


def print_json(model: str, engine: Engine, asked: Rounds) -> int:
    """All rounds as one object. A round that is refused is raised, and is the `error` behind those
    that have run before it. 2 if a sample has failed."""
    outputs, refused = [], {}
    try:
        for requests in asked:
            for _ in engine.run(requests):
                pass
            outputs += [request.output() for request in requests]
    except ValueError as error:
        if not outputs:
            raise
        refused = {"error": str(error)}
    print(json.dumps({"model": model} | report(engine, outputs) | refused, allow_nan=False))
    if refused:
        raise UserError(refused["error"])
    return 2 if any(own.error for output in outputs for own in output.outputs) else 0


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    prompts = [given.read() for given in args.prompts or ()]
    options.sampling_params(args)  # mistakes first: a model takes its time
    options.cache_control(args)
    engine = options.open_engine(args)
    if args.json:
        return print_json(args.model, engine, rounds(args, engine, prompts))
    print(*engine.opened.notes, sep="\n", file=sys.stderr)
    failed = sum(show(engine, requests) for requests in rounds(args, engine, prompts))
    print(closing_line(engine))
    return 2 if failed else 0


if __name__ == "__main__":
    run(main)
