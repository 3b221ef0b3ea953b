"""Causal depthwise short convolution with SiLU, and its window (architecture 3.2).

    y_t = SiLU( sum_j w[:, j] * x_(t - W + 1 + j) )      w[:, W-1] multiplies the current token

The conv state is the window of the last W-1 RAW inputs (before convolution and SiLU), oldest first.
The new window is the last W-1 of (old window ++ inputs), never of the inputs alone: a piece may be
shorter than the window. Taps are added one after the other, each product rounded, so that a token
gets the same bits in a long prefill, in any split of it and in decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.numerics import compute_dtype, silu
from kernels.packing import Export, check_exports, row_lengths


class ConvResult(NamedTuple):
    """y [N, D] outputs; conv [B, W-1, D] final windows; exported [E, W-1, D] in call order."""

    y: Tensor
    conv: Tensor
    exported: Tensor


def short_conv(
    x: Tensor,
    weight: Tensor,
    conv0: Tensor,
    query_start: Tensor | Sequence[int],
    exports: Sequence[Export] = (),
) -> ConvResult:
    """Convolve packed rows, each behind its own window.

    x [N, D] raw inputs; weight [D, W]; conv0 [B, W-1, D] windows in the dtype of x (zeros for a row
    that starts a sequence); query_start [B+1]; exports after any token.
    y is float32 (float64 for float64 x); windows keep the dtype of x. Differentiable, nothing in
    place. Raises ValueError for disagreeing shapes.
    """
    D, W = weight.shape
    starts, lengths = row_lengths(query_start, x.shape[0])
    check_exports(exports, lengths, alignment=1)
    if x.shape[1] != D or tuple(conv0.shape) != (len(lengths), W - 1, D):
        raise ValueError(
            f"with weight {[D, W]} and {len(lengths)} rows, x must be [N, {D}] and conv0 "
            f"{[len(lengths), W - 1, D]}; got {[*x.shape]} and {[*conv0.shape]}"
        )
    # every row behind its window: row r starts at starts[r] + r*(W-1)
    conv0 = conv0.to(x.dtype)
    pieces = [
        part
        for r, (start, length) in enumerate(zip(starts, lengths, strict=True))
        for part in (conv0[r], x[start : start + length])
    ]
    extended = torch.cat(pieces) if pieces else x
    offsets = [start + r * (W - 1) for r, start in enumerate(starts)]

    def window(row: int, after: int) -> Tensor:
        return extended[offsets[row] + after : offsets[row] + after + W - 1]

    if len(lengths) == 1:
        y = _taps(extended, weight, x.shape[0])
    else:
        count = max(0, extended.shape[0] - W + 1)
        everywhere = _taps(extended, weight, count)
        parts = [
            everywhere[at : at + length]
            for at, length in zip(offsets, lengths, strict=True)
            if length
        ]
        y = torch.cat(parts) if parts else everywhere[:0]
    return ConvResult(
        y,
        torch.stack([window(r, length) for r, length in enumerate(lengths)]) if lengths else conv0,
        torch.stack([window(r, after) for r, after in exports]) if exports else conv0[:0],
    )


def short_conv_step(x: Tensor, weight: Tensor, conv0: Tensor) -> tuple[Tensor, Tensor]:
    """One token for each of B rows: x [B, D], conv0 [B, W-1, D] → (y [B, D], conv [B, W-1, D])."""
    extended = torch.cat([conv0.to(x.dtype), x.unsqueeze(1)], 1)  # [B, W, D]
    return _taps(extended.transpose(0, 1), weight, 1)[0], extended[:, 1:]


def _taps(extended: Tensor, weight: Tensor, count: int) -> Tensor:
    """SiLU of the weighted sum of W neighbours along the first axis: [count+W-1, ..., D]."""
    dtype = compute_dtype(extended)
    extended = extended.to(dtype)
    taps = weight.to(dtype).unbind(-1)
    total = extended[:count] * taps[0]
    for j, tap in enumerate(taps[1:], 1):
        total = total + extended[j : j + count] * tap
    return silu(total)
