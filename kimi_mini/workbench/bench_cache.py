"""What a prefix cache costs and saves: time to the first token, and the index's own operations.

Cold and hit are timed in turn on one engine: a cold prompt is one that nobody has sent, a hit has
its prefix cached and another suffix. Index operations run over pools without memory, on trees of
growing size, so that what grows with the tree shows.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from cache.leases import CacheRequest, StepPlan
from cache.pools.storage import Sizes, Storage, one_of_each
from cache.radix.manager import RadixCache
from cache.radix.tree import RadixTree
from kimi_mini.serving.control import CacheControl
from kimi_mini.serving.engine import Engine
from kimi_mini.serving.sampling_params import SamplingParams

PAGE = 16
KEY = 4096  # tokens of a key
FAN_OUT = 10  # children of a node near the root
ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


class FirstToken(NamedTuple):
    """Seconds from a request's arrival to its first token; medians."""

    prefix: int
    suffix: int
    cold: float
    hit: float
    cached_tokens: int  # of the hit
    cached_bytes: int  # one prefix: its latent rows and one checkpoint

    @property
    def ratio(self) -> float:
        return self.cold / self.hit

    def as_json(self) -> dict[str, Any]:
        return self._asdict() | {"ratio": self.ratio}


class IndexTimes(NamedTuple):
    """Microseconds of one operation on keys of KEY tokens; medians."""

    nodes: int
    shape: str
    match: float
    insert: float
    publish: float
    evict_kv: float
    evict_state: float

    def as_json(self) -> dict[str, Any]:
        return self._asdict()


def measure_first_token(
    engine: Engine, prefix: int, suffix: int, repeats: int, seed: int = 0
) -> FirstToken:
    """Cold against hit for prompts of prefix + suffix tokens. ValueError if they do not fit."""
    source = random.Random(seed)
    ids = _random_ids(engine, source)
    shared = ids(prefix)
    _first_token(engine, shared + ids(suffix), CacheControl(checkpoint_at=(prefix,)))
    cold, hit, cached = [], [], 0
    for _ in range(repeats):
        cold.append(_first_token(engine, ids(prefix) + ids(suffix))[0])
        seconds, cached = _first_token(engine, shared + ids(suffix))
        hit.append(seconds)
    sizes = engine.memory.sizes
    held = prefix * sizes.row_bytes + sizes.slot_bytes
    return FirstToken(prefix, suffix, statistics.median(cold), statistics.median(hit), cached, held)


def _first_token(
    engine: Engine, prompt: list[int], control: CacheControl | None = None
) -> tuple[float, int]:
    (output,) = engine.generate(prompt, ONE_TOKEN, control)
    (own,) = output.outputs
    return own.timings.first_token, own.cached_tokens


def _random_ids(engine: Engine, source: random.Random) -> Callable[[int], list[int]]:
    most = engine.opened.sample_below or engine.model.config.vocab_size
    return lambda count: [source.randrange(3, most) for _ in range(count)]


def measure_index(nodes: int, shape: str, repeats: int, seed: int = 0) -> IndexTimes:
    """Times of single operations on a tree of about `nodes` nodes.

    shape: "bushy", every node has FAN_OUT children and one page, keys end in one long edge;
    "chains", keys share their first pages and have a node for each page.
    """
    source = random.Random(seed)
    keys = _bushy_keys(nodes, source) if shape == "bushy" else _chain_keys(nodes, source)
    storage = _storage(2 * nodes + 64 * KEY // PAGE, 2 * nodes + 64)
    cache = RadixCache(storage, state_chunk=PAGE)
    tree = cache.tree
    _grow(tree, storage, keys, shape == "chains")
    count = sum(1 for _ in tree.nodes())
    probes = [source.choice(keys) for _ in range(repeats)]
    full = [[*key, *_page_tokens(source, KEY - len(key))] for key in probes]
    match = _median_us(lambda key: tree.match(key), full)
    insert = _median_us(
        lambda args: tree.insert(args[0], args[1], args[2]),
        [(key, storage.pages[0].alloc(KEY // PAGE), storage.states[0].alloc(1)[0]) for key in full],
    )
    halves = [probe[: KEY // 2] for probe in probes]
    publish = statistics.median(_publish_us(cache, key, source) for key in halves)
    evict_kv = _median_us(lambda _: tree.evict_kv(1), probes)
    evict_state = _median_us(lambda _: tree.evict_states(1), probes)
    return IndexTimes(count, shape, match, insert, publish, evict_kv, evict_state)


def _publish_us(cache: RadixCache, key: Sequence[int], source: random.Random) -> float:
    """Microseconds of the commit that publishes a prompt of KEY tokens, its prefix `key` a hit."""
    tokens = [*key, *_page_tokens(source, KEY - len(key)), 1]
    cache.begin_step()
    lease = cache.admit(CacheRequest("publisher", tokens))
    plan = cache.plan(lease, len(tokens))
    if not isinstance(plan, StepPlan):
        raise RuntimeError(f"a pool without other users made a request wait: {plan}")
    began = time.perf_counter()
    cache.commit(lease, plan.end, [2])
    seconds = time.perf_counter() - began
    cache.abort(lease)
    cache.end_step()
    return seconds * 1e6


def _grow(
    tree: RadixTree, storage: Storage, keys: Sequence[Sequence[int]], every_page: bool
) -> None:
    """Insert keys, with a node at each page of each if asked for."""
    for key in keys:
        start = tree.match(key).kv_depth + PAGE if every_page else len(key)
        for end in range(start, len(key) + 1, PAGE):
            part = key[:end]
            pages = storage.pages[0].alloc(end // PAGE)
            tree.insert(part, pages, storage.states[0].alloc(1)[0])


def _bushy_keys(nodes: int, source: random.Random) -> list[list[int]]:
    """Keys of a FAN_OUT-ary tree of one page an edge, the shallow ones first."""
    level: list[list[int]] = [[]]
    keys: list[list[int]] = []
    while len(keys) < nodes:
        level = [[*key, *_page_tokens(source, PAGE)] for key in level for _ in range(FAN_OUT)]
        keys += level
    return keys[:nodes]


def _chain_keys(nodes: int, source: random.Random) -> list[list[int]]:
    """Keys of KEY tokens that part within the first pages, with FAN_OUT children a node there."""
    heads = _bushy_keys(FAN_OUT + FAN_OUT**2, source)[FAN_OUT:]
    count = max(1, nodes // (KEY // PAGE))
    chosen = (heads[i % len(heads)] for i in range(count))
    return [[*head, *_page_tokens(source, KEY - len(head))] for head in chosen]


def _page_tokens(source: random.Random, count: int) -> list[int]:
    return [source.randrange(1 << 17) for _ in range(count)]


def _storage(pages: int, slots: int) -> Storage:
    return one_of_each(Sizes(PAGE, 1, 1), slots, pages)


def _median_us(call: Callable[[Any], object], arguments: Sequence[Any]) -> float:
    def seconds() -> Iterator[float]:
        for argument in arguments:
            began = time.perf_counter()
            call(argument)
            yield time.perf_counter() - began

    return statistics.median(seconds()) * 1e6
