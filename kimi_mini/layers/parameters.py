"""Parameters as checkpoints have them: unfilled until loaded, float32 where published as such."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from kernels.layer_functions import TORCH, LayerFunctions
from kimi_mini.dtypes import at_least_float32


def unfilled(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """A parameter of NaN, so that one which nothing has filled shows in every result."""
    return nn.Parameter(torch.full(shape, float("nan"), dtype=dtype))


def parameter(module: nn.Module, name: str) -> nn.Parameter:
    """module.<name>, without the search of nn.Module's attributes: of one token, a model that asks
    that way for its five hundred parameters spends a tenth of the step on asking."""
    return module._parameters[name]


def weight_of(module: nn.Module, child: str) -> nn.Parameter | None:
    """module.<child>.weight, likewise; None where the module has no such child."""
    owner = module._modules.get(child)
    return None if owner is None else owner._parameters["weight"]


class Linear(nn.Module):
    """x W^T with W [out, in] and no bias: no linear layer of the text model has one."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = unfilled(outputs, inputs, dtype=dtype)

    def forward(self, x: Tensor, functions: LayerFunctions = TORCH) -> Tensor:
        """[..., in] → [..., out]."""
        return functions.linear(x, parameter(self, "weight"))


class KeepsFloat32(nn.Module):
    """A module whose OWN parameters stay float32 when the model is cast to half precision.

    They are the ones published as F32: rounding a router bias to bf16 merges neighbouring experts,
    rounding a gate rate changes what a state remembers for good. Its children are cast as usual.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        if recurse:
            for child in self.children():
                child._apply(fn)

        def keeping(tensor: Tensor) -> Tensor:
            out = fn(tensor)
            if out.dtype == at_least_float32(out.dtype):
                return out
            return tensor.to(device=out.device, dtype=at_least_float32(tensor.dtype))

        return super()._apply(keeping, recurse=False)
