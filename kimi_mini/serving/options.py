"""Command-line options that scripts share: which model, which prompts, how to sample, what room.

Names are the engines' own (decision 1); what a parameter means is said where it lives.
"""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path
from typing import NamedTuple

from kimi_mini.cli import UserError, add_backend, check_seed, set_threads
from kimi_mini.config_file import shown
from kimi_mini.dtypes import DTYPES
from kimi_mini.serving.caches import DENSE, PREFIX_CACHES, CacheOptions, check_prefix_cache
from kimi_mini.serving.control import CacheControl
from kimi_mini.serving.engine import Engine
from kimi_mini.serving.request import Prompt
from kimi_mini.serving.sampling_params import SamplingParams

SAMPLING = {
    "n": (int, "samples of each prompt"),
    "max_tokens": (int, "new tokens, at most (default: 64)"),
    "min_tokens": (int, "new tokens, at least"),
    "temperature": (float, "0 is greedy (default)"),
    "top_p": (float, "keep the likeliest tokens of this mass"),
    "top_k": (int, "keep so many tokens; 0: all"),
    "min_p": (float, "keep tokens this likely, as a share of the likeliest"),
    "repetition_penalty": (float, "over 1: less of what prompt and output have"),
    "presence_penalty": (float, "over 0: less of what the output has"),
    "frequency_penalty": (float, "over 0: less of what the output has often"),
    "logprobs": (int, "report so many alternatives a token (needs --json)"),
    "prompt_logprobs": (int, "the same for the prompt (needs --json)"),
}
CLI_DEFAULTS = {"max_tokens": 64, "temperature": 0.0}  # decision 19
ROOM = {
    "max_batch_tokens": "tokens of one step, all requests together",
    "prefill_chunk": "tokens of one step, one request",
    "state_slots": "states of KDA layers, one a running request",
    "kv_pages": "pages of latent rows of MLA layers",
    "cache_bytes": "bytes for both, or for the one that is not given",
    "page": "latent rows a page",
}


def _interval(text: str) -> int | str:
    if text.lower() == DENSE:
        return DENSE
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be {DENSE}, or tokens from 0 on; got {text!r}"
        ) from None


CACHE = {  # the engine's names, if it has any → `CacheOptions`
    "mamba_radix_cache_strategy": (
        "strategy",
        str,
        "no_buffer, extra_buffer, extra_buffer_lazy, auto",
    ),
    "mamba_track_interval": ("track_interval", int, "tokens between checkpoints in decode"),
    "mamba_max_states_per_path": ("max_states_per_path", int, "checkpoints of a path; -1: no cap"),
    "state_chunk": ("state_chunk", int, "tokens between checkpoints in prefill (64)"),
    "mamba_block_size": ("state_block", int, "tokens of a state block (64)"),
    "prefix_match_unit": ("hash_unit", int, "tokens of a link of the hash chain"),
    "prefix_cache_retention_interval": (
        "retention",
        _interval,
        "tokens between states that stay; 0: only where one will be wanted; none: all (0)",
    ),
    "admission": ("admission", str, "which states are stored: all, second-hit, marconi (all)"),
    "eviction": ("eviction", str, "which states go first: lru, flop-aware, auto (lru)"),
    "eviction_alpha": ("eviction_alpha", float, "weight of FLOPs in flop-aware eviction (1)"),
    "compat": ("compat", str, "rules of an engine to the letter: sglang, vllm"),
}
CONTROL = {
    "cache_salt": ("share prefixes only with requests of the same salt", {}),
    "skip_read": ("compute everything, cache it as usual", {"action": "store_true"}),
    "checkpoint_at": ("keep the state after so many tokens", {"type": int, "action": "append"}),
}


class GivenPrompt(NamedTuple):
    """A prompt as the command line has it: which option, and its text."""

    option: str
    text: str

    def read(self) -> Prompt:
        """Text or token ids. UserError for ids that are none, OSError for a file that is none."""
        return PROMPTS[self.option][0](self.text)


def _token_ids(text: str) -> list[int]:
    try:
        ids = json.loads(text if text.strip().startswith("[") else f"[{text}]")
    except (ValueError, RecursionError):
        ids = None
    if not isinstance(ids, list) or any(type(i) is not int for i in ids):
        raise UserError(f"--prompt-ids takes whole numbers, 1,2,3 or [1,2,3]; got {shown(text)}")
    return ids


def _file_text(path: str) -> str:
    # every byte as it is: line ends too, and what is no UTF-8 as it would come from a command line
    return Path(path).read_bytes().decode("utf-8", "surrogateescape")


PROMPTS = {
    "prompt": (str, "text; may be given again, as may the next two"),
    "prompt-file": (_file_text, "a file whose whole text is a prompt"),
    "prompt-ids": (_token_ids, "token ids: 1,2,3 or a JSON list"),
}


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Model, numbers, threads, seed, cache and the room it has."""
    add = parser.add_argument
    add("--model", default="mini", help="a preset or a checkpoint folder (default: mini)")
    add("--seed", type=int, default=0, help="of a preset's random weights and of sampling")
    add("--dtype", choices=("auto", *DTYPES), default="float32", help="auto: as the config says")
    add("--threads", type=int, help="torch threads (default: torch's own choice)")
    add_backend(parser)
    add("--prefix-cache", choices=PREFIX_CACHES, default="none", help="none: no reuse of prefixes")
    for name, text in ROOM.items():
        add(_option(name), type=int, help=text)
    for name, (_, kind, text) in CACHE.items():
        add(_option(name), type=kind, help=text)


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    """Prompts in any number and order, as `args.prompts`, a list of GivenPrompt or None."""
    for name, (_, text) in PROMPTS.items():
        kind = functools.partial(GivenPrompt, name)
        parser.add_argument(
            f"--{name}",
            dest="prompts",
            action="append",
            type=kind,
            metavar=name.removeprefix("prompt-").upper(),
            help=text,
        )


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """vLLM's sampling parameters by name."""
    for name, (kind, text) in SAMPLING.items():
        parser.add_argument(_option(name), type=kind, help=text)
    add = parser.add_argument
    add("--stop", action="append", help="end before this text; may be given again")
    add("--stop-token-id", type=int, action="append", help="end at this token; the same")
    add("--ignore-eos", action="store_true", help="go on after an end-of-sequence token")


def add_control_options(parser: argparse.ArgumentParser) -> None:
    """What requests have to do with the prefix cache."""
    for name, (text, more) in CONTROL.items():
        parser.add_argument(_option(name), help=text, **more)


def cache_control(args: argparse.Namespace) -> CacheControl:
    """ValueError for boundaries below 1, UserError for any of it without a cache to control."""
    given = [name for name in CONTROL if getattr(args, name) not in (None, False)]
    if given and args.prefix_cache == "none":
        raise UserError(f"{_option(given[0])} is for a prefix cache: give --prefix-cache, too")
    return CacheControl(args.cache_salt, args.skip_read, args.checkpoint_at or ())


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """ValueError for values that are out of range or contradict each other."""
    check_seed(args.seed)
    return SamplingParams(
        seed=args.seed,
        stop=args.stop,
        stop_token_ids=args.stop_token_id,
        ignore_eos=args.ignore_eos,
        **CLI_DEFAULTS | _given(args, SAMPLING),
    )


def open_engine(args: argparse.Namespace) -> Engine:
    """The engine that the model options describe; sets the threads. ValueError as `Engine`."""
    set_threads(args.threads)
    check_seed(args.seed)
    given = _given(args, CACHE)
    cache_options = CacheOptions(**{CACHE[name][0]: value for name, value in given.items()})
    check_prefix_cache(args.prefix_cache, cache_options)  # before a model is loaded for nothing
    return Engine.from_pretrained(
        args.model,
        dtype=args.dtype,
        seed=args.seed,
        backend=args.backend,
        prefix_cache=args.prefix_cache,
        cache_options=cache_options,
        **_given(args, ROOM),
    )


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _given(args: argparse.Namespace, names: dict) -> dict[str, int | float]:
    return {name: value for name in names if (value := getattr(args, name)) is not None}
