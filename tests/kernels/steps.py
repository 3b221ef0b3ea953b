"""One KDA layer's weights, inputs and state pool for tests of the dispatcher, and the truth."""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.dispatcher import KDAState
from kernels.kda import KDAInputs, KDAWeights
from kernels.reference import kda_reference, short_conv_reference
from kimi_mini.workbench.cases import relative_error

H, K, V, W = 2, 16, 24, 4
D = H * (2 * K + V)
NAN = float("nan")
BACKENDS = ["torch", "reference", "native"]

# The core of a layer in float32 against float64: convolution, norm and gates add their roundings
# to those of the scan (measured over these tests: 4e-7 on outputs, 5e-7 on states).
OUTPUTS, STATES = 1e-6, 1e-6


def make_weights(lower_bound: float | None = -5.0, dtype: torch.dtype = torch.float32):
    """Gates as a fresh K3 has them (architecture 1.3): most channels remember for many tokens."""
    dt = torch.exp(torch.empty(H, K).uniform_(-6.9, -2.3))
    A_log = torch.empty(H).uniform_(-0.5, 0.5)
    weights = (torch.randn(D, W), A_log, dt + torch.log(-torch.expm1(-dt)))
    return KDAWeights(*(x.to(dtype) for x in weights), lower_bound)


def make_inputs(N: int, dtype: torch.dtype = torch.float32) -> KDAInputs:
    raw = (torch.randn(N, D), 0.3 * torch.randn(N, H, K), torch.randn(N, H) - 1)
    return KDAInputs(*(x.to(dtype) for x in raw))


def at(inputs: KDAInputs, *spans: tuple[int, int]) -> KDAInputs:
    """The tokens of some spans, packed."""
    return KDAInputs(*(torch.cat([x[a:b] for a, b in spans]) for x in inputs))


def make_state(
    num_slots: int, dtype: torch.dtype = torch.float32, storage: str = "own"
) -> KDAState:
    """Slots full of what somebody else has left there.

    storage: "own" tensors, or the view of one layer in a "layer-major" [layers, slots, ...] or a
    "slot-major" [slots, bytes of all layers and kinds] pool.
    """
    slots = num_slots + 1
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if storage == "own":
        return KDAState(
            torch.randn(slots, H, V, K, dtype=wide), torch.randn(slots, W - 1, D).to(dtype)
        )
    if storage == "layer-major":
        recurrent = torch.randn(3, slots, H, V, K, dtype=wide)
        return KDAState(recurrent[1], torch.randn(3, slots, W - 1, D).to(dtype)[1])
    one, window = H * V * K, (W - 1) * D
    pool = torch.randn(slots, 3 * (one + window), dtype=wide)
    start = one + window
    return KDAState(
        pool[:, start : start + one].view(slots, H, V, K),
        pool[:, start + one : 2 * start].view(slots, W - 1, D),
    )


def copied(state: KDAState) -> KDAState:
    return KDAState(*(x.clone() for x in state))


class Row(NamedTuple):
    """A row's truth: read-outs and the state after its last token."""

    o: Tensor
    S: Tensor
    conv: Tensor


def run_alone(
    inputs: KDAInputs, weights: KDAWeights, start: KDAState | None = None, slot: int = 0
) -> Row:
    """One row from a slot's state, or from zeros: architecture 3.2 to 3.6 in float64."""
    x, r, b = (t.double() for t in inputs)
    conv_weight, A_log, dt_bias = (t.double() for t in weights[:3])
    S0, conv0 = torch.zeros(1, H, V, K).double(), torch.zeros(1, W - 1, D).double()
    if start is not None:
        S0, conv0 = (t[slot : slot + 1].double() for t in start)
    row = [0, len(x)]
    y, conv, _ = short_conv_reference(x, conv_weight, conv0, row)
    q, k, v = y[:, : H * K], y[:, H * K : 2 * H * K], y[:, 2 * H * K :]
    q, k = q.reshape(-1, H, K), k.reshape(-1, H, K)
    q = q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    rate, z = A_log.exp().view(1, H, 1), r + dt_bias
    if weights.lower_bound is None:
        g = -rate * torch.nn.functional.softplus(z)
    else:
        g = weights.lower_bound * torch.sigmoid(rate * z)
    scan = kda_reference(q, k, v.reshape(-1, H, V), g, torch.sigmoid(b), S0, row)
    return Row(scan.o, scan.S[0], conv[0])


def run(dispatcher, inputs, weights, state, query_start, slots, context, exports=None, **options):
    """Plan a step for all the slots of `state` and run it."""
    num_slots = state.recurrent.shape[0] - 1
    step = dispatcher.plan(query_start, slots, context, exports, num_slots=num_slots, **options)
    return dispatcher.mixed(inputs, weights, state, step)


def assert_untouched(state, before, slots):
    for slot in slots:
        assert torch.equal(state.recurrent[slot], before.recurrent[slot]), slot
        assert torch.equal(state.conv[slot], before.conv[slot]), slot


def assert_slot(state, slot, true):
    assert relative_error(state.recurrent[slot], true.S) <= STATES
    assert torch.equal(state.conv[slot].double(), true.conv)
