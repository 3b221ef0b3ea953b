"""Elementwise functions whose result for a value depends on nothing but that value.

torch evaluates `sigmoid`, `silu` and `softplus` with one formula inside vector registers and with
another for the elements left over at the end, so the last bit of a result depends on where the
element happens to lie. `exp`, division and `sqrt` have no such seam. The forms below are built from
them alone: a token gets the same bits whatever was packed around it and however its prompt was cut.
"""

from __future__ import annotations

import torch
from torch import Tensor

# exp(-x) stays finite, so that neither the value nor its gradient meets inf * 0
_SMALLEST_LOGIT = {torch.float32: -87.0, torch.float64: -700.0}


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of internal arithmetic: float64 for float64 input, else float32."""
    return torch.promote_types(x.dtype, torch.float32)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x), elementwise; float32 or float64; x below -87 (-700) counts as that bound."""
    return 1.0 / (1.0 + torch.exp(-x.clamp(min=_SMALLEST_LOGIT[x.dtype])))


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x), elementwise; float32 or float64."""
    return x / (1.0 + torch.exp(-x.clamp(min=_SMALLEST_LOGIT[x.dtype])))


def l2_normalise(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last axis, eps INSIDE the root (architecture 3.3).

    An RMS norm rescaled by 1/sqrt(K) would put eps on the mean, K times larger in effect, and
    differ visibly for small activations. A zero vector stays zero. In place: nothing.
    Result in float32 (float64 for float64 x).
    """
    x = x.to(compute_dtype(x))
    squares = (x * x).contiguous()  # the last bit of a sum depends on the order in memory
    return x / torch.sqrt(squares.sum(-1, keepdim=True) + eps)
