#!/usr/bin/env python3
"""Write a checkpoint folder with seeded random weights, in the published layout.

    python scripts/make_tiny_weights.py OUT --preset nano
    python scripts/make_tiny_weights.py OUT --config path/to/config.json --experts mxfp4

The same seed gives the same bytes. MXFP4 experts are the rounded random ones, as published in
shape and name; like any random weights they only show that everything fits together.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
from collections.abc import Sequence

from kimi_mini.cli import Parser, check_seed, run
from kimi_mini.config import PRESETS, KimiConfig, preset
from kimi_mini.dtypes import DTYPES, torch_dtype
from kimi_mini.machine import refuse_oversize
from kimi_mini.weights import Experts, parameter_count, random_parameters, write_checkpoint
from kimi_mini.weights.writing import DEFAULT_SHARD_BYTES


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument(
        "out", metavar="OUT", help="the folder to write: new or empty (or --overwrite)"
    )
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--preset", default="mini", help=f"{', '.join(PRESETS)} (default: mini)")
    shape.add_argument("--config", help="a config.json, or the folder that holds one")
    add = parser.add_argument
    add("--seed", type=int, default=0, help="of the weights (default: 0)")
    add("--dtype", choices=DTYPES, default="float32", help="kinds published as F32 stay so")
    add(
        "--experts",
        choices=[form.value for form in Experts],
        default="plain",
        help="how routed experts are stored",
    )
    add("--max-shard-bytes", type=int, default=DEFAULT_SHARD_BYTES, help="data bytes in one file")
    add("--overwrite", action="store_true", help="replace the checkpoint that OUT holds")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    check_seed(args.seed)
    config = KimiConfig.from_json(args.config) if args.config else preset(args.preset)
    count = parameter_count(config)
    refuse_oversize(f"{count:,} parameters", 4 * count)
    written = write_checkpoint(
        args.out,
        config,
        random_parameters(config, args.seed),
        dtype=torch_dtype(args.dtype),
        experts=args.experts,
        max_shard_bytes=args.max_shard_bytes,
        overwrite=args.overwrite,
    )
    print(
        f"{args.out}: {count:,} parameters (seed {args.seed}) in "
        f"{written.tensors:,} tensors, {written.num_bytes:,} bytes, {len(written.files)} file(s)"
    )
    return 0


if __name__ == "__main__":
    run(main)
