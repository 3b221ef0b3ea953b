"""Causality to the bit: what comes later leaves no trace in what came before."""

import pytest
import torch

from kimi_mini.workbench.cases import scan_case
from tests.kernels.scans import chunk


@pytest.mark.parametrize("C", [5, 16, 64])
@pytest.mark.parametrize("at", [1, 7, 15, 16, 37, 63, 64, 99])
def test_later_tokens_change_no_bit_of_earlier_outputs(C, at):
    """Pitfall 13: an anchor in the middle of a chunk reads later gates, which cancel in exact
    arithmetic only. Here everything later changes, inside the same chunk too, and forgets all."""
    case = scan_case("mixed", [100])
    before = chunk(C)(*case).o
    for x in case.tokens:
        x[at:] = torch.randn_like(x[at:])
    case.g[at:] = -100.0
    case.k[at:] *= 50
    after = chunk(C)(*case).o
    assert torch.equal(before[:at], after[:at])
    assert not torch.equal(before[at], after[at])


@pytest.mark.parametrize("C", [16, 64])
def test_a_later_gate_alone_changes_no_bit_of_earlier_outputs(C):
    case = scan_case("slow", [64])
    before = chunk(C)(*case).o
    for at in range(63, 0, -1):
        case.g[at] = -100.0 if at % 2 else -1.0
        after = chunk(C)(*case).o
        assert torch.equal(before[:at], after[:at]), at
