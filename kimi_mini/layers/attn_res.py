"""Attention Residuals: every sublayer reads a learned mixture of earlier blocks (architecture 2).

    s_j = (c . x_j) / sqrt(mean(x_j^2) + eps)      c = norm * proj, the pseudo-query
    Mix = sum_j softmax(s)_j x_j                   no 1/sqrt(width); the values are the RAW sources

Sources are the bank (the embedding, then the sum of all sublayer outputs of each finished block)
and the running prefix p. There is no ordinary residual: a mixture feeds its sublayer and is never
added back; p holds only sublayer outputs of the current block. All of it is per token: no state.

The whole stream is float32 (float64), also in a bf16 model: sublayers read it through a norm that
casts, and rounding p after every sum is what would cost most. A model without AttnRes uses the same
stream with an empty bank, where Mix is p itself.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from kernels.numerics import compute_dtype
from kimi_mini.layers.parameters import unfilled


class ResidualStream(NamedTuple):
    """What flows between layers, for N tokens; all of it float32 (float64)."""

    prefix: Tensor | None  # [N, hidden]; None just after a block has opened
    bank: Tensor  # [N, m, hidden] finished sources
    inverse_rms: Tensor  # [N, m] of the bank, so that a frozen source is measured once

    def open_block(self, eps: float) -> ResidualStream:
        """Freeze the prefix as a new source; the next block starts from nothing."""
        source = self.prefix.unsqueeze(1)
        return ResidualStream(
            None,
            torch.cat([self.bank, source], 1),
            torch.cat([self.inverse_rms, inverse_rms(source, eps)], 1),
        )

    def add(self, output: Tensor) -> ResidualStream:
        """Add a sublayer's output to the prefix."""
        output = output.to(self.bank.dtype)
        return self._replace(prefix=output if self.prefix is None else self.prefix + output)

    def at(self, tokens: Tensor) -> ResidualStream:
        """The stream of some of the tokens."""
        return ResidualStream(*(part[tokens] for part in self))


def start_stream(embedding: Tensor) -> ResidualStream:
    """The stream before the first layer: the embedding [N, hidden] as prefix, nothing banked."""
    prefix = embedding.to(compute_dtype(embedding))
    empty = prefix.new_zeros(prefix.shape[0], 0, prefix.shape[1])
    return ResidualStream(prefix, empty, empty[..., 0])


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last axis."""
    return torch.rsqrt(x.square().mean(-1) + eps)


class AttnResidual(nn.Module):
    """One reading point: stream → mixture [N, hidden] in the dtype of the stream."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = unfilled(width, dtype=dtype)
        self.proj = unfilled(width, dtype=dtype)
        self.eps = eps

    def forward(self, stream: ResidualStream) -> Tensor:
        p, bank, bank_rms = stream
        if bank.shape[1] == 0:
            return p
        query = self.norm.to(p.dtype) * self.proj.to(p.dtype)
        own = (p @ query) * inverse_rms(p, self.eps)  # [N]
        scores = torch.cat([(bank @ query) * bank_rms, own.unsqueeze(1)], 1)
        weights = torch.softmax(scores, 1)  # [N, m+1]
        return torch.bmm(weights[:, None, :-1], bank).squeeze(1) + weights[:, -1:] * p


class PlainResidual(nn.Module):
    """The reading point of a model without AttnRes: the stream is the prefix."""

    def forward(self, stream: ResidualStream) -> Tensor:
        return stream.prefix
