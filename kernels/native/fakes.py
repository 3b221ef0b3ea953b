"""What the operators return without computing it: shapes and dtypes, for torch's fake tensors.

Torch also takes them for calls with a tensor on the meta device, so other arguments may not be on
another one: a result there would be memory that nobody has written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor


def register() -> None:
    """Tell torch, once the library has been loaded."""
    layers = (few_rows, linear, rms_norm, gated_norm, gated, glu, mix_norm, route, mix_experts)
    sublayers = (kda_inputs, kda_output, mla_inputs, mla_output, mlp, moe)
    for fake in (kda_scan, short_conv, kda_rows_, latent_attention, decoder, *layers, *sublayers):
        torch.library.register_fake(f"kda_native::{fake.__name__}", _on_one_device(fake))


def _on_one_device(fake: Callable) -> Callable:
    """`fake`, which raises ValueError for arguments on several devices."""

    @functools.wraps(fake)
    def checked(*args: object) -> Tensor | tuple[Tensor, ...]:
        devices = sorted({str(x.device) for x in _tensors(args)})
        if len(devices) > 1:
            raise ValueError(f"{fake.__name__} must get tensors on one device, got {devices}")
        return fake(*args)

    return checked


def _tensors(args: tuple | list) -> Iterator[Tensor]:
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, (tuple, list)):
            yield from _tensors(arg)


def kda_scan(q, k, v, g, beta, S0, query_start, export_rows, export_after, scale):
    exported = S0.new_empty(len(export_rows), *S0.shape[1:])
    return S0.new_empty(v.shape), S0.new_empty(S0.shape), exported


def short_conv(x, weight, conv0, query_start, export_rows, export_after):
    wide = torch.promote_types(x.dtype, torch.float32)
    exported = conv0.new_empty(len(export_rows), *conv0.shape[1:])
    return x.new_empty(x.shape, dtype=wide), conv0.new_empty(conv0.shape), exported


def kda_rows_(qkv, gate, beta, conv_weight, A_log, dt_bias, lower_bound, recurrent, *_rest):
    return recurrent.new_empty(qkv.shape[0], *recurrent.shape[1:3])


def few_rows(x, weight):
    return x.new_empty(x.shape[0], weight.shape[0])


def linear(x, weight):
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def rms_norm(x, weight, eps):
    return x.new_empty(x.shape, dtype=weight.dtype)


def gated_norm(o, gate, weight, eps):
    return torch.empty_like(gate, memory_format=torch.contiguous_format)


def gated(o, gate):
    return torch.empty_like(gate, memory_format=torch.contiguous_format)


def glu(gate_up, situ, beta, linear_beta):
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


def mix_norm(prefix, bank, bank_rms, norm, proj, weight, eps):
    return prefix.new_empty(prefix.shape, dtype=weight.dtype)


def route(x, weight, bias, top_k, groups, kept_groups, renormalise, factor, experts):
    wide = torch.promote_types(weight.dtype, torch.float32)
    chosen = x.new_empty(x.shape[0], top_k, dtype=torch.long)
    return chosen, x.new_empty(x.shape[0], top_k, dtype=wide)


def mix_experts(x, experts, weights, w13, w2, situ, beta, linear_beta):
    return x.new_empty(x.shape, dtype=weights.dtype)


def kda_inputs(x, in_proj, widths, f_b, g_b, heads):
    fused = linear(x, in_proj)
    decay = x.new_empty(x.shape[0], heads, f_b.shape[0] // heads)
    return fused, decay, x.new_empty(0) if g_b is None else linear(x, g_b)


def kda_output(o, gate, norm, eps, o_proj):
    return linear(gate, o_proj)


def mla_inputs(x, in_proj, widths, q_norm, q_b, kv_norm, eps, heads):
    q = x.new_empty(0) if q_b is None else linear(x, q_b).unflatten(-1, (heads, -1))
    return linear(x, in_proj), q, x.new_empty(x.shape[0], widths[1] + widths[2])


def mla_output(o, gate, o_proj):
    return gate.new_empty(o.shape[0], o_proj.shape[0])


def mlp(x, gate_up, down, *_rest):
    return x.new_empty(x.shape[0], down.shape[0])


def moe(x, router, bias, in_proj, widths, w13, w2, norm, eps, up, *_rest):
    return x.new_empty(x.shape[0], w2.shape[1] if up is None else up.shape[0])


def latent_attention(q, pool, kv_b, spans, pages):
    nope = q.shape[2] - (pool.shape[2] - kv_b.shape[2])
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(*q.shape[:2], kv_b.shape[1] - nope, dtype=wide)


def decoder(ids, wanted, weights, *_rest):
    head = weights[-1]
    return head.new_empty(len(ids if wanted is None else wanted), len(head))
