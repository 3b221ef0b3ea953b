"""Where states are kept, as arithmetic (serving.md 9.4)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.boundaries import Grids, floored, grids, junction_above, piece_checkpoint


@pytest.mark.parametrize(
    "state_chunk, page, interval, wanted",
    [
        (4, 1, 8, Grids(4, 4, 4, 8)),
        (64, 16, 256, Grids(64, 64, 64, 256)),
        (4, 8, 8, Grids(4, 8, 8, 8)),
        (4, 6, 8, Grids(4, 6, 6, 24)),
        (4, 3, 8, Grids(4, 4, 12, 24)),  # T18 as it can be configured
        (6, 4, 8, Grids(6, 6, 12, 24)),
        (4, 1, 6, Grids(4, 4, 4, 12)),
    ],
)
def test_grids_are_common_multiples(state_chunk, page, interval, wanted):
    assert grids(state_chunk, page, interval) == wanted


@pytest.mark.parametrize("name", ["state_chunk", "page", "interval"])
@pytest.mark.parametrize("size", [0, -4])
def test_a_size_below_one_is_refused_by_name(name, size):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got {size}"):
        grids(**dict(state_chunk=4, page=4, interval=4) | {name: size})


FOUR = grids(4, 1, 8)


@pytest.mark.parametrize(
    "start, length, junction, grid, boundary",
    [
        pytest.param(0, 10, None, FOUR, 8, id="T01"),
        pytest.param(0, 8, None, FOUR, 8, id="T02"),
        pytest.param(0, 3, None, FOUR, None, id="T03"),
        pytest.param(8, 10, None, FOUR, 16, id="T04"),
        pytest.param(6, 9, None, FOUR, 14, id="T05 relative to the piece"),
        pytest.param(0, 10, 4, FOUR, 4, id="T06"),
        pytest.param(0, 8, 4, FOUR, 4, id="T07"),
        pytest.param(4, 4, 8, FOUR, 8, id="T08 it ends there anyway"),
        pytest.param(4, 8, 8, FOUR, 8, id="T09"),
        pytest.param(0, 10, 6, FOUR, 8, id="T10 off the chunk"),
        pytest.param(0, 10, None, Grids(4, 8, 8, 8), 8, id="T11"),
        pytest.param(0, 14, None, grids(4, 8, 8), 8, id="T12"),
        pytest.param(0, 14, None, Grids(4, 4, 12, 24), 12, id="T13"),
        pytest.param(0, 10, None, FOUR, 8, id="T14 lazy is the same"),
        pytest.param(0, 3, None, FOUR, None, id="T25 a piece below the grid"),
        pytest.param(4, 8, 4, FOUR, 12, id="a junction where the piece begins"),
        pytest.param(8, 8, 4, FOUR, 16, id="a junction behind it"),
        pytest.param(0, 8, 12, FOUR, 8, id="a junction beyond it"),
        pytest.param(0, 3, 2, FOUR, None, id="a junction in a piece below the grid"),
        pytest.param(0, 14, 8, Grids(4, 4, 12, 24), 8, id="a junction on the chunk, off the grid"),
        pytest.param(0, 14, 12, Grids(4, 4, 12, 24), 12, id="a junction at the checkpoint"),
        pytest.param(0, 19, 16, Grids(4, 4, 12, 24), 12, id="a junction past the checkpoint"),
    ],
)
def test_a_piece_keeps_one_state(start, length, junction, grid, boundary):
    assert piece_checkpoint(start, start + length, grid, junction) == boundary


def test_t25_no_piece_below_the_grid_ever_keeps_one():
    pieces = [(n, n + 3) for n in range(0, 30, 3)]
    assert {piece_checkpoint(*piece, FOUR) for piece in pieces} == {None}


@pytest.mark.parametrize(
    "token_hit, joint, unit, junction",
    [
        (7, 0, 4, 4),
        (8, 8, 4, None),
        (9, 8, 4, None),
        (15, 8, 4, 12),
        (3, 0, 4, None),
        (0, 0, 4, None),
    ],
)
def test_a_junction_lies_above_the_joint_boundary(token_hit, joint, unit, junction):
    assert junction_above(token_hit, joint, unit) == junction


sizes = st.integers(1, 12)


@given(sizes, sizes, sizes, st.integers(0, 60), st.integers(1, 60), st.none() | st.integers(0, 120))
def test_what_a_piece_keeps_is_inside_of_it_and_where_the_kernel_has_a_state(
    state_chunk, pages, interval, start, length, junction
):
    """Pages that divide the state chunk or the other way round, as the engine demands (3.1)."""
    grid = grids(state_chunk, state_chunk * pages, interval)
    boundary = piece_checkpoint(start, start + length, grid, junction)
    assert (boundary is None) == (length < grid.checkpoint)
    if boundary is not None:
        assert start < boundary <= start + length
        assert (boundary - start) % state_chunk == 0
        assert boundary == junction or (boundary - start) % grid.checkpoint == 0


@given(st.integers(0, 1000), st.integers(1, 99))
def test_floored_is_the_largest_multiple_within(boundary, unit):
    assert floored(boundary, unit) % unit == 0 <= boundary - floored(boundary, unit) < unit
