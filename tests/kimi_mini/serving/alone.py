"""What a request gets alone, worked out without the engine: one sequence, no state, naive text.

Logits come from an `Oracle`, a function of the whole known sequence. One is the model's stateless
door; another, `prefix_hash`, is no model at all but as sensitive as can be, and fast: any wrong
token in front gives other logits. `oracle_engine` runs it; the null executor checks its plans.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cache.leases import StepPlan
from cache.null_executor import NullExecutor
from cache.pools.storage import Storage
from kimi_mini import Engine, KimiForCausalLM, SamplingParams, preset
from kimi_mini.serving.logprobs import TokenLogprobs, prompt_logprobs
from kimi_mini.serving.open_model import OpenModel, around
from kimi_mini.serving.outputs import CompletionOutput, FinishReason
from kimi_mini.serving.sampling import TokenSampler
from kimi_mini.serving.text.byte_level import ByteTokenizer

VOCAB = 320
Oracle = Callable[[Sequence[int]], Tensor]  # known tokens → logits [vocab] of the next


def small_config(context: int = 256, eos: int | list[int] | None = 2):
    """One KDA and one MLA layer, the second with experts; a vocabulary that speaks bytes."""
    nano = preset("nano")
    kda = dataclasses.replace(
        nano.linear_attn_config, kda_layers=(1,), full_attn_layers=(2,), num_heads=2, head_dim=16
    )
    return dataclasses.replace(
        nano,
        num_hidden_layers=2,
        attn_res_block_size=1,
        linear_attn_config=kda,
        hidden_size=32,
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=16,
        kv_lora_rank=8,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        intermediate_size=64,
        num_experts=4,
        moe_intermediate_size=32,
        routed_expert_hidden_size=16,
        max_position_embeddings=context,
        eos_token_id=eos,
    )


@functools.cache
def small_model(
    dtype: torch.dtype = torch.float64,
    context: int = 256,
    eos: int | tuple[int, ...] | None = 2,
    backend: str = "auto",
) -> KimiForCausalLM:
    """Slow gates: nothing is forgotten, so that a state of somebody else cannot fade away."""
    eos = list(eos) if isinstance(eos, tuple) else eos
    model = KimiForCausalLM.from_config(
        small_config(context, eos), seed=1, dtype=dtype, backend=backend
    )
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        attention.A_log.zero_()
        attention.dt_bias.fill_(-6.0)
    return model


def stateless(model: KimiForCausalLM, guess: Iterable[int] = ()) -> Oracle:
    """The stateless door on the whole known sequence. guess: a sequence that is probably meant;
    what agrees with it is answered from one call (no token sees a later one)."""
    guess = list(guess)
    guessed = model(torch.tensor([guess]))[0].detach() if guess else None

    def logits(known: Sequence[int]) -> Tensor:
        if guess[: len(known)] == list(known):
            return guessed[len(known) - 1]
        return model(torch.tensor([list(known)]))[0, -1].detach()

    return logits


def prefix_hash(known: Sequence[int]) -> Tensor:
    """Logits that are a hash of the known sequence."""
    return _draw(hash(tuple(known)))


@functools.lru_cache(100_000)
def _draw(seed: int) -> Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def script(prompt_tokens: int, tokens: Sequence[int]) -> Oracle:
    """Logits that make these the tokens after a prompt of that length, whatever it says."""

    def logits(known: Sequence[int]) -> Tensor:
        place = len(known) - prompt_tokens
        meant = tokens[place] if 0 <= place < len(tokens) else 0
        return torch.full((VOCAB,), -9.0).index_fill(0, torch.tensor(meant), 9.0)

    return logits


class OracleExecutor:
    """Stands in for the model's executor: plans are checked, logits are an oracle's."""

    def __init__(self, storage: Storage, oracle: Oracle) -> None:
        self.null, self.oracle = NullExecutor(storage), oracle
        self.copy = self.null.copy

    def run(self, plans: Sequence[StepPlan], wanted: Sequence[range]) -> list[Tensor]:
        self.null.run(plans)
        return [
            torch.stack(
                [torch.empty(VOCAB), *(self.oracle(plan.lease.tokens[: t + 1]) for t in at)]
            )[1:]
            for plan, at in zip(plans, wanted, strict=True)
        ]


def oracle_engine(
    oracle: Oracle = prefix_hash, *, context: int = 256, eos: int | tuple | None = 2, **options
) -> Engine:
    """An engine that runs no model, for a great many requests."""
    engine = Engine(small_model(torch.float32, context, eos), **options)
    engine.executor = OracleExecutor(engine.memory.storage, oracle)
    return engine


class Expected(NamedTuple):
    """What CompletionOutput must say."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stop_reason: str | int | None
    logprobs: list[TokenLogprobs] | None


def alone(
    oracle: Oracle, opened: OpenModel | KimiForCausalLM, prompt: str | Sequence[int],
    params: SamplingParams, index: int = 0,
) -> Expected:  # fmt: skip
    """Sample `index` of a request. Stop strings of a request must not overlap each other."""
    opened = opened if isinstance(opened, OpenModel) else around(opened)
    own, config = params.child(index), opened.model.config
    ids = opened.encode(prompt) if isinstance(prompt, str) else list(prompt)
    ends = frozenset() if own.ignore_eos else opened.end_ids
    sampler = TokenSampler(
        own, ids, vocab_size=VOCAB, end_ids=ends, sample_below=opened.sample_below
    )
    left = config.max_position_embeddings - len(ids)
    room = left if own.max_tokens is None else min(own.max_tokens, left)
    out, logprobs = [], []
    while len(out) < room:
        sampled = sampler.sample(oracle([*ids, *out]))
        out.append(sampled.token)
        logprobs.append(sampled.logprobs)
        if len(out) < own.min_tokens:
            continue
        if sampled.token in ends or sampled.token in own.stop_token_ids:
            return _ended_by_token(own, ends, out, logprobs)
        if _first_stop(own, out, whole=False):
            return _expected(own, out, logprobs, FinishReason.STOP)
    reason = FinishReason.STOP if _first_stop(own, out) else FinishReason.LENGTH
    return _expected(own, out, logprobs, reason)


def _expected(
    own: SamplingParams, out: list[int], logprobs: list, reason: FinishReason, unseen: int = 0
) -> Expected:
    """unseen: tokens that have come and have no text."""
    text, found = _text(own, out), _first_stop(own, out, unseen=unseen)
    if found:
        place, stop = found
        text = text[: place + (len(stop) if own.include_stop_str_in_output else 0)]
    said = None if own.logprobs is None else list(logprobs)
    return Expected(tuple(out), text, reason, found[1] if found else None, said)


def _ended_by_token(
    own: SamplingParams, ends: frozenset[int], out: list[int], logprobs: list
) -> Expected:
    shown = out if own.include_stop_str_in_output else out[:-1]
    unseen = len(out) - len(shown)
    text = _expected(own, shown, logprobs, FinishReason.STOP, unseen).text
    reason = None if out[-1] in ends else out[-1]
    said = None if own.logprobs is None else list(logprobs)
    return Expected(tuple(out), text, FinishReason.STOP, reason, said)


def _text(own: SamplingParams, out: list[int], whole: bool = True) -> str:
    """All of the text, or what is certain of it while more may come."""
    stream = ByteTokenizer().stream(own.skip_special_tokens)
    text = "".join(stream.push(token) for token in out)
    return text + stream.finish() if whole else text


def _first_stop(
    own: SamplingParams, out: list[int], whole: bool = True, unseen: int = 0
) -> tuple[int, str] | None:
    """By trying every place: where the first stop string stands that ends after the text of the
    first min_tokens tokens; there is none before another token has come (vLLM's rule)."""
    if len(out) + unseen <= own.min_tokens:
        return None
    text, border = _text(own, out, whole), len(_text(own, out[: own.min_tokens], whole=False))
    places = [
        (start, stop)
        for start in range(len(text))
        for stop in own.stop
        if text[start:].startswith(stop) and start + len(stop) > border
    ]
    return min(places, default=None)


def assert_same(own: CompletionOutput, expected: Expected) -> None:
    """All that an output says, logprobs within rounding."""
    assert own.token_ids == expected.token_ids, (own, expected)
    assert own.finish_reason is expected.finish_reason, (own, expected)
    assert own.stop_reason == expected.stop_reason
    assert own.text == expected.text, (own, expected)
    assert (own.logprobs is None) == (expected.logprobs is None)
    for one, other in zip(own.logprobs or (), expected.logprobs or (), strict=True):
        assert_logprobs(one, other)


def assert_logprobs(one: TokenLogprobs | None, other: TokenLogprobs | None) -> None:
    if one is None or other is None:
        assert one is other
        return
    assert [(t, p.rank) for t, p in one.items()] == [(t, p.rank) for t, p in other.items()]
    for token, own in one.items():
        assert abs(own.logprob - other[token].logprob) < 1e-9, (one, other)


def scored_prompt(oracle: Oracle, ids: Sequence[int], count: int) -> list[TokenLogprobs | None]:
    """prompt_logprobs of a request."""
    rows = [oracle(ids[: n + 1]) for n in range(len(ids) - 1)]
    return [None, *(prompt_logprobs(torch.stack(rows), ids[1:], count) if rows else [])]


def assert_all_free(engine: Engine) -> None:
    """Nobody runs, nobody waits, nothing is held, and every invariant holds."""
    assert not engine.has_unfinished
    assert not engine.scheduler.running and not engine.scheduler.waiting
    stats = engine.cache.stats()
    assert stats.leases == 0
    assert all(pool.free == pool.size for pool in stats.pools)
    engine.cache.audit()
