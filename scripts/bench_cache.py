#!/usr/bin/env python3
"""What the prefix caches save and cost: first token cold against hit, calls, tree operations.

    python scripts/bench_cache.py
    python scripts/bench_cache.py --model nano --prefixes 256 --nodes 1000 --json

Cold and hit are timed in turn, with either manager, medians. Calls are those of the contract, for a
prompt of 4,096 tokens half of which is cached, in a cache that is full. Tree operations are on keys
of 4,096 tokens with pages of 16, in trees whose nodes have about 10 children ("bushy"), or where
every page of a key is a node ("chains", the longest walk there is).
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import json
from collections.abc import Sequence
from typing import NamedTuple

from kimi_mini.cli import Parser, UserError, add_backend, check_seed, check_threads, run
from kimi_mini.dtypes import DTYPES
from kimi_mini.serving.engine import Engine
from kimi_mini.serving.open_model import open_model
from kimi_mini.workbench import bench_cache, bench_requests
from kimi_mini.workbench.bench import measure_machine, using_threads

SHAPES = ("bushy", "chains")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--model", default="mini", help="a preset or a checkpoint folder (mini)")
    add("--prefixes", type=int, nargs="+", default=[1024, 4096, 16384], help="tokens shared")
    add("--suffix", type=int, default=32, help="tokens of a request's own (32)")
    sizes = [1000, 10000, 100000]
    add("--nodes", type=int, nargs="+", default=sizes, help="of a tree; pages of a full cache")
    add("--repeats", type=int, default=3, help="of a first token; calls and operations: 7 times")
    add("--threads", type=int, default=1, help="torch threads (1)")
    add("--dtype", choices=tuple(DTYPES), default="float32")
    add_backend(parser)
    add("--seed", type=int, default=0)
    add("--json", action="store_true", help="one JSON object instead of tables")
    args = parser.parse_args(argv)
    check_threads(args.threads)
    check_seed(args.seed)
    for name in ("prefixes", "suffix", "nodes", "repeats"):
        value = getattr(args, name)
        for number in value if isinstance(value, list) else [value]:
            if number < 1:
                raise UserError(f"--{name} must be at least 1, got {number}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    longest = max(args.prefixes) + args.suffix + 1
    opened = open_model(args.model, args.dtype, args.seed, args.backend)
    pages = 3 * -(-longest // bench_requests.PAGE)
    engines = {
        name: Engine(opened, prefix_cache=name, state_slots=64, kv_pages=pages)
        for name in bench_requests.MANAGERS
    }
    with using_threads(args.threads):
        machine = measure_machine(args.threads, args.repeats)
        firsts = [
            first
            for n in args.prefixes
            for first in bench_cache.measure_first_token(
                engines, n, args.suffix, args.repeats, args.seed
            )
        ]
    calls = [
        bench_requests.measure_requests(name, n, 7 * args.repeats, seed=args.seed)
        for n in args.nodes
        for name in engines
    ]
    index = [
        bench_cache.measure_index(n, shape, 7 * args.repeats, args.seed)
        for shape in SHAPES
        for n in args.nodes
    ]
    if args.json:
        parts = {"first_token": firsts, "calls": calls, "index": index}
        listed = {name: [f.as_json() for f in part] for name, part in parts.items()}
        print(json.dumps({"model": args.model, "machine": machine.as_json()} | listed))
        return 0
    print(
        f"{args.model}, {machine.cpu}, {args.threads} thread(s), {machine.sgemm_gflops:.0f} GFLOP/s"
    )
    print("\nfirst token, ms; one prefix takes its latent rows and one checkpoint\n")
    print(
        f"{'prefix':>8} {'suffix':>6} {'manager':>8} {'cold':>10} {'hit':>8} {'ratio':>8} "
        f"{'cached':>7} {'bytes':>12}"
    )
    for f in firsts:
        print(
            f"{f.prefix:8,} {f.suffix:6,} {f.manager:>8} {f.cold * 1e3:10,.1f} "
            f"{f.hit * 1e3:8,.1f} {f.ratio:8,.1f} {f.cached_tokens:7,} {f.cached_bytes:12,}"
        )
    print(f"\ncalls, microseconds, prompts of {calls[0].prompt:,} tokens in a full cache\n")
    _print_figures(("cached", "manager", "hit"), bench_requests.CALLS, calls)
    print(f"\ntree, microseconds, keys of {bench_cache.KEY:,} tokens\n")
    _print_figures(("nodes", "shape"), bench_cache.OPERATIONS, index)
    return 0


def _print_figures(of: Sequence[str], names: Sequence[str], rows: Sequence[NamedTuple]) -> None:
    """A line each: what it is of, then times."""
    print(" ".join(f"{name:>9}" for name in of), *(f"{name:>11}" for name in names))
    for row in rows:
        what = (getattr(row, name) for name in of)
        cells = (f"{value:9,}" if isinstance(value, int) else f"{value:>9}" for value in what)
        print(*cells, *(f"{getattr(row, name):11,.1f}" for name in names))


if __name__ == "__main__":
    run(main)
