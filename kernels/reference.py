"""The truth the fast kernels are held against: one row, one token at a time, nothing clever.

These loops follow the formulas of architecture 3.2 to 3.6 and 6 line by line, with the library's
own functions where the fast forms have theirs. They run in float64 when given float64, and share
with the forms they check only the reading of query_start and exports. Slow on purpose.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.kda import Activated, KDAInputs, KDAWeights
from kernels.numerics import compute_dtype
from kernels.packing import Export, check_exports, check_scan_shapes, row_lengths
from kernels.recurrent import ScanResult
from kernels.short_conv import ConvResult


def kda_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    S0: Tensor,
    query_start: Tensor | Sequence[int],
    exports: Sequence[Export] = (),
    scale: float | None = None,
) -> ScanResult:
    """The recurrence. Arguments and results as in `chunked.kda_chunk_scan`; exports anywhere."""
    check_scan_shapes(q, k, v, g, beta, S0, query_start)
    starts, lengths = row_lengths(query_start, q.shape[0])
    check_exports(exports, lengths, alignment=1)
    dtype = compute_dtype(q)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v, g, beta, S0 = (x.to(dtype) for x in (q, k, v, g, beta, S0))
    outputs, finals, snapshots = [], [], {}
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        S = S0[row].clone()  # [H, V, K]
        for t in range(start, start + length):
            S = S * torch.exp(g[t]).unsqueeze(1)
            u = beta[t].unsqueeze(1) * (v[t] - torch.einsum("hvk,hk->hv", S, k[t]))
            S = S + torch.einsum("hv,hk->hvk", u, k[t])
            outputs.append(scale * torch.einsum("hvk,hk->hv", S, q[t]))
            snapshots[row, t + 1 - start] = S if Export(row, t + 1 - start) in exports else None
        finals.append(S)
    return ScanResult(
        torch.stack(outputs) if outputs else v[:0],
        torch.stack(finals) if finals else S0,
        torch.stack([snapshots[export] for export in exports]) if exports else S0[:0],
    )


def short_conv_reference(
    x: Tensor,
    weight: Tensor,
    conv0: Tensor,
    query_start: Tensor | Sequence[int],
    exports: Sequence[Export] = (),
) -> ConvResult:
    """The convolution. Arguments and results as in `short_conv.short_conv`."""
    starts, lengths = row_lengths(query_start, x.shape[0])
    check_exports(exports, lengths, alignment=1)
    dtype = compute_dtype(x)
    outputs, finals, snapshots = [], [], {}
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        window = list(conv0[row].to(x.dtype))  # W-1 raw inputs, oldest first
        for t in range(start, start + length):
            window.append(x[t])
            seen = torch.stack(window).to(dtype)  # [W, D]
            total = sum(seen[j] * weight[:, j].to(dtype) for j in range(weight.shape[1]))
            outputs.append(F.silu(total))
            window.pop(0)
            snapshots[row, t + 1 - start] = list(window)
        finals.append(window)

    def stacked(windows: list[list[Tensor]]) -> Tensor:
        if not windows or not windows[0]:
            return conv0.new_zeros(len(windows), *conv0.shape[1:], dtype=x.dtype)
        return torch.stack([torch.stack(window) for window in windows])

    return ConvResult(
        torch.stack(outputs) if outputs else x[:0].to(dtype),
        stacked(finals),
        stacked([snapshots[export] for export in exports]),
    )


def activate_reference(y: Tensor, inputs: KDAInputs, weights: KDAWeights, V: int) -> Activated:
    """Norms and gates. Arguments and results as in `kda.activate`."""
    dtype = compute_dtype(y)
    (H, K), bound = weights.dt_bias.shape, weights.lower_bound
    rate = torch.exp(weights.A_log.to(dtype)).unsqueeze(1)  # [H, 1]
    tokens = []
    for t in range(y.shape[0]):
        q, k, v = y[t].to(dtype).split([H * K, H * K, H * V])
        q, k = (
            u / torch.sqrt(torch.linalg.vecdot(u, u).unsqueeze(1) + 1e-6)
            for u in (q.view(H, K), k.view(H, K))
        )
        z = inputs.gate[t].to(dtype) + weights.dt_bias.to(dtype)
        if bound is None:
            g = -rate * torch.logaddexp(z, torch.zeros_like(z))
        else:
            g = bound * torch.sigmoid(rate * z)
        tokens.append(Activated(q, k, v.view(H, V), g, torch.sigmoid(inputs.beta[t].to(dtype))))
    if not tokens:
        widths = ((H, K), (H, K), (H, V), (H, K), (H,))
        return Activated(*(y.new_zeros(0, *width, dtype=dtype) for width in widths))
    return Activated(*(torch.stack(parts) for parts in zip(*tokens, strict=True)))


def attention_reference(q: Tensor, rows: Tensor, kv_b: Tensor, context_len: int) -> Tensor:
    """Latent attention of one row, query by query, keys and values expanded one at a time.

    Arguments and result as in `latent_attention.attend_materialised`.
    """
    dtype = compute_dtype(q)
    q, rows, kv_b = q.to(dtype), rows.to(dtype), kv_b.to(dtype)
    T, H, width = q.shape
    L = kv_b.shape[-1]
    nope = width - (rows.shape[-1] - L)
    outputs = []
    for t in range(T):
        heads = []
        for h in range(H):
            scores, values = [], []
            for s in range(context_len + t + 1):
                expanded = kv_b[h] @ rows[s, :L]  # [nope + V]
                key = torch.cat([expanded[:nope], rows[s, L:]])
                scores.append((q[t, h] * key).sum() * width**-0.5)
                values.append(expanded[nope:])
            weights = torch.softmax(torch.stack(scores), 0)
            heads.append((weights.unsqueeze(1) * torch.stack(values)).sum(0))
        outputs.append(torch.stack(heads))
    return torch.stack(outputs)
