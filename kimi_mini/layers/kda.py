"""The KDA layer: projections, the recurrent core, gated head norm (architecture 3).

    q|k|v|f_a|b|g = in_proj x            one product; rows in this order
    r             = f_b f_a              decay logits, rank D, no activation between
    o             = core(q|k|v, r, b)    short convolution, gates, delta rule over the row's state
    y             = o_proj( RMSNorm(o; o_norm) * sigmoid(g) )      norm first, gate second

g is one full matrix (K3) or low-rank g_b g_a (Kimi-Linear). The gate is a sigmoid, not a swish.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.dispatcher import KDAState
from kernels.kda import KDAWeights
from kernels.sublayers import KDAProjections
from kimi_mini.batch import Step
from kimi_mini.config import KimiConfig
from kimi_mini.dtypes import at_least_float32
from kimi_mini.layers.norm import HeadNorm
from kimi_mini.layers.parameters import KeepsFloat32, Linear, parameter, unfilled, weight_of


class KimiDeltaAttention(KeepsFloat32):
    """x [N, hidden] → [N, hidden], reading and writing `state` at the slots of the step."""

    def __init__(self, config: KimiConfig, dtype: torch.dtype) -> None:
        super().__init__()
        kda = config.linear_attn_config
        H, D, width = kda.num_heads, kda.head_dim, config.kda_width
        self.heads = H
        self.lower_bound = kda.gate_lower_bound
        self.widths = [3 * width, D, H, width if kda.use_full_rank_gate else D]
        self.in_proj = Linear(config.hidden_size, sum(self.widths), dtype)
        self.f_b_proj = Linear(D, width, dtype)
        self.g_b_proj = None if kda.use_full_rank_gate else Linear(D, width, dtype)
        float32 = at_least_float32(dtype)
        self.conv_weight = unfilled(3 * width, kda.short_conv_kernel_size, dtype=float32)
        self.A_log = unfilled(H, dtype=float32)
        self.dt_bias = unfilled(H, D, dtype=float32)
        self.o_norm = HeadNorm(D, dtype)
        self.eps = config.rms_norm_eps
        self.o_proj = Linear(width, config.hidden_size, dtype)

    def forward(self, x: Tensor, step: Step, state: KDAState | None) -> Tensor:
        """state None: from zeros, nothing kept."""
        functions = step.dispatcher.functions
        projections = KDAProjections(
            weight_of(self, "in_proj"),
            self.widths,
            weight_of(self, "f_b_proj"),
            weight_of(self, "g_b_proj"),
        )
        inputs, gate = functions.kda_inputs(x, projections, self.heads)
        own = (parameter(self, name) for name in ("conv_weight", "A_log", "dt_bias"))
        weights = KDAWeights(*own, self.lower_bound)
        o = step.dispatcher.mixed(inputs, weights, state, step.kda)  # [N, H, D]
        norm, o_proj = weight_of(self, "o_norm"), weight_of(self, "o_proj")
        return functions.kda_output(o, gate, norm, self.eps, o_proj)
