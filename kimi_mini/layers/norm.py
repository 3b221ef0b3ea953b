"""RMS norms as modules: a weight vector, published under the name of its module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kernels.layer_functions import TORCH, LayerFunctions
from kimi_mini.dtypes import at_least_float32
from kimi_mini.layers.parameters import KeepsFloat32, unfilled


class RMSNorm(nn.Module):
    """Over the last axis; the result has the dtype of the weight, the activation dtype."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = unfilled(width, dtype=dtype)
        self.eps = eps

    def forward(self, x: Tensor, functions: LayerFunctions = TORCH) -> Tensor:
        """[..., width] → [..., width]."""
        return functions.rms_norm(x, self.weight, self.eps)


class GatedHeadNorm(KeepsFloat32):
    """The KDA o_norm, then the output gate: one weight vector for all heads, published as
    float32."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = unfilled(width, dtype=at_least_float32(dtype))
        self.eps = eps

    def forward(self, o: Tensor, gate: Tensor, functions: LayerFunctions = TORCH) -> Tensor:
        """o [N, H, V], gate logits [N, H*V] → [N, H*V] in the dtype of the gate."""
        return functions.gated_norm(o, gate, self.weight, self.eps)
