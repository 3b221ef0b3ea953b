"""The matrix products that a call of a layer function makes, each with the matrix it is made with.

Inputs that only the call itself sees (what an activation or a norm gives to the next product) are
ones of the same shape: a product's time does not depend on its numbers. The products of attention
(kv_b, queries and rows) are not here, for attention is timed as it is.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.numerics import compute_dtype
from kernels.routing import RouterRule, Routing, route
from kernels.sublayers import MoEWeights


class Product(NamedTuple):
    """x [N, K] times the transpose of a matrix [M, K]."""

    x: Tensor
    weight: Tensor

    @property
    def flops(self) -> int:
        return 2 * self.x.shape[0] * self.weight.numel()

    @property
    def matrix_bytes(self) -> int:
        return self.weight.numel() * self.weight.itemsize

    def of_one_number(self) -> Product:
        """As many rows, of one number, and a matrix of one: nothing but the call."""
        return Product(self.x.new_ones(self.x.shape[0], 1), self.weight.new_ones(1, 1))


@torch.inference_mode()
def products_of(name: str, args: tuple) -> list[Product]:
    """In the order of the call. name: of LayerFunctions; args: what it is called with."""
    match name, args:
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
    """Two for each expert that was chosen, with as many rows as chose it."""
    inner = x.new_ones(x.shape[0], w2.shape[-1])
    counts = torch.bincount(routing.experts.flatten(), minlength=w13.shape[0]).tolist()
    return [
        product
        for e, n in enumerate(counts)
        if n
        for product in (Product(x[:n], w13[e]), Product(inner[:n], w2[e]))
    ]
