"""The core of a KDA layer: raw projections in, read-outs before norm and output gate out.

    conv   q|k|v  = SiLU(short convolution)             3.2
    norm   q, k   = L2-normalised per head              3.3
    gate   g      = decay gate,  beta = sigmoid(b)      3.4, 3.5
    scan   o, S   = delta rule with scale K^-0.5        3.6

Pure: initial states in, final states out. Written once; the backends of the dispatcher differ in
the convolution, activation and scan that they put in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from kernels.gates import decay_gate
from kernels.numerics import compute_dtype, l2_normalise, sigmoid
from kernels.packing import Export
from kernels.recurrent import ScanResult, kda_step
from kernels.short_conv import ConvResult, short_conv_step


class KDAInputs(NamedTuple):
    """Raw projections of N tokens, any float dtype; views of one fused projection are fine."""

    qkv: Tensor  # [N, D], D = H*(2K+V), order q, k, v, heads inside
    gate: Tensor  # [N, H, K] decay logits before A_log and dt_bias
    beta: Tensor  # [N, H] write-strength logits before the sigmoid


class KDAWeights(NamedTuple):
    """What one layer's recurrence needs of its parameters."""

    conv: Tensor  # [D, W]
    A_log: Tensor  # [H]
    dt_bias: Tensor  # [H, K]
    lower_bound: float | None  # bounded gate (K3) or, if None, softplus gate (Kimi-Linear)


class Activated(NamedTuple):
    """Operands of the recurrence: q, k, g [N, H, K], v [N, H, V], beta [N, H]."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


class CoreResult(NamedTuple):
    """o [N, H, V]; S [B, H, V, K]; conv [B, W-1, D]; and both kinds of exports [E, ...]."""

    o: Tensor
    S: Tensor
    conv: Tensor
    exported_S: Tensor
    exported_conv: Tensor


def kda_extend(
    inputs: KDAInputs,
    weights: KDAWeights,
    S0: Tensor,
    conv0: Tensor,
    query_start: Sequence[int],
    exports: Sequence[Export],
    convolve: Callable[..., ConvResult],
    activate: Callable[..., Activated],
    scan: Callable[..., ScanResult],
) -> CoreResult:
    """Packed rows of any length from their initial states S0 [B, H, V, K], conv0 [B, W-1, D]."""
    conv = convolve(inputs.qkv, weights.conv, conv0, query_start, exports)
    out = scan(*activate(conv.y, inputs, weights, S0.shape[2]), S0, query_start, exports)
    return CoreResult(out.o, out.S, conv.conv, out.exported, conv.exported)


def kda_decode(
    inputs: KDAInputs, weights: KDAWeights, S0: Tensor, conv0: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One token for each of B rows → (o [B, H, V], S [B, H, V, K], conv [B, W-1, D])."""
    y, conv = short_conv_step(inputs.qkv, weights.conv, conv0)
    o, S = kda_step(*activate(y, inputs, weights, S0.shape[2]), S0)
    return o, S, conv


def activate(y: Tensor, inputs: KDAInputs, weights: KDAWeights, V: int) -> Activated:
    """Convolved channels y [N, D] and raw logits → the operands of the recurrence; V is given."""
    H, K = weights.dt_bias.shape
    qk, v = y.split([2 * H * K, H * V], -1)
    q, k = l2_normalise(qk.unflatten(-1, (2, H, K))).unbind(1)
    g = decay_gate(inputs.gate, weights.A_log, weights.dt_bias, weights.lower_bound)
    beta = sigmoid(inputs.beta.to(compute_dtype(inputs.beta)))
    return Activated(q, k, v.unflatten(-1, (H, V)), g, beta)
