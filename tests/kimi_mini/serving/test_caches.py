"""Which cache an engine gets, and which options are refused."""

import warnings

import pytest
import torch

from cache.blocks.manager import BlockCache
from cache.blocks.vllm import VLLMCache
from cache.plain import PlainCache
from cache.policy.admission import Marconi, SecondHit
from cache.policy.alpha import LearntAlpha
from cache.policy.cost_model import PrefixFlops
from cache.policy.eviction import FlopAware
from cache.radix.manager import RadixCache
from cache.radix.sglang import SGLangCache
from kimi_mini import Engine
from kimi_mini.costs import prefix_flops
from kimi_mini.serving.caches import CacheOptions, build_cache, check_prefix_cache
from kimi_mini.serving.memory import DEFAULT_BLOCKS
from tests.cache.memory import Shape, make_storage
from tests.kimi_mini.serving.alone import oracle_engine, small_model

FLOPS = PrefixFlops(1000, 1)


def built(name, page=16, alignment=16, largest_piece=512, flops=FLOPS, **options):
    storage = make_storage(Shape(((20, page),), (8,)))
    return build_cache(
        name, CacheOptions(**options), storage, alignment, largest_piece, flops=flops
    )


def test_none_has_no_reuse_and_is_the_default():
    assert type(built("none")) is PlainCache
    engine = oracle_engine()
    assert type(engine.cache) is PlainCache and not engine.reuses


def test_radix_has_the_products_rules():
    """Decision 22: extra buffer, grid 64, decode as dense as pages and kernel allow, no cap."""
    cache = built("radix")
    assert type(cache) is RadixCache
    assert (cache.strategy, cache.page, cache.unit) == ("extra_buffer", 16, 16)
    assert (cache.grids.state_chunk, cache.grids.checkpoint, cache.decode_grid) == (64, 64, 16)
    assert cache.tree.path_cap is None


def test_compat_has_the_engines_rules():
    cache = built("radix", compat="sglang")
    assert type(cache) is SGLangCache
    assert (cache.strategy, cache.grids.checkpoint, cache.decode_grid) == ("extra_buffer", 64, 256)


@pytest.mark.parametrize("compat", [None, "sglang"])
def test_options_reach_the_cache(compat):
    options = dict(
        strategy="extra_buffer_lazy", state_chunk=32, track_interval=96, max_states_per_path=3
    )
    cache = built("radix", compat=compat, **options)
    assert cache.strategy == "extra_buffer_lazy"
    assert (cache.grids.checkpoint, cache.decode_grid, cache.tree.path_cap) == (32, 96, 3)
    assert built("radix", compat=compat, max_states_per_path=-1).tree.path_cap is None


def test_the_alignment_of_the_backend_reaches_the_cache():
    cache = built("radix", page=48, alignment=64)
    assert (cache.export_alignment, cache.unit, cache.decode_grid) == (64, 192, 192)


def test_the_engine_builds_it_over_its_own_memory():
    engine = Engine(
        small_model(torch.float32, backend="torch"), prefix_cache="radix", page=1, state_slots=3,
        cache_options=CacheOptions(strategy="no_buffer", state_chunk=48),
    )  # fmt: skip
    assert engine.reuses and engine.prefix_cache == "radix"
    assert engine.cache.storage is engine.memory.storage
    assert engine.cache.export_alignment == engine.model.dispatcher.export_alignment == 16
    assert (engine.cache.strategy, engine.cache.grids.checkpoint) == ("no_buffer", 48)


def test_blocks_have_the_products_rules():
    """Decision 22: KV block 16, state block 64, hash unit 16, retention 0."""
    cache = built("blocks")
    assert type(cache) is BlockCache
    assert (cache.sizes.attention, cache.sizes.states, cache.sizes.unit) == ((16,), (64,), 16)
    assert (cache.retention.interval, cache.sizes.partial_hits) == (0, True)


def test_options_reach_the_blocks():
    cache = built("blocks", page=8, state_block=32, hash_unit=4, retention=64)
    assert (cache.sizes.attention, cache.sizes.states, cache.sizes.unit) == ((8,), (32,), 4)
    assert cache.retention.interval == 64
    assert built("blocks", retention="none").retention.interval is None


def test_under_the_engines_rules_one_list_counts_pages_and_slots():
    """Decision 30: the engine makes as many of each; who gives both must give them equal."""
    rules = dict(prefix_cache="blocks", cache_options=CacheOptions(compat="vllm"))
    for given, count in [(dict(state_slots=9), 9), (dict(kv_pages=7), 7), ({}, DEFAULT_BLOCKS)]:
        engine = oracle_engine(**rules, **given)
        assert type(engine.cache) is VLLMCache
        assert [pool.size for pool in engine.cache.storage] == [count, count]
    with pytest.raises(ValueError, match="must be equal, got 9 and 7"):
        oracle_engine(**rules, state_slots=9, kv_pages=7)
    with pytest.raises(ValueError, match="do not hold 1 block.s. of"):
        oracle_engine(**rules, cache_bytes=1)
    sizes = oracle_engine(**rules).memory.sizes
    room = 5 * (sizes.page_bytes + sizes.slot_bytes)
    engine = oracle_engine(**rules, cache_bytes=room)
    assert [pool.size for pool in engine.cache.storage] == [4, 4]


@pytest.mark.parametrize("name", ["radix", "blocks"])
def test_by_default_no_policy_is_asked(name):
    for options in ({}, dict(admission="all", eviction="lru")):
        cache = built(name, flops=None, **options)
        assert cache.admission is None and cache.eviction is None


@pytest.mark.parametrize("name", ["radix", "blocks"])
def test_policies_reach_the_cache_with_the_bytes_of_its_memory(name):
    cache = built(name, admission="second-hit", eviction="flop-aware")
    assert type(cache.admission) is SecondHit
    assert cache.eviction == FlopAware(FLOPS, state_bytes=88, row_bytes=32, alpha=1.0)
    assert built(name, eviction="flop-aware", eviction_alpha=0).eviction.alpha == 0
    cache = built(name, admission="marconi", eviction="auto")
    assert type(cache.admission) is Marconi and type(cache.eviction) is LearntAlpha
    assert (cache.eviction.alpha, cache.eviction.learnt) == (0, False)


@pytest.mark.parametrize("name", ["radix", "blocks"])
def test_the_engine_weighs_the_flops_of_its_model_and_the_bytes_of_its_states(name):
    options = CacheOptions(eviction="flop-aware", eviction_alpha=0.5)
    engine = oracle_engine(prefix_cache=name, cache_options=options)
    sizes, flops = engine.memory.sizes, prefix_flops(engine.model.config)
    assert engine.cache.eviction == FlopAware(flops, sizes.slot_bytes, sizes.row_bytes, 0.5)


@pytest.mark.parametrize("eviction", ["flop-aware", "auto"])
@pytest.mark.parametrize("name", ["radix", "blocks"])
def test_flops_that_nobody_has_said_cannot_be_weighed(name, eviction):
    with pytest.raises(ValueError, match=f"'{eviction}' weighs the FLOPs of a prefix, and they we"):
        built(name, eviction=eviction, flops=None)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(strategy="fast"), "strategy must be one of no_buffer, extra_buffer, extra_buffer_la"),
        (dict(strategy=""), "strategy must be one of"),
        (dict(state_chunk=0), "state_chunk must be at least 1, got 0"),
        (dict(state_chunk=2.5), "state_chunk must be an integer of at least 1, got 2.5"),
        (dict(track_interval=-1), "track_interval must be at least 1, got -1"),
        (dict(track_interval=True), "track_interval must be an integer"),
        (dict(max_states_per_path=0), "max_states_per_path must be -1 .no cap. or at least 1, g"),
        (dict(max_states_per_path=-2), "max_states_per_path must be -1 .no cap. or at least 1, g"),
        (dict(max_states_per_path=1.5), "max_states_per_path must be -1 .no cap. or at least 1"),
        (dict(state_block=0), "state_block must be at least 1, got 0"),
        (dict(hash_unit=1.5), "hash_unit must be an integer of at least 1, got 1.5"),
        (dict(retention=-1), "retention must be at least 0, got -1"),
        (dict(retention="all"), "retention must be an integer of at least 0, got 'all'"),
        (dict(admission="some"), "admission must be one of all, second-hit, marconi; got 'some'"),
        (dict(admission=["all"]), "admission must be one of .*; got .'all'."),
        (dict(eviction=""), "eviction must be one of lru, flop-aware, auto; got ''"),
        (dict(eviction_alpha=1), "eviction_alpha is for eviction 'flop-aware', got 1 for 'lru'"),
        (dict(eviction="auto", eviction_alpha=0), "for eviction 'flop-aware', got 0 for 'auto'"),
        (dict(eviction="flop-aware", eviction_alpha=-1), "a number from 0 on, got -1"),
        (dict(eviction="flop-aware", eviction_alpha=float("nan")), "from 0 on, got nan"),
        (dict(eviction="flop-aware", eviction_alpha=float("inf")), "from 0 on, got inf"),
        (dict(eviction="flop-aware", eviction_alpha=True), "from 0 on, got True"),
        (dict(eviction="flop-aware", eviction_alpha="2"), "from 0 on, got '2'"),
    ],
)
def test_options_out_of_range_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        CacheOptions(**options)


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("tree", {}, "prefix_cache must be one of none, radix, blocks; got 'tree'"),
        ("", {}, "prefix_cache must be one of"),
        ("none", dict(state_chunk=64), "prefix_cache 'none' has no options; got state_chunk"),
        ("none", dict(compat="sglang", strategy="no_buffer"), "got compat, strategy"),
        (
            "blocks",
            dict(state_chunk=64),
            "'blocks' has compat, state_block, hash_unit, retention, .*; got state_chunk",
        ),
        ("radix", dict(retention=0), "'radix' has compat, strategy, .*; got retention"),
        ("blocks", dict(compat="sglang"), "compat of prefix_cache 'blocks' must be vllm; got"),
        ("none", dict(admission="all"), "'none' has no options; got admission"),
        ("radix", dict(compat="sglang", admission="marconi"), "engine's own rules, .*; got admiss"),
        (
            "blocks",
            dict(compat="vllm", eviction="auto"),
            "'vllm' is that engine's .*; got eviction",
        ),
        ("radix", dict(compat="vllm"), "compat of prefix_cache 'radix' must be sglang; got 'vllm'"),
    ],
)
def test_a_cache_that_is_not_there_is_refused_before_anything_is_allocated(name, options, message):
    with pytest.raises(ValueError, match=message):
        check_prefix_cache(name, CacheOptions(**options))
    with pytest.raises(ValueError, match=message):
        oracle_engine(prefix_cache=name, cache_options=CacheOptions(**options), state_slots=10**9)


@pytest.mark.parametrize("compat", [None, "sglang"])
def test_a_strategy_that_does_not_go_with_the_page_is_refused(compat):
    with pytest.raises(ValueError, match="no_buffer .* needs pages of one token, got 16"):
        built("radix", strategy="no_buffer", compat=compat)


@pytest.mark.parametrize("compat", [None, "sglang"])
def test_auto_is_the_engines_choice(compat):
    assert built("radix", page=16, strategy="auto", compat=compat).strategy == "extra_buffer"
    assert built("radix", page=1, strategy="auto", compat=compat).strategy == "no_buffer"


@pytest.mark.parametrize("page, state_chunk, chunk", [(4, 20, 20), (1, 8, 8), (24, 8, 24)])
@pytest.mark.parametrize("strategy", ["extra_buffer", "extra_buffer_lazy"])
def test_under_the_engines_rules_a_grid_that_the_backend_cannot_export_is_refused(
    page, state_chunk, chunk, strategy
):
    """Found at the first piece that has such a boundary inside, it would fail in every step."""
    options = dict(page=page, state_chunk=state_chunk, strategy=strategy)
    with pytest.raises(ValueError, match=f"multiples of {chunk} tokens, which the backend cannot"):
        built("radix", compat="sglang", **options)
    built("radix", compat="sglang", alignment=4, **options)
    built("radix", **options)  # ours keeps what can be kept


def test_without_a_buffer_the_engine_exports_nothing():
    built("radix", page=1, state_chunk=20, strategy="no_buffer", compat="sglang")


def test_pieces_that_can_never_leave_a_checkpoint_are_warned_of():
    """The engine's tracked strategies keep one of a piece of the grid or longer, or none."""
    with pytest.warns(
        UserWarning, match=r"the checkpoint grid \(192 .* at most 191.*keep no checkpoint"
    ):
        built("radix", page=48, compat="sglang", largest_piece=191)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        built("radix", page=48, compat="sglang", largest_piece=192)
        built("radix", page=48, largest_piece=1)
        built("radix", page=1, compat="sglang", strategy="no_buffer", largest_piece=1)


@pytest.mark.parametrize("budget, chunk", [(63, 512), (512, 63)])
def test_the_largest_piece_is_the_smaller_of_budget_and_chunk(budget, chunk):
    with pytest.warns(UserWarning, match="at most 63"):
        oracle_engine(
            prefix_cache="radix", cache_options=CacheOptions(compat="sglang"),
            max_batch_tokens=budget, prefill_chunk=chunk,
        )  # fmt: skip
