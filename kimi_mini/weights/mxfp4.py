"""MXFP4: weights in groups of 32 along a row, one power of two per group (OCP microscaling).

    weight[o, i] = value(nibble[o, i]) * 2 ^ (scale[o, i // 32] - 127)

Byte j of a packed row holds input 2j in its low nibble and 2j + 1 in its high one. Bit 3 of a
nibble is the sign, bits 0..2 choose among 0, 0.5, 1, 1.5, 2, 3, 4, 6. Scale 255 is NaN.
Source: the published checkpoint (compressed-tensors, `mxfp4-pack-quantized`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kimi_mini.dtypes import at_least_float32

GROUP = 32
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
SCALE_BIAS = 127

# what the published config says of such experts
QUANTIZATION_CONFIG = {
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
    "format": "mxfp4-pack-quantized",
    "global_compression_ratio": None,
    "kv_cache_scheme": None,
    "ignore": [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*",
        "re:.*vision_tower.*",
        "re:.*mm_projector.*",
    ],
    "config_groups": {
        "group_0": {
            "format": "mxfp4-pack-quantized",
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": GROUP,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "scale_dtype": "torch.uint8",
                "strategy": "group",
                "symmetric": True,
                "type": "float",
                "zp_dtype": None,
            },
        }
    },
}


class Packed(NamedTuple):
    """packed [..., I / 2] and scale [..., I / 32], both uint8, of a weight [..., I]."""

    packed: Tensor
    scale: Tensor


def packed_shapes(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Shapes of the packed bytes and of the scales of a weight, or None if I % 32 is not 0."""
    *rows, width = shape
    return None if width % GROUP else ((*rows, width // 2), (*rows, width // GROUP))


def decode(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """packed [..., I/2] uint8, scale [..., I/32] uint8 → weight [..., I] of `dtype`, exact.

    Every value fits bf16 (at most two significant bits); float16 lacks the exponents.
    """
    wide = at_least_float32(dtype)
    values = torch.tensor(MAGNITUDES, dtype=wide, device=packed.device)
    values = torch.cat((values, -values))
    powers = [2.0 ** (e - SCALE_BIAS) for e in range(255)] + [float("nan")]
    powers = torch.tensor(powers, dtype=wide, device=packed.device)

    nibbles = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)  # [..., I]
    groups = values[nibbles.int()].unflatten(-1, (-1, GROUP))  # [..., I/32, 32]
    return (groups * powers[scale.int()].unsqueeze(-1)).flatten(-2).to(dtype)


def encode(weight: Tensor) -> Packed:
    """weight [..., I], I % 32 == 0, finite → the nearest MXFP4 weight; ties to the even nibble.

    A weight that came out of `decode` is kept exactly. The scale is the power of two that brings
    the group's largest magnitude to [3.5, 7), so that it rounds to 4 or 6 with the least error.
    Raises ValueError for another width or a value that is not finite.
    """
    if packed_shapes(tuple(weight.shape)) is None:
        raise ValueError(f"width {weight.shape[-1]} is not a multiple of {GROUP}")
    groups = weight.detach().double().unflatten(-1, (-1, GROUP))  # [..., I/32, 32]
    largest = groups.abs().amax(-1, keepdim=True)
    if not largest.isfinite().all():
        raise ValueError("a weight is not finite: MXFP4 cannot hold it")

    # frexp: x = m * 2^e with m in [0.5, 1); the factor moves the step from 8 to 7
    exponent = torch.frexp(largest * (8 / 7)).exponent - 3
    exponent = exponent.clamp(-SCALE_BIAS, 254 - SCALE_BIAS)
    scaled = torch.ldexp(groups.abs(), -exponent)
    midpoints = torch.tensor(MIDPOINTS, dtype=torch.float64, device=weight.device)
    below, above = (torch.bucketize(scaled, midpoints, right=up) for up in (False, True))
    nibbles = torch.where(below % 2 == 0, below, above) + 8 * groups.signbit()
    low, high = nibbles.to(torch.uint8).flatten(-2).unflatten(-1, (-1, 2)).unbind(-1)
    return Packed(low | (high << 4), (exponent.squeeze(-1) + SCALE_BIAS).to(torch.uint8))
