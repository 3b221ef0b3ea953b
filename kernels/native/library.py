"""Whether the native operators are wanted, whether they can be had, and the operators.

KIMI_MINI_NATIVE=1 makes the choice "auto" take them, 0 switches them off; without it they run only
where the backend is asked for by name.
"""

from __future__ import annotations

import functools
import os
from types import ModuleType

import torch

from kernels.native import fakes
from kernels.native.build import NotBuilt, build

SWITCH = "KIMI_MINI_NATIVE"


def wanted() -> bool | None:
    """The switch in the environment: True, False, or None where it is not set.

    Raises ValueError for a value that is neither 0 nor 1.
    """
    value = os.environ.get(SWITCH, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{SWITCH} must be 0 or 1, got {value!r}")
    return bool(int(value)) if value else None


def missing() -> str | None:
    """Why there are no native operators; None if they are loaded, after a build if need be."""
    if wanted() is False:
        return f"switched off by {SWITCH}=0"
    return _load()


@functools.cache
def _load() -> str | None:
    try:
        built = build()
        torch.ops.load_library(built.path)
    except NotBuilt as error:
        return str(error)
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
