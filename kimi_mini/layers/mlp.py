"""Gated MLPs: down( act(gate x, up x) ), gate rows first (architecture 7)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kernels.glu import GLUForm
from kernels.layer_functions import TORCH, LayerFunctions
from kimi_mini.config import KimiConfig
from kimi_mini.layers.parameters import Linear, weight_of


def glu_form(config: KimiConfig) -> GLUForm:
    """The activation that a config names for its MLPs and experts."""
    if config.hidden_act != "situ":
        return GLUForm(situ=False)
    return GLUForm(True, config.activation_situ_beta, config.activation_situ_linear_beta)


class MLP(nn.Module):
    """The dense MLP: x [N, hidden] → [N, hidden]."""

    def __init__(self, config: KimiConfig, intermediate: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up_proj = Linear(config.hidden_size, 2 * intermediate, dtype)
        self.down_proj = Linear(intermediate, config.hidden_size, dtype)
        self.form = glu_form(config)

    def forward(self, x: Tensor, functions: LayerFunctions = TORCH) -> Tensor:
        gate_up, down = weight_of(self, "gate_up_proj"), weight_of(self, "down_proj")
        return functions.mlp(x, gate_up, down, self.form)
