"""Every form of the KDA recurrence under one signature, and how results are compared."""

import functools

import torch

from kernels.chunked import kda_chunk_scan
from kernels.native.operators import kda_scan
from kernels.packing import Export
from kernels.recurrent import ScanResult, kda_step, kda_token_scan
from kernels.reference import kda_reference
from kimi_mini.workbench.cases import ScanCase, relative_error


def step_scan(q, k, v, g, beta, S0, query_start, scale=None):
    """Decode: one `kda_step` a token, row after row."""
    outputs, finals = [v[:0].to(S0.dtype)], [S0[:0]]
    for r in range(len(query_start) - 1):
        S = S0[r : r + 1]
        for t in range(query_start[r], query_start[r + 1]):
            o, S = kda_step(*(x[t : t + 1] for x in (q, k, v, g, beta)), S, scale)
            outputs.append(o)
        finals.append(S)
    return ScanResult(torch.cat(outputs), torch.cat(finals), S0[:0])


def chunk(C):
    return functools.partial(kda_chunk_scan, kernel_chunk=C)


FORMS = {
    "reference": kda_reference,
    "token scan": kda_token_scan,
    "decode steps": step_scan,
    "chunks of 1": chunk(1),
    "chunks of 2": chunk(2),
    "chunks of 16": chunk(16),
    "chunks of 64": chunk(64),
    "native scan": kda_scan,
}
# what may run over any packed batch, the references being too slow for long ones
FAST = {name: FORMS[name] for name in ("token scan", "chunks of 16", "chunks of 64", "native scan")}

# (outputs, states) of a float32 scan against float64, relative. Decision 9 allows states 5e-6 and
# 1e-5 for the last two; measured over K up to 128 and 513 tokens: chunks at most 8e-7 and 6e-7,
# loops 3e-7 and 1e-6, except that a loop under one constant gate repeats the same rounding of e^g
# at every token and so drifts by 2e-8 a token.
TOLERANCE = {
    "slow": (1e-6, 2e-6),
    "mixed": (1e-6, 2e-6),
    "saturated": (1e-6, 2e-6),
    "unbounded": (1e-6, 2e-6),
    "equal keys": (1e-5, 1e-5),
}


def truth(case: ScanCase, exports: tuple[Export, ...] = ()) -> ScanResult:
    """The recurrence in float64, from the very numbers the case holds."""
    return kda_reference(*case.to(torch.float64), exports)


def assert_near(got: ScanResult, true: ScanResult, gates: str) -> None:
    """Outputs, final states and exports within the tolerance of these gates."""
    outputs, states = TOLERANCE[gates]
    errors = [relative_error(a, b) for a, b in zip(got, true, strict=True)]
    assert errors[0] <= outputs, errors
    assert errors[1] <= states, errors
    assert errors[2] <= states, errors


def assert_same_bits(got: ScanResult, expected: ScanResult) -> None:
    for name in ScanResult._fields:
        assert torch.equal(getattr(got, name), getattr(expected, name)), name
