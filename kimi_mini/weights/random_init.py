"""Seeded random weights under which the model's state and routing mean something.

    matrices        N(0, initializer_range); those that write into the residual stream that times
                    min(1, 2 / sqrt(num_hidden_layers))
    vocabulary      embedding and head N(0, 2 / sqrt(hidden_size))
    AttnRes proj    N(0, 1 / sqrt(hidden_size)), so that sources are mixed unevenly
    norms           1
    convolution     U(-1, 1) / sqrt(width of the window)
    A_log           U(-0.5, 1)
    dt_bias         softplus^-1(dt), dt log-uniform in [0.001, 0.1]: three of four channels keep
                    1 % of the state over 64 tokens; with dt_bias = 0 none would, and every test
                    of a cached state would pass without one (architecture 1.3)
    router bias     N(0, initializer_range): not zero, so that leaving it out changes choices

The narrower writers keep a deep random model from being chaotic: without them every layer made a
rounding error a third larger, and bf16 cost 5 % of the logits in 21 layers; now 2.5 %.

The wider embedding and head are for the logits: with initializer_range a small model's logits have
standard deviation 0.3, so flat that greedy decoding says little; here it is about 2.

Values come from a counter-based generator keyed by (seed, published name): the same in any order,
and for any dtype the rounding of the same float32 values.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from kimi_mini.config import KimiConfig
from kimi_mini.dtypes import at_least_float32
from kimi_mini.weights.names import (
    Kind,
    TensorEntry,
    check_parameters,
    model_tensors,
    parameter_specs,
)

DT_MIN, DT_MAX, DT_FLOOR = 0.001, 0.1, 1e-4


def initialise(parameters: Mapping[str, Tensor], config: KimiConfig, seed: int) -> None:
    """Fills `parameters` (as in `model.state_dict()`) in place.

    Raises ValueError if they are not those of `config`.
    """
    check_parameters(parameters, config)
    with torch.no_grad():
        for entry in model_tensors(config):
            values = torch.from_numpy(_draw(entry, config, seed).astype(np.float32))
            parameters[entry.param][entry.index].copy_(values.view(entry.region))


def random_parameters(
    config: KimiConfig, seed: int, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """New parameters of a model of this config, without the model."""
    keep = at_least_float32(dtype)
    parameters = {
        name: torch.empty(spec.shape, dtype=keep if spec.keeps_float32 else dtype)
        for name, spec in parameter_specs(config).items()
    }
    initialise(parameters, config, seed)
    return parameters


def _draw(entry: TensorEntry, config: KimiConfig, seed: int) -> np.ndarray:
    """Float64 values of an entry, flat."""
    count, bits = math.prod(entry.region), _Bits(seed, entry.name)
    match entry.kind:
        case Kind.NORM | Kind.HEAD_NORM:
            return np.ones(count)
        case Kind.VOCABULARY:
            return bits.normal(count) * (2 / math.sqrt(config.hidden_size))
        case Kind.MIX:
            return bits.normal(count) / math.sqrt(config.hidden_size)
        case Kind.CONV:
            return (2 * bits.uniform(count) - 1) / math.sqrt(entry.region[-1])
        case Kind.A_LOG:
            return 1.5 * bits.uniform(count) - 0.5
        case Kind.DT_BIAS:
            low, high = math.log(DT_MIN), math.log(DT_MAX)
            dt = np.maximum(np.exp(low + (high - low) * bits.uniform(count)), DT_FLOOR)
            return dt + np.log(-np.expm1(-dt))
        case _:
            std = config.initializer_range
            if _writes_to_stream(entry, config):
                std *= min(1, 2 / math.sqrt(config.num_hidden_layers))
            return bits.normal(count) * std


def _writes_to_stream(entry: TensorEntry, config: KimiConfig) -> bool:
    """Whether the tensor is the last matrix of a sublayer."""
    writers = ["o_proj.weight", ".down_proj.weight", "routed_expert_up_proj.weight"]
    if config.routed_expert_hidden_size is None:
        writers.append(".w2.weight")
    return entry.name.endswith(tuple(writers))


class _Bits:
    """Random numbers of one tensor: Philox counters under a key from seed and name."""

    def __init__(self, seed: int, name: str) -> None:
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        self._philox = np.random.Philox(key=int.from_bytes(digest[:16], "little"))

    def uniform(self, count: int) -> np.ndarray:
        """Uniform in [0, 1), 53 bits."""
        return (self._philox.random_raw(count) >> np.uint64(11)) * 2.0**-53

    def normal(self, count: int) -> np.ndarray:
        """Mean 0, deviation 1, nearly normal: the sum of the four 16-bit parts of a word.

        Cut at 3.5 deviations, and exact integer arithmetic: no logarithm whose last bit would
        depend on the CPU.
        """
        words = self._philox.random_raw(count)
        total = sum((words >> np.uint64(shift)) & np.uint64(0xFFFF) for shift in (0, 16, 32, 48))
        return (total.astype(np.float64) - 2 * 0xFFFF) / math.sqrt((2**32 - 1) / 3)
