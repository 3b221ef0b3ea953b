"""What a random test of prefix caches draws: an engine that has barely room for one request, and
what is asked of it. Beginnings are shared, and boundaries are dense.
"""

import functools
import math
import random
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch

from kimi_mini import Engine, KimiForCausalLM, SamplingParams
from kimi_mini.serving.control import CacheControl
from tests.kimi_mini.serving.alone import small_config
from tests.kimi_mini.serving.reuse import Rules, reusing
from tests.kimi_mini.serving.witness import Truth

LONGEST_PROMPT, MOST_TOKENS = 44, 12
LONGEST = LONGEST_PROMPT + MOST_TOKENS - 1
TEXTS = ([7, 8, 9, 10] * 7, [7, 8, 9, 10] * 4 + [11, 7] * 14, [12, 7, 8])
EOS = [2, *range(40, 50)]  # so many that some end by themselves


@functools.cache
def tiny(backend: str) -> Truth:
    """Kernel chunks of 4, so that torch's boundaries are dense, too; nothing is forgotten."""
    model = KimiForCausalLM.from_config(
        small_config(64, EOS), seed=1, dtype=torch.float64, backend=backend, kernel_chunk=4
    )
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        attention.A_log.zero_()
        attention.dt_bias.fill_(-6.0)
    return Truth(model)


class Tight(NamedTuple):
    """An engine whose pools hold barely the longest request; own: of the cache's options."""

    rules: Rules
    page: int
    own: dict[str, object]
    slots: int
    more_pages: int
    budget: int
    piece: int

    def engine(self, model: KimiForCausalLM) -> Engine:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some keep nothing of prompts
            return reusing(
                model, self.rules, page=self.page, state_slots=self.slots,
                kv_pages=-(-LONGEST // self.page) + self.more_pages,
                max_batch_tokens=self.budget, prefill_chunk=self.piece, **self.own,
            )  # fmt: skip


def cache_options(
    rng: random.Random, rules: Rules, page: int, spacings: Sequence[int]
) -> dict[str, object]:
    """spacings: of a tree's states, or tokens of a state block."""
    spacing = rng.choice(spacings)
    if not rules.blocks:
        return dict(
            state_chunk=spacing,
            track_interval=rng.choice([None, 1, 6]),
            max_states_per_path=rng.choice([None, None, None, 1, 2]),
        )
    largest = math.gcd(page, spacing)
    units = [unit for unit in range(1, largest + 1) if largest % unit == 0]
    return dict(
        state_block=spacing,
        hash_unit=rng.choice([None, *units]),
        retention=rng.choice([0, "none", math.lcm(page, spacing)]),
    )


def tight(rng: random.Random, rules: Rules) -> Tight:
    # the engines' own rules keep nothing of small pieces
    large = rules.compat is not None and rng.random() < 0.8
    page = 1 if rules.name == "no_buffer" else rng.choice([1, 3, 4, 16])
    return Tight(
        rules,
        page=page,
        own=cache_options(rng, rules, page, (1, 3, 4, 6, 8, 12) if rules.blocks else (4, 8, 12)),
        slots=max(rng.choice([12, 8, 6, 4, 3, 2, 1]), rules.least_slots),
        more_pages=rng.choice([0, 2, 40, 80]) + rules.spare,
        budget=rng.choice([60] if large else [60, 20, 7]),
        piece=rng.choice([60, 60, 16] if large else [60, 16, 7, 5, 3, 1]),
    )


def random_control(rng: random.Random, rules: Rules) -> CacheControl:
    """An engine's own rules know no boundaries that a caller names."""
    salt, skip_read = rng.choice([None] * 12 + ["", "a"]), rng.random() < 0.06
    named = rng.sample(range(1, LONGEST), rng.choice([0, 0, 1, 2]))
    return CacheControl(salt, skip_read, () if rules.compat else named)


class Wish(NamedTuple):
    """text: what somebody has said or one of TEXTS, by number; without the last `missing` tokens,
    `own` in their place."""

    text: int
    missing: int
    own: list[int]
    params: SamplingParams
    control: CacheControl
    streamed: bool


def wish(rng: random.Random, rules: Rules) -> Wish:
    params = SamplingParams(
        max_tokens=rng.choice([0, 1, 5, 5, MOST_TOKENS, MOST_TOKENS]),
        temperature=rng.choice([0.0, 1.0]),
        seed=rng.randrange(3),
        ignore_eos=rng.random() < 0.5,
        n=rng.choice([1, 1, 1, 1, 2]),
        logprobs=rng.choice([0, 2]),
        prompt_logprobs=rng.choice([None] * 15 + [0]),
    )
    own = rng.choice([[], [], [12], [7, 7, 7]])
    missing = rng.choice([0, 0, 0, 1, 2, 5, 9, 22])
    return Wish(
        rng.randrange(6), missing, own, params, random_control(rng, rules), rng.random() < 0.25
    )
