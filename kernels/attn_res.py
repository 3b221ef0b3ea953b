"""Attention Residuals: a learned mixture of a token's earlier blocks (architecture 2.1).

    s_j = (c . x_j) / sqrt(mean(x_j^2) + eps)      c = norm * proj, the pseudo-query
    Mix = sum_j softmax(s)_j x_j                   no 1/sqrt(width); the values are the RAW sources

Sources of a token are the m entries of its bank, frozen, and its running prefix. Everything is per
token and in float32 (float64), also in a bf16 model; what reads a mixture is an RMS norm, which
rounds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.norms import rms_norm


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last axis."""
    return torch.rsqrt(x.square().mean(-1) + eps)


def mix(
    prefix: Tensor,
    bank: Tensor,
    bank_rms: Tensor,
    norm: Tensor | None,
    proj: Tensor | None,
    eps: float,
) -> Tensor:
    """Mix of a token's bank and prefix → [N, width] in the dtype of prefix.

    prefix [N, width]; bank [N, m, width] and its `inverse_rms` [N, m], so that a frozen source is
    measured once; norm, proj [width] (unused, and None, in a model without AttnRes, where m = 0 and
    the mixture is the prefix).
    """
    if bank.shape[1] == 0:
        return prefix
    query = norm.to(prefix.dtype) * proj.to(prefix.dtype)
    own = (prefix @ query) * inverse_rms(prefix, eps)  # [N]
    scores = torch.cat([(bank @ query) * bank_rms, own.unsqueeze(1)], 1)
    weights = torch.softmax(scores, 1)  # [N, m+1]
    return torch.bmm(weights[:, None, :-1], bank).squeeze(1) + weights[:, -1:] * prefix


def mix_norm(
    prefix: Tensor,
    bank: Tensor,
    bank_rms: Tensor,
    norm: Tensor | None,
    proj: Tensor | None,
    weight: Tensor,
    eps: float,
) -> Tensor:
    """rms_norm(mix(...); weight) → [N, width] in the dtype of weight; one eps for both."""
    return rms_norm(mix(prefix, bank, bank_rms, norm, proj, eps), weight, eps)
