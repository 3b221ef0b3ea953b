"""Random mixes of requests, driven through an engine as a server would, each held against alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kimi_mini import Delta, Engine, RequestOutput, SamplingParams
from kimi_mini.serving.outputs import FinishReason
from kimi_mini.serving.request import Request
from tests.kimi_mini.serving.alone import (
    Oracle,
    alone,
    assert_all_free,
    assert_logprobs,
    assert_same,
    scored_prompt,
)

LENGTHS = (1, 2, 3, 15, 16, 17, 33)  # around a page, and shorter than the convolution
MOST_TOKENS = 12
LONGEST = max(LENGTHS) + MOST_TOKENS - 1


@dataclass
class Arrival:
    """A request that comes at a step, and is perhaps cancelled some steps later."""

    step: int
    prompt: list[int]
    params: SamplingParams
    cancelled: int | None


def tight_options(rng: random.Random) -> dict:
    """An engine whose pools hold barely the longest request, and steps of any size."""
    page = rng.choice([1, 3, 16])
    return dict(
        page=page,
        state_slots=rng.choice([1, 2, 3, 4, 4]),
        kv_pages=-(-LONGEST // page) + rng.choice([0, 0, 0, 2]),
        max_batch_tokens=rng.choice([1, 2, 3, 7, 16, 50]),
        prefill_chunk=rng.choice([1, 2, 5, 16, 50]),
    )


def arrivals(
    rng: random.Random, count: int, refine: Callable[[list[int], dict], None] | None = None
) -> list[Arrival]:
    """Prompts repeat now and then, so that A comes, B, and A again. refine: changes params."""
    prompts: list[list[int]] = []
    made = []
    for _ in range(count):
        prompt = [rng.randrange(320) for _ in range(rng.choice(LENGTHS))]
        if prompts and rng.random() < 0.25:
            prompt = rng.choice(prompts)
        prompts.append(prompt)
        values = random_values(rng)
        if refine is not None:
            refine(prompt, values)
        cancelled = rng.randint(0, 40) if rng.random() < 0.15 else None
        made.append(Arrival(rng.randint(0, 3 * count), prompt, SamplingParams(**values), cancelled))
    return made


def random_values(rng: random.Random) -> dict:
    """Keywords of SamplingParams."""
    values = dict(
        max_tokens=rng.choice([0, 1, 5, MOST_TOKENS, MOST_TOKENS]),
        temperature=rng.choice([0.0, 0.0, 0.7, 1.5]),
        seed=rng.randrange(1000),
        logprobs=rng.choice([0, 3]),  # the most sensitive of all that is compared
        prompt_logprobs=rng.choice([None, None, 0, 2]),
        n=rng.choice([1, 1, 1, 2, 3]),
    )
    values["min_tokens"] = rng.choice([0, 0, values["max_tokens"] // 2])
    if rng.random() < 0.3:
        values |= rng.choice(
            [
                {"repetition_penalty": 1.3},
                {"frequency_penalty": 1.0, "presence_penalty": -0.5},
                {"ignore_eos": True},
                {"include_stop_str_in_output": True, "skip_special_tokens": False},
                {"top_k": 5, "top_p": 0.9, "min_p": 0.02},
            ]
        )
    return values


def with_stops(rng: random.Random, oracle: Oracle, engine: Engine) -> Callable:
    """A refinement: a stop string or stop token that the request is going to meet."""

    def refine(prompt: list[int], values: dict) -> None:
        free = alone(oracle, engine.opened, prompt, SamplingParams(**values))
        kind = rng.random()
        if free.text and kind < 0.4:
            first = rng.randrange(len(free.text))
            values["stop"] = free.text[first : first + rng.randint(1, 3)]
        elif free.token_ids and kind < 0.5:
            values["stop_token_ids"] = [rng.choice(free.token_ids)]

    return refine


def drive(engine: Engine, coming: Iterable[Arrival]) -> list[tuple[Request, Arrival]]:
    """Run all to their ends. What `step` tells must add up to what the outputs say."""
    coming = sorted(coming, key=lambda arrival: arrival.step)
    requests: list[tuple[Request, Arrival]] = []
    told: list[Delta] = []
    step = 0
    while coming or engine.has_unfinished:
        while coming and coming[0].step <= step:
            arrival = coming.pop(0)
            requests.append((engine.add_request(arrival.prompt, arrival.params), arrival))
        for request, arrival in requests:
            if arrival.cancelled is not None and step == arrival.step + arrival.cancelled:
                engine.abort(request.request_id)
        told += engine.step()
        step += 1
        assert step < 100 * (len(requests) + 1) * LONGEST, "it does not end"
    for request, _ in requests:
        assert_told(request.output(), [d for d in told if d.request_id == request.request_id])
    return requests


def assert_told(output: RequestOutput, deltas: Sequence[Delta]) -> None:
    """Every token and character once, in order, and one end."""
    for own in output.outputs:
        mine = [delta for delta in deltas if delta.index == own.index]
        assert tuple(token for delta in mine for token in delta.token_ids) == own.token_ids
        assert "".join(delta.text for delta in mine) == own.text
        ends = [delta.finish_reason for delta in mine if delta.finish_reason is not None]
        assert ends == [own.finish_reason] and mine[-1].finish_reason is own.finish_reason


def assert_as_alone(
    engine: Engine,
    requests: Sequence[tuple[Request, Arrival]],
    oracle_of: Callable[[Sequence[int]], Oracle],
    assert_idle: Callable[[Engine], None] = assert_all_free,
) -> None:
    """oracle_of: a sequence that is probably meant → its oracle. assert_idle: what must hold of the
    engine at the end."""
    for request, arrival in requests:
        output = request.output()
        for own in output.outputs:
            known = [*arrival.prompt, *own.token_ids]
            oracle = oracle_of(known)
            expected = alone(oracle, engine.opened, arrival.prompt, arrival.params, own.index)
            if own.finish_reason is FinishReason.ABORT:
                assert arrival.cancelled is not None
                assert own.token_ids == expected.token_ids[: len(own.token_ids)]
            else:
                assert_same(own, expected)
        count = arrival.params.prompt_logprobs
        assert (output.prompt_logprobs is None) == (count is None)
        if count is not None and output.outputs[0].finish_reason is not FinishReason.ABORT:
            expected = scored_prompt(oracle_of(arrival.prompt), arrival.prompt, count)
            for one, other in zip(output.prompt_logprobs, expected, strict=True):
                assert_logprobs(one, other)
    assert_idle(engine)
