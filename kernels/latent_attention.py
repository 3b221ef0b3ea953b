"""Latent attention: MLA without rotation, one cached row of L + R numbers a token (architecture 6).

A latent row is [c | r]: the normalised latent c [L] and the shared key part r [R], never rotated in
K3 but cached and counted in the scale. With W_UK, W_UV the key and value rows of kv_b per head:

    materialised   k = [W_UK c | r],  v = W_UV c;   o = softmax(q k^T (nope+R)^-1/2) v     (extend)
    absorbed       q^ = W_UK^T q_nope;  scores = q^ c + q_rope r;  o = W_UV (p c)          (decode)

Equal in exact arithmetic. Materialising pays once per key and serves many queries of a prompt;
absorbing never expands a key and serves the one query of a decode step.

Softmax and products run in float32 (float64 for float64 queries) whatever the rows are stored in.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.numerics import compute_dtype
from kernels.paging import AttentionMetadata, read_rows

# scores [H, block, S] held at a time in prefill: 2^22 float32 are 16 MB
_SCORE_ELEMENTS = 1 << 22


def attend_materialised(q: Tensor, rows: Tensor, kv_b: Tensor, context_len: int) -> Tensor:
    """Causal attention of T queries of one row over its S = context_len + T latent rows.

    q [T, H, nope+R]; rows [S, L+R] in time order; kv_b [H, nope+V, L]; query t sees rows
    0 .. context_len + t. Returns [T, H, V] in float32 (float64 for float64 q); softmax there too.
    Memory: keys and values are expanded once, H*S*(nope+V); queries are taken in blocks (at least
    16) whose size depends on this row alone, so that their scores stay near 2^22 numbers.
    """
    dtype = compute_dtype(q)
    T, H, width = q.shape
    L = kv_b.shape[-1]
    nope = width - (rows.shape[-1] - L)
    S = context_len + T
    q = q.to(dtype).transpose(0, 1) * width**-0.5  # [H, T, nope+R]
    rows, kv_b = rows.to(dtype), kv_b.to(dtype)
    c, r = rows[:, :L], rows[:, L:]
    expanded = torch.matmul(c, kv_b.mT)  # [H, S, nope+V]
    k, v = expanded[..., :nope], expanded[..., nope:]
    block = min(T, max(16, _SCORE_ELEMENTS // (H * S)))
    outputs = []
    for first in range(0, T, block):
        last = min(first + block, T)
        seen = context_len + last
        qb = q[:, first:last]
        shared = torch.matmul(qb[..., nope:], r[:seen].mT)
        scores = torch.baddbmm(shared, qb[..., :nope], k[:, :seen].mT)
        # earlier columns are seen by every query of the block
        future = torch.ones(last - first, last - first, dtype=torch.bool, device=q.device).triu(1)
        scores[..., context_len + first :].masked_fill_(future, float("-inf"))
        outputs.append(torch.bmm(torch.softmax(scores, -1), v[:, :seen]))
    return torch.cat(outputs, 1).transpose(0, 1)


def attend_absorbed(q: Tensor, rows: Tensor, kv_b: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Attention of one query for each of B requests over its own latent rows.

    q [B, H, nope+R]; rows [B, S, L+R], request b owning the first lengths[b] >= 1 of them (the rest
    must be finite, see `paging.read_rows`), None: all; kv_b [H, nope+V, L].
    Returns [B, H, V] in float32 (float64 for float64 q).
    """
    dtype = compute_dtype(q)
    width = q.shape[-1]
    L = kv_b.shape[-1]
    nope = width - (rows.shape[-1] - L)
    q, rows, kv_b = q.to(dtype), rows.to(dtype), kv_b.to(dtype)
    q = (q * width**-0.5).transpose(0, 1)  # [H, B, nope+R]
    absorbed = torch.bmm(q[..., :nope], kv_b[:, :nope])  # [H, B, L]
    query = torch.cat([absorbed, q[..., nope:]], -1).transpose(0, 1)  # [B, H, L+R]
    scores = torch.bmm(query, rows.mT)  # [B, H, S]
    if lengths is not None:
        unseen = torch.arange(rows.shape[1], device=q.device) >= lengths[:, None]
        scores = scores.masked_fill(unseen[:, None], float("-inf"))
    weights = torch.softmax(scores, -1)
    latent = torch.bmm(weights, rows[..., :L]).transpose(0, 1)  # [H, B, L]
    return torch.bmm(latent, kv_b[:, nope:].mT).transpose(0, 1)


def attend(q: Tensor, pool: Tensor, kv_b: Tensor, step: AttentionMetadata) -> Tensor:
    """All rows of a step: q [N, H, nope+R] over pool [pages, page, L+R] → [N, H, V].

    Rows of one token are absorbed together with those of similar length, longer ones materialised
    one by one; a row's own length decides which. Tokens of no row give zeros.
    """
    H, V = kv_b.shape[0], kv_b.shape[1] - (q.shape[-1] - (pool.shape[-1] - kv_b.shape[-1]))
    where, parts = [], []
    for row in step.extend:
        rows = read_rows(pool, row.pages, row.total)
        where.append(row.tokens)
        parts.append(attend_materialised(q[row.tokens], rows, kv_b, row.context_len))
    for group in step.decode:
        where.append(group.tokens)
        rows = read_rows(pool, group.pages, group.longest, group.beyond)
        lengths = None if group.beyond is None else group.lengths
        parts.append(attend_absorbed(q[group.tokens], rows, kv_b, lengths))
    if len(parts) == 1 and parts[0].shape[0] == q.shape[0]:
        return parts[0]
    o = q.new_zeros(q.shape[0], H, V, dtype=compute_dtype(q))
    for tokens, part in zip(where, parts, strict=True):
        o[tokens] = part
    return o
