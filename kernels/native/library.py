"""Whether the native operators are wanted, whether they can be had, and the operators.

KIMI_MINI_NATIVE=1 makes the choice "auto" take them, 0 switches them off; without it they run only
where the backend is asked for by name.
"""

from __future__ import annotations

import functools
import os
from types import ModuleType

import torch
from torch import Tensor

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
    _register_fakes()
    return None


def operators() -> ModuleType:
    """torch.ops.kda_native. Raises RuntimeError, with the reason, where they are missing."""
    reason = missing()
    if reason is not None:
        raise RuntimeError(f"native operators are not available: {reason}")
    return torch.ops.kda_native


def _register_fakes() -> None:
    @torch.library.register_fake("kda_native::kda_scan")
    def _(q, k, v, g, beta, S0, query_start, export_rows, export_after, scale):
        exported = S0.new_empty(len(export_rows), *S0.shape[1:])
        return S0.new_empty(v.shape), torch.empty_like(S0), exported

    @torch.library.register_fake("kda_native::kda_rows_")
    def _(qkv, gate, beta, conv_weight, A_log, dt_bias, lower_bound, recurrent, *_rest) -> Tensor:
        return recurrent.new_empty(qkv.shape[0], *recurrent.shape[1:3])
