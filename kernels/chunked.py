"""KDA in chunks of C tokens: the same map as the recurrence, as matrix products (architecture 4.1).

Inside a chunk with incoming state S_0 let G_i be the inclusive sum of g from the chunk's start,
kappa_ij = sum_d k_id k_jd e^(G_id - G_jd), and rows stacked into K, V, Q:

    L_ij = beta_i kappa_ij  for j < i       T = (I + L)^-1       A as kappa with q_i, diagonal kept
    N   = T diag(beta) (V - (K e^G) S_0)    the corrections u_j of the whole chunk
    O   = scale [ (Q e^G) S_0 + A N ]
    S_C = diag(e^G_C) S_0 + (K e^(G_C - G))^T N

Decays without overflow, for ANY gate. The true weights e^(G_i - G_j), j <= i, are at most 1, but
split as e^(G_i) e^(-G_j) the second factor leaves float32 once a chunk decays by e^88. Here a chunk
is halved again and again: for a block of 2s tokens, with R = G at the last row of its first half,

    rows i of the second half against rows j of the first:   e^(G_i - R) * e^(R - G_j)

both factors are at most 1, and nothing later than row i is read, so causality holds to the bit.
On the way up T grows by the block inverse, T_21 = -T_22 L_21 T_11. (Doubling powers of L instead
would lose everything with nearly equal keys: entries of T stay below 1, powers of L do not.)

G is summed in float64: with an unbounded gate a float32 sum costs 1e-5 (decision 8).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from kernels.numerics import compute_dtype
from kernels.packing import Export, check_exports, check_scan_shapes, row_lengths
from kernels.recurrent import ScanResult, stack_exports

# Elements of one [chunks*H, C, K] operand that are worked on together: about half a megabyte in
# float32, so that a group of chunks stays in a core's own cache. For widths that models have it
# changes no bit of the result; for odd ones (K = 17, V = 1) a product may pick another path.
_GROUP_ELEMENTS = 1 << 17


class ChunkTerms(NamedTuple):
    """What a chunk contributes whatever its incoming state; leading axis: chunks * heads."""

    q_in: Tensor  # [., C, K]  Q e^G * scale          reads S_0
    k_in: Tensor  # [., C, K]  K e^G                  reads S_0
    k_out: Tensor  # [., C, K]  K e^(G_C - G)         writes S_C
    decay: Tensor  # [., 1, K]  e^G_C
    attn: Tensor  # [., C, C]  A * scale, lower triangle with diagonal
    solve: Tensor  # [., C, C]  T diag(beta), lower triangle
    v: Tensor  # [., C, V]


def chunk_terms(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> ChunkTerms:
    """Everything of n chunks that does not depend on the incoming state, heads folded into n.

    q (already scaled), k, g [n, C, K]; v [n, C, V]; beta [n, C]; contiguous; C a power of two.
    A token with k = 0, beta = 0, g = 0 is padding: it changes nothing.
    """
    n, C, K = k.shape
    dtype = q.dtype
    G = g.double().cumsum(1)
    attn = (q * k).sum(-1).view(n * C, 1, 1)
    inverse = torch.ones_like(attn)
    half = 1
    while half < C:
        Gs, qs, ks = (x.view(-1, 2, half, K) for x in (G, q, k))
        R = Gs[:, 0, -1:]
        later = (Gs[:, 1] - R).to(dtype).exp()
        earlier = (R - Gs[:, 0]).to(dtype).exp() * ks[:, 0]
        written = later * ks[:, 1] * beta.reshape(-1, 2, half, 1)[:, 1]
        cross_attn = torch.bmm(later * qs[:, 1], earlier.mT)
        cross = torch.bmm(written, earlier.mT)
        first, second = inverse.view(-1, 2, half, half).unbind(1)
        inverse = _lower_blocks(first, -torch.bmm(second, torch.bmm(cross, first)), second)
        first, second = attn.view(-1, 2, half, half).unbind(1)
        attn = _lower_blocks(first, cross_attn, second)
        half *= 2
    since_start = G.to(dtype).exp()
    to_end = (G[:, -1:] - G).to(dtype).exp()
    return ChunkTerms(
        q_in=q * since_start,
        k_in=k * since_start,
        k_out=k * to_end,
        decay=since_start[:, -1:],
        attn=attn,
        solve=inverse * beta.unsqueeze(1),
        v=v,
    )


def _lower_blocks(first: Tensor, cross: Tensor, second: Tensor) -> Tensor:
    """[[first, 0], [cross, second]] for square blocks [m, s, s] → [m, 2s, 2s]."""
    s = first.shape[-1]
    return torch.cat([F.pad(first, (0, s)), torch.cat([cross, second], -1)], -2)


def carry(terms: ChunkTerms, S: Tensor) -> tuple[Tensor, Tensor]:
    """Take states S [n, V, K] through one chunk each → (read-outs [n, C, V], states [n, V, K])."""
    N = torch.bmm(terms.solve, torch.baddbmm(terms.v, terms.k_in, S.mT, alpha=-1))
    o = torch.baddbmm(torch.bmm(terms.q_in, S.mT), terms.attn, N)
    return o, torch.baddbmm(S * terms.decay, N.mT, terms.k_out)


class Piece(NamedTuple):
    """Chunk number `column` of the sorted rows first..last, chunks at..at+last-first of a group."""

    column: int
    first: int
    last: int
    at: int


def kda_chunk_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    S0: Tensor,
    query_start: Tensor | Sequence[int],
    exports: Sequence[Export] = (),
    scale: float | None = None,
    kernel_chunk: int = 16,
) -> ScanResult:
    """KDA over packed rows, chunk by chunk; chunks restart at every row's start.

    q, k, g [N, H, K] (q and k L2-normalised, g natural-log decays, finite, <= 0); v [N, H, V];
    beta [N, H]; S0 [B, H, V, K] initial states; query_start [B+1]; kernel_chunk any positive
    number. scale defaults to K^-0.5. Works in float32, or in float64 if q is float64.
    exports: states wanted inside the pass, at multiples of kernel_chunk from the row's start or at
    its end; asking for them does not change the computation.
    Returns ScanResult. Differentiable; changes nothing in place; memory O(N).

    A row cut at multiples of kernel_chunk and resumed gives the same bits as in one piece.
    Raises ValueError for disagreeing shapes, a bad query_start or an export out of place.
    """
    check_scan_shapes(q, k, v, g, beta, S0, query_start)
    if kernel_chunk < 1:
        raise ValueError(f"kernel_chunk must be at least 1, got {kernel_chunk}")
    starts, lengths = row_lengths(query_start, q.shape[0])
    check_exports(exports, lengths, kernel_chunk)
    N, H, K = q.shape
    dtype = compute_dtype(q)
    scale = K**-0.5 if scale is None else scale
    q, k, v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
    # Longest row first: the rows that still have a chunk number c are then the first few.
    order = sorted(range(len(lengths)), key=lambda r: -lengths[r])
    chunks_of = [-(-lengths[r] // kernel_chunk) for r in order]
    wanted = set(exports)
    index = torch.tensor(order, device=q.device, dtype=torch.long)
    S = S0.to(dtype)[index].contiguous()
    done: list[Tensor] = []  # final states of finished rows, shortest first
    fresh: list[Tensor] = []  # states after the current column, as far as it has been computed
    outputs: list[Tensor] = []
    where: list[tuple[int, int]] = []  # (first token, tokens) of each chunk, in order of outputs
    exported: dict[Export, Tensor] = {}
    width = 1 << (kernel_chunk - 1).bit_length()
    per_group = max(1, _GROUP_ELEMENTS // max(1, H * width * max(K, v.shape[-1])))
    for pieces in _groups(chunks_of, per_group):
        spans = []
        for column, first, last, _ in pieces:
            offset = column * kernel_chunk
            spans += [
                (starts[r] + offset, min(kernel_chunk, lengths[r] - offset))
                for r in order[first : last + 1]
            ]
        where += spans
        qc, kc, vc, gc = (_cut(x, spans, width) for x in (q, k, v, g))
        terms = chunk_terms(qc * scale, kc, vc, gc, _cut(beta.unsqueeze(-1), spans, width)[..., 0])
        for column, first, last, at in pieces:
            active = sum(chunks > column for chunks in chunks_of)
            if active < S.shape[0]:
                done.append(S[active:])
                S = S[:active]
            mine = slice(at * H, (at + last + 1 - first) * H)
            before = S[first : last + 1].reshape(-1, *S.shape[2:])
            o, after = carry(ChunkTerms(*(x[mine] for x in terms)), before)
            after = after.view(-1, *S.shape[1:])
            outputs.append(o.view(-1, H, width, v.shape[-1]))
            fresh.append(after)
            for i, r in enumerate(order[first : last + 1]):
                export = Export(r, min((column + 1) * kernel_chunk, lengths[r]))
                if export in wanted:
                    exported[export] = after[i]
            if last + 1 == active:
                S = torch.cat(fresh) if len(fresh) > 1 else after
                fresh = []
    S = torch.cat([S, *reversed(done)])
    return ScanResult(
        _uncut(outputs, where, N, v.new_empty(0, H, v.shape[-1])),
        S[index.argsort()],
        stack_exports(exported, exports, S),
    )


def _groups(chunks_of: Sequence[int], per_group: int) -> Iterator[list[Piece]]:
    """All chunks, column by column (rows sorted longest first), in groups of at most per_group."""
    group: list[Piece] = []
    size = 0
    for column in range(max(chunks_of, default=0)):
        active = sum(chunks > column for chunks in chunks_of)
        first = 0
        while first < active:
            count = min(active - first, per_group - size)
            group.append(Piece(column, first, first + count - 1, size))
            first += count
            size += count
            if size == per_group:
                yield group
                group, size = [], 0
    if group:
        yield group


def _cut(x: Tensor, spans: Sequence[tuple[int, int]], width: int) -> Tensor:
    """Tokens [N, H, F] → chunks [len(spans)*H, width, F], short chunks filled up with zeros."""
    n = len(spans)
    start = spans[0][0]
    if all(span == (start + i * width, width) for i, span in enumerate(spans)):
        chunks = x[start : start + n * width]
    else:
        chunks = torch.cat(
            [F.pad(x[at : at + count], (0, 0, 0, 0, 0, width - count)) for at, count in spans]
        )
    return rearrange(chunks, "(n c) h f -> (n h) c f", n=n).contiguous()


def _uncut(
    outputs: Sequence[Tensor], where: Sequence[tuple[int, int]], num_tokens: int, empty: Tensor
) -> Tensor:
    """Chunks [., H, width, V] with their token spans → tokens [N, H, V]."""
    if not outputs:
        return empty
    padded = torch.cat([o.transpose(1, 2) for o in outputs])  # [chunks, width, H, V]
    width = padded.shape[1]
    if all(at == i * width for i, (at, _) in enumerate(where)):
        return padded.flatten(0, 1)[:num_tokens]
    ordered = sorted(range(len(where)), key=lambda i: where[i])
    return torch.cat([padded[i, : where[i][1]] for i in ordered])
