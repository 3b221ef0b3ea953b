"""The layer functions of the native backend.

Each has the signature of its torch twin and is that twin where the operators do not serve: where
gradients are asked for, and for dtypes other than float32, bfloat16 (with float32 beside it) and
float64. Every token gets the same bits whatever is beside it and on however many threads, except
from `linear`, which is one product for few rows and another for many.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.glu import GLUForm
from kernels.layer_functions import TORCH
from kernels.native.library import operators
from kernels.paging import AttentionMetadata
from kernels.routing import RouterRule, Routing

# Up to so many rows are one pass over the matrix.
FEW_ROWS = 8

_SINGLE = {torch.float32, torch.bfloat16}
_DOUBLE = {torch.float64}


def serves(*tensors: Tensor | None) -> bool:
    """Whether operators may run on these: nothing asks for gradients, and all have dtypes that are
    known together."""
    given = [x for x in tensors if x is not None]
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        return False
    dtypes = {x.dtype for x in given}
    return dtypes <= _SINGLE or dtypes == _DOUBLE


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Few rows meet a matrix in one pass over it; many are torch's business."""
    if x.dim() != 2 or x.shape[0] > FEW_ROWS or not serves(x, weight):
        return TORCH.linear(x, weight)
    return operators().few_rows(x, weight)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if not serves(x, weight):
        return TORCH.rms_norm(x, weight, eps)
    return operators().rms_norm(x, weight, eps)


def gated_norm(o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    if not serves(o, gate, weight):
        return TORCH.gated_norm(o, gate, weight, eps)
    return operators().gated_norm(o, gate, weight, eps)


def gated(o: Tensor, gate: Tensor) -> Tensor:
    if not serves(o, gate):
        return TORCH.gated(o, gate)
    return operators().gated(o, gate)


def glu(gate_up: Tensor, form: GLUForm) -> Tensor:
    if not serves(gate_up):
        return TORCH.glu(gate_up, form)
    return operators().glu(gate_up, form.situ, form.beta or 1.0, form.linear_beta)


def mix_norm(
    prefix: Tensor,
    bank: Tensor,
    bank_rms: Tensor,
    norm: Tensor | None,
    proj: Tensor | None,
    weight: Tensor,
    eps: float,
) -> Tensor:
    if not serves(prefix, bank, norm, proj, weight):
        return TORCH.mix_norm(prefix, bank, bank_rms, norm, proj, weight, eps)
    if bank.shape[1] == 0:
        return operators().rms_norm(prefix, weight, eps)
    return operators().mix_norm(prefix, bank, bank_rms, norm, proj, weight, eps)


def route(
    x: Tensor, weight: Tensor, bias: Tensor, rule: RouterRule, experts: Tensor | None = None
) -> Routing:
    if not serves(x, weight, bias):
        return TORCH.route(x, weight, bias, rule, experts)
    return Routing(*operators().route(x, weight, bias, *rule, experts))


def mix_experts(x: Tensor, routing: Routing, w13: Tensor, w2: Tensor, form: GLUForm) -> Tensor:
    if not serves(x, routing.weights, w13, w2):
        return TORCH.mix_experts(x, routing, w13, w2, form)
    return operators().mix_experts(
        x, *routing, w13, w2, form.situ, form.beta or 1.0, form.linear_beta
    )


def attend(q: Tensor, pool: Tensor, kv_b: Tensor, step: AttentionMetadata) -> Tensor:
    if not serves(q, pool, kv_b) or not q.dtype == pool.dtype == kv_b.dtype:
        return TORCH.attend(q, pool, kv_b, step)
    return operators().latent_attention(q, pool, kv_b, *step.rows)


NATIVE = TORCH._replace(
    linear=linear,
    mix_norm=mix_norm,
    rms_norm=rms_norm,
    gated_norm=gated_norm,
    gated=gated,
    glu=glu,
    route=route,
    mix_experts=mix_experts,
    attend=attend,
)
