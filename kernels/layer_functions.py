"""What the layers compute, their matrix products included, as one table per backend.

A layer calls `functions.mix_norm(...)` and knows no backend; the torch functions are the readable
truth, and another backend puts in twins of the same signature that fall back to them where they do
not serve (gradients, a dtype that they do not know). `KDAKernelDispatcher.functions` is the table
of the backend that it chose.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from kernels.attn_res import mix_norm
from kernels.experts import mix_experts
from kernels.glu import glu
from kernels.kda import KDAInputs
from kernels.latent_attention import attend
from kernels.norms import gated, gated_norm, rms_norm
from kernels.routing import Routing, route
from kernels.sublayers import kda_inputs, kda_output, mla_inputs, mla_output, mlp, moe


class LayerFunctions(NamedTuple):
    """One backend's functions; the modules that TORCH takes them from say what they do."""

    linear: Callable[[Tensor, Tensor], Tensor]  # x W^T
    mix_norm: Callable[..., Tensor]
    rms_norm: Callable[..., Tensor]
    gated_norm: Callable[..., Tensor]
    gated: Callable[..., Tensor]
    glu: Callable[..., Tensor]
    route: Callable[..., Routing]
    mix_experts: Callable[..., Tensor]
    attend: Callable[..., Tensor]
    kda_inputs: Callable[..., tuple[KDAInputs, Tensor]]
    kda_output: Callable[..., Tensor]
    mla_inputs: Callable[..., tuple[Tensor, Tensor, Tensor]]
    mla_output: Callable[..., Tensor]
    mlp: Callable[..., Tensor]
    moe: Callable[..., Tensor]
    decoder: Callable[..., Tensor | None] | None = None  # all layers at once (kernels.decoder)


TORCH = LayerFunctions(
    linear=F.linear,
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
)
