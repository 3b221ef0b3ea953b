#!/usr/bin/env python3
"""Time prefill and decode of a whole model at several depths and batches, beside transformers.

    python scripts/bench_model.py
    python scripts/bench_model.py --model mini --depths 0 4096 --batches 1 8 --no-peer --json

A depth is not run up to: slots and pages are filled with random numbers, which cost a step the same
as real ones. Rates are tokens/s of the whole batch, medians of interleaved repeats.

The parts of a step are timed alone right after it. "overhead": what is left behind products,
attention, and states (decode) or recurrence (prefill), with "preparing" (checks before the layers)
in it; at most a quarter of a decode step of mini on one thread, ! where that is missed. "calling":
what calling products and moves one by one takes of itself. transformers' kimi_linear of the same
widths (no AttnRes, latent MoE, SiTU) is timed in the same rounds where it is installed: batch 1, to
a depth of 2048. The default grid takes about ten minutes.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import json
from collections.abc import Sequence

from kimi_mini.cli import Parser, UserError, add_backend, check_threads, run
from kimi_mini.dtypes import DTYPES
from kimi_mini.serving.open_model import open_model
from kimi_mini.weights.inventory import parameter_count
from kimi_mini.workbench.bench import measure_machine
from kimi_mini.workbench.bench_cells import Plan
from kimi_mini.workbench.bench_model import Comparison, PrefillFigure, StepFigure, growth, measure
from kimi_mini.workbench.bench_peer import find_peer
from kimi_mini.workbench.tables import in_words, table

MOST_STEPS = 10_000  # of one timing: each is a batch made beforehand
COUNTS = ("depths", "batches", "prompt", "prefill_chunk", "decode_steps", "repeats")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--model", default="bench", help="a preset or a checkpoint folder (bench)")
    add("--depths", type=int, nargs="+", default=[0, 2048, 16384], help="tokens before each row")
    add("--batches", type=int, nargs="+", default=[1, 8], help="rows of a step (1 8)")
    add("--prompt", type=int, default=2048, help="tokens of a prefill, over all rows (2048)")
    add("--prefill-chunk", type=int, default=512, help="tokens of a step, over all rows (512)")
    add("--decode-steps", type=int, default=16, help="steps of one timing (16)")
    add("--threads", type=int, default=1, help="torch threads (1)")
    add("--dtype", choices=("auto", *DTYPES), default="float32", help="auto: as the config says")
    add_backend(parser)
    add("--repeats", type=int, default=7, help="of every figure (7)")
    add("--peer", action=argparse.BooleanOptionalAction, help="transformers too (if installed)")
    add("--json", action="store_true", help="one JSON object instead of tables")
    args = parser.parse_args(argv)
    check_threads(args.threads)
    for name in COUNTS:
        value, least = getattr(args, name), int(name != "depths")
        for number in value if isinstance(value, list) else [value]:
            if number < least:
                option = name.replace("_", "-")
                raise UserError(f"--{option} must be at least {least}, got {number}")
    if args.decode_steps > MOST_STEPS:
        raise UserError(f"--decode-steps must be 1..{MOST_STEPS}, got {args.decode_steps}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    opened = open_model(args.model, args.dtype, backend=args.backend)
    plan = Plan(args.depths, args.batches, args.prompt, args.prefill_chunk, args.decode_steps)
    peer, no_peer = find_peer(args.peer, opened.model.config, opened.model.dtype)
    machine = measure_machine(args.threads, args.repeats)
    facts = {
        "model": args.model,
        "parameters": parameter_count(opened.model.config),
        "dtype": str(opened.model.dtype).removeprefix("torch."),
        "backend": opened.model.dispatcher.backend.name,
        **{name: getattr(args, name) for name in COUNTS[2:]},
    }
    if not args.json:
        print(in_words(facts))
        print(
            f"{machine.cpu}, torch {machine.torch}, {machine.threads} thread(s): sgemm "
            f"{machine.sgemm_gflops:.0f} GFLOP/s, copy {machine.copy_gbs:.1f} GB/s (read + write)",
            flush=True,
        )
    report = measure(opened.model, plan, threads=args.threads, repeats=args.repeats, peer=peer)
    if args.json:
        beside = peer and {"name": peer.name} | peer.describe()
        about = {"machine": machine.as_json(), "peer": beside, "no_peer": no_peer}
        print(json.dumps(facts | about | report.as_json()))
        return 0
    show("prefill", report.prefill)
    show("the last piece of a prompt; ms of it and of its parts alone", report.pieces)
    show("decode; ms of a step and of its parts alone", report.decode)
    print(*growth(report.decode), sep="\n")
    for s in report.skipped:
        print(f"skipped: {s.work}, depth {s.depth}, batch {s.batch}: {s.reason}")
    if peer is None:
        print(f"no comparison: {no_peer}")
    else:
        title = f"tokens/s, batch 1, beside {peer.name} ({in_words(peer.describe())})"
        show(title, report.compared)
    return 0


def show(title: str, figures: Sequence[PrefillFigure | StepFigure | Comparison]) -> None:
    print()
    print(table(title, [figure.as_row() for figure in figures]))


if __name__ == "__main__":
    run(main)
