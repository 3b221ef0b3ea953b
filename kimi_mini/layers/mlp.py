"""Gated MLPs: down( act(gate x, up x) ), gate rows first (architecture 7).

SiTU-GLU(a, b) = b1 tanh(a / b1) sigmoid(a) * b2 tanh(b / b2)      sigmoid of the UNCAPPED a
SwiGLU(a, b)   = SiLU(a) * b                                       the older Kimi-Linear models
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.numerics import compute_dtype
from kimi_mini.config import KimiConfig
from kimi_mini.layers.parameters import Linear


def situ_glu(a: Tensor, b: Tensor, beta: float | None, linear_beta: float | None) -> Tensor:
    """SiTU of gate a and up b, any shape, float32 inside, result in the dtype of a.

    beta None or 0 counts as 1; linear_beta None leaves b as it is.
    """
    dtype = compute_dtype(a)
    a32, b32 = a.to(dtype), b.to(dtype)
    beta = beta or 1.0
    if linear_beta is not None:
        b32 = linear_beta * torch.tanh(b32 / linear_beta)
    return (beta * torch.tanh(a32 / beta) * torch.sigmoid(a32) * b32).to(a.dtype)


class GLU(nn.Module):
    """The activation a config names, on gate and up side by side: [..., 2I] → [..., I]."""

    def __init__(self, config: KimiConfig) -> None:
        super().__init__()
        self.situ = config.hidden_act == "situ"
        self.betas = (config.activation_situ_beta, config.activation_situ_linear_beta)

    def forward(self, gate_up: Tensor) -> Tensor:
        a, b = gate_up.chunk(2, -1)
        if self.situ:
            return situ_glu(a, b, *self.betas)
        dtype = compute_dtype(a)
        return (F.silu(a.to(dtype)) * b.to(dtype)).to(a.dtype)


class MLP(nn.Module):
    """The dense MLP and the shared experts: x [..., hidden] → [..., hidden]."""

    def __init__(self, config: KimiConfig, intermediate: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up_proj = Linear(config.hidden_size, 2 * intermediate, dtype)
        self.glu = GLU(config)
        self.down_proj = Linear(intermediate, config.hidden_size, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.glu(self.gate_up_proj(x)))
