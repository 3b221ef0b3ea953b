"""From logits to a token: greedy, or one draw from softmax(logits / temperature)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Below this a temperature means greedy: dividing by it would only overflow.
GREEDY_BELOW = 1e-5


def check_temperature(temperature: float) -> None:
    """ValueError unless temperature is finite and not negative."""
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature must be 0 (greedy) or a positive number, got {temperature}")


def sample(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    """One token from logits [vocab]; temperature below 1e-5 takes the largest, lowest id on ties.

    Entries of -inf are never drawn. The generator is advanced once a draw, not at all when greedy.
    Raises ValueError if a logit is NaN or +inf, or none is finite.
    """
    best = logits.max()  # NaN if any is
    if not bool(best.isfinite()):
        raise ValueError(f"the logits are not finite (largest: {best}): are the weights damaged?")
    if temperature < GREEDY_BELOW:
        return int((logits == best).nonzero()[0])
    weights = torch.softmax((logits - best).double() / temperature, -1)
    return int(torch.multinomial(weights, 1, generator=generator))
