"""The float types a model may have, by name, and the rule of what stays float32."""

from __future__ import annotations

from types import MappingProxyType

import torch

DTYPES = MappingProxyType(
    {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "float64": torch.float64,
    }
)


def torch_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """A dtype by its name, or itself. Raises ValueError for one that no model may have."""
    found = DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype
    if found not in DTYPES.values():
        raise ValueError(f"dtype is {dtype!r}, allowed: {', '.join(DTYPES)}")
    return found


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """float32 for the half-precision types, else the type itself."""
    return torch.promote_types(dtype, torch.float32)
