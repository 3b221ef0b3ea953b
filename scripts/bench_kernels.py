#!/usr/bin/env python3
"""Time the KDA scan in chunks against the token loop and a matrix product of the same FLOPs.

    python scripts/bench_kernels.py
    python scripts/bench_kernels.py --K 64 128 --T 2048 32768 --threads 1 2 --json

Operands are given (q, k normalised; v, g, beta); rates are tokens/s of one layer, medians of
interleaved repeats, beside what this machine did for a float32 product in the same minute. The
target is 25k tokens/s at K = V = 64 and 12k at 128 on a core with 160 GFLOP/s, scaled by it, and
0.8 of that from T = 32768.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import itertools
import json
from collections.abc import Sequence

from kimi_mini.cli import Parser, UserError, check_threads, run
from kimi_mini.workbench import bench


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--K", type=int, nargs="+", default=[64, 128], help="key widths (64 128)")
    add("--V", type=int, nargs="+", help="value widths (each K with V = K)")
    add("--T", type=int, nargs="+", default=[2048, 32768], help="tokens (2048 32768)")
    add("--threads", type=int, nargs="+", default=[1], help="torch threads (1)")
    add("--heads", type=int, default=8, help="heads of the layer (8)")
    add("--kernel-chunk", type=int, default=16, help="tokens of a chunk (16)")
    add("--repeats", type=int, default=5, help="of every figure (5)")
    add("--json", action="store_true", help="one JSON object instead of tables")
    args = parser.parse_args(argv)
    for number in args.threads:
        check_threads(number)
    for name in ("K", "V", "T", "heads", "kernel_chunk", "repeats"):
        value = getattr(args, name)
        for number in value if isinstance(value, list) else [value]:
            if number is not None and number < 1:
                option = name.replace("_", "-")
                raise UserError(f"--{option} must be at least 1, got {number}")
    return args


def scan_row(f: bench.ScanFigures) -> dict[str, str]:
    missed = f.target is not None and f.chunked < f.target
    return {
        "K": f"{f.K}",
        "V": f"{f.V}",
        "T": f"{f.T}",
        "threads": f"{f.threads}",
        "chunked": f"{f.chunked:,.0f}",
        "target": ("-" if f.target is None else f"{f.target:,.0f}") + " !" * missed,
        "loop": f"{f.loop:,.0f}",
        "x loop": f"{f.to_loop:.1f}",
        "product": f"{f.product:,.0f}",
        "x product": f"{f.to_product:.2f}",
        "FLOP/token": f"{f.flops_per_token:,}",
        "GFLOP/s": f"{f.sgemm_gflops:.0f}",
    }


def other_row(f: bench.OtherFigure) -> dict[str, str]:
    rate = f"{f.rate:,.0f}"
    return {"kernel": f.what, "K": f"{f.K}", "V": f"{f.V}", "threads": f"{f.threads}", "rate": rate}


def show(title: str, rows: list[dict[str, str]]) -> None:
    lines = [tuple(rows[0]), *(tuple(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(f"\n{title}\n")
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    widths = [(K, V) for K in args.K for V in args.V or [K]]
    scans: list[bench.ScanFigures] = []
    others: list[bench.OtherFigure] = []
    machines = [bench.measure_machine(threads, args.repeats) for threads in args.threads]
    for threads, (K, V) in itertools.product(args.threads, widths):
        shared = {"H": args.heads, "threads": threads, "repeats": args.repeats}
        for T in args.T:
            scans.append(bench.measure_scan(K, V, T, kernel_chunk=args.kernel_chunk, **shared))
        others += bench.measure_others(K, V, min(args.T), **shared)
    if args.json:
        parts = {"machines": machines, "scans": scans, "others": others}
        print(json.dumps({name: [f.as_json() for f in part] for name, part in parts.items()}))
        return 0
    for m in machines:
        print(
            f"{m.cpu}, torch {m.torch}, {m.threads} thread(s): sgemm {m.sgemm_gflops:.0f} GFLOP/s, "
            f"copy {m.copy_gbs:.1f} GB/s (read + write)"
        )
    title = f"the scan in chunks of {args.kernel_chunk}, {args.heads} heads, tokens/s"
    show(title, [scan_row(f) for f in scans])
    print(f"\nloop: timed on {bench.LOOP_TOKENS} tokens where T is more")
    print("product: as many FLOPs as the chunk form, 4C(K+V) + 6KV per token and head")
    print("target: scaled by this machine's product, see --help; ! where it is missed")
    show("other kernels, tokens/s", [other_row(f) for f in others])
    return 0


if __name__ == "__main__":
    run(main)
