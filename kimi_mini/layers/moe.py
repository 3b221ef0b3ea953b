"""Mixture of experts: router, routed experts in a latent space, shared experts (architecture 7).

    l|g|u = in_proj x                                      one product; rows in this order
    a     = sum of the experts that the router picks for x, over l         in float32
    y     = up RMSNorm(a) + down act(g, u)                 norm on the aggregate; shared unweighted

The latent l is there in K3; without it the experts see x. The router's product stands alone: it is
float32 in a bf16 model too, for rounded scores would merge neighbouring experts. The formulas are
`kernels.sublayers.moe`; here is where the weights stand.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kernels.layer_functions import TORCH, LayerFunctions
from kernels.routing import RouterRule, Routing
from kernels.sublayers import MoEWeights
from kimi_mini.config import KimiConfig
from kimi_mini.dtypes import at_least_float32
from kimi_mini.layers.mlp import glu_form
from kimi_mini.layers.norm import RMSNorm
from kimi_mini.layers.parameters import KeepsFloat32, Linear, parameter, unfilled, weight_of


class Router(KeepsFloat32):
    """x [N, hidden] → Routing."""

    def __init__(self, config: KimiConfig, dtype: torch.dtype) -> None:
        super().__init__()
        grouped = config.use_grouped_topk
        self.rule = RouterRule(
            config.num_experts_per_token,
            config.num_expert_group if grouped else 1,
            config.topk_group if grouped else 1,
            config.moe_renormalize,
            config.routed_scaling_factor,
        )
        self.proj = Linear(config.hidden_size, config.num_experts, dtype)
        self.e_score_correction_bias = unfilled(config.num_experts, dtype=at_least_float32(dtype))

    def forward(self, x: Tensor, functions: LayerFunctions = TORCH) -> Routing:
        return functions.route(x, *self.weights(), self.rule)

    def weights(self) -> tuple[Tensor, Tensor]:
        """The matrix [E, hidden] and the bias [E]."""
        return weight_of(self, "proj"), parameter(self, "e_score_correction_bias")


class Experts(nn.Module):
    """E gated MLPs stored side by side: w13 [E, 2I, L] (gate rows first), w2 [E, L, I]."""

    def __init__(self, config: KimiConfig, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        E, inner = config.num_experts, config.moe_intermediate_size
        self.w13 = unfilled(E, 2 * inner, width, dtype=dtype)
        self.w2 = unfilled(E, width, inner, dtype=dtype)

    def weights(self) -> tuple[Tensor, Tensor]:
        """w13, w2."""
        return parameter(self, "w13"), parameter(self, "w2")


class SparseMoE(nn.Module):
    """The routed and shared experts of one layer: x [N, hidden] → [N, hidden]."""

    def __init__(self, config: KimiConfig, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, latent = config.hidden_size, config.routed_expert_hidden_size
        shared = config.num_shared_experts * config.moe_intermediate_size
        self.widths = [latent or 0, 2 * shared]
        self.gate = Router(config, dtype)
        self.in_proj = Linear(hidden, sum(self.widths), dtype) if any(self.widths) else None
        self.experts = Experts(config, latent or hidden, dtype)
        normed = latent and config.latent_moe_use_norm
        self.routed_expert_norm = RMSNorm(latent, config.rms_norm_eps, dtype) if normed else None
        self.routed_expert_up_proj = Linear(latent, hidden, dtype) if latent else None
        self.shared_down_proj = Linear(shared, hidden, dtype) if shared else None
        self.form = glu_form(config)
        self.eps = config.rms_norm_eps

    def forward(
        self, x: Tensor, functions: LayerFunctions = TORCH, experts: Tensor | None = None
    ) -> Tensor:
        """experts [N, k]: take these choices instead of the router's (decision 9)."""
        return functions.moe(x, self._weights(), self.gate.rule, self.form, experts)

    def _weights(self) -> MoEWeights:
        return MoEWeights(
            *self.gate.weights(),
            weight_of(self, "in_proj"),
            self.widths,
            *self.experts.weights(),
            weight_of(self, "routed_expert_norm"),
            self.eps,
            weight_of(self, "routed_expert_up_proj"),
            weight_of(self, "shared_down_proj"),
        )
