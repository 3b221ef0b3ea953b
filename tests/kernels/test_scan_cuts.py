"""Cuts and exports: a state in the middle of a row, asked for or carried on.

Equality is to the bit wherever the same tokens meet the same partition into chunks.
"""

import pytest
import torch

from kernels.chunked import kda_chunk_scan
from kernels.packing import Export
from kernels.recurrent import kda_token_scan
from kimi_mini.workbench.cases import GATES, relative_error, scan_case
from tests.kernels.scans import FORMS, assert_near, chunk, truth


@pytest.mark.parametrize("C", [5, 16, 48, 64])
@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize(("H", "K", "V"), [(3, 16, 24), (1, 64, 64), (1, 5, 3)])
def test_cutting_at_multiples_of_the_kernel_chunk_changes_no_bit(H, K, V, gates, C):
    case = scan_case(gates, [5 * C + 3], H=H, K=K, V=V)
    whole = chunk(C)(*case)
    for cuts in ([C], [4 * C], [5 * C], [2 * C, 3 * C], [C, 2 * C, 3 * C, 4 * C, 5 * C]):
        S, outputs = case.S0, []
        for first, last in zip([0, *cuts], [*cuts, 5 * C + 3], strict=True):
            o, S, _ = chunk(C)(*case.piece(first, last, S))
            outputs.append(o)
        assert torch.equal(torch.cat(outputs), whole.o), cuts
        assert torch.equal(S, whole.S), cuts


def test_cutting_all_rows_of_a_batch_at_once_changes_no_bit():
    lengths, C = [50, 5, 32, 16], 16
    case = scan_case("mixed", lengths)
    whole = kda_chunk_scan(*case)
    S, outputs = case.S0, [[] for _ in lengths]
    for column in range(4):
        spans = [
            (start + min(column * C, T), start + min(column * C + C, T))
            for start, T in zip(case.query_start, lengths, strict=False)
        ]
        tokens = [torch.cat([x[first:last] for first, last in spans]) for x in case.tokens]
        sizes = [last - first for first, last in spans]
        o, S, _ = kda_chunk_scan(*tokens, S, [sum(sizes[:r]) for r in range(5)])
        for row, piece in zip(outputs, o.split(sizes), strict=True):
            row.append(piece)
    assert torch.equal(torch.cat([piece for row in outputs for piece in row]), whole.o)
    assert torch.equal(S, whole.S)


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("cuts", [[1], [99], [33, 66], [3, 4, 64, 97]], ids=str)
def test_cutting_anywhere_stays_within_rounding(gates, cuts):
    """BR-61: another partition into chunks, so other roundings and nothing else."""
    case = scan_case(gates, [100])
    S, outputs = case.S0, []
    for first, last in zip([0, *cuts], [*cuts, 100], strict=True):
        o, S, _ = kda_chunk_scan(*case.piece(first, last, S))
        outputs.append(o)
    whole = kda_chunk_scan(*case)
    assert relative_error(torch.cat(outputs), whole.o) <= 2e-6  # both within 1e-6 of the truth
    assert relative_error(S, whole.S) <= 4e-6


@pytest.mark.parametrize(("K", "V"), [(16, 24), (16, 16)])
def test_decode_continues_where_the_chunk_form_stopped(K, V):
    """BR-22: square states hide a transposed layout; it errs by 1.17, a lost state by 0.69."""
    case = scan_case("mixed", [50], K=K, V=V)
    head = kda_chunk_scan(*case.piece(0, 40, case.S0))
    tail = FORMS["decode steps"](*case.piece(40, 50, head.S))
    true = truth(case)
    assert relative_error(torch.cat([head.o, tail.o]), true.o) <= 1e-6
    assert relative_error(tail.S, true.S) <= 2e-6


@pytest.mark.parametrize("H", [1, 3])
def test_the_token_scan_is_decode_to_the_bit(H):
    case = scan_case("mixed", [23, 1], H=H)
    scan, steps = kda_token_scan(*case), FORMS["decode steps"](*case)
    assert torch.equal(scan.o, steps.o)
    assert torch.equal(scan.S, steps.S)


@pytest.mark.parametrize("C", [16, 64])
def test_exports_are_the_states_after_exactly_that_many_tokens(C):
    """BR-50: a flat index by floor(length / C) takes rows 2, 5, 9 of the chunk states instead of
    2, 6, 11; pitfall 27: the state at the START of a chunk is off by one chunk."""
    case = scan_case("slow", [130, 200, 300])
    exports = (Export(0, 128), Export(1, 192), Export(2, 256), Export(2, 64), Export(1, 64),
               Export(0, 130), Export(2, 300), Export(2, 64))  # fmt: skip
    got, true = chunk(C)(*case, exports), truth(case, exports)
    assert_near(got, true, "slow")
    for i, (row, offset) in enumerate(exports):
        alone = case.row(row)
        assert torch.equal(got.exported[i], chunk(C)(*alone.piece(0, offset, alone.S0)).S[0])
    assert torch.equal(got.exported[5], got.S[0])
    assert relative_error(got.exported[0], true.S[0]) > 1e-3  # two tokens before the end


@pytest.mark.parametrize("form", ["chunks of 16", "token scan", "reference"])
def test_asking_for_exports_changes_no_bit_of_the_computation(form):
    case = scan_case("mixed", [70, 0, 33, 16])
    plain = FORMS[form](*case)
    every = tuple(
        Export(r, t) for r, T in enumerate([70, 0, 33, 16]) for t in [*range(16, T + 1, 16), T] if T
    )
    asked = FORMS[form](*case, every)
    assert torch.equal(plain.o, asked.o)
    assert torch.equal(plain.S, asked.S)
    assert plain.exported.shape == (0, 3, 24, 16)
    assert asked.exported.shape == (len(every), 3, 24, 16)
    assert_near(asked, truth(case, every), "mixed")


def test_the_token_scan_exports_after_any_token():
    case = scan_case("mixed", [7, 3])
    every = tuple(Export(r, t) for r, T in enumerate([7, 3]) for t in range(T, 0, -1))
    assert_near(kda_token_scan(*case, every), truth(case, every), "mixed")


@pytest.mark.parametrize(
    ("export", "message"),
    [
        (Export(0, 17), "multiple of 16"),
        (Export(0, 32 + 15), "multiple of 16"),
        (Export(0, 49), r"offset must be 1\.\.48"),
        (Export(0, 0), r"offset must be 1\.\.48"),
        (Export(1, 1), r"offset must be 1\.\.0"),
        (Export(2, 16), r"rows 0\.\.1"),
        (Export(-1, 16), r"rows 0\.\.1"),
    ],
)
def test_an_export_out_of_place_is_refused(export, message):
    with pytest.raises(ValueError, match=message):
        kda_chunk_scan(*scan_case("slow", [48, 0]), [export])
