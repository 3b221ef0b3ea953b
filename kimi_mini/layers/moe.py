"""Mixture of experts: router, routed experts in a latent space, shared experts (architecture 7).

    s     = sigmoid(W_gate x)                              per expert, not normalised, float32
    pick  = top-k of s + bias                              bias decides WHO, never how much
    w_e   = s_e / (sum of picked s + 1e-20) * factor
    l     = down x                                         latent MoE (K3); else l = x
    a     = sum_e w_e w2_e( act(w1_e l, w3_e l) )          weighted sum in float32
    y     = up RMSNorm(a) + shared(x)                      norm on the aggregate; shared unweighted

With several groups (decision 12) a group scores the sum of its two best biased experts, the best
`topk_group` groups stay and the others are masked with -inf. Ties go to the lowest index.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.numerics import compute_dtype
from kimi_mini.config import KimiConfig
from kimi_mini.dtypes import at_least_float32
from kimi_mini.layers.mlp import GLU, MLP
from kimi_mini.layers.norm import RMSNorm
from kimi_mini.layers.parameters import KeepsFloat32, Linear, unfilled

# Up to so many tokens (a decode step, a short piece) share one padded product over all experts.
PADDED_TOKENS = 128
# Up to so many choices (tokens * k) take a product each: no matrix is copied, or read for nobody.
SINGLE_CHOICES = 16


class Routing(NamedTuple):
    """Chosen experts [N, k] int64 and their final weights [N, k] float32 (float64)."""

    experts: Tensor
    weights: Tensor


def select_experts(biased: Tensor, k: int, groups: int = 1, kept_groups: int = 1) -> Tensor:
    """The k best of biased scores [N, E], restricted to the best groups → [N, k], best first.

    Ties go to the lowest expert; none is chosen twice. Raises ValueError if a token has fewer than
    k experts above -inf.
    """
    if groups > 1:
        grouped = biased.unflatten(-1, (groups, -1))  # [N, groups, E/groups]
        best_two = grouped.sort(dim=-1, descending=True).values[..., :2].sum(-1)
        kept = best_two.sort(dim=-1, descending=True, stable=True).indices[:, :kept_groups]
        dropped = torch.ones_like(best_two, dtype=torch.bool).scatter(1, kept, False)
        biased = grouped.masked_fill(dropped.unsqueeze(-1), float("-inf")).flatten(1)
    best = biased.sort(dim=-1, descending=True, stable=True)
    if biased.shape[0] and bool(best.values[:, k - 1].isneginf().any()):
        raise ValueError(f"fewer than {k} experts have a score above -inf for some token")
    return best.indices[:, :k]


class Router(KeepsFloat32):
    """x [N, hidden] → Routing."""

    def __init__(self, config: KimiConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_token
        grouped = config.use_grouped_topk
        self.groups = (config.num_expert_group, config.topk_group) if grouped else (1, 1)
        self.renormalise = config.moe_renormalize
        self.factor = config.routed_scaling_factor
        self.proj = Linear(config.hidden_size, config.num_experts, dtype)
        self.e_score_correction_bias = unfilled(config.num_experts, dtype=at_least_float32(dtype))

    def forward(self, x: Tensor, experts: Tensor | None = None) -> Routing:
        """experts [N, k]: take these choices instead of making them, to compare two runs whose
        scores differ in the last bits (decision 9)."""
        dtype = compute_dtype(x)
        scores = torch.sigmoid(F.linear(x.to(dtype), self.proj.weight.to(dtype)))
        if experts is None:
            biased = scores + self.e_score_correction_bias.to(dtype)
            experts = select_experts(biased, self.top_k, *self.groups)
        weights = scores.gather(1, experts)
        if self.renormalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return Routing(experts, weights * self.factor)


class Experts(nn.Module):
    """E gated MLPs stored side by side: w13 [E, 2I, L] (gate rows first), w2 [E, L, I]."""

    def __init__(self, config: KimiConfig, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        E, inner = config.num_experts, config.moe_intermediate_size
        self.w13 = unfilled(E, 2 * inner, width, dtype=dtype)
        self.w2 = unfilled(E, width, inner, dtype=dtype)
        self.glu = GLU(config)

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """Weighted sum over the chosen experts: x [N, L] → [N, L] in float32 (float64)."""
        N, k = routing.experts.shape
        E = self.w13.shape[0]
        if 0 < N * k <= max(SINGLE_CHOICES, E // 3):  # far fewer matrices than there are
            out = self._choice_by_choice(x, routing.experts)
        elif N <= PADDED_TOKENS:
            out = self._padded(x, routing.experts)
        else:
            out = self._one_by_one(x, routing.experts)
        weights = routing.weights.unsqueeze(1)  # [N, 1, k]
        return torch.bmm(weights, out.view(N, k, x.shape[-1]).to(weights.dtype)).squeeze(1)

    def _choice_by_choice(self, x: Tensor, experts: Tensor) -> Tensor:
        """Few tokens: each choice's product over the matrix where it lies. [N*k, L], in order."""
        chosen, inputs = experts.flatten().tolist(), x.repeat_interleave(experts.shape[1], 0)
        pairs = zip(inputs, chosen, strict=True)
        hidden = self.glu(torch.stack([F.linear(token, self.w13[e]) for token, e in pairs]))
        pairs = zip(hidden, chosen, strict=True)
        return torch.stack([F.linear(inner, self.w2[e]) for inner, e in pairs])

    def _padded(self, x: Tensor, experts: Tensor) -> Tensor:
        """Some tokens: every expert takes as many places as the fullest one. [N*k, L]."""
        E, k = self.w13.shape[0], experts.shape[1]
        chosen, order = experts.flatten().sort(stable=True)
        counts = torch.bincount(chosen, minlength=E)
        place = torch.arange(len(chosen)) - (counts.cumsum(0) - counts)[chosen]
        inputs = x.new_zeros(E, int(counts.max()), x.shape[-1])
        inputs = inputs.index_put((chosen, place), x[order // k])
        hidden = self.glu(torch.bmm(inputs, self.w13.mT))
        out = torch.bmm(hidden, self.w2.mT)[chosen, place]
        return out[order.argsort()]

    def _one_by_one(self, x: Tensor, experts: Tensor) -> Tensor:
        """Many tokens: one product per expert that got any. [N*k, L]."""
        k = experts.shape[1]
        chosen, order = experts.flatten().sort(stable=True)
        counts = torch.bincount(chosen, minlength=self.w13.shape[0]).tolist()
        parts = [
            F.linear(self.glu(F.linear(tokens, self.w13[e])), self.w2[e])
            for e, tokens in enumerate(x[order // k].split(counts))
            if len(tokens)
        ]
        return torch.cat(parts)[order.argsort()]


class SparseMoE(nn.Module):
    """The routed and shared experts of one layer: x [N, hidden] → [N, hidden]."""

    def __init__(self, config: KimiConfig, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, latent = config.hidden_size, config.routed_expert_hidden_size
        self.gate = Router(config, dtype)
        self.experts = Experts(config, latent or hidden, dtype)
        self.routed_expert_down_proj = Linear(hidden, latent, dtype) if latent else None
        normed = latent and config.latent_moe_use_norm
        self.routed_expert_norm = RMSNorm(latent, config.rms_norm_eps, dtype) if normed else None
        self.routed_expert_up_proj = Linear(latent, hidden, dtype) if latent else None
        shared = config.num_shared_experts * config.moe_intermediate_size
        self.shared_experts = MLP(config, shared, dtype) if shared else None

    def forward(self, x: Tensor) -> Tensor:
        routing = self.gate(x)
        routed = x if self.routed_expert_down_proj is None else self.routed_expert_down_proj(x)
        y = self.experts(routed, routing).to(x.dtype)
        if self.routed_expert_norm is not None:
            y = self.routed_expert_norm(y)
        if self.routed_expert_up_proj is not None:
            y = self.routed_expert_up_proj(y)
        return y if self.shared_experts is None else y + self.shared_experts(x)
