"""Packed rows: every row is as if alone, whatever lies beside it and however it is grouped."""

import random

import pytest
import torch

from kernels import chunked
from kernels.chunked import kda_chunk_scan
from kernels.packing import Export
from kernels.recurrent import kda_step, kda_token_scan
from kernels.reference import kda_reference
from kimi_mini.workbench.cases import relative_error, scan_case
from tests.kernels.scans import FAST, FORMS, assert_near, assert_same_bits, chunk, truth


@pytest.mark.parametrize("form", FAST)
@pytest.mark.parametrize("lengths", [[5, 64, 1, 130, 3], [130, 200, 300], [16, 32, 0, 7]], ids=str)
def test_packed_rows_are_the_rows_alone(form, lengths):
    """BR-66: decays, chunks and states restart at every row, not at the grid of the buffer."""
    case = scan_case("mixed", lengths)
    packed = FORMS[form](*case)
    assert packed.S.shape == case.S0.shape
    for r in range(len(lengths)):
        alone = FORMS[form](*case.row(r))
        first, last = case.query_start[r : r + 2]
        # the same numbers in batched products of another size: the last bits may differ
        assert relative_error(packed.o[first:last], alone.o) <= 1e-6, r
        assert relative_error(packed.S[r : r + 1], alone.S) <= 1e-6, r
    assert_near(packed, truth(case), "mixed")


@pytest.mark.parametrize(("H", "K", "V"), [(1, 128, 128), (3, 16, 24), (2, 5, 3)])
def test_a_decoding_row_gets_the_same_bits_in_any_batch(H, K, V):
    case = scan_case("mixed", [1] * 9, H=H, K=K, V=V)
    together = kda_step(*case[:6])
    for first, last in ((0, 1), (4, 6), (2, 9)):
        some = kda_step(*(x[first:last] for x in case[:6]))
        for all_rows, rows in zip(together, some, strict=True):
            assert torch.equal(all_rows[first:last], rows)


@pytest.mark.parametrize("form", FAST)
def test_changing_one_row_changes_no_bit_of_the_others(form):
    case = scan_case("mixed", [5, 64, 1, 130, 3])
    before = FORMS[form](*case)
    for x in case.tokens:
        x[5:69] = -0.5
    case.S0[1] = float("nan")
    after = FORMS[form](*case)
    assert torch.equal(before.o[:5], after.o[:5])
    assert torch.equal(before.o[69:], after.o[69:])
    for r in (0, 2, 3, 4):
        assert torch.equal(before.S[r], after.S[r]), r


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lengths", [[0], [0, 5], [5, 0], [0, 0, 0], [0, 3, 0, 0, 2]], ids=str)
def test_a_row_without_tokens_returns_its_state(form, lengths):
    """BR-33."""
    case = scan_case("mixed", lengths)
    got, true = FORMS[form](*case), truth(case)
    assert got.o.shape == (sum(lengths), 3, 24)
    assert_near(got, true, "mixed")
    for r, length in enumerate(lengths):
        if length == 0:
            assert torch.equal(got.S[r], case.S0[r])


@pytest.mark.parametrize("form", [kda_reference, kda_token_scan, kda_chunk_scan])
def test_a_batch_without_rows_is_no_error(form):
    """BR-33: query_start [0], no tokens, no states."""
    got = form(*scan_case("mixed", []))
    assert got.o.shape == (0, 3, 24)
    assert got.S.shape == got.exported.shape == (0, 3, 24, 16)


def test_decode_of_no_rows_is_no_error():
    """BR-33."""
    case = scan_case("mixed", [])
    o, S = kda_step(*case.tokens, case.S0)
    assert (o.shape, S.shape) == ((0, 3, 24), (0, 3, 24, 16))


@pytest.mark.parametrize("C", [5, 16, 64])
@pytest.mark.parametrize("seed", range(4))
def test_many_rows_of_any_lengths_agree_with_the_recurrence(C, seed):
    draw = random.Random(seed)
    lengths = [draw.choice([0, 1, 2, 15, 16, 17, 33, 64, 65, 100]) for _ in range(11)]
    case = scan_case(draw.choice(["mixed", "slow", "unbounded"]), lengths, seed=seed)
    exports = tuple(
        Export(r, draw.choice([*range(C, length + 1, C), length]))
        for r, length in enumerate(lengths)
        if length
    )
    got, true = chunk(C)(*case, exports), truth(case, exports)
    for a, b in zip(got, true, strict=True):
        assert relative_error(a, b) <= 2e-6  # a state after one token may be small beside S_0


@pytest.mark.parametrize("elements", [1, 3 * 16 * 24 * 2, 3 * 16 * 24 * 7, 1 << 30])
def test_the_size_of_a_group_of_chunks_changes_no_bit(monkeypatch, elements):
    """Groups of one chunk, two, seven, and all at once; rows begin and end inside groups."""
    case = scan_case("mixed", [70, 3, 0, 200, 16, 1])
    exports = (Export(3, 160), Export(0, 70), Export(3, 16))
    usual = kda_chunk_scan(*case, exports)
    monkeypatch.setattr(chunked, "_GROUP_ELEMENTS", elements)
    assert_same_bits(kda_chunk_scan(*case, exports), usual)


def test_row_boundaries_follow_the_contents_of_query_start():
    """BR-88: the same tensor object with other contents, and a thousand short-lived tensors."""
    case = scan_case("mixed", [64, 64], H=1, K=4, V=4)
    query_start = torch.tensor([0, 64, 128])
    operands = (*case.tokens, case.S0)
    assert_same_bits(kda_chunk_scan(*operands, query_start), kda_chunk_scan(*case))
    query_start.copy_(torch.tensor([0, 10, 128]))
    expected = kda_chunk_scan(*operands, [0, 10, 128])
    assert_same_bits(kda_chunk_scan(*operands, query_start), expected)
    small = scan_case("mixed", [3, 3], H=1, K=2, V=2)
    expected = {m: kda_chunk_scan(*small[:6], [0, m, 6]).S for m in range(7)}
    for i in range(1000):
        got = kda_chunk_scan(*small[:6], torch.tensor([0, i % 7, 6]))
        assert torch.equal(got.S, expected[i % 7])
