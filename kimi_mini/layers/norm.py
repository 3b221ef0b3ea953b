"""RMSNorm: w * x / sqrt(mean(x^2) + eps), statistics and product in float32, rounded once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.numerics import compute_dtype
from kimi_mini.layers.parameters import KeepsFloat32, at_least_float32, unfilled


class RMSNorm(nn.Module):
    """Over the last axis; result in the dtype of x."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = unfilled(width, dtype=dtype)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] → [..., width]."""
        dtype = compute_dtype(x)
        normed = F.rms_norm(x.to(dtype), self.weight.shape, self.weight.to(dtype), self.eps)
        return normed.to(x.dtype)


class HeadNorm(RMSNorm, KeepsFloat32):
    """The KDA o_norm: one weight vector shared by all heads, published as float32."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__(width, eps, at_least_float32(dtype))
