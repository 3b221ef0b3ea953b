"""Operands of a KDA scan that make mistakes visible, by the kind of their gates.

A random state under random gates forgets within a few tokens, and then every test of carrying,
cutting or restoring passes whatever the code does. These cases keep state alive where they should
(`slow`, `mixed`, `equal keys`), kill it where the arithmetic is in danger (`saturated`,
`unbounded`), and take K, V and H different, so that a transposed state is a shape error.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.numerics import l2_normalise


class ScanCase(NamedTuple):
    """Arguments of a KDA scan in its order: q, k, g [N, H, K]; v [N, H, V]; beta [N, H];
    S0 [B, H, V, K]; query_start [B+1]."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    S0: Tensor
    query_start: list[int]

    @property
    def tokens(self) -> tuple[Tensor, ...]:
        """The operands that have one row a token: q, k, v, g, beta."""
        return self[:5]

    def to(self, dtype: torch.dtype) -> ScanCase:
        """The same numbers in another dtype."""
        return ScanCase(*(x.to(dtype) for x in self[:6]), self.query_start)

    def piece(self, first: int, last: int, S0: Tensor) -> ScanCase:
        """Tokens first..last of a one-row case as a case of its own, from state S0."""
        return ScanCase(*(x[first:last] for x in self.tokens), S0, [0, last - first])

    def row(self, r: int) -> ScanCase:
        """Row r alone."""
        first, last = self.query_start[r : r + 2]
        return self.piece(first, last, self.S0[r : r + 1])


def _slow(u: Tensor) -> Tensor:
    return -0.02 * u


def _mixed(u: Tensor) -> Tensor:
    """Half of the channels as `slow`, half from nothing down to -5 (architecture 12)."""
    fast = torch.arange(u.shape[-1]) % 2 == 1
    return torch.where(fast, -5 * u**3, -0.02 * u)


def _saturated(u: Tensor) -> Tensor:
    return torch.full_like(u, -5.0)


def _unbounded(u: Tensor) -> Tensor:
    """Slow, but one gate in twenty at -100: an fp32 running sum would lose the slow ones."""
    return torch.where(u < 0.05, -100.0, -0.02 * u)


def _frozen(u: Tensor) -> Tensor:
    return torch.full_like(u, -1e-4)


GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "slow": _slow,
    "mixed": _mixed,
    "saturated": _saturated,
    "unbounded": _unbounded,
    "equal keys": _frozen,
}


def scan_case(
    gates: str,
    lengths: Sequence[int],
    *,
    H: int = 3,
    K: int = 16,
    V: int = 24,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> ScanCase:
    """Rows of the given lengths with gates of one kind of `GATES`, each behind a random state.

    slow: written weakly too, for strong writes wipe a small state out as surely as decay does.
    equal keys: every key is one unit vector plus 1e-3 of noise, written with beta near 1 and almost
    never forgotten, where powers of the triangular matrix explode. Drawn in float64 and rounded.
    """
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=random, dtype=torch.float64)

    N = sum(lengths)
    equal = gates == "equal keys"
    common = l2_normalise(normal(1, H, K)) if equal else 0.0
    return ScanCase(
        l2_normalise(normal(N, H, K)).to(dtype),
        l2_normalise(common + (1e-3 if equal else 1.0) * normal(N, H, K)).to(dtype),
        normal(N, H, V).to(dtype),
        GATES[gates](uniform(N, H, K)).to(dtype),
        (1 - 0.05 * uniform(N, H) if equal else _write_strength(gates, normal(N, H))).to(dtype),
        normal(len(lengths), H, V, K).to(dtype),
        [0, *itertools.accumulate(lengths)],
    )


def _write_strength(gates: str, logits: Tensor) -> Tensor:
    return torch.sigmoid(logits - 3 if gates == "slow" else logits)


def relative_error(got: Tensor, truth: Tensor) -> float:
    """max|got - truth| / max|truth| in float64 (decision 9); infinite if `got` is not finite."""
    return _ratio(got, truth, lambda x: x.abs().max())


def root_mean_square_error(got: Tensor, truth: Tensor) -> float:
    """rms(got - truth) / rms(truth) in float64 (decision 11); infinite if `got` is not finite."""
    return _ratio(got, truth, lambda x: x.square().mean().sqrt())


def _ratio(got: Tensor, truth: Tensor, size: Callable[[Tensor], Tensor]) -> float:
    if got.shape != truth.shape:
        raise ValueError(f"shapes {[*got.shape]} and {[*truth.shape]} cannot be compared")
    if not got.numel():
        return 0.0
    got, truth = got.detach().double(), truth.detach().double()
    if not bool(got.isfinite().all()):
        return float("inf")
    return float(size(got - truth) / size(truth).clamp(min=1e-30))
