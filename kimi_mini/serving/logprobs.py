"""Log-probabilities as vLLM reports them: of a token and of the likeliest alternatives.

    logprob_i = logit_i - log(sum_j exp(logit_j))

"Raw" ones: of the logits as the model gave them, whatever masks, penalties, temperature or
truncation do to the draw (vLLM's logprobs_mode = raw_logprobs). Everything here follows one
order: larger logits first, lower ids first among equals; a rank is a place in it, from 1 on. (So
are vLLM's ranks of the alternatives; for a token outside them it counts all equals as in front.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.packing import integers


class Logprob(NamedTuple):
    """What is said of one token id."""

    logprob: float
    rank: int


TokenLogprobs = dict[int, Logprob]


def largest(logits: Tensor) -> Tensor:
    """The largest of logits [vocab], a scalar; ValueError if any is NaN or +inf, or none finite."""
    best = logits.max()  # NaN if any is
    if not bool(best.isfinite()):
        raise ValueError(f"the logits are not finite (largest: {best}): are the weights damaged?")
    return best


def top_ids(logits: Tensor, count: int) -> Tensor:
    """The first `count` ids of logits [vocab], or all if there are fewer, in order. [count]"""
    if count >= len(logits):
        return logits.sort(descending=True, stable=True).indices
    if count == 0:
        return torch.empty(0, dtype=torch.long)
    # torch.topk picks any among equals; so it only says where the border is
    border = logits.topk(count).values[-1]
    above = (logits > border).nonzero()[:, 0]
    level = (logits == border).nonzero()[: count - len(above), 0]
    ids = torch.cat([above, level])
    return ids[logits[ids].sort(descending=True, stable=True).indices]


def token_logprobs(logits: Tensor, token: int, count: int) -> TokenLogprobs:
    """Logprob and rank of `token` and of the `count` likeliest ids, from logits [vocab].

    count: 0 is the token alone, -1 the whole vocabulary, as is anything beyond it. The dict is in
    order of rank, but a token that is not among the likeliest stands first. Raises ValueError if
    the logits are not finite or the token is not in the vocabulary.
    """
    if not 0 <= token < len(logits):
        raise ValueError(f"token must be in the vocabulary, 0..{len(logits) - 1}, got {token}")
    largest(logits)
    logprobs = logits.double().log_softmax(-1)
    ids = top_ids(logits, len(logits) if count < 0 else count)
    values = logprobs[ids].tolist()
    top = {
        i: Logprob(value, rank)
        for rank, (i, value) in enumerate(zip(ids.tolist(), values, strict=True), start=1)
    }
    if token in top:
        return top
    own = logits[token]
    before = (logits > own).sum() + (logits[:token] == own).sum()
    return {token: Logprob(float(logprobs[token]), int(before) + 1), **top}


def prompt_logprobs(
    logits: Tensor, next_tokens: Tensor | Sequence[int], count: int
) -> list[TokenLogprobs]:
    """For each row of logits [M, vocab], `token_logprobs` of the token that really came next.

    next_tokens: [M] integers; for a prompt computed in pieces, the piece moved on by one token. A
    request's list begins with None for its first token, which nothing predicts; then come these,
    piece by piece. Raises ValueError for other shapes, and as `token_logprobs` does.
    """
    tokens = integers("next_tokens", next_tokens)
    if logits.dim() != 2 or len(logits) != len(tokens):
        raise ValueError(
            f"logits must be [M, vocab] with a row for each of the {len(tokens)} next tokens, "
            f"got {[*logits.shape]}"
        )
    return [token_logprobs(row, token, count) for row, token in zip(logits, tokens, strict=True)]
