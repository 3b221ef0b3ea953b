"""Gradients: against finite differences in float64, and against the plain recurrence."""

import pytest
import torch
from torch.autograd import gradcheck

from kernels.affine import chunk_map
from kernels.gates import decay_gate
from kernels.latent_attention import attend_absorbed, attend_materialised
from kernels.numerics import l2_normalise
from kernels.packing import Export
from kernels.reference import kda_reference
from kernels.short_conv import short_conv
from kimi_mini.workbench.cases import GATES, relative_error, scan_case
from tests.kernels.scans import FORMS, chunk


def leaves(*tensors):
    return [x.detach().double().requires_grad_() for x in tensors]


@pytest.mark.parametrize("form", ["chunks of 2", "chunks of 16", "token scan", "reference"])
def test_scan_gradients_agree_with_finite_differences(form):
    """Through outputs, final states and exports, with respect to all six operands."""
    case = scan_case("mixed", [5, 0, 3], H=2, K=3, V=2)
    exports = [Export(0, 5), Export(2, 3)] + ([Export(0, 2)] if form != "chunks of 16" else [])

    def scan(*operands):
        return tuple(FORMS[form](*operands, case.query_start, exports))

    assert gradcheck(scan, leaves(*case[:6]))


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("C", [5, 16, 64])
def test_chunk_gradients_are_those_of_the_recurrence(gates, C):
    """Over several chunks, with gates that underflow: a 0 * inf would be NaN here first."""
    case = scan_case(gates, [70, 3, 16], H=2, K=5, V=4)
    weights = [torch.randn(n, 2, *tail).double() for n, tail in ((89, (4,)), (3, (4, 5)))]
    grads = []
    for scan in (kda_reference, chunk(C)):
        operands = leaves(*case[:6])
        o, S, _ = scan(*operands, case.query_start)
        ((o * weights[0]).sum() + (S * weights[1]).sum()).backward()
        grads.append([x.grad for x in operands])
    for name, truth, got in zip(case._fields, *grads, strict=False):
        assert relative_error(got, truth) <= 1e-11, name


def test_float32_gradients_stay_finite_and_near():
    case = scan_case("unbounded", [70])
    grads = []
    for dtype in (torch.float64, torch.float32):
        operands = [x.to(dtype).requires_grad_() for x in case[:6]]
        chunk(64)(*operands, case.query_start).o.square().sum().backward()
        grads.append([x.grad for x in operands])
    for name, truth, got in zip(case._fields, *grads, strict=False):
        assert relative_error(got, truth) <= 5e-6, name  # sums over 70 tokens of float32 roundings


@pytest.mark.parametrize("W", [1, 4])
def test_convolution_gradients_agree_with_finite_differences(W):
    x, weight, window = leaves(torch.randn(5, 3), torch.randn(3, W), torch.randn(3, W - 1, 3))

    def convolve(*operands):
        results = short_conv(*operands, [0, 3, 3, 5], [Export(0, 1)])
        return results if W > 1 else results.y  # windows of no rows have no gradient

    assert gradcheck(convolve, [x, weight, window])


@pytest.mark.parametrize("lower_bound", [-5.0, None], ids=["bounded", "softplus"])
def test_gate_gradients_agree_with_finite_differences(lower_bound):
    operands = leaves(torch.randn(3, 2, 4), torch.randn(2), torch.randn(2, 4))
    assert gradcheck(lambda *x: decay_gate(*x, lower_bound), operands)


def test_l2_norm_gradients_agree_with_finite_differences_also_at_zero():
    x = torch.randn(3, 4)
    x[1] = 0
    assert gradcheck(l2_normalise, leaves(x), eps=1e-8, atol=1e-4)


def test_affine_map_gradients_agree_with_finite_differences():
    case = scan_case("mixed", [5], H=1, K=3, V=2)
    assert gradcheck(chunk_map, leaves(case.k, case.v, case.g, case.beta))


def test_attention_gradients_agree_with_finite_differences():
    kv_b = torch.randn(2, 3 + 4, 5)
    assert gradcheck(
        lambda q, rows, w: attend_materialised(q, rows, w, context_len=2),
        leaves(torch.randn(4, 2, 3 + 2), torch.randn(6, 5 + 2), kv_b),
    )
    assert gradcheck(
        lambda q, rows, w: attend_absorbed(q, rows, w, torch.tensor([3, 6, 1])),
        leaves(torch.randn(3, 2, 3 + 2), torch.randn(3, 6, 5 + 2), kv_b),
    )
