"""Where a step's time goes: each kind of work timed alone, in turn with the whole step.

A step is run once with every call that its layers make written down; then the calls of one kind
are made again by themselves, with the same operands, in turn with whole steps.

    products        every matrix product, the router's and the experts' included, and nothing else
    attention       latent attention over its rows
    recurrence      the core of the KDA layers, from slots to slots
    states          the same states read and written where they lie, and no arithmetic

What is left of the step is its overhead: of a decode step behind products, attention and states
(the arithmetic of the recurrence counts as overhead there, for it should hide behind its memory);
of a prefill piece behind products, attention and recurrence.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.dispatcher import KDAKernelDispatcher
from kernels.layer_functions import LayerFunctions
from kernels.numerics import compute_dtype
from kernels.routing import RouterRule, Routing, route
from kernels.sublayers import MoEWeights
from kimi_mini.batch import ForwardBatch, ModelState
from kimi_mini.model import KimiForCausalLM
from kimi_mini.workbench.bench import Limits, limit_probes, limits_from, medians

CORE = "mixed"  # the dispatcher's method that runs a KDA layer's core


class Call(NamedTuple):
    """One call of a layer: a name of LayerFunctions or CORE, and what was called."""

    name: str
    function: Callable[..., Any]
    args: tuple

    def again(self) -> Any:
        """Make it once more."""
        return self.function(*self.args)


class Product(NamedTuple):
    """x [N, K] times the transpose of a matrix [M, K]."""

    x: Tensor
    weight: Tensor


class Shares(NamedTuple):
    """Milliseconds of a step and of its kinds of work alone; what the products work on."""

    what: str
    tokens: int
    decode: bool
    step_ms: float
    products_ms: float
    attention_ms: float
    recurrence_ms: float
    states_ms: float
    product_flops: int
    matrix_bytes: int
    bound_ms: float  # of the products: their FLOPs at sgemm, or their matrices at a copy's speed

    @property
    def overhead_ms(self) -> float:
        """What no product, attention, and state or recurrence accounts for."""
        states = self.states_ms if self.decode else self.recurrence_ms
        return self.step_ms - self.products_ms - self.attention_ms - states

    @property
    def overhead(self) -> float:
        """The same as a share of the step."""
        return self.overhead_ms / self.step_ms

    def as_json(self) -> dict[str, Any]:
        return self._asdict() | {"overhead_ms": self.overhead_ms, "overhead": self.overhead}

    def as_row(self) -> dict[str, str]:
        parts = ("products", "attention", "recurrence", "states")
        return {
            "step": self.what,
            "tokens/s": f"{self.tokens / self.step_ms * 1e3:,.1f}",
            "ms": f"{self.step_ms:.2f}",
            **{name: f"{getattr(self, f'{name}_ms'):.2f}" for name in parts},
            "overhead": f"{self.overhead_ms:.2f} ({self.overhead:.0%})",
            "products' bound": f"{self.bound_ms:.2f}",
            "GFLOP/s": f"{self.product_flops / self.products_ms / 1e6:.1f}",
            "GB/s": f"{self.matrix_bytes / self.products_ms / 1e6:.1f}",
        }


def measure_shares(
    model: KimiForCausalLM, state: ModelState, step: ForwardBatch, *, what: str, repeats: int
) -> Shares:
    """Time a step and its parts in turn; the state moves on at the slots of the step."""
    with torch.inference_mode():
        with recorded(model.dispatcher) as calls:
            model.forward_batch(step, state)
        products = [p for call in calls for p in products_of(call)]
        decode = bool((step.query_start.diff() <= 1).all())
        linear = model.dispatcher.functions.linear
        states = states_of(state, step.slots[step.slots > 0])
        seconds = medians(
            {
                "step": lambda: model.forward_batch(step, state),
                "products": lambda: [linear(*product) for product in products],
                "attention": _those(calls, "attend"),
                "recurrence": _those(calls, CORE),
                "states": lambda: [x.mul_(1.0) for x in states],
            }
            | limit_probes(),
            repeats,
        )
    kinds = ("step", "products", "attention", "recurrence", "states")
    parts = (seconds[kind] * 1e3 for kind in kinds)
    flops = sum(2 * p.x.shape[0] * p.weight.numel() for p in products)
    matrices = sum(p.weight.numel() * p.weight.itemsize for p in products)
    bound = _least_ms(products, limits_from(seconds))
    tokens = len(step.token_ids)
    return Shares(what, tokens, decode, *parts, flops, matrices, bound)


@contextlib.contextmanager
def recorded(dispatcher: KDAKernelDispatcher) -> Iterator[list[Call]]:
    """Write down every call of the layers, in order, while the block runs."""
    calls: list[Call] = []

    def recording(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls.append(Call(name, function, args))
            return function(*args)

        return call

    backend = dispatcher.backend
    table = backend.functions._asdict()
    watched = LayerFunctions(**{name: recording(name, f) for name, f in table.items()})
    dispatcher.backend = backend._replace(functions=watched)
    dispatcher.mixed = recording(CORE, dispatcher.mixed)
    try:
        yield calls
    finally:
        dispatcher.backend = backend
        del dispatcher.mixed


@torch.inference_mode()
def products_of(call: Call) -> list[Product]:
    """The matrix products that a call makes; those of attention count as attention."""
    match call.name, call.args:
        case "linear", (x, weight):
            return [Product(x, weight)]
        case "kda_inputs", (x, weights, _):
            first = Product(x, weights.in_proj)
            return [first, *(_like(x, w) for w in (weights.f_b, weights.g_b) if w is not None)]
        case "mla_inputs", (x, weights, _):
            first = Product(x, weights.in_proj)
            return [first] if weights.q_b is None else [first, _like(x, weights.q_b)]
        case "kda_output" | "mla_output", (_, gate, *_, o_proj):
            return [_like(gate, o_proj)]
        case "mlp", (x, gate_up, down, _):
            return [Product(x, gate_up), _like(x, down)]
        case "moe", (x, weights, rule, *_):
            return _moe_products(x, weights, rule)
    return []


def _like(x: Tensor, weight: Tensor) -> Product:
    """With as many rows as x, but some other input."""
    return Product(x.new_ones(x.shape[0], weight.shape[1]), weight)


def _moe_products(x: Tensor, weights: MoEWeights, rule: RouterRule) -> list[Product]:
    dtype = compute_dtype(x)
    routing = route(x, weights.router, weights.bias, rule)
    routed = x.new_ones(x.shape[0], weights.w13.shape[-1])
    return [
        Product(x.to(dtype), weights.router.to(dtype)),
        *([] if weights.in_proj is None else [Product(x, weights.in_proj)]),
        *_expert_products(routed, routing, weights.w13, weights.w2),
        *(_like(x, w) for w in (weights.up, weights.shared_down) if w is not None),
    ]


def _expert_products(x: Tensor, routing: Routing, w13: Tensor, w2: Tensor) -> list[Product]:
    """Two products for each chosen expert; of a single token, those of all its experts are taken
    for one, as if they lay side by side, so that no time goes into calling."""
    inner = x.new_ones(x.shape[0], w2.shape[-1])
    if x.shape[0] == 1:
        k = routing.experts.shape[1]
        first = min(int(routing.experts[0, 0]), w13.shape[0] - k)
        one, two = (w[first : first + k].flatten(0, 1) for w in (w13, w2))
        return [Product(x, one), Product(inner, two)]
    counts = torch.bincount(routing.experts.flatten(), minlength=w13.shape[0]).tolist()
    return [
        product
        for e, n in enumerate(counts)
        if n
        for product in (Product(x[:n], w13[e]), Product(inner[:n], w2[e]))
    ]


def states_of(state: ModelState, slots: Tensor) -> list[Tensor]:
    """Every KDA layer's states at the slots, where they lie."""
    pools = (state.recurrent, state.conv)
    return [layer for pool in pools for slot in slots.tolist() for layer in pool[:, slot]]


def _those(calls: list[Call], name: str) -> Callable[[], None]:
    mine = [call for call in calls if call.name == name]

    def again() -> None:
        for call in mine:
            call.again()

    return again


def _least_ms(products: list[Product], limits: Limits) -> float:
    return 1e3 * sum(
        limits.least_seconds(2 * x.shape[0] * weight.numel(), weight.numel() * weight.itemsize)
        for x, weight in products
    )
