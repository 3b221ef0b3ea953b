"""What an engine did, as plain values for JSON and as one line for a person."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import asdict
from math import isfinite
from typing import Any

from cache.leases import Hit
from kimi_mini.serving.engine import Engine
from kimi_mini.serving.logprobs import TokenLogprobs
from kimi_mini.serving.outputs import CompletionOutput, Delta, RequestOutput, rate
from kimi_mini.serving.request import Request


def report(engine: Engine, outputs: Iterable[RequestOutput]) -> dict[str, Any]:
    """requests: one entry a sample; totals: of all steps; prefix_cache: of all admissions, None
    without one; pools: now."""
    return {
        "dtype": str(engine.model.dtype).removeprefix("torch."),
        "backend": engine.model.dispatcher.backend.name,
        "requests": [_sample(request, own) for request in outputs for own in request.outputs],
        "totals": _totals(engine),
        "prefix_cache": _prefix_cache(engine) if engine.reuses else None,
        "pools": _pools(engine),
        "notes": list(engine.opened.notes),
    }


def closing_line(engine: Engine) -> str:
    """Rates, and what state costs: fixed for KDA, a token at a time for MLA."""
    totals, state = engine.totals, engine.memory.state
    return (
        f"prefill {totals.prefill_tokens:,} tokens, {totals.prefill_rate:,.0f} tokens/s · "
        f"decode {totals.decode_tokens:,} tokens, {totals.decode_rate:,.0f} tokens/s · "
        f"a request's state: recurrent {state.recurrent[:, 0].nbytes:,} B + conv "
        f"{state.conv[:, 0].nbytes:,} B (fixed), latent {engine.memory.sizes.row_bytes:,} B a token"
    )


class Progress:
    """A line on the terminal while prompts are long: tokens in the state, of all prompts together.
    Nothing where standard error is no terminal."""

    def __init__(self, requests: Iterable[Request]) -> None:
        sequences = [sequence for request in requests for sequence in request.sequences]
        self._total = sum(sequence.prompt_tokens for sequence in sequences)
        self._done: dict[tuple[str, int], int] = {}
        self._shown = False

    def show(self, delta: Delta) -> None:
        """Take one step's news in; clears the line when all prompts are done."""
        self._done[delta.request_id, delta.index] = delta.prefilled
        done = sum(self._done.values())
        if not sys.stderr.isatty() or (done == self._total and not self._shown):
            return
        if done < self._total and not delta.text:
            print(f"\r\033[Kprefill {done:,}/{self._total:,}", end="", file=sys.stderr, flush=True)
            self._shown = True
        elif self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
            self._shown = False


def cache_line(own: CompletionOutput) -> str:
    """What the prefix cache did for one sample."""
    hit, first = own.hit or Hit(), own.timings.first_token
    wait = "" if first is None else f", first token after {first * 1000:,.1f} ms"
    replayed = f", {hit.token_hit - hit.joint:,} replayed" if hit.token_hit > hit.joint else ""
    kept = "".join(
        f"; state {f'kept at {at:,}' if at else 'not kept'} for {asked:,}"
        for asked, at in own.checkpoint_at.items()
    )
    return f"[{hit.joint:,} prompt tokens cached{replayed}; not more: {hit.lower}{wait}{kept}]"


def _sample(request: RequestOutput, own: CompletionOutput) -> dict[str, Any]:
    timings = own.timings
    return {
        "request_id": request.request_id,
        "index": own.index,
        "prompt": request.prompt,
        "prompt_ids": list(request.prompt_token_ids),
        "output_ids": list(own.token_ids),
        "text": own.text,
        "finish_reason": own.finish_reason,
        "stop_reason": own.stop_reason,
        "logprobs": own.logprobs and [_logprobs(entry) for entry in own.logprobs],
        "prompt_logprobs": request.prompt_logprobs
        and [entry and _logprobs(entry) for entry in request.prompt_logprobs],
        "cache": own.hit
        and _hit(own.hit)
        | {"checkpoint_at": [{"asked": n, "kept": at} for n, at in own.checkpoint_at.items()]},
        "timings": {
            "queue_seconds": timings.queue,
            "first_token_seconds": timings.first_token,
            "prefill_seconds": timings.prefill,
            "prefill_tokens": timings.prefill_tokens,
            "prefill_tokens_per_second": rate(timings.prefill_tokens, timings.prefill),
            "decode_seconds": timings.decode,
            "decode_tokens": timings.decode_tokens,
            "decode_tokens_per_second": rate(timings.decode_tokens, timings.decode),
            "preemptions": timings.preemptions,
        },
    }


def _hit(hit: Hit) -> dict[str, Any]:
    return {
        "cached_tokens": hit.joint,
        "token_hit": hit.token_hit,
        "replayed_tokens": hit.token_hit - hit.joint,
        "junction": hit.junction,
        "not_more_because": hit.lower,
    }


def _logprobs(entry: TokenLogprobs) -> list[dict[str, Any]]:
    """In order: the token itself first if it is not among the likeliest. JSON has no infinity: a
    probability of 0 has the logprob null."""
    return [
        {"token_id": token, "logprob": own.logprob if isfinite(own.logprob) else None}
        | {"rank": own.rank}
        for token, own in entry.items()
    ]


def _totals(engine: Engine) -> dict[str, Any]:
    totals, stats = engine.totals, engine.cache.stats()
    return asdict(totals) | {
        "prefill_tokens_per_second": totals.prefill_rate,
        "decode_tokens_per_second": totals.decode_rate,
        "preemptions": stats.preempted,
        "waits": {str(reason): count for reason, count in stats.waits.items()},
    }


def _prefix_cache(engine: Engine) -> dict[str, Any]:
    stats, identity = engine.cache.stats(), engine.cache.identity
    return {
        "kind": engine.prefix_cache,
        "identity": asdict(identity),
        "lookups": stats.lookups,
        "cached_tokens": stats.joint_hit_tokens,
        "token_hit": stats.token_hit_tokens,
        "replayed_tokens": stats.replayed_tokens,
        "not_more_because": {str(reason): count for reason, count in stats.lower.items()},
        "evicted": stats.evictions._asdict(),
    }


def _pools(engine: Engine) -> dict[str, Any]:
    sizes, state = engine.memory.sizes, engine.memory.state
    pages, slots = (pool._asdict() for pool in engine.cache.stats().pools)
    return {
        "pages": pages | {"page": sizes.page, "row_bytes": sizes.row_bytes},
        "slots": slots
        | {
            "recurrent_bytes": state.recurrent[:, 0].nbytes,
            "conv_bytes": state.conv[:, 0].nbytes,
        },
    }
