"""The native operators under the signatures of their torch twins.

    kda_scan      recurrent.kda_token_scan, chunked.kda_chunk_scan
    short_conv    short_conv.short_conv
    kda_rows      the core of a layer over slots, in place; its twin is gather, kda.kda_extend or
                  kda.kda_decode, scatter

None is differentiable.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.kda import KDAInputs, KDAWeights
from kernels.kda_metadata import RowGroup
from kernels.native.library import operators
from kernels.numerics import compute_dtype
from kernels.packing import Export, check_exports, check_scan_shapes, row_lengths
from kernels.recurrent import ScanResult
from kernels.short_conv import ConvResult

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def kda_scan(
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
    """The recurrence along packed rows; arguments and results as in `chunked.kda_chunk_scan`,
    exports after any token. Raises ValueError for disagreeing shapes."""
    check_scan_shapes(q, k, v, g, beta, S0, query_start)
    starts, lengths = row_lengths(query_start, q.shape[0])
    check_exports(exports, lengths, alignment=1)
    dtype = compute_dtype(q)
    return ScanResult(
        *operators().kda_scan(
            *(x.to(dtype) for x in (q, k, v, g, beta, S0)),
            [*starts, q.shape[0]],
            [export.row for export in exports],
            [export.offset for export in exports],
            q.shape[-1] ** -0.5 if scale is None else scale,
        )
    )


def short_conv(
    x: Tensor,
    weight: Tensor,
    conv0: Tensor,
    query_start: Tensor | Sequence[int],
    exports: Sequence[Export] = (),
) -> ConvResult:
    """Packed rows, each behind its own window; arguments and results as in `short_conv.short_conv`,
    for x in float32, bfloat16 or float64. Raises ValueError for disagreeing shapes."""
    starts, lengths = row_lengths(query_start, x.shape[0])
    check_exports(exports, lengths, alignment=1)
    return ConvResult(
        *operators().short_conv(
            x,
            weight,
            conv0.to(x.dtype),
            [*starts, x.shape[0]],
            [export.row for export in exports],
            [export.offset for export in exports],
        )
    )


def takes(inputs: KDAInputs, weights: KDAWeights) -> bool:
    """Whether `kda_rows` may run: nothing asks for gradients, and the activations have one dtype
    that it knows."""
    differentiated = torch.is_grad_enabled() and any(
        x.requires_grad for x in (*inputs, *weights[:3])
    )
    dtypes = {x.dtype for x in inputs}
    return not differentiated and len(dtypes) == 1 and dtypes <= {*DTYPES}


def kda_rows(
    inputs: KDAInputs,
    weights: KDAWeights,
    state: tuple[Tensor, Tensor] | None,
    rows: RowGroup,
) -> Tensor:
    """Rows of any length from their slots → o [N, H, V]; in place: the slots of the rows and of
    their exports. Rows of the sink, slot 0, read it and leave it as it is.

    state: recurrent [slots, H, V, K], float32 (float64 for float64 inputs), and conv
    [slots, W-1, D], in the dtype of the inputs, both contiguous inside a slot; None: every row
    starts from zeros and none is kept. Raises ValueError, before anything is written, for shapes,
    dtypes, strides or slots that do not fit.
    """
    if state is None:
        H, K = weights.dt_bias.shape
        D, W = weights.conv.shape
        sink = inputs.qkv.new_empty(1, H, D // H - 2 * K, K, dtype=compute_dtype(inputs.qkv))
        state = (sink, inputs.qkv.new_empty(1, W - 1, D))
        rows = rows._replace(
            slots=torch.zeros_like(rows.slots),
            resumed=[False] * len(rows.resumed),
            exports=[],
            export_slots=rows.export_slots[:0],
        )
    return operators().kda_rows_(
        inputs.qkv,
        inputs.gate,
        inputs.beta,
        weights.conv,
        weights.A_log,
        weights.dt_bias,
        weights.lower_bound,
        *state,
        rows.query_start,
        rows.slots,
        rows.resumed,
        [export.row for export in rows.exports],
        [export.offset for export in rows.exports],
        rows.export_slots,
    )
