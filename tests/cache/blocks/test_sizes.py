"""Block sizes: which go together, and where hits may end (serving 4.1)."""

import pytest

from cache.blocks.sizes import block_sizes


@pytest.mark.parametrize(
    "attention, states, asked, unit, scheduler, hits",
    [
        pytest.param([16], [64], None, 16, 64, 16, id="ours: inside of state blocks"),
        pytest.param([16], [16], None, 16, 16, 16, id="equal blocks have no inside"),
        pytest.param([16], [16], 4, 4, 16, 4, id="unless the unit is finer"),
        pytest.param([4], [8], None, 4, 8, 4, id="a finer page makes it finer by itself"),
        pytest.param([8], [4], None, 4, 8, 8, id="a finer state block does not"),
        pytest.param([4, 6], [8], None, 2, 24, 2, id="several"),
        pytest.param([8], [], None, 8, 8, 8, id="rows alone"),
        pytest.param([], [8], 8, 8, 8, 8, id="states alone"),
        pytest.param([4, 6], [], None, 2, 12, 12, id="rows alone, unequal"),
    ],
)
def test_the_unit_divides_every_block_and_hits_end_on_it_if_states_have_an_inside(
    attention, states, asked, unit, scheduler, hits
):
    sizes = block_sizes(attention, states, asked)
    assert (sizes.unit, sizes.scheduler, sizes.hits) == (unit, scheduler, hits)
    assert sizes.partial_hits == (hits < scheduler)


@pytest.mark.parametrize(
    "attention, states, unit, message",
    [
        ([8], [8], 16, "must divide every block, got 16 for blocks of \\[8, 8\\]"),
        ([8], [12], 8, "must divide every block, got 8"),
        ([8], [8], 0, "must divide every block, got 0"),
        ([8], [], 4, "with one group .* must be 8, got 4"),
        ([], [], None, "each group needs a block of at least one token, got \\[\\]"),
        ([0], [8], None, "each group needs a block of at least one token, got \\[0, 8\\]"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(attention, states, unit, message):
    with pytest.raises(ValueError, match=message):
        block_sizes(attention, states, unit)
