"""Which cache an engine has: by name, with the options that it knows.

none    no reuse
radix   SGLang's prefix tree; compat="sglang" for the engine's own rules to the letter
blocks  to come
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from cache.identity import Identity
from cache.plain import PlainCache
from cache.pools.storage import Storage
from cache.radix.manager import RadixCache
from cache.radix.sglang import SGLangCache
from cache.radix.strategy import Strategy
from cache.state_cache import StateCache
from kimi_mini.serving.checks import check_count

PREFIX_CACHES = ("none", "radix", "blocks")
_TO_COME = ("blocks",)
COMPAT = {"radix": ("sglang",)}

AUTO = "auto"


@dataclass(frozen=True)
class CacheOptions:
    """What a cache with reuse may be told; None: the cache's own default.

    compat               rules of an engine, to the letter ("sglang" for radix)
    strategy             which tracked slots decode has (`radix.strategy`); "auto" is the engine's
                         choice: no_buffer with pages of one token, else extra_buffer
    state_chunk          spacing of checkpoints in prefill (64)
    track_interval       spacing of checkpoints in decode
    max_states_per_path  cap on checkpoints of one path; -1: no cap
    """

    compat: str | None = None
    strategy: str | None = None
    state_chunk: int | None = None
    track_interval: int | None = None
    max_states_per_path: int | None = None

    def __post_init__(self) -> None:
        names = [*(strategy.value for strategy in Strategy), AUTO]
        if self.strategy is not None and self.strategy not in names:
            raise ValueError(f"strategy must be one of {', '.join(names)}; got {self.strategy!r}")
        for name in ("state_chunk", "track_interval"):
            value = getattr(self, name)
            if value is not None:
                check_count(name, value)
        cap = self.max_states_per_path
        kind = isinstance(cap, int | None) and not isinstance(cap, bool)
        if not kind or (cap is not None and cap != -1 and cap < 1):
            raise ValueError(f"max_states_per_path must be -1 (no cap) or at least 1, got {cap!r}")

    def given(self) -> dict[str, object]:
        """Those that are not left to the cache."""
        return {name: value for name, value in vars(self).items() if value is not None}


def check_prefix_cache(name: str, options: CacheOptions) -> None:
    """ValueError for a cache that is unknown or not there yet, or options that it does not know."""
    if name not in PREFIX_CACHES:
        raise ValueError(f"prefix_cache must be one of {', '.join(PREFIX_CACHES)}; got {name!r}")
    if name in _TO_COME:
        there = ", ".join(other for other in PREFIX_CACHES if other not in _TO_COME)
        raise ValueError(f"prefix_cache {name!r} is not there yet; use {there}")
    if name == "none" and options.given():
        raise ValueError(f"prefix_cache 'none' has no options, got {', '.join(options.given())}")
    known = COMPAT.get(name, ())
    if options.compat is not None and options.compat not in known:
        raise ValueError(
            f"compat of prefix_cache {name!r} must be {' or '.join(known)}; got {options.compat!r}"
        )


def build_cache(
    name: str,
    options: CacheOptions,
    storage: Storage,
    export_alignment: int,
    largest_piece: int,
    identity: Identity = Identity(),  # noqa: B008 (frozen)
) -> StateCache:
    """The cache of that name over `storage`. largest_piece: tokens of one row in one step; warns if
    no piece is long enough to leave a checkpoint. identity: whose results it keeps."""
    check_prefix_cache(name, options)
    if name == "none":
        return PlainCache(storage, export_alignment=export_alignment)
    cap = options.max_states_per_path
    given = {
        "strategy": _strategy(options.strategy, storage.page_tokens[0]),
        "state_chunk": options.state_chunk,
        "interval": options.track_interval,
        "path_cap": None if cap == -1 else cap,
    }
    kind = SGLangCache if options.compat == "sglang" else RadixCache
    cache = kind(
        storage,
        export_alignment=export_alignment,
        identity=identity,
        **{name: value for name, value in given.items() if value is not None},
    )
    if kind is SGLangCache and cache.tracks_pieces and largest_piece < cache.grids.checkpoint:
        warnings.warn(
            f"no piece of prefill is as long as the checkpoint grid ({cache.grids.checkpoint} "
            f"tokens, pieces have at most {largest_piece}): prefill will keep no checkpoint",
            stacklevel=2,
        )
    return cache


def _strategy(name: str | None, page: int) -> str | None:
    if name != AUTO:
        return name
    return Strategy.EXTRA_BUFFER if page > 1 else Strategy.NO_BUFFER
