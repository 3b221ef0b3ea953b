"""Attention Residuals: every sublayer reads a learned mixture of earlier blocks (architecture 2).

Sources are the bank (the embedding, then the sum of all sublayer outputs of each finished block)
and the running prefix p; `kernels.attn_res` has the formula. There is no ordinary residual: a
mixture feeds its sublayer and is never added back; p holds only sublayer outputs of the current
block. All of it is per token: no state.

The whole stream is float32 (float64), also in a bf16 model: sublayers read it through a norm that
casts, and rounding p after every sum is what would cost most. A model without AttnRes uses the same
stream with an empty bank, where the mixture is p itself.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from kernels.attn_res import inverse_rms
from kernels.layer_functions import TORCH, LayerFunctions
from kernels.numerics import compute_dtype
from kimi_mini.layers.norm import RMSNorm
from kimi_mini.layers.parameters import parameter, unfilled


class Room(NamedTuple):
    """Memory for the bank of a whole call: entries [N, blocks, hidden], inverse rms [N, blocks]."""

    bank: Tensor
    inverse_rms: Tensor


class ResidualStream(NamedTuple):
    """What flows between layers, for N tokens; all of it float32 (float64)."""

    prefix: Tensor | None  # [N, hidden]; None just after a block has opened
    bank: Tensor  # [N, m, hidden] finished sources
    inverse_rms: Tensor  # [N, m] of the bank, so that a frozen source is measured once
    room: Room | None = None  # what the bank is the beginning of; None: every block makes a new one

    def open_block(self, eps: float) -> ResidualStream:
        """Freeze the prefix as a new source; the next block starts from nothing."""
        rms = inverse_rms(self.prefix, eps)
        if self.room is None:
            bank = torch.cat([self.bank, self.prefix.unsqueeze(1)], 1)
            return ResidualStream(None, bank, torch.cat([self.inverse_rms, rms.unsqueeze(1)], 1))
        m = self.bank.shape[1]
        self.room.bank[:, m] = self.prefix
        self.room.inverse_rms[:, m] = rms
        filled = (part[:, : m + 1] for part in self.room)
        return ResidualStream(None, *filled, self.room)

    def add(self, output: Tensor) -> ResidualStream:
        """Add a sublayer's output to the prefix."""
        p, bank, rms, room = self
        p = output.to(bank.dtype) if p is None else p + output
        return ResidualStream(p, bank, rms, room)

    def at(self, tokens: Tensor) -> ResidualStream:
        """The stream of some of the tokens, to be read only."""
        return ResidualStream(self.prefix[tokens], self.bank[tokens], self.inverse_rms[tokens])


def start_stream(embedding: Tensor, blocks: int) -> ResidualStream:
    """The stream before the first layer: the embedding [N, hidden] as prefix, nothing banked.

    blocks: how many will be opened. Their memory is taken now, once, unless gradients are on: a
    bank that is written in place would lose what the backward pass needs.
    """
    prefix = embedding.to(compute_dtype(embedding))
    N, hidden = prefix.shape
    room = None
    if not torch.is_grad_enabled():
        room = Room(prefix.new_empty(N, blocks, hidden), prefix.new_empty(N, blocks))
    bank, rms = room or (prefix.new_empty(N, 0, hidden), prefix.new_empty(N, 0))
    return ResidualStream(prefix, bank[:, :0], rms[:, :0], room)


class AttnResidual(nn.Module):
    """One reading point: the stream's mixture under a learned pseudo-query, then a norm."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = unfilled(width, dtype=dtype)
        self.proj = unfilled(width, dtype=dtype)

    def forward(
        self, stream: ResidualStream, norm: RMSNorm, functions: LayerFunctions = TORCH
    ) -> Tensor:
        """[N, hidden] in the activation dtype; one eps for sources and mixture."""
        p, bank, rms, _ = stream
        learned = parameter(self, "norm"), parameter(self, "proj")
        return functions.mix_norm(p, bank, rms, *learned, parameter(norm, "weight"), norm.eps)


class PlainResidual(nn.Module):
    """The reading point of a model without AttnRes: a norm of the prefix."""

    def forward(
        self, stream: ResidualStream, norm: RMSNorm, functions: LayerFunctions = TORCH
    ) -> Tensor:
        """[N, hidden] in the activation dtype."""
        return norm(stream.prefix, functions)
