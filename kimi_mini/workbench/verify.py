"""Checks of one computation against another: what is compared, what is allowed, how it is shown.

Chunks, the token loop, pieces over slots and pages, decode: all are one function of the tokens.
A check names the two that were held against each other, a quantity, their error and the tolerance
that decisions 8 to 11 state for it. `verify_kernels` and `verify_stack` make them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

# cuts: outputs and states of rows cut at multiples of the kernel chunk, against whole rows
QUANTITIES = ("outputs", "recurrent", "conv", "latent", "exports", "cuts")


class Tolerance(NamedTuple):
    """Relative errors allowed: of outputs, of states (exports are states), and of cut rows."""

    outputs: float
    states: float
    cuts: float = 0.0

    def of(self, quantity: str) -> float:
        """The tolerance of one of QUANTITIES."""
        return {"outputs": self.outputs, "cuts": self.cuts}.get(quantity, self.states)


class Check(NamedTuple):
    """One quantity of one comparison."""

    level: str  # kernel, layer, model
    case: str  # mostly the kind of gates
    form: str  # what was held against what
    quantity: str
    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        """Within the tolerance; an error that is not a number is not."""
        return self.error <= self.tolerance


# Decision 9, by the kind of gates. In bf16 the operands are only read in bf16, so it holds as well.
_ORDINARY, _HARD = Tolerance(1e-6, 5e-6), Tolerance(1e-5, 1e-5)
_FLOAT32 = dict.fromkeys(("slow", "mixed", "saturated"), _ORDINARY) | dict.fromkeys(
    ("unbounded", "equal keys"), _HARD
)
# float64: sums of gates near -600 are known to 1e-13
_FLOAT64 = dict.fromkeys(_FLOAT32, Tolerance(1e-12, 1e-12))
KERNEL = {torch.float32: _FLOAT32, torch.bfloat16: _FLOAT32, torch.float64: _FLOAT64}

# The whole model: decision 9, and for bf16 decision 11, by root mean square. One layer is given
# what decision 9 gives a kernel in a hard case, for the roundings of its matrix products.
MODEL = {
    torch.float32: Tolerance(5e-5, 5e-5),
    torch.float64: Tolerance(1e-10, 1e-10),
    torch.bfloat16: Tolerance(0.03, 0.03),
}
LAYER = MODEL | {torch.float32: _HARD}


def table(checks: Sequence[Check]) -> str:
    """One line per comparison: an error per quantity, `!` where it exceeds, and what is allowed
    of outputs and states. Cuts must be 0."""
    lines: dict[tuple[str, str, str], dict[str, Check]] = {}
    for check in checks:
        lines.setdefault(check[:3], {})[check.quantity] = check
    rows = [("level", "case", "form", *QUANTITIES, "allowed")]
    for names, found in lines.items():
        cells = (_cell(found.get(quantity)) for quantity in QUANTITIES)
        allowed = {check.tolerance for check in found.values() if check.tolerance}
        rows.append((*names, *cells, " / ".join(f"{error:.0e}" for error in sorted(allowed))))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _cell(check: Check | None) -> str:
    if check is None:
        return "-"
    return f"{check.error:.1e}".replace("0.0e+00", "0") + ("" if check.ok else " !")


def as_json(checks: Sequence[Check]) -> list[dict]:
    """Checks as JSON values; an error that is not finite becomes null."""
    return [
        check._asdict()
        | {"error": check.error if math.isfinite(check.error) else None}
        | {"ok": check.ok}
        for check in checks
    ]
