"""Whether the native operators can be had, and the operators.

They run wherever they are compiled already or can be; KIMI_MINI_NATIVE=0 in the environment
switches them off, for "auto" and by name.
"""

from __future__ import annotations

import functools
import os
import threading
from types import ModuleType

import torch

from kernels.native import fakes
from kernels.native.build import NotBuilt, build

SWITCH = "KIMI_MINI_NATIVE"
_one_at_a_time = threading.Lock()


def switched_off() -> bool:
    """Whether the environment says 0. Raises ValueError where it says neither 0 nor 1."""
    value = os.environ.get(SWITCH) or "1"
    if value not in ("0", "1"):
        raise ValueError(f"{SWITCH} must be 0 or 1, got {value!r}")
    return value == "0"


def missing() -> str | None:
    """Why there are no native operators; None if they are loaded, after a build if need be."""
    if switched_off():
        return f"switched off by {SWITCH}=0"
    with _one_at_a_time:
        return _load()


@functools.cache
def _load() -> str | None:
    try:
        built = build()
    except NotBuilt as error:
        return str(error)
    try:
        torch.ops.load_library(built.path)
    except OSError as error:
        return f"{built.path} cannot be loaded: {error}"
    fakes.register()
    return None


@functools.cache  # called a hundred times a step
def operators() -> ModuleType:
    """torch.ops.kda_native. Raises RuntimeError, with the reason, where they are missing."""
    reason = missing()
    if reason is not None:
        raise RuntimeError(f"native operators are not available: {reason}")
    return torch.ops.kda_native
