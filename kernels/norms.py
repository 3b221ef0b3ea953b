"""RMS norms and sigmoid gates on read-outs: statistics and products in float32, rounded once.

    rms_norm     w * x / sqrt(mean(x^2) + eps)
    gated_norm   rms_norm(o; w) * sigmoid(gate)        KDA's read-out, per head (architecture 3.7)
    gated        o * sigmoid(gate)                     MLA's read-out (architecture 6)

Norm first, gate second; the gate is a sigmoid, not a swish.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.numerics import compute_dtype, sigmoid


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last axis: x [..., width], weight [width] → [..., width] in the dtype of weight."""
    wide = x.to(compute_dtype(x))
    rms = torch.sqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide / rms * weight).to(weight.dtype)


def gated_norm(o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """o [N, H, V] normed per head, weight [V] shared by all; gate logits [N, H*V].

    Returns [N, H*V] in the dtype of gate.
    """
    wide = compute_dtype(o)
    y = rms_norm(o, weight.to(wide), eps) * sigmoid(gate.to(wide)).view_as(o)
    return y.flatten(1).to(gate.dtype)


def gated(o: Tensor, gate: Tensor) -> Tensor:
    """o [...] times the sigmoid of logits of its shape, in the dtype of gate."""
    wide = compute_dtype(o)
    return (o.to(wide) * sigmoid(gate.to(wide))).to(gate.dtype)
