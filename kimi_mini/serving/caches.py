"""Which cache an engine has: by name, with the options that it knows.

none    no reuse
radix   SGLang's prefix tree; compat="sglang" for the engine's own rules to the letter
blocks  vLLM's hashed blocks; compat="vllm" the same
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial

from cache.blocks.manager import BlockCache
from cache.blocks.vllm import VLLMCache
from cache.identity import Identity
from cache.plain import PlainCache
from cache.policy.cost_model import PrefixFlops
from cache.pools.storage import Storage
from cache.radix.manager import RadixCache
from cache.radix.sglang import SGLangCache
from cache.radix.strategy import Strategy
from cache.state_cache import StateCache
from kimi_mini.serving.checks import check_count
from kimi_mini.serving.policies import Policies

PREFIX_CACHES = ("none", "radix", "blocks")
COMPAT = {"radix": ("sglang",), "blocks": ("vllm",)}
POLICIES = ("admission", "eviction", "eviction_alpha")
RADIX = ("strategy", "state_chunk", "track_interval", "max_states_per_path")
BLOCKS = ("state_block", "hash_unit", "retention")
KNOWN = {  # options by cache
    "none": (),
    "radix": ("compat", *RADIX, *POLICIES),
    "blocks": ("compat", *BLOCKS, *POLICIES),
}
DENSE = "none"  # the engine's name of a retention that keeps all
AUTO = "auto"  # and of its own choice of a strategy


@dataclass(frozen=True)
class CacheOptions:
    """What a cache with reuse may be told; None: the cache's own default.

    compat               rules of an engine, to the letter ("sglang" for radix, "vllm" for blocks)
    strategy             which tracked slots decode has (`radix.strategy`); "auto" is the engine's
                         choice: no_buffer with pages of one token, else extra_buffer
    state_chunk          spacing of checkpoints in prefill (64)
    track_interval       spacing of checkpoints in decode
    max_states_per_path  cap on checkpoints of one path; -1: no cap
    state_block          tokens of a state block (64)
    hash_unit            tokens of one link of the hash chain, what hits are multiples of
    retention            spacing of states that stay; 0: only where a resend or a fork will want
                         one; "none": all (0)
    admission, eviction  which states are stored and which go first ("all", "lru"): see `policies`
    eviction_alpha       weight of FLOPs against recency, of "flop-aware" (1)
    """

    compat: str | None = None
    strategy: str | None = None
    state_chunk: int | None = None
    track_interval: int | None = None
    max_states_per_path: int | None = None
    state_block: int | None = None
    hash_unit: int | None = None
    retention: int | str | None = None
    admission: str | None = None
    eviction: str | None = None
    eviction_alpha: float | None = None

    def __post_init__(self) -> None:
        names = [*(strategy.value for strategy in Strategy), AUTO]
        if self.strategy is not None and self.strategy not in names:
            raise ValueError(f"strategy must be one of {', '.join(names)}; got {self.strategy!r}")
        for name in ("state_chunk", "track_interval", "state_block", "hash_unit"):
            value = getattr(self, name)
            if value is not None:
                check_count(name, value)
        cap = self.max_states_per_path
        kind = isinstance(cap, int | None) and not isinstance(cap, bool)
        if not kind or (cap is not None and cap != -1 and cap < 1):
            raise ValueError(f"max_states_per_path must be -1 (no cap) or at least 1, got {cap!r}")
        if self.retention not in (None, DENSE):
            check_count("retention", self.retention, least=0)
        self.policies()

    def given(self) -> dict[str, object]:
        """Those that are not left to the cache."""
        return _given(**vars(self))

    def policies(self) -> Policies:
        """ValueError for names and numbers that are none."""
        return Policies(
            **_given(admission=self.admission, eviction=self.eviction, alpha=self.eviction_alpha)
        )


def check_prefix_cache(name: str, options: CacheOptions) -> None:
    """ValueError for a cache that is unknown, or options that it does not know."""
    if name not in PREFIX_CACHES:
        raise ValueError(f"prefix_cache must be one of {', '.join(PREFIX_CACHES)}; got {name!r}")
    unknown = [option for option in options.given() if option not in KNOWN[name]]
    if unknown:
        raise ValueError(
            f"prefix_cache {name!r} has {', '.join(KNOWN[name]) or 'no options'}; got "
            f"{', '.join(unknown)}"
        )
    if options.compat is not None and options.compat not in COMPAT[name]:
        raise ValueError(
            f"compat of prefix_cache {name!r} must be {' or '.join(COMPAT[name])}; got "
            f"{options.compat!r}"
        )
    asked = [policy for policy in POLICIES if policy in options.given()]
    if options.compat is not None and asked:
        raise ValueError(
            f"compat {options.compat!r} is that engine's own rules, which know no policies; got "
            f"{', '.join(asked)}"
        )


def build_cache(
    name: str,
    options: CacheOptions,
    storage: Storage,
    export_alignment: int,
    largest_piece: int,
    identity: Identity = Identity(),  # noqa: B008 (frozen)
    flops: PrefixFlops | None = None,
) -> StateCache:
    """The cache of that name over `storage`. largest_piece: tokens of one row in one step; warns if
    no piece is long enough to leave a checkpoint. identity: whose results it keeps. flops: of a
    prefix of the model, for eviction that weighs them.

    ValueError for options that do not go together, or need `flops` and have none."""
    check_prefix_cache(name, options)
    whose = dict(export_alignment=export_alignment, identity=identity)
    if name == "none":
        return PlainCache(storage, **whose)
    if name == "blocks":
        arguments = whose | _block_arguments(options)
        if options.compat:
            return VLLMCache(storage, inner_checkpoint=export_alignment, **arguments)
        return options.policies().cache(partial(BlockCache, **arguments), storage, flops)
    arguments = whose | _radix_arguments(options, storage.page_tokens[0])
    if not options.compat:
        return options.policies().cache(partial(RadixCache, **arguments), storage, flops)
    cache = SGLangCache(storage, **arguments)
    if cache.tracks_pieces and largest_piece < cache.grids.checkpoint:
        warnings.warn(
            f"no piece of prefill is as long as the checkpoint grid ({cache.grids.checkpoint} "
            f"tokens, pieces have at most {largest_piece}): prefill will keep no checkpoint",
            stacklevel=2,
        )
    return cache


def _radix_arguments(options: CacheOptions, page: int) -> dict[str, object]:
    cap = options.max_states_per_path
    return _given(
        strategy=_strategy(options.strategy, page),
        state_chunk=options.state_chunk,
        interval=options.track_interval,
        path_cap=None if cap == -1 else cap,
    )


def _block_arguments(options: CacheOptions) -> dict[str, object]:
    given = _given(state_block=options.state_block, hash_unit=options.hash_unit)
    if options.retention is not None:
        given["retention"] = None if options.retention == DENSE else options.retention
    return given


def _given(**arguments: object) -> dict[str, object]:
    """Those that are not left to the cache."""
    return {name: value for name, value in arguments.items() if value is not None}


def _strategy(name: str | None, page: int) -> str | None:
    if name != AUTO:
        return name
    return Strategy.EXTRA_BUFFER if page > 1 else Strategy.NO_BUFFER
