"""Measuring honestly on a shared machine (decision 33).

What is compared is timed in turn, again and again, and the median counts: a slow minute then falls
on all alike. The machine's own limits (a float32 product of 1024^3, a copy out of cache) are among
what is timed, so that figures can be read on another machine. A matrix product of as many FLOPs is
the ceiling of the chunk form; the token loop is what it has to beat.
"""

from __future__ import annotations

import contextlib
import functools
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from kernels.chunked import kda_chunk_scan
from kernels.latent_attention import attend_absorbed, attend_materialised
from kernels.recurrent import kda_step, kda_token_scan
from kernels.short_conv import short_conv, short_conv_step
from kimi_mini.workbench.cases import scan_case

LOOP_TOKENS = 512  # the loop's time is proportional to T; longer is only waiting
SIDE = 1024  # of the products that stand for the machine
SAMPLE_SECONDS = 0.01  # the least that one timing takes
COPIED = 1 << 24  # float32 elements of the copy: 64 MB, more than any cache here holds

# tokens/s of the bare scan, one thread, H = 8, on a core with 160 GFLOP/s; by K = V
TARGETS = {64: 25_000, 128: 12_000}
TARGET_GFLOPS = 160


class Machine(NamedTuple):
    """Facts measured in the same run as the figures beside them."""

    cpu: str
    threads: int
    torch: str
    sgemm_gflops: float  # float32 product of 1024^3
    copy_gbs: float  # read + write, out of cache

    def as_json(self) -> dict:
        return self._asdict()


class ScanFigures(NamedTuple):
    """One shape of the scan. Rates are tokens/s of one layer with H heads."""

    K: int
    V: int
    H: int
    T: int
    kernel_chunk: int
    threads: int
    chunked: float
    loop: float
    loop_tokens: int  # what the loop was timed on
    product: float  # a matrix product of as many FLOPs
    flops_per_token: int
    sgemm_gflops: float
    target: float | None

    @property
    def to_loop(self) -> float:
        return self.chunked / self.loop

    @property
    def to_product(self) -> float:
        return self.chunked / self.product

    def as_json(self) -> dict:
        return self._asdict() | {"to_loop": self.to_loop, "to_product": self.to_product}


class OtherFigure(NamedTuple):
    """Another kernel of the layers: tokens/s at the shape that `what` says."""

    what: str
    K: int
    V: int
    threads: int
    rate: float

    def as_json(self) -> dict:
        return self._asdict()


def medians(functions: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of one call of each function, timed in turn `repeats` times.

    A short function is called so often for one timing that this takes SAMPLE_SECONDS.
    """
    calls = {name: _calls_worth_timing(function) for name, function in functions.items()}
    samples: dict[str, list[float]] = {name: [] for name in functions}
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
    source = torch.rand(COPIED)
    target = torch.empty(COPIED)
    limits = {"sgemm": product(2 * SIDE**3), "copy": lambda: target.copy_(source)}
    with using_threads(threads), torch.inference_mode():
        seconds = medians(limits, repeats)
    return Machine(
        cpu_name(),
        threads,
        torch.__version__,
        2 * SIDE**3 / seconds["sgemm"] / 1e9,
        2 * 4 * COPIED / seconds["copy"] / 1e9,
    )


def product(flops: int) -> Callable[[], object]:
    """A float32 matrix product [m, 1024] x [1024, 1024] of that many FLOPs."""
    left, right = torch.rand(max(1, round(flops / (2 * SIDE**2))), SIDE), torch.rand(SIDE, SIDE)
    return lambda: left @ right


def scan_flops(C: int, K: int, V: int) -> int:
    """FLOPs of the chunk form per token and head, by the formulas of architecture 4.1.

    Per chunk: L and A, 2 C^2 K each; T and A times a [C, V], 2 C^2 V each; three products of C K V
    with the state. Squares are counted whole; the inverse of the triangle (C^3 / 3) is not counted.
    """
    return 4 * C * (K + V) + 6 * K * V


def measure_scan(
    K: int, V: int, T: int, *, H: int, kernel_chunk: int, threads: int, repeats: int
) -> ScanFigures:
    """Chunk form, token loop, product of equal FLOPs and sgemm, in turn."""
    case = scan_case("mixed", [T], H=H, K=K, V=V)
    loop_tokens = min(T, LOOP_TOKENS)
    short = case.piece(0, loop_tokens, case.S0)
    flops = H * scan_flops(kernel_chunk, K, V)
    functions = {
        "chunked": lambda: kda_chunk_scan(*case, kernel_chunk=kernel_chunk),
        "loop": lambda: kda_token_scan(*short),
        "product": product(T * flops),
        "sgemm": product(2 * SIDE**3),
    }
    with using_threads(threads), torch.inference_mode():
        seconds = medians(functions, repeats)
    gflops = 2 * SIDE**3 / seconds["sgemm"] / 1e9
    known = K == V and K in TARGETS and H == 8 and threads == 1
    share = 0.8 if T >= 32768 else 1.0
    return ScanFigures(
        K,
        V,
        H,
        T,
        kernel_chunk,
        threads,
        T / seconds["chunked"],
        loop_tokens / seconds["loop"],
        loop_tokens,
        T / seconds["product"],
        flops,
        gflops,
        TARGETS[K] * share * gflops / TARGET_GFLOPS if known else None,
    )


def measure_others(
    K: int, V: int, T: int, *, H: int, threads: int, repeats: int
) -> list[OtherFigure]:
    """Decode, convolution and latent attention at the same widths, in turn.

    Attention has nope = K, rope = K/2 and a latent of 4K, the proportions of K3.
    """
    L, R = 4 * K, K // 2
    kv_b = torch.randn(H, K + V, L)
    functions, tokens = {}, {}

    def add(what: str, count: int, function: Callable, *operands: object) -> None:
        functions[what] = functools.partial(function, *operands)
        tokens[what] = count

    for B in (1, 8):
        step = scan_case("mixed", [1] * B, H=H, K=K, V=V)
        add(f"decode step, {B} rows", B, kda_step, *step[:6])
    D = H * (2 * K + V)
    x, weight = torch.randn(T, D), torch.randn(D, 4)
    add(f"convolution, T = {T}", T, short_conv, x, weight, torch.zeros(1, 3, D), [0, T])
    add("convolution step, 8 rows", 8, short_conv_step, x[:8], weight, torch.zeros(8, 3, D))
    S = min(T, 1024)
    queries, rows = torch.randn(S, H, K + R), torch.randn(8, S, L + R)
    add(f"attention, {S} queries", S, attend_materialised, queries, rows[0], kv_b, 0)
    lengths = torch.full((8,), S)
    add(f"attention step, 8 rows over {S}", 8, attend_absorbed, queries[:8], rows, kv_b, lengths)
    with using_threads(threads), torch.inference_mode():
        seconds = medians(functions, repeats)
    return [OtherFigure(what, K, V, threads, tokens[what] / seconds[what]) for what in functions]
