"""RMS norms as modules: a weight vector, published under the name of its module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kernels.layer_functions import TORCH, LayerFunctions
from kimi_mini.dtypes import at_least_float32
from kimi_mini.layers.parameters import KeepsFloat32, parameter, unfilled


class RMSNorm(nn.Module):
    """Over the last axis; the result has the dtype of the weight, the activation dtype."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = unfilled(width, dtype=dtype)
        self.eps = eps

    def forward(self, x: Tensor, functions: LayerFunctions = TORCH) -> Tensor:
        """[..., width] → [..., width]."""
        return functions.rms_norm(x, parameter(self, "weight"), self.eps)


class HeadNorm(KeepsFloat32):
    """The KDA o_norm: one weight vector for all heads, published as float32. The output gate comes
    right behind it, so `kernels.sublayers.kda_output` applies both."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = unfilled(width, dtype=at_least_float32(dtype))
