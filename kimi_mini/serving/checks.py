"""What is asked of numbers at the door, said the same way everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from kernels.packing import integers


def check_count(name: str, value: Any, least: int = 1) -> int:
    """The value as an int of at least `least`; ValueError, naming it, if it is none. A bool is
    none."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return int(value)


def check_ids(what: str, ids: Sequence[int], vocab: int) -> list[int]:
    """The ids, each in 0..vocab-1; ValueError if not. what: the name of one of them."""
    if getattr(ids, "ndim", 1) != 1:  # an array of more is a list of lists, and long to print
        raise ValueError(f"{what}s must be integers along 1 axis, got shape {[*ids.shape]}")
    ids = integers(f"{what}s", ids)
    for token in ids:
        if not 0 <= token < vocab:
            raise ValueError(f"{what} {token} is not in this model's vocabulary, 0..{vocab - 1}")
    return ids
