"""KDAKernelDispatcher: which kernel runs, on which slots (serving 5).

The kernels are pure; here, and only here, states are gathered from slots before and scattered to
slots after, without autograd. Backends:

    reference   token by token, the formulas as written; exports after any token
    torch       chunk form for extend, one-step form for decode; exports at kernel_chunk multiples
    native      C++ operators on the slots themselves, one token scan for both; exports after any
                token; where gradients are asked for, the functions of torch

"auto" is native where its operators have been compiled or can be, which happens on first use; else
it is torch, with one warning, or with none if KIMI_MINI_NATIVE=0 is in the environment.
State semantics are the same for all: decode is extend with one token, a mixed batch is its rows run
alone, and slots that no row of the batch names keep every bit.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.chunked import kda_chunk_scan
from kernels.kda import CoreResult, KDAInputs, KDAWeights, activate, kda_decode, kda_extend
from kernels.kda_metadata import KDAMetadata, RowGroup, build_metadata
from kernels.layer_functions import TORCH, LayerFunctions
from kernels.native import library, operators
from kernels.native.layers import NATIVE
from kernels.numerics import compute_dtype
from kernels.packing import Export
from kernels.recurrent import ScanResult, kda_token_scan
from kernels.reference import activate_reference, kda_reference, short_conv_reference
from kernels.short_conv import short_conv


class KDAState(NamedTuple):
    """One layer's view of the state pools; slot 0 is the sink. Slot stride is free.

    recurrent [slots+1, H, V, K] float32 (float64 for a float64 model); conv [slots+1, W-1, D] in
    the activation dtype.
    """

    recurrent: Tensor
    conv: Tensor


class Backend(NamedTuple):
    """One family of kernels. extend(inputs, weights, S0, conv0, query_start, exports);
    decode(inputs, weights, S0, conv0). Where takes(inputs, weights) allows it,
    on_slots(inputs, weights, state, rows) runs rows in place instead. functions: of the layers.
    one_kernel: rows of one token need no kernel of their own, so all rows of a step are one call.
    """

    name: str
    export_alignment: int
    functions: LayerFunctions
    extend: Callable[..., CoreResult]
    decode: Callable[..., tuple[Tensor, Tensor, Tensor]]
    on_slots: Callable[..., Tensor] | None = None
    takes: Callable[..., bool] | None = None
    one_kernel: bool = False


def _torch_backend(kernel_chunk: int) -> Backend:
    scan = functools.partial(kda_chunk_scan, kernel_chunk=kernel_chunk)
    extend = functools.partial(kda_extend, convolve=short_conv, activate=activate, scan=scan)
    return Backend("torch", kernel_chunk, TORCH, extend, kda_decode)


def _reference_backend(_kernel_chunk: int) -> Backend:
    return Backend("reference", 1, TORCH, _extend_reference, _decode_reference)


_extend_reference = functools.partial(
    kda_extend, convolve=short_conv_reference, activate=activate_reference, scan=kda_reference
)


def _decode_reference(
    inputs: KDAInputs, weights: KDAWeights, S0: Tensor, conv0: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    out = _extend_reference(inputs, weights, S0, conv0, range(S0.shape[0] + 1), ())
    return out.o, out.S, out.conv


def _scan_or_loop(
    *operands: Tensor | Sequence[int] | Sequence[Export], kernel_chunk: int
) -> ScanResult:
    exports = operands[-1]
    if exports:  # only the loop has them after any token
        return kda_token_scan(*operands)
    return kda_chunk_scan(*operands, kernel_chunk=kernel_chunk)


def _native_backend(kernel_chunk: int) -> Backend:
    scan = functools.partial(_scan_or_loop, kernel_chunk=kernel_chunk)
    extend = functools.partial(kda_extend, convolve=short_conv, activate=activate, scan=scan)
    rows, takes = operators.kda_rows, operators.takes
    return Backend("native", 1, NATIVE, extend, kda_decode, rows, takes, one_kernel=True)


_BUILDERS = {"native": _native_backend, "torch": _torch_backend, "reference": _reference_backend}
BACKENDS = ("auto", *_BUILDERS)


class KDAKernelDispatcher:
    """Chooses a backend once, then runs the rows of each step on it.

    backend: "auto" (native if it can be had, else torch), "native", "torch" or "reference".
    kernel_chunk: tokens of one chunk inside the torch backend.
    `not_taken` maps each backend that was passed over to the reason; `describe()` says it in words.
    Raises ValueError for a backend that is unknown or not available, with the reason.
    """

    def __init__(self, backend: str = "auto", kernel_chunk: int = 16) -> None:
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}; got {backend!r}")
        if kernel_chunk < 1:
            raise ValueError(f"kernel_chunk must be at least 1, got {kernel_chunk}")
        chosen, self.not_taken = _choose(backend)
        self.backend = _BUILDERS[chosen](kernel_chunk)

    @property
    def export_alignment(self) -> int:
        """Exports fall on multiples of this many tokens from a row's start, or on its end."""
        return self.backend.export_alignment

    @property
    def functions(self) -> LayerFunctions:
        """What else the layers compute, in the same backend."""
        return self.backend.functions

    def describe(self) -> str:
        """One line: the backend in use, and why each other one is not."""
        others = "; ".join(f"{name}: {why}" for name, why in self.not_taken.items())
        return f"KDA backend {self.backend.name} (not taken: {others})"

    def plan(
        self,
        query_start: Tensor | Sequence[int],
        slots: Tensor | Sequence[int],
        context_len: Tensor | Sequence[int],
        exports: Tensor | Sequence[Sequence[int]] | None = None,
        *,
        num_slots: int,
        num_tokens: int | None = None,
        extend_only: bool = False,
    ) -> KDAMetadata:
        """Check a step against this backend; see `kda_metadata.build_metadata`. Once per step."""
        return build_metadata(
            query_start,
            slots,
            context_len,
            exports,
            num_slots=num_slots,
            export_alignment=self.export_alignment,
            num_tokens=num_tokens,
            extend_only=extend_only or self.backend.one_kernel,
        )

    def extend(
        self, inputs: KDAInputs, weights: KDAWeights, state: KDAState | None, step: KDAMetadata
    ) -> Tensor:
        """Rows of any length from their slots (zeros where context_len is 0) → o [N, H, V].

        Changes, in place, the slots of the rows and of their exports, and nothing else. Raises
        ValueError if `step` holds rows planned for decode.
        """
        if step.decode is not None:
            raise ValueError("extend was given a step with decode rows; use mixed")
        return self.mixed(inputs, weights, state, step)

    def decode(
        self, inputs: KDAInputs, weights: KDAWeights, state: KDAState | None, step: KDAMetadata
    ) -> Tensor:
        """Rows of exactly one token (or none) → o [N, H, V]; slots are changed in place."""
        if step.extend is not None and step.extend.query_start[-1] > len(step.extend.resumed):
            raise ValueError("decode was given rows of more than one token; use mixed")
        return self.mixed(inputs, weights, state, step)

    def mixed(
        self, inputs: KDAInputs, weights: KDAWeights, state: KDAState | None, step: KDAMetadata
    ) -> Tensor:
        """Extend rows and decode rows of one step → o [N, H, V], zeros for tokens of no row.

        state None: every row starts from zeros and no state is kept; the call is then
        differentiable. Output in float32 (float64 for float64 inputs).
        """
        N = inputs.qkv.shape[0]
        if step.num_tokens != N:
            raise ValueError(f"tokens of qkv must be {step.num_tokens}, got {N}")
        groups = [(rows, rows is step.decode) for rows in (step.extend, step.decode) if rows]
        parts = [self._run(inputs, weights, state, rows, decode) for rows, decode in groups]
        if len(parts) == 1 and parts[0].shape[0] == N:
            return parts[0]
        H, V = weights.dt_bias.shape[0], self._value_width(inputs, weights)
        dtype = parts[0].dtype if parts else weights.dt_bias.dtype
        o = inputs.qkv.new_zeros(N, H, V, dtype=dtype)
        for (rows, _), part in zip(groups, parts, strict=True):
            o[rows.tokens] = part
        return o

    def _run(
        self,
        inputs: KDAInputs,
        weights: KDAWeights,
        state: KDAState | None,
        rows: RowGroup,
        decode: bool,
    ) -> Tensor:
        if rows.query_start[-1] != inputs.qkv.shape[0]:
            inputs = KDAInputs(*(x[rows.tokens] for x in inputs))
        takes = self.backend.takes
        if takes is not None and takes(inputs, weights):  # on_slots checks shapes by itself
            return self.backend.on_slots(inputs, weights, state, rows)
        self._check_shapes(inputs, weights, state)
        S0, conv0 = self._gather(inputs, weights, state, rows)
        if decode:
            o, S, conv = self.backend.decode(inputs, weights, S0, conv0)
        else:
            o, S, conv, *exported = self.backend.extend(
                inputs, weights, S0, conv0, rows.query_start, rows.exports
            )
        if state is not None:
            _scatter(state, rows.slots, S, conv)
            if rows.exports:
                if decode:  # the only place to export a one-token row is its end
                    exported = (S[rows.export_rows], conv[rows.export_rows])
                _scatter(state, rows.export_slots, *exported)
        return o

    def _gather(
        self, inputs: KDAInputs, weights: KDAWeights, state: KDAState | None, rows: RowGroup
    ) -> tuple[Tensor, Tensor]:
        """Initial states of the rows; a row that does not resume gets zeros, not 0 * its slot."""
        H, K = weights.dt_bias.shape
        D, W = weights.conv.shape
        B = len(rows.resumed)
        if state is None or not any(rows.resumed):
            V = self._value_width(inputs, weights)
            return (
                inputs.qkv.new_zeros(B, H, V, K, dtype=compute_dtype(inputs.qkv)),
                inputs.qkv.new_zeros(B, W - 1, D),
            )
        S0, conv0 = state.recurrent[rows.slots], state.conv[rows.slots]
        if not all(rows.resumed):
            resumed = torch.tensor(rows.resumed).view(B, 1, 1)
            S0 = torch.where(resumed.unsqueeze(-1), S0, 0)
            conv0 = torch.where(resumed, conv0, 0)
        return S0, conv0

    @staticmethod
    def _value_width(inputs: KDAInputs, weights: KDAWeights) -> int:
        H, K = weights.dt_bias.shape
        return inputs.qkv.shape[-1] // H - 2 * K

    def _check_shapes(self, inputs: KDAInputs, weights: KDAWeights, state: KDAState | None) -> None:
        N, D = inputs.qkv.shape
        H, K = weights.dt_bias.shape
        V = self._value_width(inputs, weights)
        if V < 1:
            raise ValueError(
                f"qkv has {D} channels; H*(2K+V) with H = {H}, K = {K} is more than {2 * H * K}"
            )
        expected = [
            ("qkv channels", D, H * (2 * K + V)),
            ("gate", tuple(inputs.gate.shape), (N, H, K)),
            ("beta", tuple(inputs.beta.shape), (N, H)),
            ("A_log", tuple(weights.A_log.shape), (H,)),
            ("conv weight channels", weights.conv.shape[0], D),
        ]
        if state is not None:
            W = weights.conv.shape[1]
            expected += [
                ("recurrent state", tuple(state.recurrent.shape[1:]), (H, V, K)),
                ("conv state", tuple(state.conv.shape[1:]), (W - 1, D)),
                ("recurrent dtype", state.recurrent.dtype, compute_dtype(inputs.qkv)),
            ]
        for name, got, want in expected:
            if got != want:
                raise ValueError(f"{name} must be {want}, got {got}")


def _choose(backend: str) -> tuple[str, dict[str, str]]:
    """The backend to take, and why each other one is not. Raises ValueError for "native" by name
    where it is missing; "auto" then warns, once, and takes torch."""
    others = dict.fromkeys(_BUILDERS, f"{backend!r} was asked for")
    chosen = backend
    if backend == "native":
        missing = library.missing()
        if missing is not None:
            raise ValueError(f"backend 'native' is not available: {missing}")
    elif backend == "auto":
        chosen, native = _automatic()
        others = dict.fromkeys(_BUILDERS, f"{chosen!r} is faster") | {"native": native}
    del others[chosen]
    return chosen, others


def _automatic() -> tuple[str, str]:
    """What "auto" takes, and why it is not native."""
    missing = library.missing()
    if missing is None:
        return "native", ""
    if not library.switched_off():
        _warn_once(
            f"native kernels are not available, torch runs instead: {missing} "
            f"({library.SWITCH}=0 is torch without this warning)"
        )
    return "torch", missing


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)


def _scatter(state: KDAState, slots: Tensor, S: Tensor, conv: Tensor) -> None:
    with torch.no_grad():
        state.recurrent.index_copy_(0, slots, S.to(state.recurrent.dtype))
        state.conv.index_copy_(0, slots, conv.to(state.conv.dtype))
