"""TOY of bug_reports.md behind an engine that reuses prefixes, for its recipes.

In float64, where COLD is exact: what the model itself gives, from zeros and in one piece. Served
with the product defaults, but for the page and the grid that a recipe names.
"""

import dataclasses
import functools
import random
from collections.abc import Iterable, Sequence

import torch

from kimi_mini import KimiForCausalLM, preset
from kimi_mini.serving.control import CacheControl
from kimi_mini.serving.outputs import CompletionOutput
from kimi_mini.serving.request import Request
from tests.kimi_mini.serving.reuse import TREE, Rules, greedy, reusing, run
from tests.kimi_mini.serving.witness import EXACT, Truth, Witness, distance


@functools.cache
def toy(backend: str = "auto", kernel_chunk: int = 16) -> Truth:
    """KDA, KDA, KDA, MLA, the last with experts; hidden 64; 2 heads of 16; convolutions of 4;
    vocabulary 97. The first two never forget."""
    nano = preset("nano")
    kda = dataclasses.replace(
        nano.linear_attn_config,
        kda_layers=(1, 2, 3),
        full_attn_layers=(4,),
        num_heads=2,
        head_dim=16,
        short_conv_kernel_size=4,
    )
    config = dataclasses.replace(
        nano,
        num_hidden_layers=4,
        first_k_dense_replace=3,
        linear_attn_config=kda,
        hidden_size=64,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=97,
        max_position_embeddings=1200,
        eos_token_id=None,
        pad_token_id=0,
        bos_token_id=1,
    )
    model = KimiForCausalLM.from_config(
        config, seed=3, dtype=torch.float64, backend=backend, kernel_chunk=kernel_chunk
    )
    with torch.no_grad():
        for layer in model.model.layers[:2]:
            layer.self_attn.A_log.zero_()
            layer.self_attn.dt_bias.fill_(-6.0)
    return Truth(model)


class Served:
    """TOY behind an engine; whatever is asked is held against COLD. running: the states of rows
    that run are asked for, too. kernel_chunk: of the torch backend."""

    def __init__(
        self,
        rules: Rules = TREE,
        *,
        backend: str = "auto",
        kernel_chunk: int = 16,
        page: int | None = None,
        running: bool = False,
        **options,
    ) -> None:
        page = page or rules.page
        roomy = dict(page=page, state_slots=12, kv_pages=-(-1100 // page))
        self.truth = toy(backend, kernel_chunk)
        self.engine = reusing(self.truth.model, rules, **roomy | options)
        self.witness = Witness(self.engine, truth=self.truth, running=running)
        self.cache, self.holdings = self.engine.cache, self.witness.holdings

    def add(self, prompt: Sequence[int], new: int = 4, **control) -> Request:
        return self.engine.add_request(prompt, greedy(new), control=CacheControl(**control))

    def run(self, *requests: Request) -> list[CompletionOutput]:
        """To the end of everything; each of these = COLD."""
        own = run(self.engine, *requests)
        for request in requests:
            self.assert_cold(request)
        return own

    def ask(self, prompt: Sequence[int], new: int = 4, **control) -> CompletionOutput:
        (own,) = self.run(self.add(prompt, new, **control))
        return own

    def reuse(self, prompt: Sequence[int], new: int = 4, **control) -> int:
        return self.ask(prompt, new, **control).cached_tokens

    def assert_cold(self, request: Request) -> None:
        (own,) = request.output().outputs
        known = [*request.prompt_ids, *own.token_ids]
        logits = self.truth.of(known)[3]
        first = len(request.prompt_ids) - 1
        assert own.finish_reason == "length"
        assert own.token_ids == tuple(logits[first:-1].argmax(-1).tolist())
        seen = self.witness.logits[request.sequences[0].name]
        assert set(range(first, len(known) - 1)) <= seen.keys()
        for position, row in seen.items():
            assert distance(row, logits[position]) < EXACT
        hit = own.hit.joint
        assert hit <= len(request.prompt_ids) - 1


def fresh(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(97) for _ in range(count)]


def out_of_memory(work: Iterable, *_) -> None:
    """In the place of a part of the executor: what has anything to do fails."""
    if list(work):
        raise MemoryError


P, X, Y, Z = fresh(1, 64), fresh(2, 9), fresh(3, 11), fresh(4, 13)
