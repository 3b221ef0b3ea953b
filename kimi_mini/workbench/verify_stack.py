"""Layer and model level: pieces over slots and pages and decode, against float64 in one piece.

The same tokens run through the model under test, packed, cut at random and at last one by one, in
state memory that was full of NaN; and through a copy of it in float64 with the reference kernels,
every row whole. Outputs of all tokens are compared, and the states that the last one leaves behind.

The expert choices of the float64 run are forced upon the others (`expert_choices`); a model that is
float64 itself must do without.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.dispatcher import KDAKernelDispatcher, KDAState
from kernels.numerics import compute_dtype
from kimi_mini.batch import ForwardBatch, Step, allocate_state
from kimi_mini.config import PRESETS, ConfigError, KimiConfig, preset
from kimi_mini.layers.kda import KimiDeltaAttention
from kimi_mini.model import KimiForCausalLM
from kimi_mini.workbench.cases import relative_error, root_mean_square_error
from kimi_mini.workbench.expert_choices import ExpertChoices
from kimi_mini.workbench.verify import LAYER, MODEL, Check
from kimi_mini.workbench.verify_kernels import row_lengths_around

DECODED = 5  # tokens at the end of a row that run one by one
GRID = 16  # exports fall on multiples of this, which the torch backend's alignment divides

Results = dict[str, list[Tensor]]  # quantity → tensors, in order of rows


class Piece(NamedTuple):
    """Tokens first..last of a row in one step; 0 or the number after which its state is kept."""

    row: int
    first: int
    last: int
    export: int = 0


Steps = list[list[Piece]]


def whole_rows(lengths: Sequence[int]) -> Steps:
    """Everything in one step; each row exports its last boundary on the grid."""
    return [[Piece(r, 0, T, T - T % GRID) for r, T in enumerate(lengths)]]


def token_by_token(lengths: Sequence[int]) -> Steps:
    """Nothing but decode, the rows side by side."""
    return [
        [Piece(r, t, t + 1) for r, T in enumerate(lengths) if t < T] for t in range(max(lengths))
    ]


def random_pieces(lengths: Sequence[int], seed: int) -> Steps:
    """Prefill in pieces of any length, also none, then decode; rows are out of step with each
    other and in any order, so that all kinds of rows mix."""
    draw = random.Random(seed)
    done, steps = [0] * len(lengths), []
    while any(d < T for d, T in zip(done, lengths, strict=True)):
        step = []
        for r in draw.sample(range(len(lengths)), k=len(lengths)):
            left = lengths[r] - done[r]
            most = left - DECODED if left > DECODED else min(1, left)
            count = min(most, draw.choice([0, 1, 2, 3, GRID, draw.randint(0, most)]))
            step.append(Piece(r, done[r], done[r] + count))
            done[r] += count
        steps.append(step)
    return steps


def layer_checks(
    layer: KimiDeltaAttention, backend: str, dtype: torch.dtype, seed: int
) -> Iterator[Check]:
    """One KDA layer under each kind of gates; its own are overwritten in copies."""
    lengths = row_lengths_around(GRID)
    random_numbers = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(lengths), layer.in_proj.weight.shape[1], generator=random_numbers).to(dtype)
    forms = {
        "whole rows": whole_rows(lengths),
        "pieces and decode": random_pieces(lengths, seed),
        "token by token": token_by_token(lengths),
    }
    for gates in ("slow", "mixed", "saturated", "unbounded"):
        subject = with_gates(layer, gates)
        exact = copy.deepcopy(subject).double()
        truth = run_layer(exact, "reference", x.double(), lengths, forms["whole rows"])
        for form, steps in forms.items():
            got = run_layer(subject, backend, x, lengths, steps)
            yield from compare("layer", gates, form, got, truth, dtype)


def model_checks(net: KimiForCausalLM, seed: int) -> Iterator[Check]:
    """The whole model with its own weights, stateless and over slots and pages."""
    lengths = row_lengths_around(GRID)
    random_numbers = torch.Generator().manual_seed(seed)
    ids = torch.randint(net.config.vocab_size, (sum(lengths),), generator=random_numbers)
    exact = copy.deepcopy(net).double()
    exact.dispatcher = KDAKernelDispatcher("reference")
    choices = ExpertChoices(exact)
    with choices.recorded(exact):
        truth = run_model(exact, ids, lengths, whole_rows(lengths), choices)
    with contextlib.nullcontext() if net.dtype == torch.float64 else choices.forced(net):
        forms = {
            "stateless": lambda: run_stateless(net, ids, lengths, choices),
            "whole rows": lambda: run_model(net, ids, lengths, whole_rows(lengths), choices),
            "pieces and decode": lambda: run_model(
                net, ids, lengths, random_pieces(lengths, seed), choices
            ),
        }
        for form, run in forms.items():
            yield from compare("model", "its own", form, run(), truth, net.dtype)


def compare(
    level: str, case: str, form: str, got: Results, truth: Results, dtype: torch.dtype
) -> Iterator[Check]:
    """A check for every quantity of `got`, by the measure and tolerance of its dtype."""
    tolerance = LAYER if level == "layer" else MODEL
    measure = root_mean_square_error if dtype == torch.bfloat16 else relative_error
    for quantity, tensors in got.items():
        error = max(map(measure, tensors, truth[quantity]))
        yield Check(level, case, form, quantity, error, tolerance[dtype].of(quantity))


def with_gates(layer: KimiDeltaAttention, gates: str) -> KimiDeltaAttention:
    """A copy of a layer whose decay gates lie about where `cases.GATES` has them."""
    layer = copy.deepcopy(layer)
    layer.lower_bound = None if gates == "unbounded" else -5.0
    slow = -6.0 if layer.lower_bound is not None else -4.6  # g about -0.01 in either form
    bias = torch.full(layer.dt_bias.shape, slow)
    if gates == "mixed":
        bias[:, 1::2] = torch.linspace(-3, 3, bias[:, 1::2].numel()).view_as(bias[:, 1::2])
    elif gates == "saturated":
        bias[:] = 30.0
    elif gates == "unbounded":
        bias[:, ::8] = 100.0
    with torch.no_grad():
        layer.A_log.zero_()
        layer.dt_bias.copy_(bias)
    return layer


def run_layer(
    layer: KimiDeltaAttention, backend: str, x: Tensor, lengths: Sequence[int], steps: Steps
) -> Results:
    """Outputs and states of x [tokens, hidden] through one layer, over slots full of NaN."""
    H, D = layer.dt_bias.shape
    window = layer.conv_weight.shape[1] - 1
    slots, dispatcher = 2 * len(lengths), KDAKernelDispatcher(backend)
    state = KDAState(
        torch.full((slots + 1, H, D, D), math.nan, dtype=compute_dtype(x)),
        torch.full((slots + 1, window, 3 * H * D), math.nan, dtype=x.dtype),
    )

    def forward(tokens: Tensor, *rows: Sequence) -> Tensor:
        plan = dispatcher.plan(*rows, num_slots=slots)
        return layer(x[tokens], Step(dispatcher, plan, None, None), state)

    with torch.no_grad():
        outputs = run_rows(lengths, steps, forward)
    return {"outputs": [outputs], **row_states(lengths, steps, *(s[None] for s in state))}


def run_model(
    net: KimiForCausalLM, ids: Tensor, lengths: Sequence[int], steps: Steps, choices: ExpertChoices
) -> Results:
    """Logits and states of ids [tokens] through the model, over slots and pages full of NaN."""
    page, most = 4, -(-max(lengths) // 4)
    slots, pages = 2 * len(lengths), most * len(lengths)
    state = allocate_state(net.config, num_slots=slots, num_pages=pages, page=page, dtype=net.dtype)
    for part in state:
        part.fill_(math.nan)
    shuffled = torch.randperm(pages, generator=torch.Generator().manual_seed(0)) + 1
    table = shuffled.view(len(lengths), most)
    latent_rows = (table[:, :, None] * page + torch.arange(page)).flatten(1)  # [rows, most * page]

    def forward(
        tokens: Tensor, query_start: list, slot: list, context: list, exports: list
    ) -> Tensor:
        choices.tokens = tokens
        row = [len(lengths) - s for s in slot]
        counts = [b - a for a, b in itertools.pairwise(query_start)]
        out_rows = [latent_rows[r, c : c + n] for r, c, n in zip(row, context, counts, strict=True)]
        batch = ForwardBatch(
            token_ids=ids[tokens],
            query_start=torch.tensor(query_start),
            context_len=torch.tensor(context),
            slots=torch.tensor(slot),
            page_table=table[row],
            out_rows=torch.cat(out_rows),
            exports=torch.tensor(exports).view(-1, 3),
            logits_at=torch.arange(len(tokens)),
        )
        return net.forward_batch(batch, state)

    outputs = run_rows(lengths, steps, forward)
    latent = state.latent.flatten(1, 2)
    return {
        "outputs": [outputs],
        **row_states(lengths, steps, state.recurrent, state.conv),
        "latent": [latent[:, latent_rows[r, :T]] for r, T in enumerate(lengths) if T],
    }


def run_stateless(
    net: KimiForCausalLM, ids: Tensor, lengths: Sequence[int], choices: ExpertChoices
) -> Results:
    """Logits of every row through `net(input_ids)`, one call a row."""
    outputs = []
    for tokens in torch.arange(len(ids)).split(list(lengths)):
        choices.tokens = tokens
        with torch.no_grad():
            outputs.append(net(ids[tokens][None])[0])
    return {"outputs": [torch.cat(outputs)]}


def run_rows(lengths: Sequence[int], steps: Steps, forward: Callable[..., Tensor]) -> Tensor:
    """Outputs [tokens, ...] of all steps, in order of tokens, row after row.

    forward(tokens, query_start, slots, context_len, exports) runs one step. Of n rows, row r lives
    in slot n - r, so that no code gets by with counting, and exports to slot n + 1 + r.
    """
    n, starts = len(lengths), [0, *itertools.accumulate(lengths)]
    where, outputs = [], []
    for pieces in steps:
        spans = [torch.arange(starts[p.row] + p.first, starts[p.row] + p.last) for p in pieces]
        tokens = torch.cat(spans)
        query_start = [0, *itertools.accumulate(len(span) for span in spans)]
        exports = [(i, p.export, n + 1 + p.row) for i, p in enumerate(pieces) if p.export]
        slots, context_len = [n - p.row for p in pieces], [p.first for p in pieces]
        outputs.append(forward(tokens, query_start, slots, context_len, exports))
        where.append(tokens)
    return torch.cat(outputs)[torch.cat(where).argsort()]


def row_states(lengths: Sequence[int], steps: Steps, recurrent: Tensor, conv: Tensor) -> Results:
    """Final states of the rows that have tokens, from [layers, slots, ...], and their exports."""
    n = len(lengths)
    final = [n - r for r, T in enumerate(lengths) if T]
    exported = [n + 1 + p.row for pieces in steps for p in pieces if p.export]
    states = {"recurrent": [recurrent[:, final]], "conv": [conv[:, final]]}
    if exported:
        states["exports"] = [recurrent[:, exported], conv[:, exported]]
    return states


def open_subject(name: str, dtype: torch.dtype, seed: int, backend: str) -> KimiForCausalLM:
    """A preset or a config.json with random weights, or a folder: its weights if it has any.

    Raises ConfigError or CheckpointError for a name, file or folder that is wrong.
    """
    path = Path(name)
    if name in PRESETS:
        config = preset(name)
    elif path.is_file():
        config = KimiConfig.from_json(path)
    elif path.is_dir():
        if any(path.glob("*.safetensors")):
            return KimiForCausalLM.from_pretrained(path, dtype=dtype, backend=backend)
        config = KimiConfig.from_json(path / "config.json")
    else:
        raise ConfigError(
            f"--config {name!r} is neither a preset ({', '.join(PRESETS)}) nor a file or folder"
        )
    return KimiForCausalLM.from_config(config, seed=seed, dtype=dtype, backend=backend)
