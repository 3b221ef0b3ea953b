"""The affine view: any stretch of tokens acts on the state as S' = S M^T + b (architecture 5).

Value-first storage; per head M [K, K] is shared by all V value rows and b is [V, K].

    one token    M = (I - beta k k^T) diag(e^g)           b = beta v k^T
    one chunk    M = diag(e^G_C) - K_out^T W              b = U^T K_out
    first, then second    (M_2 M_1,  b_1 M_2^T + b_2)     associative, NOT commutative

So pieces may be computed apart and merged, but tokens may not be reordered, and no state in the
middle can be inferred from its neighbours: that is why a KDA prefix needs checkpoints.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.chunked import chunk_terms
from kernels.numerics import compute_dtype


class AffineMap(NamedTuple):
    """S [..., V, K] → S M^T + b, with M [..., K, K] and b [..., V, K]."""

    M: Tensor
    b: Tensor

    def apply(self, S: Tensor) -> Tensor:
        """The state after this stretch, [..., V, K]."""
        return S @ self.M.mT + self.b

    def then(self, later: AffineMap) -> AffineMap:
        """This stretch followed by `later`."""
        return AffineMap(later.M @ self.M, self.b @ later.M.mT + later.b)


def identity_map(like: AffineMap) -> AffineMap:
    """The map of no tokens: (I, 0), in the shapes of `like`."""
    eye = torch.eye(like.M.shape[-1], dtype=like.M.dtype, device=like.M.device)
    return AffineMap(eye.expand_as(like.M), torch.zeros_like(like.b))


def token_map(k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> AffineMap:
    """The map of single tokens. k, g [..., K]; v [..., V]; beta [...]; k L2-normalised."""
    dtype = compute_dtype(k)
    k, v, g, beta = (x.to(dtype) for x in (k, v, g, beta))
    written = beta[..., None] * k
    eye = torch.eye(k.shape[-1], dtype=dtype, device=k.device)
    M = (eye - written[..., :, None] * k[..., None, :]) * g.exp()[..., None, :]
    return AffineMap(M, v[..., :, None] * written[..., None, :])


def chunk_map(k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> AffineMap:
    """The map of a whole stretch of T tokens per head, T any number.

    k, g [T, H, K]; v [T, H, V]; beta [T, H]. Returns M [H, K, K] and b [H, V, K].
    """
    T = k.shape[0]
    pad = (1 << (T - 1).bit_length()) - T
    dtype = compute_dtype(k)
    k, v, g, beta = (
        F.pad(x.to(dtype).movedim(0, -2), (0, 0, 0, pad)).contiguous()
        for x in (k, v, g, beta.unsqueeze(-1))
    )
    terms = chunk_terms(torch.zeros_like(k), k, v, g, beta.squeeze(-1))
    W = terms.solve @ terms.k_in
    U = terms.solve @ terms.v
    return AffineMap(torch.diag_embed(terms.decay[:, 0]) - terms.k_out.mT @ W, U.mT @ terms.k_out)
