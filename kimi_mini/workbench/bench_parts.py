"""The kinds of work in a step, each to be done again alone, in the order of the step.

A step is run once with every call of its layers written down. What was written down is then made
again part by part, so that each finds the caches as it does in the step: between two uses of a
matrix, or of a state, everything else passes through them.

    preparing    the checks and addresses that come before the layers
    products     every matrix product, the router's and those of the chosen experts included, with
                 the backend's own product, and nothing else
    attention    latent attention over its rows, as the backend does it
    recurrence   the core of the KDA layers, from slots to slots, as the backend does it
    states       the same states read and written where they lie, and no arithmetic
    calling      as many products and moves as there are above, of one number each

A core and the moving of its state are parts of passes of their own, for the second of the two would
find warm what the first has fetched.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from kernels.dispatcher import KDAKernelDispatcher
from kernels.layer_functions import LayerFunctions
from kimi_mini.batch import ForwardBatch, ModelState, prepare_step
from kimi_mini.model import KimiForCausalLM
from kimi_mini.workbench.bench_products import Product, products_of

CORE, ATTEND = "mixed", "attend"  # what runs a KDA layer's core, and an MLA layer's attention


class Kind(StrEnum):
    """A kind of work."""

    PREPARING = "preparing"
    PRODUCTS = "products"
    ATTENTION = "attention"
    RECURRENCE = "recurrence"
    STATES = "states"
    CALLING = "calling"


class Part(NamedTuple):
    """Something that a step does."""

    kind: Kind
    run: Callable[[], object]


class Call(NamedTuple):
    """One call of a layer: a name of LayerFunctions or CORE, and what was called."""

    name: str
    function: Callable[..., Any]
    args: tuple

    def again(self) -> Any:
        """Make it once more."""
        return self.function(*self.args)


@contextlib.contextmanager
def recorded(dispatcher: KDAKernelDispatcher) -> Iterator[list[Call]]:
    """Write down every call of the layers, in order, while the block runs."""
    calls: list[Call] = []

    def recording(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls.append(Call(name, function, args))
            return function(*args)

        return call

    backend = dispatcher.backend
    table = backend.functions._replace(decoder=None)._asdict()  # layers one by one
    watched = LayerFunctions(**{name: f and recording(name, f) for name, f in table.items()})
    dispatcher.backend = backend._replace(functions=watched)
    dispatcher.mixed = recording(CORE, dispatcher.mixed)
    try:
        yield calls
    finally:
        dispatcher.backend = backend
        del dispatcher.mixed


class Parts:
    """What a step does. decode: no row has more than one token; products: those it makes.

    The states of the step move on while it is written down, and whenever its cores run again; its
    rows must have neighbouring slots. A later run of the step may choose other experts, as many.
    Raises RuntimeError for a model whose layers do not call what can be written down.
    """

    def __init__(self, model: KimiForCausalLM, state: ModelState, step: ForwardBatch) -> None:
        with recorded(model.dispatcher) as calls:
            model.forward_batch(step, state)
        _check_complete(calls, model)
        self.decode = bool((step.query_start.diff() <= 1).all())
        self.products: list[Product] = []
        linear = model.dispatcher.functions.linear
        prepare = partial(prepare_step, step, state, model.config, model.dtype, model.dispatcher)
        with_cores = [Part(Kind.PREPARING, prepare)]
        with_moves, calling = [*with_cores], []
        for call in calls:
            if call.name == CORE:
                with_cores.append(Part(Kind.RECURRENCE, call.again))
                states = states_of(call, step.slots)
                with_moves += [Part(Kind.STATES, _moving(x)) for x in states]
                calling += [_moving(x.new_ones(1)) for x in states if self.decode]
                continue
            if call.name == ATTEND:
                parts = [Part(Kind.ATTENTION, call.again)]
            else:
                products = products_of(call.name, call.args)
                self.products += products
                parts = [Part(Kind.PRODUCTS, partial(linear, *p)) for p in products]
                calling += [partial(linear, *p.of_one_number()) for p in products]
            with_cores += parts
            with_moves += parts
        last = [Part(Kind.CALLING, call) for call in calling]
        passes = (with_cores, with_moves, last) if self.decode else (with_cores, last)
        self._passes = [_grouped(parts) for parts in passes]

    def seconds(self) -> dict[Kind, float]:
        """Make all parts once: what those of each kind took. Of a decode step, products and
        attention are those of the pass in which states are moved."""
        spent: dict[Kind, float] = {}
        for groups in self._passes:
            spent |= _timed(groups)
        return spent


def states_of(call: Call, slots: Tensor) -> list[Tensor]:
    """The recurrent and conv states that a core works on, where they lie; slots: neighbours."""
    first, last = int(slots.min()), int(slots.max())
    return [pool[first : last + 1] for pool in call.args[2]]


def _moving(x: Tensor) -> Callable[[], object]:
    return partial(x.mul_, 1.0)


def _grouped(parts: Sequence[Part]) -> list[tuple[Kind, list[Callable[[], object]]]]:
    """Parts of a kind that follow each other, together: looking at the clock takes time too."""
    groups = itertools.groupby(parts, key=lambda part: part.kind)
    return [(kind, [part.run for part in group]) for kind, group in groups]


def _timed(groups: Sequence[tuple[Kind, list[Callable[[], object]]]]) -> dict[Kind, float]:
    spent = dict.fromkeys((kind for kind, _ in groups), 0.0)
    for kind, runs in groups:
        began = time.perf_counter()
        for run in runs:
            run()
        spent[kind] += time.perf_counter() - began
    return spent


def _check_complete(calls: Sequence[Call], model: KimiForCausalLM) -> None:
    config, made = model.config, [call.name for call in calls]
    for name, layers in ((CORE, config.kda_layer_ids), (ATTEND, config.mla_layer_ids)):
        if made.count(name) != len(layers):
            raise RuntimeError(
                f"{len(layers)} layers must call {name!r} once each to be timed part by part; "
                f"{made.count(name)} calls were seen"
            )
