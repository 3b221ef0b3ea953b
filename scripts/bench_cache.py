#!/usr/bin/env python3
"""What the prefix cache saves and costs: first token cold against hit, index operations, bytes.

    python scripts/bench_cache.py
    python scripts/bench_cache.py --model nano --prefixes 256 --nodes 1000 --json

Cold and hit are timed in turn, medians. Index operations are on keys of 4,096 tokens with pages of
16, in trees whose nodes have about 10 children ("bushy"), or where every page of a key is a node
("chains", the longest walk there is).
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import json
from collections.abc import Sequence

from kernels.dispatcher import BACKENDS
from kimi_mini.cli import Parser, UserError, check_seed, check_threads, run
from kimi_mini.dtypes import DTYPES
from kimi_mini.serving.engine import Engine
from kimi_mini.workbench import bench_cache
from kimi_mini.workbench.bench import measure_machine, using_threads

SHAPES = ("bushy", "chains")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--model", default="mini", help="a preset or a checkpoint folder (mini)")
    add("--prefixes", type=int, nargs="+", default=[1024, 4096, 16384], help="tokens shared")
    add("--suffix", type=int, default=32, help="tokens of a request's own (32)")
    add("--nodes", type=int, nargs="+", default=[1000, 10000, 100000], help="sizes of trees")
    add("--repeats", type=int, default=3, help="of a first token; index operations: 7 times that")
    add("--threads", type=int, default=1, help="torch threads (1)")
    add("--dtype", choices=tuple(DTYPES), default="float32")
    add("--backend", choices=BACKENDS, default="auto")
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
    engine = Engine.from_pretrained(
        args.model,
        dtype=args.dtype,
        seed=args.seed,
        backend=args.backend,
        prefix_cache="radix",
        state_slots=64,
        kv_pages=3 * -(-longest // 16),
    )
    with using_threads(args.threads):
        machine = measure_machine(args.threads, args.repeats)
        firsts = [
            bench_cache.measure_first_token(engine, n, args.suffix, args.repeats, args.seed)
            for n in args.prefixes
        ]
    index = [
        bench_cache.measure_index(n, shape, 7 * args.repeats, args.seed)
        for shape in SHAPES
        for n in args.nodes
    ]
    if args.json:
        parts = {"first_token": firsts, "index": index}
        listed = {name: [f.as_json() for f in part] for name, part in parts.items()}
        print(json.dumps({"model": args.model, "machine": machine.as_json()} | listed))
        return 0
    print(
        f"{args.model}, {machine.cpu}, {args.threads} thread(s), {machine.sgemm_gflops:.0f} GFLOP/s"
    )
    print("\nfirst token, ms; one prefix takes its latent rows and one checkpoint\n")
    widths = {"prefix": 8, "suffix": 6, "cold": 10, "hit": 8, "ratio": 8, "cached": 7, "bytes": 12}
    print(" ".join(name.rjust(width) for name, width in widths.items()))
    for f in firsts:
        print(
            f"{f.prefix:8,} {f.suffix:6,} {f.cold * 1e3:10,.1f} {f.hit * 1e3:8,.1f} "
            f"{f.ratio:8,.1f} {f.cached_tokens:7,} {f.cached_bytes:12,}"
        )
    print(f"\nindex, microseconds, keys of {bench_cache.KEY:,} tokens\n")
    names = ("match", "insert", "publish", "evict_kv", "evict_state")
    print(f"{'nodes':>8} {'tree':>7} " + " ".join(f"{name:>11}" for name in names))
    for t in index:
        figures = " ".join(f"{getattr(t, name):11,.1f}" for name in names)
        print(f"{t.nodes:8,} {t.shape:>7} {figures}")
    return 0


if __name__ == "__main__":
    run(main)
