"""Where a step's time goes: whole steps, and right after each its parts alone (`bench_parts`).

What is left of a step is its overhead: of a decode step behind products, attention and states (the
arithmetic of the recurrence counts as overhead there, for it should hide behind its memory); of a
prefill piece behind products, attention and recurrence. Parts are called from here one by one,
which a step of the native backend is not; what calling products and moves takes of itself stands
beside them, for whoever wants to count it as overhead too. All that is taken sample by sample, so
that a slow moment falls on the step and its parts alike.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kimi_mini.batch import ForwardBatch, ModelState
from kimi_mini.model import KimiForCausalLM
from kimi_mini.workbench.bench import Limits
from kimi_mini.workbench.bench_parts import Kind, Parts

STEP, OVERHEAD = "step", "overhead"  # of a sample, beside the kinds of work


class Shares(NamedTuple):
    """Milliseconds of a step and of its kinds of work alone; what the products work on.

    states_ms: of a decode step. target: the most that the overhead should be of the step.
    """

    step_ms: float
    preparing_ms: float
    products_ms: float
    attention_ms: float
    recurrence_ms: float
    states_ms: float | None
    calling_ms: float
    overhead_ms: float
    product_flops: int
    matrix_bytes: int
    bound_ms: float  # of the products: their FLOPs at sgemm, or their matrices at a copy's speed
    target: float | None = None

    @property
    def overhead(self) -> float:
        """As a share of the step."""
        return self.overhead_ms / self.step_ms

    def as_json(self) -> dict[str, Any]:
        return self._asdict() | {"overhead": self.overhead}

    def as_row(self) -> dict[str, str]:
        parts = {name: getattr(self, f"{name}_ms") for name in (STEP, *Kind)}
        missed = self.target is not None and self.overhead > self.target
        return {
            **{name: "-" if ms is None else f"{ms:.2f}" for name, ms in parts.items()},
            "overhead": f"{self.overhead_ms:.2f} ({self.overhead:.0%})",
            "at most": ("-" if self.target is None else f"{self.target:.0%}") + " !" * missed,
            "products' bound": f"{self.bound_ms:.2f}",
            "GFLOP/s": f"{self.product_flops / self.products_ms / 1e6:.1f}",
            "GB/s": f"{self.matrix_bytes / self.products_ms / 1e6:.1f}",
        }


class StepTimer:
    """Times steps and their parts; one call runs all steps once and adds one sample.

    The states of the steps move on.
    """

    def __init__(
        self, model: KimiForCausalLM, state: ModelState, steps: Sequence[ForwardBatch]
    ) -> None:
        self.model, self.state = model, state
        self.steps = [(step, Parts(model, state, step)) for step in steps]
        self.samples: list[dict[str, float]] = []

    def __call__(self) -> None:
        spent: Counter[str] = Counter()  # seconds
        for step, parts in self.steps:
            began = time.perf_counter()
            self.model.forward_batch(step, self.state)
            spent[STEP] += time.perf_counter() - began
            spent.update(parts.seconds())
        self.samples.append({name: total / len(self.steps) for name, total in spent.items()})

    def shares(self, limits: Limits, warm_up: int, target: float | None = None) -> Shares:
        """Medians of all samples but the first `warm_up`."""
        samples = [sample | {OVERHEAD: _overhead(sample)} for sample in self.samples[warm_up:]]
        ms = {
            name: statistics.median(sample[name] for sample in samples) * 1e3 for name in samples[0]
        }
        products = [product for _, parts in self.steps for product in parts.products]
        steps = len(self.steps)
        return Shares(
            ms[STEP],
            *(ms.get(kind) for kind in Kind),
            ms[OVERHEAD],
            sum(product.flops for product in products) // steps,
            sum(product.matrix_bytes for product in products) // steps,
            sum(limits.least_seconds(p.flops, p.matrix_bytes) for p in products) / steps * 1e3,
            target,
        )


def _overhead(sample: Mapping[str, float]) -> float:
    """Of a step, what no product, attention, and state (decode) or recurrence accounts for."""
    last = Kind.STATES if Kind.STATES in sample else Kind.RECURRENCE
    parts = sum(sample[kind] for kind in (Kind.PRODUCTS, Kind.ATTENTION, last))
    return sample[STEP] - parts
