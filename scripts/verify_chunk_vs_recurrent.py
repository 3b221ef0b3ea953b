#!/usr/bin/env python3
"""Show that chunked prefill, recurrent decode and the float64 recurrence are one function.

    python scripts/verify_chunk_vs_recurrent.py
    python scripts/verify_chunk_vs_recurrent.py --config mini --dtype bfloat16
    python scripts/verify_chunk_vs_recurrent.py --config path/to/checkpoint --json

Three levels: the bare kernels, one KDA layer through the dispatcher, the whole model over slots
and pages. Each line holds one form of the computation against float64, token by token: errors of
outputs, final states and exports over rows of 0 to 193 tokens, packed and cut at random. Exit code
1 if any error exceeds what is allowed.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import json
import time
from collections.abc import Sequence

import torch

from kimi_mini.cli import Parser, add_backend, check_seed, run, set_threads
from kimi_mini.dtypes import torch_dtype
from kimi_mini.model import KimiForCausalLM
from kimi_mini.workbench.verify import Check, as_json, table
from kimi_mini.workbench.verify_kernels import kernel_checks
from kimi_mini.workbench.verify_stack import layer_checks, model_checks, open_subject

VERIFIED = ("float32", "bfloat16", "float64")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--config", default="nano", help="a preset, a config.json or a checkpoint folder (nano)")
    add("--dtype", choices=VERIFIED, default="float32", help="of operands, layer and model")
    add("--seed", type=int, default=0, help="of operands, cuts and random weights")
    add_backend(parser)
    add("--threads", type=int, help="torch threads (default: torch's own choice)")
    add("--json", action="store_true", help="one JSON object instead of the table")
    return parser.parse_args(argv)


def checks_of(net: KimiForCausalLM, dtype: torch.dtype, seed: int) -> list[Check]:
    kda, backend = net.config.linear_attn_config, net.dispatcher.backend.name
    layer = net.model.layers[net.config.kda_layer_ids[0]].self_attn
    return [
        *kernel_checks(backend, dtype, seed, kda.num_heads, kda.head_dim),
        *layer_checks(layer, backend, dtype, seed),
        *model_checks(net, seed),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    check_seed(args.seed)
    set_threads(args.threads)
    began = time.perf_counter()
    dtype = torch_dtype(args.dtype)
    net = open_subject(args.config, dtype, args.seed, args.backend)
    checks = checks_of(net, dtype, args.seed)
    seconds = time.perf_counter() - began
    backend, exceeded = net.dispatcher.backend.name, sum(not check.ok for check in checks)
    if args.json:
        print(
            json.dumps(
                {
                    "config": args.config,
                    "dtype": args.dtype,
                    "seed": args.seed,
                    "backend": backend,
                    "seconds": round(seconds, 3),
                    "ok": not exceeded,
                    "checks": as_json(checks),
                }
            )
        )
    else:
        half = args.dtype == "bfloat16"
        print(f"{args.config}, {args.dtype}, {backend}, seed {args.seed}: largest relative errors")
        print("against float64" + (" (layer, model: root mean square)" * half) + "\n")
        print(table(checks))
        verdict = f"{exceeded} exceed (!)" if exceeded else "all within what is allowed"
        print(
            "\nallowed: of outputs / of states and exports; cuts: rows of a scan cut at chunks, 0"
        )
        print(f"{len(checks)} figures, {verdict}, {seconds:.1f} s")
    return 1 if exceeded else 0


if __name__ == "__main__":
    run(main)
