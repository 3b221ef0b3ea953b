"""What state costs, from a config: bytes a token, bytes a boundary (serving.md 8.1).

latent row        = MLA layers · (L + R) · itemsize            one a token
recurrent state   = KDA layers · H · D² · itemsize             one a boundary, at least float32
conv state        = KDA layers · (W-1) · 3HD · itemsize        with it, always
"""

from __future__ import annotations

import math

import torch

from cache.pools.storage import Sizes
from kimi_mini.batch import state_form
from kimi_mini.config import KimiConfig


def state_sizes(config: KimiConfig, dtype: torch.dtype, page: int) -> Sizes:
    """Bytes of one token's latent rows and of one boundary's states, for activations of `dtype`."""
    recurrent, conv, latent = (
        math.prod(shape) * wanted.itemsize for shape, wanted in state_form(config, 1, 1, 1, dtype)
    )
    return Sizes(page, row_bytes=latent, slot_bytes=recurrent + conv)
