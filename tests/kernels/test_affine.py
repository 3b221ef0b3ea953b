"""The affine view: tokens and chunks as maps of the state, and how they compose."""

import functools

import pytest
import torch

from kernels.affine import AffineMap, chunk_map, identity_map, token_map
from kimi_mini.workbench.cases import GATES, relative_error, scan_case
from tests.kernels.scans import truth


def affine_operands(case, first, last):
    return [x[first:last] for x in (case.k, case.v, case.g, case.beta)]


def of_tokens(case, first, last):
    """The composition of the maps of single tokens."""
    single = [
        token_map(*(x[t] for x in affine_operands(case, 0, last))) for t in range(first, last)
    ]
    return functools.reduce(AffineMap.then, single)


def assert_same_map(got, expected, tolerance):
    assert relative_error(got.M, expected.M) <= tolerance
    assert relative_error(got.b, expected.b) <= tolerance


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("T", [1, 2, 3, 16, 63, 64, 65])
def test_the_map_of_a_chunk_is_its_token_maps_in_order(gates, T):
    case = scan_case(gates, [T], dtype=torch.float64)
    assert_same_map(chunk_map(*affine_operands(case, 0, T)), of_tokens(case, 0, T), 2e-13)


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_applying_the_map_is_running_the_tokens(gates, dtype):
    case = scan_case(gates, [64], dtype=dtype)
    got = chunk_map(*affine_operands(case, 0, 64)).apply(case.S0[0])
    assert got.dtype == dtype
    assert relative_error(got, truth(case).S[0]) <= (2e-6 if dtype == torch.float32 else 2e-13)


def test_shapes_are_value_first_and_heads_stay_apart():
    case = scan_case("mixed", [5], H=3, K=16, V=24)
    M, b = chunk_map(*affine_operands(case, 0, 5))
    assert (M.shape, b.shape) == ((3, 16, 16), (3, 24, 16))
    one = chunk_map(*(x[:, 1:2] for x in affine_operands(case, 0, 5)))
    assert_same_map(one, AffineMap(M[1:2], b[1:2]), 1e-6)


def test_pieces_merge_in_any_grouping_but_in_no_other_order():
    case = scan_case("slow", [100], dtype=torch.float64)
    first, second, third = (
        chunk_map(*affine_operands(case, a, b)) for a, b in ((0, 37), (37, 64), (64, 100))
    )
    whole = chunk_map(*affine_operands(case, 0, 100))
    assert_same_map(first.then(second).then(third), whole, 1e-14)
    assert_same_map(first.then(second.then(third)), whole, 1e-14)
    swapped = second.then(first)
    assert relative_error(swapped.b, first.then(second).b) > 0.01
    assert relative_error(swapped.M, first.then(second).M) > 1e-4


def test_no_tokens_are_the_identity():
    case = scan_case("mixed", [7], dtype=torch.float64)
    some = chunk_map(*affine_operands(case, 0, 7))
    nothing = identity_map(some)
    assert torch.equal(nothing.apply(case.S0[0]), case.S0[0])
    for merged in (nothing.then(some), some.then(nothing)):
        assert_same_map(merged, some, 1e-15)
    assert_same_map(chunk_map(*affine_operands(case, 0, 0)), nothing, 0.0)


@pytest.mark.parametrize("gates", GATES)
def test_the_map_is_a_contraction(gates):
    """Errors of a restored state fade: 0 < beta < 1, |k| <= 1 and e^g <= 1 (architecture 5)."""
    case = scan_case(gates, [64], dtype=torch.float64)
    M = chunk_map(*affine_operands(case, 0, 64)).M
    assert torch.linalg.matrix_norm(M, 2).max() <= 1 + 1e-12


def test_inputs_are_not_changed():
    case = scan_case("mixed", [7])
    kept = [x.clone() for x in case[:6]]
    chunk_map(*affine_operands(case, 0, 7)).apply(case.S0[0]).fill_(float("nan"))
    assert all(torch.equal(a, b) for a, b in zip(kept, case[:6], strict=True))
