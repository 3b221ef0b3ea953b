"""A step is checked before anything runs, and its rows are shared out by what they are."""

import pytest
import torch

from kernels.kda_metadata import build_metadata
from kernels.packing import Export


def plan(query_start, slots, context, exports=None, **options):
    options = {"num_slots": 6, "export_alignment": 16, **options}
    return build_metadata(query_start, slots, context, exports, **options)


def test_rows_of_one_token_decode_and_longer_rows_extend():
    step = plan([0, 3, 3, 4, 6, 7], [2, 5, 1, 6, 3], [0, 9, 9, 4, 0])
    assert step.num_tokens == 7
    assert step.extend.tokens.tolist() == [0, 1, 2, 4, 5]
    assert step.extend.query_start == [0, 3, 5]
    assert step.extend.slots.tolist() == [2, 6]
    assert step.extend.resumed == [False, True]
    assert step.decode.tokens.tolist() == [3, 6]
    assert step.decode.slots.tolist() == [1, 3]
    assert step.decode.resumed == [True, False]  # BR-35: one token, yet from zeros


def test_rows_of_one_token_extend_when_asked_to():
    step = plan([0, 3, 4], [2, 5], [0, 9], extend_only=True)
    assert step.decode is None
    assert step.extend.tokens == slice(0, 4)


def test_skipped_and_empty_rows_are_in_no_group():
    step = plan([0, 2, 2, 5, 6], [-1, 1, 3, -1], [0, 0, 7, 0])
    assert step.extend.tokens == slice(2, 5)
    assert step.extend.slots.tolist() == [3]
    assert step.decode is None
    nothing = plan([0, 2], [-1], [0])
    assert (nothing.num_tokens, nothing.extend, nothing.decode) == (2, None, None)


def test_exports_are_renumbered_within_their_group_and_dropped_without_a_destination():
    step = plan(
        [0, 20, 21, 53],
        [1, 2, 3],
        [0, 5, 0],
        torch.tensor([[2, 16, 5], [1, 1, 4], [0, 16, -1], [2, 32, 6], [0, 20, 0]]),
    )
    assert step.extend.exports == [Export(1, 16), Export(1, 32)]
    assert step.extend.export_slots.tolist() == [5, 6]
    assert step.decode.exports == [Export(0, 1)]
    assert step.decode.export_slots.tolist() == [4]


def test_a_plan_keeps_what_the_tensors_said_when_it_was_made():
    """BR-88."""
    query_start, slots = torch.tensor([0, 2, 5]), torch.tensor([1, 2])
    step = plan(query_start, slots, torch.tensor([0, 0]))
    query_start.copy_(torch.tensor([0, 4, 5]))
    slots.fill_(6)
    assert step.extend.query_start == [0, 2, 5]
    assert step.extend.slots.tolist() == [1, 2]


def test_several_rows_may_share_the_sink():
    step = plan([0, 2, 4, 5], [0, 0, 0], [0, 0, 0])
    assert step.extend.slots.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0, 2, 4], [3, 3], [0, 0]), "row 1 names slot 3, which this batch uses already"),  # D09
        (([0, 2, 2], [3, 3], [0, 0]), "row 1 names slot 3, which this batch uses already"),
        (([0, 2], [7], [0]), r"row 0 names slot 7; slots are 1..6"),
        (([0, 2], [-2], [0]), r"row 0 names slot -2"),
        (([0, 2], [1], [-1]), "context_len must not be negative, got -1"),
        (([0, 2], [1, 2], [0]), "1 rows, but there are 2 slots and 1 context"),
        (([0, 2], [1], [0, 0]), "1 rows, but there are 1 slots and 2 context"),
        (([0, 2], [1], [0], [(0, 2)]), r"\(row, offset, destination slot\); got entry \(0, 2\)"),
        (([0, 2], [1], [0], [(0, 1, 2)]), "multiple of 16"),  # D10
        (([0, 2], [1], [0], [(1, 2, 2)]), r"rows 0\.\.0"),
        (([0, 2], [1], [0], [(0, 2, 1)]), "export 0 names slot 1, which this batch uses already"),
        (([0, 20], [1], [0], [(0, 16, 2), (0, 20, 2)]), "export 1 names slot 2, which this batch"),
        (([0, 2], [1], [0], [(0, 2, 7)]), "export 0 names slot 7"),
        (([0, 2], [-1], [0], [(0, 2, 3)]), r"row 0, which is padding \(slot -1\)"),
        (([0, 4, 2], [1, 2], [0, 0]), "falls from 4 to 2 at row 1"),
    ],
)
def test_a_step_that_cannot_run_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan(*arguments)


def test_fewer_tokens_than_rows_claim_are_refused_and_more_are_padding():
    with pytest.raises(ValueError, match="ends at 5, beyond the 4 tokens given"):
        plan([0, 5], [1], [0], num_tokens=4)
    assert plan([0, 5], [1], [0], num_tokens=8).num_tokens == 8
