"""What a request asks of sampling: vLLM's SamplingParams, by the same names and defaults.

Where we differ from vLLM (vllm/sampling_params.py): top_p = 0 is legal and keeps one token,
max_tokens = 0 is legal and ends with reason "length", n > 1 may be greedy, a bool is never a
number, temperatures from 1e-5 to 0.01 are used as they are (vLLM raises them to 0.01) and so are
those above 2 (vLLM refuses them), and seed = -1 does not mean "no seed".
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import Any, NamedTuple

# Below this a temperature means greedy: dividing by it would only overflow.
GREEDY_BELOW = 1e-5
SEEDS = 2**63
MOST_SAMPLES = 16384  # vLLM's own bound on n


class _Rule(NamedTuple):
    """Which numbers a parameter may be, and how to say so."""

    kind: type[int] | type[float]
    low: float
    high: float
    allowed: str
    optional: bool = False

    def accepts(self, value: Any) -> bool:
        if value is None:
            return self.optional
        tower = Integral if self.kind is int else Real
        if not isinstance(value, tower) or isinstance(value, bool):
            return False
        try:
            return self.low <= self.kind(value) <= self.high  # NaN is not
        except OverflowError:
            return False


_LARGEST = sys.float_info.max
_PENALTY = _Rule(float, -2, 2, "a number in -2..2")
_SHARE = _Rule(float, 0, 1, "a number in 0..1")
_ALTERNATIVES = _Rule(
    int, -1, math.inf, "None, an integer of at least 0, or -1 for the whole vocabulary", True
)
_RULES = {
    "n": _Rule(int, 1, MOST_SAMPLES, f"an integer in 1..{MOST_SAMPLES}"),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "repetition_penalty": _Rule(float, math.ulp(0.0), _LARGEST, "a positive number"),
    "temperature": _Rule(float, 0, _LARGEST, "0 (greedy) or a positive number"),
    "top_p": _SHARE,
    "top_k": _Rule(int, -1, math.inf, "an integer of at least 1, or 0 or -1 (no limit)"),
    "min_p": _SHARE,
    "seed": _Rule(int, 0, SEEDS - 1, "None or an integer in 0..2**63-1", True),
    "max_tokens": _Rule(int, 0, math.inf, "None (no limit) or an integer of at least 0", True),
    "min_tokens": _Rule(int, 0, math.inf, "an integer of at least 0"),
    "logprobs": _ALTERNATIVES,
    "prompt_logprobs": _ALTERNATIVES,
}
_SWITCHES = ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    n: samples of the prompt; under greedy sampling they are all equal. presence_penalty,
    frequency_penalty: -2..2, over output tokens. repetition_penalty: above 0, over prompt and
    output tokens. temperature: below 1e-5 greedy. top_p: 0 keeps one token, 1 is off. top_k: 0 or
    -1 is off. min_p: 0 is off. seed: 0 is a seed, None takes one from the system. stop: a string or
    list of strings, kept as a tuple. stop_token_ids: kept as a tuple without repeats. max_tokens:
    None is as many as the context allows, 0 samples nothing. min_tokens: the first so many
    tokens hold no end token or stop token, and no stop string ends within their text; one that
    begins there and ends later does end the sample, and its text before it. logprobs,
    prompt_logprobs: how many alternatives to report with each token (of n samples the first alone
    scores the prompt); 0 is the token itself only, -1 the whole vocabulary, None no report.

    Raises ValueError, one line that tells of every mistake: the parameter, what it may be, the
    value seen. Numbers are kept as Python's own int and float.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        stored, mistakes = _checked(given)
        if mistakes:
            raise ValueError("; ".join(mistakes))
        for name, value in stored.items():
            object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        """Whether the largest logit is taken, without chance."""
        return self.temperature < GREEDY_BELOW

    def heeded(self, eos_ids: Iterable[int]) -> frozenset[int]:
        """eos_ids, or none of them if they are ignored."""
        return frozenset(() if self.ignore_eos else eos_ids)

    def end_ids(self, eos_ids: Iterable[int]) -> frozenset[int]:
        """The tokens that end a sample: the end-of-sequence ids it heeds, and stop_token_ids."""
        return self.heeded(eos_ids).union(self.stop_token_ids)

    def child(self, index: int) -> SamplingParams:
        """The params of sample `index` of n: n = 1, and seed + index if there is a seed (vLLM's
        rule; past the last seed it goes on with 0). ValueError unless 0 <= index < n.
        """
        if not 0 <= index < self.n:
            raise ValueError(f"index must be in 0..{self.n - 1} (n = {self.n}), got {index}")
        seed = None if self.seed is None else (self.seed + index) % SEEDS
        return replace(self, n=1, seed=seed)


def _checked(given: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The parameters as they are to be stored, and a line for each that is wrong."""
    stored = dict(given)
    mistakes = {}

    def refuse(name: str, allowed: str) -> None:
        mistakes[name] = f"{name} must be {allowed}, got {given[name]!r}"

    for name, rule in _RULES.items():
        if not rule.accepts(given[name]):
            refuse(name, rule.allowed)
        elif given[name] is not None:
            stored[name] = rule.kind(given[name])
    for name in _SWITCHES:
        if not isinstance(given[name], bool):  # the string "false" would count as true
            refuse(name, "True or False")

    stop = [given["stop"]] if isinstance(given["stop"], str) else _items(given["stop"])
    if stop is None or not all(isinstance(text, str) and text for text in stop):
        refuse("stop", "None, a string or a list of strings, none of them empty")
    else:
        stored["stop"] = tuple(stop)
    ids = _items(given["stop_token_ids"])
    token = _Rule(int, 0, math.inf, "")
    if ids is None or not all(token.accepts(value) for value in ids):
        refuse("stop_token_ids", "None or a list of token ids (integers of at least 0)")
    else:
        stored["stop_token_ids"] = tuple(dict.fromkeys(int(value) for value in ids))

    most = stored["max_tokens"]
    comparable = most is not None and not mistakes.keys() & {"min_tokens", "max_tokens"}
    if comparable and stored["min_tokens"] > most:
        refuse("min_tokens", f"at most max_tokens, which is {most}")
    return stored, list(mistakes.values())


def _items(value: Any) -> Sequence[Any] | None:
    """The entries of a list or tuple; none for None; None for anything else."""
    if value is None:
        return ()
    return value if isinstance(value, list | tuple) else None
