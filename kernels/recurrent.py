"""KDA, one token at a time: the delta rule with per-channel decay (architecture 3.6).

Per head, with alpha = e^g and the state S [V, K] stored value-first:

    decay   S~  = S diag(alpha)                 column d, the key channel, is scaled by alpha[d]
    delta   u   = beta (v - S~ k)               the read uses the DECAYED state
    write   S'  = S~ + u k^T
    read    o   = S' q * scale                  the read uses the NEW state

`kda_step` is decode: B rows, one token each. `kda_token_scan` runs it along packed rows; it is the
slow twin of the chunk form and can export after any token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.numerics import compute_dtype
from kernels.packing import Export, check_exports, check_scan_shapes, row_lengths


class ScanResult(NamedTuple):
    """o [N, H, V] read-outs; S [B, H, V, K] final states; exported [E, H, V, K] in call order."""

    o: Tensor
    S: Tensor
    exported: Tensor


def kda_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """One token for each of B rows.

    q, k, g [B, H, K]; v [B, H, V]; beta [B, H]; S [B, H, V, K]; q and k already L2-normalised.
    scale defaults to K^-0.5. Returns (o [B, H, V], S' [B, H, V, K]) in the dtype of S.
    Nothing is changed in place. A row gets the same bits whatever rows are beside it.
    """
    # no torch.bmm: with a single column it takes five times as long, and its bits vary with B
    dtype = S.dtype
    scale = S.shape[-1] ** -0.5 if scale is None else scale
    q, k, v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
    key = k.unsqueeze(-2)  # [B, H, 1, K]
    decayed = (S * g.exp().unsqueeze(-2)).contiguous()
    u = beta.unsqueeze(-1) * (v - (decayed * key).sum(-1))  # [B, H, V]
    S = torch.addcmul(decayed, u.unsqueeze(-1), key)
    return (S * (q * scale).unsqueeze(-2)).sum(-1), S


def kda_token_scan(
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
    """`kda_step` along packed rows; arguments and results as in `chunked.kda_chunk_scan`.

    All rows advance together, so the loop is as long as the longest row. Exports may fall after
    any token.
    """
    check_scan_shapes(q, k, v, g, beta, S0, query_start)
    starts, lengths = row_lengths(query_start, q.shape[0])
    check_exports(exports, lengths, alignment=1)
    order = sorted(range(len(lengths)), key=lambda r: -lengths[r])
    index = torch.tensor(order, device=q.device, dtype=torch.long)
    S = S0.to(compute_dtype(q))[index]
    done: list[Tensor] = []  # final states of finished rows, shortest row first
    outputs: list[Tensor] = []
    tokens: list[int] = []
    exported: dict[Export, Tensor] = {}
    wanted = set(exports)
    for t in range(max(lengths, default=0)):
        active = sum(length > t for length in lengths)
        if active < S.shape[0]:
            done.append(S[active:])
            S = S[:active]
        at = [starts[r] + t for r in order[:active]]
        rows = slice(at[0], at[0] + 1) if active == 1 else torch.tensor(at, device=q.device)
        o, S = kda_step(q[rows], k[rows], v[rows], g[rows], beta[rows], S, scale)
        outputs.append(o)
        tokens += at
        for i, r in enumerate(order[:active]):
            if (r, t + 1) in wanted:
                exported[Export(r, t + 1)] = S[i]
    S = torch.cat([S, *reversed(done)])
    o = torch.cat([v.new_empty(0, *v.shape[1:], dtype=S.dtype), *outputs])
    return ScanResult(
        o[torch.tensor(tokens, device=q.device, dtype=torch.long).argsort()],
        S[index.argsort()],
        stack_exports(exported, exports, S),
    )


def stack_exports(found: dict[Export, Tensor], exports: Sequence[Export], like: Tensor) -> Tensor:
    """States [E, ...] in the order of `exports`; an empty tensor of like's row shape if none."""
    if not exports:
        return like.new_empty(0, *like.shape[1:])
    return torch.stack([found[export] for export in exports])
