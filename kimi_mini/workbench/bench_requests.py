"""What a request costs in a manager's books, call by call of the contract, whichever manager it is.

Over pools without memory that are full: some prompts have been served before, and whatever is new
pushes something old out. A request's prompt is the first half of one of them and as much of its
own, so that half of it is a hit.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from cache.blocks.manager import BlockCache
from cache.leases import CacheRequest, Lease, StepPlan, Wait
from cache.pools.storage import Sizes, one_of_each
from cache.radix.manager import RadixCache
from cache.state_cache import StateCache

PAGE = 16
STATES = 4  # slots a served prompt
MANAGERS: dict[str, type[StateCache]] = {"radix": RadixCache, "blocks": BlockCache}


class RequestTimes(NamedTuple):
    """Microseconds of each call for a prompt of so many tokens; medians. cached: tokens whose rows
    were in the cache at the end; hit: tokens of each prompt that were read."""

    manager: str
    prompt: int
    cached: int
    hit: int
    lookup: float
    admit: float
    plan: float
    commit: float
    decode: float
    finish: float

    def as_json(self) -> dict[str, Any]:
        return self._asdict()


CALLS = RequestTimes._fields[4:]


def measure_requests(
    manager: str, pages: int, repeats: int, *, prompt: int = 4096, seed: int = 0
) -> RequestTimes:
    """In a cache that is full with about so many pages. manager: one of MANAGERS."""
    bench = RequestBench(manager, pages, prompt, seed)
    seconds: dict[str, list[float]] = {call: [] for call in CALLS}
    for _ in range(repeats):
        for call, spent in bench.serve().items():
            seconds[call].append(spent)
    times = {call: statistics.median(spent) * 1e6 for call, spent in seconds.items()}
    return RequestTimes(manager, prompt, bench.cached, bench.hit, **times)


class RequestBench:
    """A manager that has served prompts of `prompt` tokens until its `pages` were used up.

    pages: of PAGE tokens; at least what two prompts take, and STATES slots for each prompt.
    """

    def __init__(self, manager: str, pages: int, prompt: int = 4096, seed: int = 0) -> None:
        self._random, self._prompt = random.Random(seed), prompt
        each = -(-(prompt + 1) // PAGE)
        served = max(2, pages // each)
        sizes = Sizes(PAGE, row_bytes=1, slot_bytes=1)
        self.cache = MANAGERS[manager](one_of_each(sizes, STATES * served, served * each))
        self.hit, self._names = 0, iter(range(1 << 62))
        self._known: list[list[int]] = []
        for _ in range(served):
            self._known.append(self._fresh(prompt))
            self._run(self._known[-1], lambda _, call: call())
        self._hot = self._known[-1]

    @property
    def cached(self) -> int:
        """Tokens whose rows are in the cache."""
        (pages,) = self.cache.storage.pages
        return (pages.size - pages.free_count) * PAGE

    def serve(self) -> dict[str, float]:
        """One request, and one token after its prompt: seconds of each call."""
        half = self._prompt // 2
        seconds: dict[str, float] = {}

        def timed(name: str, call: Callable[[], Any]) -> Any:
            began = time.perf_counter()
            result = call()
            seconds[name] = time.perf_counter() - began
            return result

        lease = self._run([*self._hot[:half], *self._fresh(self._prompt - half)], timed)
        self.hit = lease.hit.joint
        return seconds

    def _run(self, prompt: list[int], do: Callable[[str, Callable[[], Any]], Any]) -> Lease:
        """A prompt in one piece, a token, and the end of it; each call goes through `do`."""
        cache, half = self.cache, (self._prompt // 2,)
        request = CacheRequest(f"r{next(self._names)}", prompt, checkpoint_at=half)
        do("lookup", lambda: cache.lookup(request))
        with self._step():
            lease = do("admit", lambda: cache.admit(request))
            plan = _granted(do("plan", lambda: cache.plan(lease, len(prompt))))
            do("commit", lambda: cache.commit(lease, plan.end, [1]))
        with self._step():
            do("decode", lambda: cache.commit(lease, _granted(cache.plan(lease, 1)).end, [2]))
        do("finish", lambda: cache.finish(lease))
        return lease

    @contextmanager
    def _step(self) -> Iterator[None]:
        self.cache.begin_step()
        yield
        self.cache.end_step()

    def _fresh(self, count: int) -> list[int]:
        return [self._random.randrange(1 << 17) for _ in range(count)]


def _granted(plan: StepPlan | Wait) -> StepPlan:
    if isinstance(plan, Wait):
        raise RuntimeError(f"a pool without other users made a request wait: {plan}")
    return plan
