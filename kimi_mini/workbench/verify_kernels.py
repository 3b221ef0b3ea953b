"""Kernel level: every form of the scan, and the convolution, against the loop in float64.

One packed batch holds the lengths where mistakes hide: none, one, two, three tokens, and one less,
exactly and one more than one and several kernel chunks. Exports lie at all multiples of the chunk
and at the ends of rows. Then rows are cut at random multiples of the chunk and carried on, which
must not change a bit, and at random places, which may cost rounding only.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence

import torch

from kernels.chunked import kda_chunk_scan
from kernels.native.operators import kda_scan
from kernels.packing import Export
from kernels.recurrent import ScanResult, kda_token_scan
from kernels.reference import kda_reference, short_conv_reference
from kernels.short_conv import short_conv
from kimi_mini.workbench.cases import GATES, ScanCase, relative_error, scan_case
from kimi_mini.workbench.verify import KERNEL, Check, Tolerance

Scan = Callable[..., ScanResult]


def kernel_checks(
    backend: str, dtype: torch.dtype, seed: int, heads: int, width: int
) -> Iterator[Check]:
    """Checks of a backend's scans: at heads x width x width, and at K = 16, V = 24 on 3 heads.

    dtype: of the operands; states are float32, or float64 for float64 operands.
    """
    shapes = ({"H": 3, "K": 16, "V": 24}, {"H": heads, "K": width, "V": width})
    for gates in GATES:
        for form, scan, step in _forms(backend):
            errors: dict[str, float] = {}
            for shape in shapes:
                for quantity, error in _scan_errors(scan, step, gates, dtype, seed, shape):
                    errors[quantity] = max(error, errors.get(quantity, 0.0))
            yield from _checks(gates, form, errors, KERNEL[dtype][gates])
    errors = dict(_convolution_errors(dtype, seed, channels=heads * 3 * width))
    yield from _checks("convolution", "against its formula", errors, KERNEL[dtype]["slow"])


def _forms(backend: str) -> Iterator[tuple[str, Scan, int]]:
    """(name, scan, tokens between places where it may export) of a backend's scans."""
    if backend == "reference":
        yield "reference", kda_reference, 1
        return
    for chunk in (16, 64):
        scan = functools.partial(kda_chunk_scan, kernel_chunk=chunk)
        yield f"chunks of {chunk}", scan, chunk
    yield "token loop", kda_token_scan, 1
    if backend == "native":
        yield "native scan", kda_scan, 1


def _checks(
    case: str, form: str, errors: dict[str, float], tolerance: Tolerance
) -> Iterator[Check]:
    for quantity, error in errors.items():
        yield Check("kernel", case, form, quantity, error, tolerance.of(quantity))


def row_lengths_around(chunk: int) -> list[int]:
    """Where chunked code goes wrong: nothing, less than a window, and around whole chunks."""
    return [0, 1, 2, 3, chunk - 1, chunk, chunk + 1, 2 * chunk, 3 * chunk - 1, 3 * chunk + 1]


def _scan_errors(
    scan: Scan, step: int, gates: str, dtype: torch.dtype, seed: int, shape: dict[str, int]
) -> Iterator[tuple[str, float]]:
    draw = random.Random(seed)
    lengths = row_lengths_around(max(step, 16))
    draw.shuffle(lengths)
    case = _wide_states(scan_case(gates, lengths, seed=seed, dtype=dtype, **shape))
    exports = [
        Export(r, offset)
        for r, T in enumerate(lengths)
        for offset in {*range(max(step, 16), T + 1, max(step, 16)), T} - {0}
    ]
    got, truth = scan(*case, exports), kda_reference(*case.to(torch.float64), exports)
    yield from zip(
        ("outputs", "recurrent", "exports"), map(relative_error, got, truth), strict=True
    )

    T = 5 * max(step, 16) + 3
    case = _wide_states(scan_case(gates, [T], seed=seed, dtype=dtype, **shape))
    whole, truth = scan(*case), kda_reference(*case.to(torch.float64))
    aligned = _in_pieces(scan, case, sorted(draw.sample(range(step, T, step), k=3)))
    yield "cuts", max(map(relative_error, aligned, whole))
    anywhere = _in_pieces(scan, case, sorted(draw.sample(range(1, T), k=5)))
    yield "outputs", relative_error(anywhere.o, truth.o)
    yield "recurrent", relative_error(anywhere.S, truth.S)


def _wide_states(case: ScanCase) -> ScanCase:
    wide = torch.float64 if case.q.dtype == torch.float64 else torch.float32
    return case._replace(S0=case.S0.to(wide))


def _in_pieces(scan: Scan, case: ScanCase, cuts: Sequence[int]) -> ScanResult:
    S, outputs = case.S0, []
    for first, last in zip([0, *cuts], [*cuts, case.query_start[-1]], strict=True):
        o, S, exported = scan(*case.piece(first, last, S))
        outputs.append(o)
    return ScanResult(torch.cat(outputs), S, exported)


def _convolution_errors(
    dtype: torch.dtype, seed: int, channels: int, width: int = 4
) -> Iterator[tuple[str, float]]:
    random_numbers = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random_numbers, dtype=torch.float64).to(dtype)

    lengths = row_lengths_around(16)
    query_start = [sum(lengths[:r]) for r in range(len(lengths) + 1)]
    x, weight, windows = (
        normal(query_start[-1], channels),
        normal(channels, width),
        normal(len(lengths), width - 1, channels),
    )
    exports = [Export(r, T) for r, T in enumerate(lengths) if T] + [Export(9, 1), Export(9, 2)]
    got = short_conv(x, weight, windows, query_start, exports)
    doubled = (t.double() for t in (x, weight, windows))
    truth = short_conv_reference(*doubled, query_start, exports)
    yield from zip(("outputs", "conv", "exports"), map(relative_error, got, truth), strict=True)

    whole = short_conv(x, weight, windows[:1], [0, len(x)])
    window, outputs = windows[:1], []
    cuts = sorted(random.Random(seed).sample(range(1, len(x)), k=5))
    for first, last in zip([0, *cuts], [*cuts, len(x)], strict=True):
        y, window, _ = short_conv(x[first:last], weight, window, [0, last - first])
        outputs.append(y)
    yield (
        "cuts",
        max(relative_error(torch.cat(outputs), whole.y), relative_error(window, whole.conv)),
    )
