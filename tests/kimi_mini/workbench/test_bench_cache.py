"""What the cache's figures are made of, and what an operation of the index costs, in counted work.

No clock is read here: work is bytecodes, bytes of a key, and comparisons of an order (`work`).
"""

import math
from itertools import pairwise

import pytest

from cache.radix import key as keys
from kimi_mini.serving.engine import Engine
from kimi_mini.serving.open_model import open_model
from kimi_mini.workbench import bench_cache
from kimi_mini.workbench.bench_cache import OPERATIONS, PAGE, IndexBench
from tests.kimi_mini.workbench.work import Compared, Read, bytecodes

SHAPES = ("bushy", "chains")
OF_A_KEY = ("match", "insert", "publish")
EVICTIONS = ("evict_kv", "evict_states")


def test_a_hit_reads_its_whole_prefix_and_a_cold_prompt_nothing():
    opened = open_model("nano", "float32", 0, "auto")
    engines = {
        name: Engine(opened, prefix_cache=name, state_slots=9, kv_pages=40)
        for name in ("radix", "blocks")
    }
    firsts = bench_cache.measure_first_token(engines, prefix=96, suffix=5, repeats=2)
    assert [first.manager for first in firsts] == [*engines]
    for first, engine in zip(firsts, engines.values(), strict=True):
        sizes = engine.memory.sizes
        assert (first.prefix, first.suffix, first.cached_tokens) == (96, 5, 96)
        assert first.cached_bytes == 96 * sizes.row_bytes + sizes.slot_bytes
        assert first.cold > 0 and first.ratio == first.cold / first.hit
        assert engine.cache.stats().joint_hit_tokens == 2 * 96


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("nodes, repeats", [(1, 1), (10, 9), (300, 2)])
def test_any_tree_has_room_for_all_operations(shape, nodes, repeats):
    """Also one that is smaller than the chain of a single key."""
    times = bench_cache.measure_index(nodes, shape, repeats)
    one_chain = bench_cache.KEY // PAGE
    assert times.nodes == (nodes if shape == "bushy" else max(one_chain, nodes // one_chain))
    assert all(getattr(times, name) > 0 for name in OPERATIONS)


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_measured_is_what_its_name_says(shape):
    bench = IndexBench(200, shape, repeats=2, key=256)
    tree = bench.tree

    def grown(name):
        before = tree.ledger()
        with getattr(bench, name)() as call:
            result = call()
        after = tree.ledger()
        bench.cache.audit()
        kv, states = (after[i] + after[i + 1] - before[i] - before[i + 1] for i in (0, 2))
        return result, kv, states

    match, *none = grown("match")
    assert match.depth == match.kv_depth > 0 and none == [0, 0]
    inserted, kv, states = grown("insert")
    assert (kv, states) == ((0, 0) if shape == "chains" else (256 - inserted.already, 1))
    assert inserted.already > 0
    _, kv, states = grown("publish")
    assert 128 <= kv < 256 and states >= 1
    freed, kv, states = grown("evict_kv")
    assert freed == (-kv, -states) and freed.tokens > 0
    freed, _, states = grown("evict_state")
    assert (freed.states, states) == (1, -1)


def work(bench, name):
    with getattr(bench, name)() as call:
        return bytecodes(call)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", OF_A_KEY)
def test_work_grows_no_faster_than_the_key(name, shape):
    costs = [work(IndexBench(100, shape, 1, key=key), name) for key in (512, 1024, 2048)]
    for shorter, longer in pairwise(costs):
        assert longer <= 2.1 * shorter, costs


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", OF_A_KEY)
def test_bytes_of_the_key_are_touched_a_few_times_each(name, shape, monkeypatch):
    """A slice of what is left at each node would touch each byte once a node."""
    encode = keys.encode
    monkeypatch.setattr(keys, "encode", lambda tokens: Read(encode(tokens)))
    for key in (512, 2048):
        bench = IndexBench(100, shape, 1, key=key)
        Read.touched = 0
        with getattr(bench, name)() as call:
            call()
        assert Read.touched <= 6 * key * keys.WIDTH


@pytest.mark.parametrize("name", OF_A_KEY)
def test_work_does_not_grow_with_the_tree_but_for_the_walk(name):
    """With FAN_OUT children a node, a tree of 64 times the nodes is about 2 nodes deeper."""
    small, large = (IndexBench(nodes, "bushy", 1, key=512) for nodes in (80, 80 * 64))
    assert work(large, name) <= work(small, name) + 2 * 500
    small, large = (IndexBench(nodes, "chains", 1, key=512) for nodes in (80, 80 * 64))
    assert work(large, name) <= 1.01 * work(small, name)


def with_counting_clocks(nodes):
    """A tree whose recency counts how often it is compared."""
    tree = IndexBench(nodes, "bushy", 1, key=PAGE).tree
    for node in tree.nodes():
        node.used, node.state_used = Compared(node.used), Compared(node.state_used)
    tree.rebuild()  # the orders, from these clocks
    return tree


@pytest.mark.parametrize("name", EVICTIONS)
@pytest.mark.parametrize("nodes", [50, 500, 5000])
def test_an_eviction_compares_as_often_as_a_heap_is_deep(name, nodes):
    """On average until nothing is left; two comparisons a tuple, two tuples a level."""
    tree = with_counting_clocks(nodes)
    Compared.comparisons = 0
    freed = getattr(tree, name)(nodes * PAGE)
    assert freed.states == nodes and Compared.comparisons > nodes
    assert Compared.comparisons <= nodes * (4 * math.log2(nodes) + 8)


@pytest.mark.parametrize("name", EVICTIONS)
def test_an_eviction_works_as_much_in_a_small_tree_as_in_a_large_one(name):
    def each(nodes):
        tree = IndexBench(nodes, "bushy", 1, key=PAGE).tree
        return bytecodes(lambda: getattr(tree, name)(nodes * PAGE)) / nodes

    assert each(5000) <= 1.1 * each(50)
