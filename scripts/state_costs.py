#!/usr/bin/env python3
"""Bytes a token and a checkpoint, break-even lengths, and the best distance between checkpoints.

    python scripts/state_costs.py
    python scripts/state_costs.py k3 bench --path 1048576 --hits-per-hour 60 --json

A checkpoint is the recurrent and conv state of all KDA layers at one boundary. Break-even: tokens
whose latent rows weigh as much. The best interval weighs bytes kept on a path of --path tokens
against tokens replayed by hits (serving.md 8.3); prices are in replayed FLOPs, of which a byte kept
for an hour is worth --flops-per-byte-hour.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import json
from collections.abc import Sequence

import torch

from cache.policy.cost_model import best_interval, interval_for_budget, mean_replay
from kimi_mini.cli import Parser, UserError, run
from kimi_mini.config import PRESETS, KimiConfig, preset
from kimi_mini.costs import checkpoint_bytes, cost_model
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
    kept, model = checkpoint_bytes(config, dtype), cost_model(config, dtype)
    price = args.flops_per_byte_hour
    interval = best_interval(
        path=args.path,
        grid=args.grid,
        holding=price * kept.full,
        replay=args.hits_per_hour * model.flops,
    )
    running = "float64" if args.dtype == "float64" else "float32"
    forms = {running: kept.full, "bfloat16": kept.half, "int8": kept.int8}
    return {
        "model": name,
        "row_bytes": model.row_bytes,
        "recurrent_bytes": kept.recurrent,
        "conv_bytes": kept.conv,
        "checkpoint_bytes": forms | {"int8, bfloat16 scales": kept.int8_half_scale},
        "break_even_tokens": {form: size / model.row_bytes for form, size in forms.items()}
        if model.row_bytes
        else None,
        "flops_per_token": model.flops,
        "best_interval": interval,
        "mean_replay": mean_replay(interval, args.grid),
        "interval_within_rows": interval_for_budget(
            kept.full, args.path, max(kept.full, args.path * model.row_bytes)
        ),
        "densities": {
            every: {"checkpoints": args.path // every, "bytes": args.path // every * kept.full}
            for every in DENSITIES
        },
    }


def show(f: dict, args: argparse.Namespace) -> None:
    print(f"\n{f['model']}: latent rows {f['row_bytes']:,} B a token")
    print(f"  state at one boundary: {f['recurrent_bytes']:,} B + {f['conv_bytes']:,} B conv")
    for form, size in f["checkpoint_bytes"].items():
        even = (f["break_even_tokens"] or {}).get(form)
        worth = "" if even is None else f", as much as the rows of {even:,.1f} tokens"
        print(f"  checkpoint in {form}: {size:,} B{worth}")
    print(f"  replay: {f['flops_per_token'] / 1e9:,.3f} GFLOP a token, without attention")
    print(
        f"  path of {args.path:,}: best interval {f['best_interval']:,} (mean replay "
        f"{f['mean_replay']:,.1f}); from {f['interval_within_rows']:,} on, checkpoints weigh no "
        "more than the rows"
    )
    kept = (f"{every:,}: {d['bytes'] / 1e9:,.3f} GB" for every, d in f["densities"].items())
    print(f"  checkpoints on it, one every {'; '.join(kept)}")


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
