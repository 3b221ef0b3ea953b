"""What sublayers do around their states: runs of products, norms and activations, as one call each.

    KDA     kda_inputs   the recurrence's inputs and the output gate     (architecture 3.1)
            kda_output   o_proj( RMSNorm(o) * sigmoid(gate) )            (3.7)
    MLA     mla_inputs   queries, latent rows and the output gate        (6)
            mla_output   o_proj( o * sigmoid(gate) )
    FFN     mlp          down act(gate_up x)                             (7)
            moe          routed and shared experts

A matrix that is a part of a model lies as [out, in]; projections of one input are one matrix, their
rows below each other in the order that `widths` counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.experts import mix_experts
from kernels.glu import GLUForm, glu
from kernels.kda import KDAInputs
from kernels.norms import gated, gated_norm, rms_norm
from kernels.routing import RouterRule, route


class KDAProjections(NamedTuple):
    """in_proj: rows q|k|v, f_a, b, g; widths counts them; g is the gate, or g_a of g_b g_a."""

    in_proj: Tensor
    widths: Sequence[int]
    f_b: Tensor  # [H*K, rank]
    g_b: Tensor | None  # [H*V, rank]


class MLAProjections(NamedTuple):
    """in_proj: rows q, c, r, g; widths counts these four; q is the queries, or q_a of q_b norm q_a;
    without an output gate g has no rows."""

    in_proj: Tensor
    widths: Sequence[int]
    q_norm: Tensor | None
    q_b: Tensor | None  # [H*(nope+R), rank]
    kv_norm: Tensor  # [L]
    eps: float


class MoEWeights(NamedTuple):
    """in_proj: rows of the latent, and gate and up of the shared experts; widths counts these two,
    0 for what is not there, None where neither is. Without a latent the experts see x."""

    router: Tensor  # [E, hidden]
    bias: Tensor  # [E]
    in_proj: Tensor | None
    widths: Sequence[int]
    w13: Tensor  # [E, 2I, L]
    w2: Tensor  # [E, L, I]
    norm: Tensor | None  # [L], of the experts' sum
    eps: float
    up: Tensor | None  # [hidden, L]
    shared_down: Tensor | None  # [hidden, shared]


def kda_inputs(x: Tensor, weights: KDAProjections, heads: int) -> tuple[KDAInputs, Tensor]:
    """x [N, hidden] → inputs of the recurrence, and logits of the output gate [N, H*V]."""
    qkv, f_a, beta, g = F.linear(x, weights.in_proj).split(weights.widths, -1)
    decay = F.linear(f_a, weights.f_b).unflatten(-1, (heads, -1))
    gate = g if weights.g_b is None else F.linear(g, weights.g_b)
    return KDAInputs(qkv, decay, beta), gate


def kda_output(o: Tensor, gate: Tensor, norm: Tensor, eps: float, o_proj: Tensor) -> Tensor:
    """o [N, H, V], gate logits [N, H*V], norm [V] → [N, hidden] in the dtype of the gate."""
    return F.linear(gated_norm(o, gate, norm, eps), o_proj)


def mla_inputs(x: Tensor, weights: MLAProjections, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """x [N, hidden] → queries [N, H, nope+R], latent rows [N, L+R], gate logits [N, H*V or 0]."""
    q, c, r, gate = F.linear(x, weights.in_proj).split(weights.widths, -1)
    if weights.q_b is not None:
        q = F.linear(rms_norm(q, weights.q_norm, weights.eps), weights.q_b)
    rows = torch.cat([rms_norm(c, weights.kv_norm, weights.eps), r], -1)
    return q.unflatten(-1, (heads, -1)), rows, gate


def mla_output(o: Tensor, gate: Tensor, o_proj: Tensor) -> Tensor:
    """o [N, H, V], gate logits [N, H*V], or [N, 0] for none → [N, hidden], in the gate's dtype."""
    o = o.flatten(1)
    return F.linear(gated(o, gate) if gate.shape[-1] else o.to(gate.dtype), o_proj)


def mlp(x: Tensor, gate_up: Tensor, down: Tensor, form: GLUForm) -> Tensor:
    """x [N, hidden] → [N, hidden]; gate_up [2I, hidden], gate rows first; down [hidden, I]."""
    return F.linear(glu(F.linear(x, gate_up), form), down)


def moe(
    x: Tensor,
    weights: MoEWeights,
    rule: RouterRule,
    form: GLUForm,
    experts: Tensor | None = None,
) -> Tensor:
    """x [N, hidden] → [N, hidden]: up norm(sum of the routed experts) + the shared ones.

    The norm is on the sum; shared experts are unweighted. The router's product stands alone: it is
    float32 in a bf16 model too. experts [N, k]: the router's choices, made already.
    """
    routing = route(x, weights.router, weights.bias, rule, experts)
    routed, gate_up = x, x[:, :0]
    if weights.in_proj is not None:
        latent, gate_up = F.linear(x, weights.in_proj).split(weights.widths, -1)
        routed = latent if weights.widths[0] else x
    y = mix_experts(routed, routing, weights.w13, weights.w2, form).to(x.dtype)
    if weights.norm is not None:
        y = rms_norm(y, weights.norm, weights.eps)
    if weights.up is not None:
        y = F.linear(y, weights.up)
    if weights.shared_down is not None:
        y = y + F.linear(glu(gate_up, form), weights.shared_down)
    return y
