"""What a request costs in a manager's books: that what is timed is what the names say."""

import pytest

from kimi_mini.workbench.bench_requests import (
    CALLS,
    MANAGERS,
    PAGE,
    RequestBench,
    measure_requests,
)
from tests.kimi_mini.workbench.work import bytecodes

PROMPT = 512


@pytest.mark.parametrize("manager", MANAGERS)
@pytest.mark.parametrize("pages", [1, 200])
def test_half_of_each_prompt_is_a_hit_in_a_cache_that_stays_full(manager, pages):
    bench = RequestBench(manager, pages, prompt=PROMPT)
    (rows,) = bench.cache.storage.pages
    for _ in range(3 * max(2, pages // (PROMPT // PAGE))):
        assert [*bench.serve()] == [*CALLS]
        assert bench.hit == PROMPT // 2
        bench.cache.audit()
    assert bench.cached > rows.size * PAGE - PROMPT
    assert bench.cache.stats().evictions.tokens > 0


@pytest.mark.parametrize("manager", MANAGERS)
def test_every_call_has_a_time(manager):
    times = measure_requests(manager, 80, repeats=2, prompt=PROMPT)
    assert (times.manager, times.prompt, times.hit) == (manager, PROMPT, PROMPT // 2)
    assert all(getattr(times, call) > 0 for call in CALLS)


@pytest.mark.parametrize("manager", MANAGERS)
def test_the_work_of_a_request_does_not_grow_with_the_cache(manager):
    def work(pages):
        bench = RequestBench(manager, pages, prompt=PROMPT)
        bench.serve()
        return bytecodes(bench.serve)

    assert work(4000) <= 1.1 * work(200)
