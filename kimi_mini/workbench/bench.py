"""Measuring honestly on a shared machine (decision 33).

What is compared is timed in turn, again and again, and the median counts: a slow minute then falls
on all alike. The machine's own limits (a float32 product of 1024^3, a copy out of cache) are among
what is timed, so that figures can be read on another machine.
"""

from __future__ import annotations

import contextlib
import platform
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

SIDE = 1024  # of the products that stand for the machine
SAMPLE_SECONDS = 0.01  # the least that one timing takes
COPIED = 1 << 24  # float32 elements of the copy: 64 MB, more than any cache here holds


class Machine(NamedTuple):
    """Facts measured in the same run as the figures beside them."""

    cpu: str
    threads: int
    torch: str
    sgemm_gflops: float  # float32 product of 1024^3
    copy_gbs: float  # read + write, out of cache

    def as_json(self) -> dict:
        return self._asdict()


def medians(
    functions: Mapping[Hashable, Callable[[], object]], repeats: int
) -> dict[Hashable, float]:
    """Median seconds of one call of each function, timed in turn `repeats` times.

    A short function is called so often for one timing that this takes SAMPLE_SECONDS.
    """
    calls = {name: _calls_worth_timing(function) for name, function in functions.items()}
    samples: dict[Hashable, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            samples[name].append(_seconds(function, calls[name]))
    return {name: statistics.median(seconds) for name, seconds in samples.items()}


def _calls_worth_timing(function: Callable[[], object]) -> int:
    function()  # warm-up
    return max(1, round(SAMPLE_SECONDS / max(_seconds(function, 1), 1e-6)))


def _seconds(function: Callable[[], object], calls: int) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - began) / calls


@contextlib.contextmanager
def using_threads(threads: int) -> Iterator[None]:
    """Run a block with that many torch threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def cpu_name() -> str:
    """What the processor calls itself."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def measure_machine(threads: int, repeats: int) -> Machine:
    """The machine's limits with that many threads."""
    with using_threads(threads), torch.inference_mode():
        limits = limits_from(medians(limit_probes(), repeats))
    return Machine(cpu_name(), threads, torch.__version__, limits.flops / 1e9, limits.traffic / 1e9)


class Limits(NamedTuple):
    """What this machine can do in a second, as measured."""

    flops: float  # of a float32 product of SIDE^3
    traffic: float  # bytes read and written by a copy out of cache

    def least_seconds(self, flops: float, traffic: float) -> float:
        """Nothing that takes so many FLOPs and moves so many bytes is done in less."""
        return max(flops / self.flops, traffic / self.traffic)


def limit_probes() -> dict[str, Callable[[], object]]:
    """What the limits are measured by, to be timed in turn with what is compared to them."""
    source, target = torch.rand(COPIED), torch.empty(COPIED)
    return {"sgemm": product(2 * SIDE**3), "copy": lambda: target.copy_(source)}


def limits_from(seconds: Mapping[Hashable, float]) -> Limits:
    """The limits, from the seconds of a call of each of their probes."""
    return Limits(2 * SIDE**3 / seconds["sgemm"], 2 * 4 * COPIED / seconds["copy"])


def product(flops: int) -> Callable[[], object]:
    """A float32 matrix product [m, 1024] x [1024, 1024] of that many FLOPs."""
    left, right = torch.rand(max(1, round(flops / (2 * SIDE**2))), SIDE), torch.rand(SIDE, SIDE)
    return lambda: left @ right
