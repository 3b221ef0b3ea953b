"""The router: which experts a token takes, and how much of each (architecture 7).

    s     = sigmoid(W x)                                   per expert, not normalised, float32
    pick  = top-k of s + bias                              bias decides WHO, never how much
    w_e   = s_e / (sum of picked s + 1e-20) * factor

With several groups (decision 12) a group scores the sum of its two best biased experts, the best
`kept_groups` groups stay and the others are masked with -inf. Ties go to the lowest index.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.numerics import compute_dtype


class Routing(NamedTuple):
    """Chosen experts [N, k] int64 and their final weights [N, k] float32 (float64)."""

    experts: Tensor
    weights: Tensor


class RouterRule(NamedTuple):
    """How a token's experts are chosen from its scores, and weighed."""

    top_k: int
    groups: int = 1
    kept_groups: int = 1
    renormalise: bool = True
    factor: float = 1.0


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


def route(
    x: Tensor, weight: Tensor, bias: Tensor, rule: RouterRule, experts: Tensor | None = None
) -> Routing:
    """x [N, hidden], weight [E, hidden], bias [E] → Routing.

    experts [N, k]: take these choices instead of making them, to compare two runs whose scores
    differ in the last bits (decision 9).
    """
    dtype = compute_dtype(x)
    scores = torch.sigmoid(F.linear(x.to(dtype), weight.to(dtype)))
    if experts is None:
        biased = scores + bias.to(dtype)
        experts = select_experts(biased, rule.top_k, rule.groups, rule.kept_groups)
    weights = scores.gather(1, experts)
    if rule.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return Routing(experts, weights * rule.factor)
