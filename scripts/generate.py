#!/usr/bin/env python3
"""Generate tokens: with no arguments, the mini preset with random weights and a sample prompt.

    python scripts/generate.py --model nano --prompt "KDA keeps a state" --max-tokens 32
    python scripts/generate.py --model path/to/checkpoint --prompt-ids 5,17,9 --json

Random weights speak no language: the text shows that tokens flow, not that they mean anything.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import json
from collections.abc import Sequence

from kernels.dispatcher import BACKENDS
from kimi_mini.cli import UserError, check_seed, run, set_threads
from kimi_mini.dtypes import DTYPES
from kimi_mini.serving.open_model import OpenModel, open_model
from kimi_mini.serving.single import Run
from kimi_mini.serving.tokenizer import ByteStream

SAMPLE_PROMPT = "A prefix is pages you can cut and a state you cannot. "


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="mini", help="a preset or a checkpoint folder (default: mini)")
    add("--prompt", help="text, encoded as bytes")
    add("--prompt-ids", help="token ids instead of text: 1,2,3 or a JSON list")
    add("--max-tokens", type=int, default=64, help="at most so many (default: 64)")
    add("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    add("--seed", type=int, default=0, help="of the random weights and of sampling")
    add("--dtype", choices=("auto", *DTYPES), default="float32", help="auto: as the config says")
    add("--threads", type=int, help="torch threads (default: torch's own choice)")
    add("--backend", choices=BACKENDS, default="auto", help="KDA kernels")
    add("--json", action="store_true", help="one JSON object instead of text")
    return parser.parse_args(argv)


def prompt_ids(args: argparse.Namespace, opened: OpenModel) -> list[int]:
    if args.prompt_ids is not None and args.prompt is not None:
        raise UserError("give --prompt or --prompt-ids, not both")
    if args.prompt_ids is None:
        if args.prompt == "":
            raise UserError("the prompt is empty: give --prompt some text, or --prompt-ids")
        return opened.encode(SAMPLE_PROMPT if args.prompt is None else args.prompt)
    text = args.prompt_ids.strip()
    try:
        ids = json.loads(text if text.startswith("[") else f"[{text}]")
    except json.JSONDecodeError:
        ids = None
    if not isinstance(ids, list) or any(type(i) is not int for i in ids):
        raise UserError(f"--prompt-ids takes whole numbers, 1,2,3 or [1,2,3]; got {text!r}")
    return ids


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    set_threads(args.threads)
    check_seed(args.seed)
    opened = open_model(args.model, args.dtype, args.seed, args.backend)
    request = Run(
        opened.model,
        prompt_ids(args, opened),
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        seed=args.seed,
        sample_below=opened.sample_below,
    )
    stream = ByteStream()
    if not args.json:
        for note in opened.notes:
            print(note, file=sys.stderr)
    text = []
    for token in request.tokens():
        text.append(stream.push(token) if opened.has_text else f"{token} ")
        if not args.json:
            print(text[-1], end="", flush=True)
    text.append(stream.finish())
    if args.json:
        shown = "".join(text) if opened.has_text else None
        names = {"model": args.model, "text": shown, "notes": list(opened.notes)}
        print(json.dumps(names | request.report()))
    else:
        print(text[-1])
        print(closing_line(request))
    return 0


def closing_line(request: Run) -> str:
    size = request.state_bytes()
    return (
        f"prefill {request.prefilled} tokens, {request.prefill_rate:,.0f} tokens/s · "
        f"decode {request.decoded} tokens, {request.decode_rate:,.0f} tokens/s · "
        f"state: recurrent {size['recurrent']:,} B + conv {size['conv']:,} B (fixed), "
        f"latent {size['latent']:,} B ({size['latent_per_token']:,} B a token)"
    )


if __name__ == "__main__":
    run(main)
