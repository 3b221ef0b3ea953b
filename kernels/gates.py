"""Decay gates of Kimi Delta Attention: from raw logits to per-channel log decays g <= 0.

    z = r + dt_bias                        r [N, H, K] raw logits, dt_bias [H, K]
    bounded  (K3):           g = lower_bound * sigmoid(e^A_log * z)        g in (lower_bound, 0)
    softplus (Kimi-Linear):  g = -e^A_log * softplus(z)                    no lower bound

The bounded form is another function, NOT a clamp of the softplus form. A_log is per HEAD although
checkpoints may store as many values as a head has channels (architecture 3.4, 10.3).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.numerics import compute_dtype, sigmoid


def bounded_gate(r: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float) -> Tensor:
    """g = lower_bound * sigmoid(e^A_log * (r + dt_bias)).

    r [N, H, K] any float dtype; A_log [H]; dt_bias [H, K]; lower_bound in [-5, 0).
    Returns [N, H, K] in float32 (float64 for float64 r), natural logarithm.
    """
    dtype = compute_dtype(r)
    z = r.to(dtype) + dt_bias.to(dtype)
    return lower_bound * sigmoid(A_log.to(dtype).exp()[:, None] * z)


def softplus_gate(r: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """g = -e^A_log * softplus(r + dt_bias), softplus(z) = max(z, 0) + log(1 + e^-|z|).

    Shapes and dtypes as in `bounded_gate`.
    """
    dtype = compute_dtype(r)
    z = r.to(dtype) + dt_bias.to(dtype)
    softplus = z.clamp(min=0) + torch.log1p(torch.exp(-z.abs()))
    return -A_log.to(dtype).exp()[:, None] * softplus


def decay_gate(r: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    """The gate a checkpoint asks for: bounded if it names a lower bound, softplus otherwise."""
    if lower_bound is None:
        return softplus_gate(r, A_log, dt_bias)
    return bounded_gate(r, A_log, dt_bias, lower_bound)
