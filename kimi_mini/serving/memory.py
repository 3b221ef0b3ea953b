"""How much state memory an engine has, and the memory itself.

`state_slots` and `kv_pages` count boundaries and pages; `cache_bytes` is for both together, or for
the one that is not given. Sinks are counted in.
"""

from __future__ import annotations

from typing import NamedTuple

from cache.pools.storage import Sizes, Storage, counts_within, one_of_each
from kimi_mini.batch import ModelState, allocate_state
from kimi_mini.costs import state_sizes
from kimi_mini.machine import refuse_oversize
from kimi_mini.model import KimiForCausalLM
from kimi_mini.serving.checks import check_count

DEFAULT_SLOTS = 16
DEFAULT_ROWS = 65536  # latent rows; no more than every slot's full context
DEFAULT_BLOCKS = 512  # of pages and slots each, where one list counts both


class Memory(NamedTuple):
    """Pools and the tensors behind them: both see the same bytes."""

    storage: Storage
    state: ModelState
    sizes: Sizes


def allocate(
    model: KimiForCausalLM,
    *,
    page: int = 16,
    state_slots: int | None = None,
    kv_pages: int | None = None,
    cache_bytes: int | None = None,
    poison: bool = False,
    one_count: bool = False,
) -> Memory:
    """Pools for `model`. one_count: there are to be as many pages as slots (decision 30).

    ValueError for numbers that contradict each other, that hold nothing, or that this machine does
    not have the memory for.
    """
    page = check_count("page", page)
    given = {"state_slots": state_slots, "kv_pages": kv_pages, "cache_bytes": cache_bytes}
    state_slots, kv_pages, cache_bytes = (
        None if number is None else check_count(name, number) for name, number in given.items()
    )
    sizes = state_sizes(model.config, model.dtype, page)
    if cache_bytes is not None and state_slots is not None and kv_pages is not None:
        raise ValueError("give state_slots and kv_pages, or cache_bytes, not all three")
    if one_count:
        state_slots = kv_pages = _one_count(sizes, state_slots, kv_pages, cache_bytes)
    elif cache_bytes is not None:
        state_slots, kv_pages = counts_within(cache_bytes, sizes, state_slots, kv_pages)
    if state_slots is None:
        state_slots = DEFAULT_SLOTS
    if kv_pages is None:
        rows = min(DEFAULT_ROWS, state_slots * model.config.max_position_embeddings)
        kv_pages = -(-rows // page)
    needed = (state_slots + 1) * sizes.slot_bytes + (kv_pages + 1) * sizes.page_bytes
    refuse_oversize(f"{state_slots:,} state slots and {kv_pages:,} pages", needed)
    state = allocate_state(
        model.config, num_slots=state_slots, num_pages=kv_pages, page=page, dtype=model.dtype
    )
    storage = one_of_each(
        sizes,
        state_slots,
        kv_pages,
        latent=state.latent,
        states=(state.recurrent, state.conv),
        poison=poison,
    )
    return Memory(storage, state, sizes)


def _one_count(
    sizes: Sizes, state_slots: int | None, kv_pages: int | None, cache_bytes: int | None
) -> int:
    """How many blocks there are if each id is a page or a slot, as its holder likes."""
    given = {count for count in (state_slots, kv_pages) if count is not None}
    if len(given) > 1:
        raise ValueError(
            "one list counts pages and slots here: state_slots and kv_pages must be equal, got "
            f"{state_slots:,} and {kv_pages:,}"
        )
    block_bytes = sizes.slot_bytes + sizes.page_bytes
    if cache_bytes is None:
        return given.pop() if given else DEFAULT_BLOCKS
    count = cache_bytes // block_bytes - 1
    if count < max({1} | given):
        raise ValueError(
            f"{cache_bytes:,} bytes of cache do not hold {max({1} | given):,} block(s) of "
            f"{block_bytes:,} bytes, a page and a slot each, with their sinks"
        )
    return given.pop() if given else count
