"""Gated activations of gate a and up b, in float32, rounded once (architecture 7).

SiTU-GLU(a, b) = b1 tanh(a / b1) sigmoid(a) * b2 tanh(b / b2)      sigmoid of the UNCAPPED a
SwiGLU(a, b)   = SiLU(a) * b                                       the older Kimi-Linear models
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.numerics import compute_dtype


class GLUForm(NamedTuple):
    """Which activation. beta None or 0 counts as 1; linear_beta None leaves b as it is."""

    situ: bool
    beta: float | None = None
    linear_beta: float | None = None


def glu(gate_up: Tensor, form: GLUForm) -> Tensor:
    """Gate and up side by side: [..., 2I] → [..., I] in the same dtype."""
    a, b = gate_up.chunk(2, -1)
    return situ_glu(a, b, form.beta, form.linear_beta) if form.situ else swiglu(a, b)


def situ_glu(a: Tensor, b: Tensor, beta: float | None, linear_beta: float | None) -> Tensor:
    """SiTU-GLU of any shape, in the dtype of a."""
    dtype = compute_dtype(a)
    a32, b32 = a.to(dtype), b.to(dtype)
    beta = beta or 1.0
    if linear_beta is not None:
        b32 = linear_beta * torch.tanh(b32 / linear_beta)
    return (beta * torch.tanh(a32 / beta) * torch.sigmoid(a32) * b32).to(a.dtype)


def swiglu(a: Tensor, b: Tensor) -> Tensor:
    """SwiGLU of any shape, in the dtype of a."""
    dtype = compute_dtype(a)
    return (F.silu(a.to(dtype)) * b.to(dtype)).to(a.dtype)
