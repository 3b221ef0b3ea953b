"""What a prefix cache saves, and what the operations of a tree cost.

Cold and hit are timed in turn, with each manager: a cold prompt is one that nobody has sent, a hit
has its prefix cached and another suffix. Operations run over pools without memory, on trees of
growing size, so that what grows with the tree shows.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

from cache.leases import CacheRequest, StepPlan
from cache.pools.storage import Sizes, one_of_each
from cache.radix.manager import RadixCache
from kimi_mini.serving.control import CacheControl
from kimi_mini.serving.engine import Engine
from kimi_mini.serving.sampling_params import SamplingParams

PAGE = 16
KEY = 4096  # tokens of a key
FAN_OUT = 10  # children of a node near the root
PUBLISHED = 4  # states that a publisher leaves at most, its running one included
ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


class FirstToken(NamedTuple):
    """Seconds from a request's arrival to its first token; medians."""

    manager: str
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
    """Microseconds of one operation on keys of `KEY` tokens; medians."""

    nodes: int
    shape: str
    match: float
    insert: float
    publish: float
    evict_kv: float
    evict_state: float

    def as_json(self) -> dict[str, Any]:
        return self._asdict()


OPERATIONS = IndexTimes._fields[2:]
Operation = AbstractContextManager[Callable[[], object]]  # ready to be done, once


def measure_first_token(
    engines: Mapping[str, Engine], prefix: int, suffix: int, repeats: int, seed: int = 0
) -> list[FirstToken]:
    """Cold against hit for prompts of prefix + suffix tokens, for each manager, by name, all with
    the same prompts. ValueError if they do not fit."""
    source = random.Random(seed)
    ids = _random_ids(next(iter(engines.values())), source)
    shared = ids(prefix)
    for engine in engines.values():
        _first_token(engine, shared + ids(suffix), CacheControl(checkpoint_at=(prefix,)))
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in engines}
    cached = dict.fromkeys(engines, 0)
    for _ in range(repeats):
        unknown, known = ids(prefix + suffix), shared + ids(suffix)
        for name, engine in engines.items():
            cold, hit = times[name]
            cold.append(_first_token(engine, unknown)[0])
            seconds, cached[name] = _first_token(engine, known)
            hit.append(seconds)
    return [
        FirstToken(
            name,
            prefix,
            suffix,
            *map(statistics.median, times[name]),
            cached[name],
            prefix * engine.memory.sizes.row_bytes + engine.memory.sizes.slot_bytes,
        )
        for name, engine in engines.items()
    ]


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
    """Times of single operations on an `IndexBench` of about `nodes` nodes."""
    bench = IndexBench(nodes, shape, repeats, seed)
    count = sum(1 for _ in bench.tree.nodes())
    times = {name: _median_us(getattr(bench, name), repeats) for name in OPERATIONS}
    return IndexTimes(count, shape, **times)


def _median_us(ready: Callable[[], Operation], repeats: int) -> float:
    """Of the call that `ready` hands out, over and over; getting ready is not counted."""

    def seconds() -> Iterator[float]:
        for _ in range(repeats):
            with ready() as call:
                began = time.perf_counter()
                call()
                yield time.perf_counter() - began

    return statistics.median(seconds()) * 1e6


class IndexBench:
    """A tree of about `nodes` nodes, with room for each operation to be done `repeats` times.

    shape: "bushy", every node has FAN_OUT children and one page, keys end in one long edge;
    "chains", keys share their first pages and have a node for each page, so that one key alone
    takes key / PAGE nodes. key: tokens of a key, whole pages.

    Each operation makes itself ready, hands out the call that is to be measured, and clears up.
    """

    def __init__(self, nodes: int, shape: str, repeats: int, seed: int = 0, key: int = KEY) -> None:
        self._random, self._key = random.Random(seed), key
        keys = self._bushy_keys(nodes) if shape == "bushy" else self._chain_keys(nodes)
        pages = key // PAGE
        grown, more = max(nodes, pages), 2 * repeats + 1  # insert, publish; one key while it grows
        sizes = Sizes(PAGE, row_bytes=1, slot_bytes=1)
        self._storage = one_of_each(sizes, grown + PUBLISHED * more, grown + (pages + 1) * more)
        self.cache = RadixCache(self._storage, state_chunk=PAGE)
        self.tree = self.cache.tree
        for path in keys:
            self._grow(path, every_page=shape == "chains")
        self._keys = keys

    @contextmanager
    def match(self) -> Iterator[Callable[[], object]]:
        """Of a key that the tree has the beginning of."""
        yield partial(self.tree.match, self._probe())

    @contextmanager
    def insert(self) -> Iterator[Callable[[], object]]:
        """Of such a key, with all pages of its own."""
        key = self._probe()
        pages, slot = self._take(len(key))
        yield partial(self.tree.insert, key, pages, slot)
        if self.tree.peek(key).node.state != slot:  # there was one
            self._storage.states[0].free([slot])

    @contextmanager
    def publish(self) -> Iterator[Callable[[], object]]:
        """The commit that publishes a prompt of a key and one token, half of it a hit at most."""
        half = self._random.choice(self._keys)[: self._key // 2]
        tokens = [*half, *self._fresh(self._key - len(half)), 1]
        self.cache.begin_step()
        lease = self.cache.admit(CacheRequest("publisher", tokens))
        plan = self.cache.plan(lease, len(tokens))
        if not isinstance(plan, StepPlan):
            raise RuntimeError(f"a pool without other users made a request wait: {plan}")
        yield partial(self.cache.commit, lease, plan.end, [2])
        self.cache.abort(lease)
        self.cache.end_step()

    @contextmanager
    def evict_kv(self) -> Iterator[Callable[[], object]]:
        """Of the oldest leaf."""
        yield partial(self.tree.evict_kv, 1)

    @contextmanager
    def evict_state(self) -> Iterator[Callable[[], object]]:
        """Of the oldest state."""
        yield partial(self.tree.evict_states, 1)

    def _grow(self, path: Sequence[int], *, every_page: bool) -> None:
        """Insert a key, with a node at each page of it if asked for."""
        start = self.tree.match(path).kv_depth + PAGE if every_page else len(path)
        for end in range(start, len(path) + 1, PAGE):
            self.tree.insert(path[:end], *self._take(end))

    def _take(self, tokens: int) -> tuple[list[int], int]:
        """Pages for so many tokens, and a slot."""
        (slot,) = self._storage.states[0].alloc(1)
        return self._storage.pages[0].alloc(tokens // PAGE), slot

    def _probe(self) -> list[int]:
        start = self._random.choice(self._keys)
        return [*start, *self._fresh(self._key - len(start))]

    def _bushy_keys(self, nodes: int) -> list[list[int]]:
        """Keys of a FAN_OUT-ary tree of one page an edge, the shallow ones first."""
        level: list[list[int]] = [[]]
        keys: list[list[int]] = []
        while len(keys) < nodes:
            level = [[*key, *self._fresh(PAGE)] for key in level for _ in range(FAN_OUT)]
            keys += level
        return keys[:nodes]

    def _chain_keys(self, nodes: int) -> list[list[int]]:
        """Whole keys that part within the first pages, with FAN_OUT children a node there."""
        heads = self._bushy_keys(FAN_OUT + FAN_OUT**2)[FAN_OUT:]
        count = max(1, nodes // (self._key // PAGE))
        chosen = (heads[i % len(heads)] for i in range(count))
        return [[*head, *self._fresh(self._key - len(head))] for head in chosen]

    def _fresh(self, count: int) -> list[int]:
        return [self._random.randrange(1 << 17) for _ in range(count)]
