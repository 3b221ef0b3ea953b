"""query_start and exports: what is read from them and what is refused."""

import pytest
import torch

from kernels.packing import Export, check_exports, row_lengths


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor], ids=["list", "tuple", "tensor"])
def test_rows_are_the_spans_between_neighbours(kind):
    assert row_lengths(kind([0, 5, 5, 9]), 9) == ([0, 5, 5], [5, 0, 4])
    assert row_lengths(kind([0]), 0) == ([], [])


@pytest.mark.parametrize(
    ("query_start", "tokens", "message"),
    [
        ([], 0, "must begin with 0, got no entries"),
        ([1, 5], 5, r"must begin with 0, got \[1\]"),
        ([0, 5, 3, 9], 9, "falls from 5 to 3 at row 1"),
        ([0, 5], 6, "ends at 5, but there are 6 tokens"),
        ([0, 7], 6, "ends at 7, but there are 6 tokens"),
    ],
)
def test_spans_that_do_not_cover_the_tokens_are_refused(query_start, tokens, message):
    with pytest.raises(ValueError, match=message):
        row_lengths(query_start, tokens)


@pytest.mark.parametrize("offset", [16, 32, 40])
def test_an_export_falls_on_the_alignment_or_on_the_end_of_its_row(offset):
    check_exports([Export(0, offset)], [40], 16)


def test_an_export_counts_from_the_start_of_its_row_in_this_call():
    with pytest.raises(ValueError, match=r"after 24 tokens: .* multiple of 16 .* row's end 40"):
        check_exports([Export(1, 24)], [24, 40], 16)
