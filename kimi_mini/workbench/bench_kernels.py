"""Every operator of the layers: torch against native, against what the machine allows.

The bound of an operator is the longer of two times: its FLOPs at the speed of a float32 product,
and its bytes at the speed of a copy, both measured in the same turns (`bench_operators` counts
them). Reading alone is faster than copying, so a matrix that is only read can beat its bound. The
bare scan is also set beside the published torch forms that are installed (`bench_published`), of
which the fastest counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from kimi_mini.workbench.bench import Limits, limit_probes, limits_from, medians, using_threads
from kimi_mini.workbench.bench_operators import Operator, Operators

# tokens/s of the native scan, one thread, H = 8, on a core with 160 GFLOP/s; by K = V
SCAN_TARGETS = {64: 350e3, 128: 90e3}
SCAN_TARGET_FLOPS = 160e9
LONG, LONG_SHARE = 32768, 0.9  # what is asked for at that length, as a share
PUBLISHED_TARGET = 18  # times the fastest published form of the scan
DECODE_TARGET = 1 / 1.5  # of the speed of a copy of the states, at K = V = 128, 8 rows and more


class Figure(NamedTuple):
    """Tokens/s of an operator, in torch, native, at its bound and in published forms; what was
    asked for, as a rate and as a multiple of the fastest published form."""

    what: str
    K: int
    V: int
    threads: int
    torch: float
    native: float | None
    bound: float
    limit: str  # "FLOPs" or "bytes"
    target: float | None
    published: dict[str, float]
    times_target: float | None

    @property
    def best(self) -> float:
        """The native rate, or torch's where there is no native form."""
        return self.native or self.torch

    @property
    def fastest(self) -> str | None:
        """The published form that counts."""
        return max(self.published, key=self.published.__getitem__, default=None)

    @property
    def times(self) -> float | None:
        """The best rate as a multiple of the fastest published form."""
        return self.best / self.published[self.fastest] if self.published else None

    def as_json(self) -> dict[str, Any]:
        ratios = {"to_torch": self.best / self.torch, "to_bound": self.best / self.bound}
        return self._asdict() | ratios | {"fastest": self.fastest, "to_published": self.times}

    def as_row(self) -> dict[str, str]:
        """Cells as wide as those of any other figure."""

        def rate(value: float | None) -> str:
            return f"{'-' if value is None else f'{value:,.0f}':>11}"

        to_torch = f"{self.native / self.torch:.1f}" if self.native else "-"
        missed = self.target is not None and self.best < self.target
        return {
            "operator": f"{self.what:>30}",
            "K": f"{self.K:4}",
            "V": f"{self.V:4}",
            "threads": f"{self.threads:7}",
            "torch": rate(self.torch),
            "native": rate(self.native),
            "x torch": f"{to_torch:>7}",
            "bound": rate(self.bound),
            "of bound": f"{f'{self.best / self.bound:.2f} {self.limit}':>10}",
            "target": rate(self.target) + (" !" if missed else "  "),
        }

    def as_comparison(self) -> dict[str, str]:
        """Beside the fastest published form: times ours, and times the bound, as the most that any
        form could reach."""
        published, target = self.published[self.fastest], self.times_target
        missed = target is not None and self.times < target
        return {
            "operator": self.what,
            "K": f"{self.K}",
            "V": f"{self.V}",
            "threads": f"{self.threads}",
            "fastest published": self.fastest,
            "tokens/s": f"{published:,.0f}",
            "ours": f"{self.best:,.0f}",
            "x published": f"{self.times:.1f}",
            "target": ("-" if target is None else f"{target}") + " !" * missed,
            "at the bound": f"{self.bound / published:.1f}",
        }


def measure(
    layer: Operators,
    lengths: Sequence[int],
    batches: Sequence[int],
    *,
    threads: int,
    repeats: int,
    only: str = "",
) -> Iterator[Figure]:
    """Every operator whose name begins with `only`, one after another; scans at all lengths, the
    rest of prefill at the shortest."""
    for name, make in layer.all(lengths, batches):
        if name.startswith(only):
            with using_threads(threads), torch.inference_mode():
                operator = make()  # now: a long scan's operands are large
                forms = operator.forms | operator.published
                seconds = medians(forms | limit_probes(), repeats)
            yield _figure(operator, seconds, threads)


def _figure(operator: Operator, seconds: dict[str, float], threads: int) -> Figure:
    limits = limits_from(seconds)
    rates = {name: operator.tokens / s for name, s in seconds.items()}
    by_flops = operator.flops / limits.flops > operator.traffic / limits.traffic
    bound = operator.tokens / limits.least_seconds(operator.flops, operator.traffic)
    target, times_target = _targets(operator, bound, limits) if threads == 1 else (None, None)
    return Figure(
        operator.what,
        operator.K,
        operator.V,
        threads,
        rates["torch"],
        rates.get("native"),
        bound,
        "FLOPs" if by_flops else "bytes",
        target,
        {name: rates[name] for name in operator.published},
        times_target if operator.published else None,
    )


def _targets(operator: Operator, bound: float, limits: Limits) -> tuple[float | None, float | None]:
    """Tokens/s that the native form should reach, and as a multiple of the fastest published form,
    where anything was set."""
    K, what = operator.K, operator.what
    if operator.H != 8 or K != operator.V:
        return None, None
    if what.startswith("scan") and K in SCAN_TARGETS:
        share = LONG_SHARE if operator.tokens >= LONG else 1.0
        return share * SCAN_TARGETS[K] * limits.flops / SCAN_TARGET_FLOPS, PUBLISHED_TARGET
    if what.startswith("core step") and K == 128 and operator.tokens >= 8:
        return bound * DECODE_TARGET, None
    return None, None
