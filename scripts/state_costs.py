#!/usr/bin/env python3
"""Bytes a token and a checkpoint, break-even lengths, and the best distance between checkpoints.

    python scripts/state_costs.py
    python scripts/state_costs.py k3 bench --path 1048576 --hits-per-hour 60 --json

A checkpoint is the recurrent and conv state of all KDA layers at one boundary. Break-even: tokens
whose latent rows weigh as much. The best interval weighs bytes kept on a path of --path tokens
against tokens replayed by hits (serving.md 8.3); prices are in replayed FLOPs, of which a byte kept
for an hour is worth --flops-per-byte-hour. "Of the rows": checkpoints as they run against the
path's latent rows.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import json
from collections.abc import Sequence

import torch

from kimi_mini import costs
from kimi_mini.cli import Parser, UserError, run
from kimi_mini.config import PRESETS, KimiConfig, preset
from kimi_mini.dtypes import DTYPES

DENSITIES = (64, 256, 4096, 8192, 16384, 65536)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("models", nargs="*", default=["k3", "mini", "nano"], help="presets or checkpoint folders")
    add("--dtype", choices=tuple(DTYPES), default="bfloat16", help="of latent and conv rows")
    add("--path", type=int, default=131072, help="tokens of a path that is shared (131072)")
    add("--grid", type=int, default=64, help="boundaries are multiples of this (64)")
    add("--hits-per-hour", type=float, default=1.0, help="of that path (1)")
    add("--flops-per-byte-hour", type=float, default=1e6, help="the price of memory (1e6)")
    add("--json", action="store_true", help="one JSON object instead of text")
    args = parser.parse_args(argv)
    for name in ("path", "grid"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} must be at least 1, got {getattr(args, name)}")
    for name in ("hits_per_hour", "flops_per_byte_hour"):
        if not 0 < getattr(args, name) < float("inf"):
            option = name.replace("_", "-")
            raise UserError(f"--{option} must be a positive number, got {getattr(args, name)}")
    return args


def opened(name: str) -> KimiConfig:
    return preset(name) if name in PRESETS else KimiConfig.from_json(Path(name) / "config.json")


def figures(name: str, args: argparse.Namespace) -> dict:
    config, dtype = opened(name), getattr(torch, args.dtype)
    kept, model = costs.checkpoint_bytes(config, dtype), costs.cost_model(config, dtype)
    prices = {"hits": args.hits_per_hour, "price": args.flops_per_byte_hour}
    found = costs.interval(config, dtype, args.path, args.grid, **prices)
    return {
        "model": name,
        "row_bytes": model.row_bytes,
        "recurrent_bytes": kept.recurrent,
        "conv_bytes": kept.conv,
        "checkpoint_bytes": costs.checkpoint_forms(config, dtype),
        "break_even_tokens": costs.break_even_tokens(config, dtype),
        "flops_per_token": model.flops,
        "flops_per_token_and_position": model.attention_flops,
        "best_interval": found.best,
        "mean_replay": found.mean_replay,
        "interval_within_rows": found.within_rows,
        "densities": {k: costs.density(config, dtype, args.path, k)._asdict() for k in DENSITIES},
    }


def show(f: dict, args: argparse.Namespace) -> None:
    print(f"\n{f['model']}: latent rows {f['row_bytes']:,} B a token")
    print(f"  state at one boundary: {f['recurrent_bytes']:,} B + {f['conv_bytes']:,} B conv")
    for form, size in f["checkpoint_bytes"].items():
        even = (f["break_even_tokens"] or {}).get(form)
        worth = "" if even is None else f", as much as the rows of {even:,.1f} tokens"
        print(f"  checkpoint in {form}: {size:,} B{worth}")
    print(
        f"  replay: {f['flops_per_token'] / 1e9:,.3f} GFLOP a token, and "
        f"{f['flops_per_token_and_position'] / 1e6:,.3f} MFLOP more for each one before it"
    )
    best, within = f["best_interval"], f["interval_within_rows"]
    found = f"no boundary on a grid of {args.grid:,}"
    if best is not None:
        found = f"best interval {best:,} (mean replay {f['mean_replay']:,.1f})"
    weigh = "one checkpoint weighs more than the rows"
    if within is not None:
        weigh = f"from {within:,} on, checkpoints weigh no more than the rows"
    print(f"  path of {args.path:,}: {found}; {weigh}")
    print(f"  {'one every':>11} {'checkpoints':>12} {'GB':>12} {'int8 GB':>12} {'of the rows':>12}")
    for every, d in f["densities"].items():
        ratio = "-" if d["of_rows"] is None else f"{d['of_rows']:,.2f}"
        sizes = f"{d['bytes'] / 1e9:12,.3f} {d['int8_bytes'] / 1e9:12,.3f}"
        print(f"  {every:11,} {d['checkpoints']:12,} {sizes} {ratio:>12}")


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    all_figures = [figures(name, args) for name in args.models]
    if args.json:
        print(json.dumps({"models": all_figures}))
        return 0
    for f in all_figures:
        show(f, args)
    return 0


if __name__ == "__main__":
    run(main)
