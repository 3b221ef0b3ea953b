"""RMSNorm: w * x / sqrt(mean(x^2) + eps), statistics and product in float32, rounded once."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kernels.numerics import compute_dtype
from kimi_mini.dtypes import at_least_float32
from kimi_mini.layers.parameters import KeepsFloat32, unfilled


class RMSNorm(nn.Module):
    """Over the last axis; the result has the dtype of the weight, the activation dtype."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = unfilled(width, dtype=dtype)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] → [..., width]."""
        wide = x.to(compute_dtype(x))
        rms = torch.sqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide / rms * self.weight).to(self.weight.dtype)


class HeadNorm(RMSNorm, KeepsFloat32):
    """The KDA o_norm: one weight vector shared by all heads, published as float32."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__(width, eps, at_least_float32(dtype))
