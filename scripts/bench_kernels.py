#!/usr/bin/env python3
"""Time every operator of the layers: torch against native, against what this machine allows.

    python scripts/bench_kernels.py
    python scripts/bench_kernels.py --K 64 --T 2048 --batches 1 8 --threads 1 2 --json

Rates are tokens/s of one layer in float32, medians of interleaved repeats. "bound": the operator's
FLOPs at the speed of a float32 product, or its bytes at the speed of a copy, whichever is longer,
measured in the same turns; of the scan, the FLOPs of four vector operations a token for each number
of its state. Targets stand beside the bare scan (350k tokens/s at K = V = 64 and 90k at 128 on a
core with 160 GFLOP/s, scaled by it; 0.9 of that from T = 32768) and the decode step of the core
(two thirds of a copy's speed); ! where one is missed.

Up to T = 2048 the bare scan runs beside the torch forms of transformers and fla, where they are
installed (extra `bench`; of fla no more than `pip install --no-deps fla-core` is needed); 18 times
the fastest is asked for, and "at the bound" says what any scan could reach. The default takes about
ten minutes.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import json
from collections.abc import Sequence

from kernels.native import library
from kimi_mini.cli import Parser, UserError, check_threads, run
from kimi_mini.workbench.bench import measure_machine
from kimi_mini.workbench.bench_kernels import measure
from kimi_mini.workbench.bench_operators import Operators
from kimi_mini.workbench.bench_published import published_scans
from kimi_mini.workbench.tables import table


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--K", type=int, nargs="+", default=[64, 128], help="key widths (64 128)")
    add("--V", type=int, nargs="+", help="value widths (each K with V = K)")
    add("--T", type=int, nargs="+", default=[2048, 32768], help="tokens of a prompt (2048 32768)")
    add("--batches", type=int, nargs="+", default=[1, 8], help="rows of a decode step (1 8)")
    add("--threads", type=int, nargs="+", default=[1], help="torch threads (1)")
    add("--heads", type=int, default=8, help="heads of the layer (8)")
    add("--repeats", type=int, default=7, help="of every figure (7)")
    add("--only", default="", help="operators whose name begins with this")
    add("--json", action="store_true", help="one JSON object instead of a table")
    args = parser.parse_args(argv)
    for number in args.threads:
        check_threads(number)
    for name in ("K", "V", "T", "batches", "heads", "repeats"):
        value = getattr(args, name)
        for number in value if isinstance(value, list) else [value]:
            if number is not None and number < 1:
                raise UserError(f"--{name} must be at least 1, got {number}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    missing = library.missing()
    machines = [measure_machine(threads, args.repeats) for threads in args.threads]
    figures = (
        figure
        for threads in args.threads
        for K in args.K
        for V in args.V or [K]
        for figure in measure(
            Operators(K, V, args.heads),
            args.T,
            args.batches,
            threads=threads,
            repeats=args.repeats,
            only=args.only,
        )
    )
    if args.json:
        listed = {"machines": machines, "operators": figures}
        parts = {name: [f.as_json() for f in part] for name, part in listed.items()}
        print(json.dumps({"heads": args.heads, "no_native": missing} | parts))
        return 0
    for m in machines:
        print(
            f"{m.cpu}, torch {m.torch}, {m.threads} thread(s): sgemm {m.sgemm_gflops:.0f} GFLOP/s, "
            f"copy {m.copy_gbs:.1f} GB/s (read + write)"
        )
    if missing is not None:
        print(f"no native operators: {missing}")
    print(f"tokens/s of one layer, {args.heads} heads, float32\n")
    compared = []
    for i, figure in enumerate(figures):
        cells = figure.as_row()
        if i == 0:
            print("  ".join(name.rjust(len(cell)) for name, cell in cells.items()))
        print("  ".join(cells.values()), flush=True)
        if figure.published:
            compared.append(figure.as_comparison())
    if compared:
        print()
        print(table("the bare scan beside the fastest published torch form", compared))
    for reason in published_scans()[1]:
        print(f"not compared: {reason}")
    return 0


if __name__ == "__main__":
    run(main)
