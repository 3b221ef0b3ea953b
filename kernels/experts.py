"""Routed experts: E gated MLPs side by side, and the weighted sum of those that a token chose.

    a = sum_e w_e w2_e act(w1_e x, w3_e x)                 weighted sum in float32 (architecture 7)

w13 [E, 2I, L] holds w1 (the gate) above w3 (up); w2 [E, L, I]. L is the width that experts work in.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.glu import GLUForm, glu
from kernels.routing import Routing

# Up to so many tokens (a decode step, a short piece) share one padded product over all experts.
PADDED_TOKENS = 128
# Up to so many choices (tokens * k) take a product each: no matrix is copied, or read for nobody.
SINGLE_CHOICES = 16


def mix_experts(x: Tensor, routing: Routing, w13: Tensor, w2: Tensor, form: GLUForm) -> Tensor:
    """Weighted sum over the chosen experts: x [N, L] → [N, L] in float32 (float64)."""
    N, k = routing.experts.shape
    E = w13.shape[0]
    if 0 < N * k <= max(SINGLE_CHOICES, E // 3):  # far fewer matrices than there are
        out = _choice_by_choice(x, routing.experts, w13, w2, form)
    elif N <= PADDED_TOKENS:
        out = _padded(x, routing.experts, w13, w2, form)
    else:
        out = _one_by_one(x, routing.experts, w13, w2, form)
    weights = routing.weights.unsqueeze(1)  # [N, 1, k]
    return torch.bmm(weights, out.view(N, k, x.shape[-1]).to(weights.dtype)).squeeze(1)


def _choice_by_choice(x: Tensor, experts: Tensor, w13: Tensor, w2: Tensor, form: GLUForm) -> Tensor:
    """Few tokens: each choice's product over the matrix where it lies. [N*k, L], in order."""
    chosen, inputs = experts.flatten().tolist(), x.repeat_interleave(experts.shape[1], 0)
    pairs = zip(inputs, chosen, strict=True)
    hidden = glu(torch.stack([F.linear(token, w13[e]) for token, e in pairs]), form)
    pairs = zip(hidden, chosen, strict=True)
    return torch.stack([F.linear(inner, w2[e]) for inner, e in pairs])


def _padded(x: Tensor, experts: Tensor, w13: Tensor, w2: Tensor, form: GLUForm) -> Tensor:
    """Some tokens: every expert takes as many places as the fullest one. [N*k, L]."""
    E, k = w13.shape[0], experts.shape[1]
    chosen, order = experts.flatten().sort(stable=True)
    counts = torch.bincount(chosen, minlength=E)
    place = torch.arange(len(chosen)) - (counts.cumsum(0) - counts)[chosen]
    inputs = x.new_zeros(E, int(counts.max()), x.shape[-1])
    inputs = inputs.index_put((chosen, place), x[order // k])
    hidden = glu(torch.bmm(inputs, w13.mT), form)
    out = torch.bmm(hidden, w2.mT)[chosen, place]
    return out[order.argsort()]


def _one_by_one(x: Tensor, experts: Tensor, w13: Tensor, w2: Tensor, form: GLUForm) -> Tensor:
    """Many tokens: one product per expert that got any. [N*k, L]."""
    k = experts.shape[1]
    chosen, order = experts.flatten().sort(stable=True)
    counts = torch.bincount(chosen, minlength=w13.shape[0]).tolist()
    parts = [
        F.linear(glu(F.linear(tokens, w13[e]), form), w2[e])
        for e, tokens in enumerate(x[order // k].split(counts))
        if len(tokens)
    ]
    return torch.cat(parts)[order.argsort()]
