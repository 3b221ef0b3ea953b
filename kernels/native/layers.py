"""The layer functions of the native backend.

Each has the signature of its torch twin and is that twin where the operators do not serve: where
gradients are asked for, and for dtypes other than float32, bfloat16 (with float32 beside it) and
float64. Every token gets the same bits whatever is beside it and on however many threads, except
where `linear` is part of it, which is one product for few rows and another for many.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.decoder import DecoderForm, StepRows
from kernels.glu import GLUForm
from kernels.kda import KDAInputs
from kernels.layer_functions import TORCH
from kernels.native.library import operators
from kernels.paging import AttentionMetadata
from kernels.routing import RouterRule, Routing
from kernels.sublayers import KDAProjections, MLAProjections, MoEWeights

_SINGLE = {torch.float32, torch.bfloat16}
_DOUBLE = {torch.float64}


def serves(*parts: object) -> bool:
    """Whether operators may run on the tensors among these: none asks for gradients, and all have
    dtypes that are known together."""
    tensors = [x for x in parts if isinstance(x, Tensor)]
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return False
    dtypes = {x.dtype for x in tensors}
    return dtypes <= _SINGLE or dtypes == _DOUBLE


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Few rows meet a matrix in one pass over it; many are torch's business."""
    if not serves(x, weight):
        return TORCH.linear(x, weight)
    return operators().linear(x, weight)


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


def kda_inputs(x: Tensor, weights: KDAProjections, heads: int) -> tuple[KDAInputs, Tensor]:
    if not serves(x, *weights):
        return TORCH.kda_inputs(x, weights, heads)
    fused, decay, gate = operators().kda_inputs(x, *weights, heads)
    qkv, _, beta, g = fused.split(weights.widths, -1)
    return KDAInputs(qkv, decay, beta), g if weights.g_b is None else gate


def kda_output(o: Tensor, gate: Tensor, norm: Tensor, eps: float, o_proj: Tensor) -> Tensor:
    if not serves(o, gate, norm, o_proj):
        return TORCH.kda_output(o, gate, norm, eps, o_proj)
    return operators().kda_output(o, gate, norm, eps, o_proj)


def mla_inputs(x: Tensor, weights: MLAProjections, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    if not serves(x, *weights):
        return TORCH.mla_inputs(x, weights, heads)
    fused, q, rows = operators().mla_inputs(x, *weights, heads)
    own, _, _, gate = fused.split(weights.widths, -1)
    return own.unflatten(-1, (heads, -1)) if weights.q_b is None else q, rows, gate


def mla_output(o: Tensor, gate: Tensor, o_proj: Tensor) -> Tensor:
    if not serves(o, gate, o_proj):
        return TORCH.mla_output(o, gate, o_proj)
    return operators().mla_output(o, gate, o_proj)


def mlp(x: Tensor, gate_up: Tensor, down: Tensor, form: GLUForm) -> Tensor:
    if not serves(x, gate_up, down):
        return TORCH.mlp(x, gate_up, down, form)
    return operators().mlp(x, gate_up, down, form.situ, form.beta or 1.0, form.linear_beta)


def moe(
    x: Tensor,
    weights: MoEWeights,
    rule: RouterRule,
    form: GLUForm,
    experts: Tensor | None = None,
) -> Tensor:
    if not serves(x, *weights):
        return TORCH.moe(x, weights, rule, form, experts)
    glu_form = (form.situ, form.beta or 1.0, form.linear_beta)
    return operators().moe(x, *weights, *rule, *glu_form, experts)


def attend(q: Tensor, pool: Tensor, kv_b: Tensor, step: AttentionMetadata) -> Tensor:
    if not serves(q, pool, kv_b) or not q.dtype == pool.dtype == kv_b.dtype:
        return TORCH.attend(q, pool, kv_b, step)
    return operators().latent_attention(q, pool, kv_b, *step.rows)


def decoder(
    ids: Tensor,
    wanted: Tensor | None,
    form: DecoderForm,
    weights: Sequence[Tensor | None],
    state: tuple[Tensor, Tensor, Tensor],
    rows: StepRows,
) -> Tensor | None:
    """ids [N] → logits [M, vocab] of the wanted tokens [M] (None: of all), in the dtype of the
    head. None, with nothing done, where the operators do not serve.

    In place: state (recurrent and conv of all KDA layers, latent of all MLA layers, as a model's
    pools are) at the rows' slots, exports and out_rows.

    Raises ValueError before anything is written for rows, pools, or weights of the wrong number or
    dtype; for weights whose shapes do not fit each other, behind the writes of earlier layers.
    """
    if torch.is_grad_enabled() or not serves(*state):
        return None
    *sizes, rule, glu_form = form
    slots = rows.slots
    return operators().decoder(
        ids,
        wanted,
        weights,
        *sizes,
        *rule,
        glu_form.situ,
        glu_form.beta or 1.0,
        glu_form.linear_beta,
        *state,
        slots.query_start,
        slots.slots,
        slots.resumed,
        [export.row for export in slots.exports],
        [export.offset for export in slots.exports],
        slots.export_slots,
        *rows.paged,
        rows.out_rows,
    )


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
    kda_inputs=kda_inputs,
    kda_output=kda_output,
    mla_inputs=mla_inputs,
    mla_output=mla_output,
    mlp=mlp,
    moe=moe,
    decoder=decoder,
)
