"""The operators of a layer, each as calls of its forms on operands of a given size.

What an operator costs at least is said beside it: its FLOPs, of the least work known and not of the
form that ran, and the bytes that it cannot avoid moving. Matrices and states of a decode step are
taken in turn from more memory than the caches hold, for so a model finds them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import short_conv
from kernels.chunked import kda_chunk_scan
from kernels.dispatcher import KDAKernelDispatcher, KDAState
from kernels.glu import GLUForm
from kernels.kda import KDAInputs, KDAWeights
from kernels.kda_metadata import KDAMetadata
from kernels.layer_functions import LayerFunctions
from kernels.native import library
from kernels.native import operators as native
from kernels.paging import build_attention_metadata
from kernels.routing import RouterRule
from kimi_mini.workbench import bench
from kimi_mini.workbench.bench_published import published_forms
from kimi_mini.workbench.cases import scan_case

PUBLISHED_LONGEST = 2048  # tokens that published forms of the scan run over: they take long
WINDOW = 4  # of the short convolution
FLOAT = 4  # bytes

Call = Callable[[], object]


class Operator(NamedTuple):
    """What is done to `tokens` tokens, what it costs at least, and its forms: "torch" and "native",
    if there is one; published: somebody else's, by name."""

    what: str
    H: int
    K: int
    V: int
    tokens: int
    flops: float
    traffic: float  # bytes
    forms: dict[str, Call]
    published: dict[str, Call]


def chunk_flops(C: int, K: int, V: int) -> int:
    """FLOPs of the chunk form of the scan per token and head, by the formulas of architecture 4.1.

    Per chunk: L and A, 2 C^2 K each; T and A times a [C, V], 2 C^2 V each; three products of C K V
    with the state. Squares are counted whole; the inverse of the triangle (C^3 / 3) is not counted.
    """
    return 4 * C * (K + V) + 6 * K * V


def token_flops(K: int, V: int) -> int:
    """The token scan likewise, in the FLOPs that a product does in the same time.

    Each of the K V numbers of the state goes through four vector operations a token: S~ = S e^g,
    then multiply-adds for S~ k, S = S~ + u k^T and S q. A product is made of multiply-adds alone,
    two FLOPs each, and the lone multiplication keeps the unit as busy as one of them.
    """
    return 4 * 2 * K * V


class Operators:
    """Those of a layer with H heads of widths K and V, hidden width H*V.

    Attention has nope = K, rope = K/2 and a latent of 4K, the proportions of K3; the experts have
    those of the bench preset. Native forms are absent where the operators cannot be had.
    """

    def __init__(self, K: int, V: int, H: int) -> None:
        self.K, self.V, self.H = K, V, H
        self.hidden = H * V
        self.backends = {"torch": KDAKernelDispatcher("torch")}
        if library.missing() is None:
            self.backends["native"] = KDAKernelDispatcher("native")

    def all(
        self, lengths: Sequence[int], batches: Sequence[int]
    ) -> Iterator[tuple[str, Callable[[], Operator]]]:
        """By name, what makes each: scans of all lengths, the rest of prefill at the shortest."""
        T = min(lengths)
        for n in lengths:
            yield "scan", partial(self.scan, n)
            yield "core of a KDA layer", partial(self.core, n)
        yield "convolution", partial(self.convolution, T)
        for B in batches:
            yield "core step", partial(self.core_step, B)
        for N in (T, *batches):
            yield "projection", partial(self.product, N)
            yield "mixture and norm", partial(self.mixture, N)
            yield "gated norm", partial(self.gated_norm, N)
            yield "SiTU-GLU", partial(self.activation, N)
            yield "router", partial(self.router, N)
            yield "experts", partial(self.experts, N)
        yield "attention", partial(self.attention, T)
        for B in batches:
            yield "attention step", partial(self.attention_step, B, T)

    # --- the recurrence

    def scan(self, T: int) -> Operator:
        """The bare recurrence: q, k normalised; v, g, beta given."""
        case = scan_case("mixed", [T], H=self.H, K=self.K, V=self.V)
        forms: dict[str, Call] = {"torch": lambda: kda_chunk_scan(*case)}
        if "native" in self.backends:
            forms["native"] = lambda: native.kda_scan(*case)
        published = published_forms(case) if T <= PUBLISHED_LONGEST else {}
        flops = T * self.H * self._scan_flops
        traffic = FLOAT * T * self.H * (3 * self.K + 2 * self.V + 1)
        return self._operator(f"scan, T = {T}", T, flops, traffic, forms, published)

    @property
    def _scan_flops(self) -> int:
        return min(chunk_flops(64, self.K, self.V), token_flops(self.K, self.V))

    def convolution(self, T: int) -> Operator:
        """The short convolution of q, k and v by itself."""
        inputs, weights = self._projections(T)
        D = inputs.qkv.shape[1]
        case = (inputs.qkv, weights.conv, torch.randn(1, WINDOW - 1, D), [0, T])
        forms: dict[str, Call] = {"torch": lambda: short_conv.short_conv(*case)}
        if "native" in self.backends:
            forms["native"] = lambda: native.short_conv(*case)
        flops, traffic = 2 * T * WINDOW * D, FLOAT * 2 * T * D
        return self._operator(f"convolution, T = {T}", T, flops, traffic, forms)

    def core(self, T: int) -> Operator:
        """Convolution, norms, gates and recurrence of one row, from and to its slot."""
        inputs, weights = self._projections(T)
        state = KDAState(*(pools[0] for pools in self._states(1)))
        forms = self._mixed(lambda: (inputs, weights, state), [0, T], [1])
        flops = T * self.H * (self._scan_flops + 2 * WINDOW * (2 * self.K + self.V))
        traffic = FLOAT * T * self.H * (3 * self.K + 2 * self.V + 1)
        return self._operator(f"core of a KDA layer, T = {T}", T, flops, traffic, forms)

    def core_step(self, B: int) -> Operator:
        """The same for one token of each of B rows, whose states no cache holds."""
        inputs, weights = self._projections(B)
        size = FLOAT * B * self.H * self.V * self.K
        many = self._states(B, _uncached(size))
        states = itertools.cycle(KDAState(*pools) for pools in zip(*many, strict=True))
        starts, slots = list(range(B + 1)), list(range(1, B + 1))
        forms = self._mixed(lambda: (inputs, weights, next(states)), starts, slots)
        flops = 7 * B * self.H * self.K * self.V
        return self._operator(f"core step, {B} rows", B, flops, 2 * size, forms)

    def _mixed(
        self,
        operands: Callable[[], tuple[KDAInputs, KDAWeights, KDAState]],
        starts: list[int],
        slots: list[int],
    ) -> dict[str, Call]:
        def call(dispatcher: KDAKernelDispatcher, step: KDAMetadata) -> Call:
            return lambda: dispatcher.mixed(*operands(), step)

        contexts = [1] * len(slots)
        return {
            name: call(d, d.plan(starts, slots, contexts, num_slots=len(slots)))
            for name, d in self.backends.items()
        }

    def _projections(self, N: int) -> tuple[KDAInputs, KDAWeights]:
        H, K, D = self.H, self.K, self.H * (2 * self.K + self.V)
        inputs = KDAInputs(torch.randn(N, D), torch.randn(N, H, K), torch.randn(N, H))
        bias = torch.randn(H, K) - 4  # slow: states live on
        return inputs, KDAWeights(torch.randn(D, WINDOW), torch.randn(H) / 2, bias, -5.0)

    def _states(self, slots: int, count: int = 1) -> tuple[Tensor, Tensor]:
        """Recurrent and conv pools of `count` layers."""
        D = self.H * (2 * self.K + self.V)
        recurrent = torch.randn(count, slots + 1, self.H, self.V, self.K)
        return recurrent, torch.randn(count, slots + 1, WINDOW - 1, D)

    # --- what is done token by token

    def product(self, N: int) -> Operator:
        """The projections of a layer's input: one matrix of 4 H V rows."""
        x, weights = torch.randn(N, self.hidden), itertools.cycle(self._matrices)
        rows, width = self._matrices[0].shape
        forms = self._forms(lambda f: f.linear(x, next(weights)))
        flops, traffic = 2 * N * rows * width, FLOAT * (rows * width + N * (rows + width))
        return self._operator(f"projection, {_of(N)}", N, flops, traffic, forms)

    @cached_property
    def _matrices(self) -> list[Tensor]:
        rows = 4 * self.hidden
        count = _uncached(FLOAT * rows * self.hidden)
        return [*torch.randn(count, rows, self.hidden)]

    @cached_property
    def _expert_weights(self) -> list[tuple[Tensor, Tensor]]:
        """w13 and w2."""
        L = inner = self.hidden // 2
        count = _uncached(FLOAT * 16 * 3 * inner * L)
        w13, w2 = torch.randn(count, 16, 2 * inner, L), torch.randn(count, 16, L, inner)
        return [*zip(w13 / L, w2, strict=True)]

    def mixture(self, N: int) -> Operator:
        """AttnRes over a bank of three and the prefix, and the norm that reads it."""
        bank, rms = torch.randn(N, 3, self.hidden), torch.rand(N, 3) + 0.5
        prefix, vectors = torch.randn(N, self.hidden), torch.randn(3, self.hidden)
        forms = self._forms(lambda f: f.mix_norm(prefix, bank, rms, *vectors, 1e-5))
        return self._operator(f"mixture and norm, {_of(N)}", N, 0, 5 * _size(prefix), forms)

    def gated_norm(self, N: int) -> Operator:
        """The head norm and output gate of a KDA layer."""
        o, gate = torch.randn(N, self.H, self.V), torch.randn(N, self.hidden)
        weight = torch.randn(self.V)
        forms = self._forms(lambda f: f.gated_norm(o, gate, weight, 1e-5))
        return self._operator(f"gated norm, {_of(N)}", N, 0, 3 * _size(o), forms)

    def activation(self, N: int) -> Operator:
        """SiTU-GLU of 2 H V channels."""
        gate_up, form = torch.randn(N, 2 * self.hidden), GLUForm(True, 4.0, 25.0)
        forms = self._forms(lambda f: f.glu(gate_up, form))
        return self._operator(f"SiTU-GLU, {_of(N)}", N, 0, 1.5 * _size(gate_up), forms)

    def router(self, N: int) -> Operator:
        """Four of 16 experts."""
        x, weight, bias = torch.randn(N, self.hidden), torch.randn(16, self.hidden), torch.randn(16)
        forms = self._forms(lambda f: f.route(x, weight, bias, RouterRule(4)))
        flops, traffic = 2 * N * 16 * self.hidden, _size(x) + _size(weight)
        return self._operator(f"router, {_of(N)}", N, flops, traffic, forms)

    def experts(self, N: int) -> Operator:
        """Four of 16 experts, of width H V / 2 in a latent space as wide."""
        L = inner = self.hidden // 2
        x, chosen = torch.randn(N, L), torch.rand(N, 16).argsort(1)[:, :4]
        routing = self.backends["torch"].functions.route(
            x, torch.randn(16, L), torch.zeros(16), RouterRule(4), chosen
        )
        weights, form = itertools.cycle(self._expert_weights), GLUForm(True, 4.0, 25.0)
        forms = self._forms(lambda f: f.mix_experts(x, routing, *next(weights), form))
        traffic = FLOAT * len(chosen.unique()) * 3 * inner * L + 2 * _size(x)
        return self._operator(f"experts, {_of(N)}", N, 2 * N * 4 * 3 * inner * L, traffic, forms)

    # --- latent attention

    def attention(self, T: int) -> Operator:
        """A prompt of T tokens over its own latent rows."""
        q, pool, kv_b = self._attention_operands(T, T, rows=1)
        table = torch.arange(len(pool)).view(1, -1)
        step = build_attention_metadata([0, T], [0], table, page=16, pages=len(pool))
        forms = self._forms(lambda f: f.attend(q, pool, kv_b, step))
        keys, values = self.K + self.K // 2, self.V
        flops = 2 * T * kv_b.numel() + T * T * self.H * (keys + values)
        return self._operator(f"attention, T = {T}", T, flops, _size(q) + _size(pool), forms)

    def attention_step(self, B: int, S: int) -> Operator:
        """One query for each of B rows, of S latent rows each."""
        q, pool, kv_b = self._attention_operands(B, S, rows=B)
        table = torch.arange(len(pool)).view(B, -1)
        step = build_attention_metadata(range(B + 1), [S - 1] * B, table, page=16, pages=len(pool))
        forms = self._forms(lambda f: f.attend(q, pool, kv_b, step))
        flops = 2 * B * (kv_b.numel() + S * self.H * (2 * kv_b.shape[-1] + self.K // 2))
        traffic = _size(pool) + _size(kv_b)
        return self._operator(f"attention step, {B} rows of {S}", B, flops, traffic, forms)

    def _attention_operands(self, N: int, S: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        L, R = 4 * self.K, self.K // 2
        pages = rows * -(-S // 16)
        q, pool = torch.randn(N, self.H, self.K + R), torch.randn(pages, 16, L + R)
        return q, pool, torch.randn(self.H, self.K + self.V, L)

    def _forms(self, call: Callable[[LayerFunctions], object]) -> dict[str, Call]:
        return {
            name: (lambda functions=d.functions: call(functions))
            for name, d in self.backends.items()
        }

    def _operator(
        self,
        what: str,
        tokens: int,
        flops: float,
        traffic: float,
        forms: dict[str, Call],
        published: dict[str, Call] | None = None,
    ) -> Operator:
        return Operator(
            what, self.H, self.K, self.V, tokens, flops, traffic, forms, published or {}
        )


def _uncached(size: int) -> int:
    """How many things of `size` bytes no cache holds."""
    return -(-FLOAT * bench.COPIED // size)


def _size(x: Tensor) -> int:
    return x.numel() * x.itemsize


def _of(N: int) -> str:
    return f"{N} token{'s' * (N != 1)}"
