"""Which states get a key (serving.md 4.6, 9.8: L08 to L16)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.policy.retention import Retention, reachable_boundaries, replay_boundaries

COLUMNS = range(10)


def kept(interval, named=(), *, block=4, alignment=4, columns=COLUMNS):
    """Columns whose states get a key."""
    reachable = reachable_boundaries(named, alignment=alignment, block=block)
    mask = Retention(interval).mask(columns, block, reachable)
    return {column for column, keep in zip(columns, mask, strict=True) if keep}


@pytest.mark.parametrize(
    "interval, named, columns",
    [
        pytest.param(12, (), {2, 5, 8}, id="every third block"),
        pytest.param(4, (), {*COLUMNS}, id="every block"),
        pytest.param(0, (), set(), id="nothing periodic"),
        pytest.param(0, (23,), {4}, id="what is reachable"),
        pytest.param(12, (30, 41), {2, 5, 6, 8, 9}, id="both"),
        pytest.param(None, (), {*COLUMNS}, id="dense"),
        pytest.param(None, (23,), {*COLUMNS}, id="dense whatever is reachable"),
    ],
)
def test_l14_masks(interval, named, columns):
    assert kept(interval, named) == columns


def test_l14_a_mask_from_a_later_column():
    reachable = reachable_boundaries((30, 41), alignment=4, block=4)
    mask = Retention(12).mask(range(3, 10), 4, reachable)
    assert mask == [False, False, True, True, False, True, True]


def test_l15_wide_blocks():
    assert kept(4800, block=1600, alignment=1600, columns=range(7)) == {2, 5}


def checked(interval, *, block=4, stateful=True):
    return Retention.checked(interval, scheduler_block=block, stateful=stateful)


@pytest.mark.parametrize("interval", [-1, 3, 6, -4])
def test_l16_an_interval_that_no_block_meets_is_refused(interval):
    with pytest.raises(ValueError, match=f"multiple of the scheduler block 4, got {interval}"):
        checked(interval)


@pytest.mark.parametrize("interval", [8, 4, 0, None])
def test_l16_one_that_blocks_meet_is_taken(interval):
    assert checked(interval) == Retention(interval)


def test_l16_without_a_state_group_there_is_nothing_to_retain():
    with pytest.raises(ValueError, match="no state group: it must be None or 0, got 8"):
        checked(8, stateful=False)
    assert checked(0, stateful=False) == Retention(0)
    assert checked(None, stateful=False) == Retention(None)


@pytest.mark.parametrize(
    "tokens, eagle, boundaries",
    [
        (40, True, (32, 36)),
        (41, True, (36,)),
        (3, True, (0,)),
        (40, False, (39,)),
        (1, False, (0,)),
        (1, True, (0,)),
    ],
)
def test_where_a_prompt_may_be_resumed(tokens, eagle, boundaries):
    assert replay_boundaries(tokens, 4, eagle=eagle) == boundaries


@pytest.mark.parametrize(
    "interval, tokens, junction, ends, keys",
    [
        pytest.param(None, 41, (), (8, 16, 24, 32, 40), {8, 16, 24, 32, 40}, id="L08 dense"),
        pytest.param(0, 41, (), (8, 16, 24, 32, 40), {40}, id="L09 the resend boundary"),
        pytest.param(0, 33, (24,), (8, 16, 24, 32), {24, 32}, id="L09 and the junction"),
        pytest.param(16, 41, (), (8, 16, 24, 32, 40), {16, 32, 40}, id="L10"),
        pytest.param(8, 41, (), (8, 16, 24, 32, 40), {8, 16, 24, 32, 40}, id="L11"),
        pytest.param(20, 41, (), (8, 16, 24, 32, 40), {40}, id="L12 no chunk ends at 20"),
        pytest.param(None, 40, (), (32, 36, 40), {32, 36, 40}, id="L13 dense"),
        pytest.param(0, 40, (), (32, 36, 40), {36}, id="L13 not the end of the prompt"),
    ],
)
def test_what_chunk_ends_get_a_key(interval, tokens, junction, ends, keys):
    """L08 to L13: blocks of 4."""
    reachable = reachable_boundaries(
        (*replay_boundaries(tokens, 4), *junction), alignment=4, block=4
    )
    assert {end for end in ends if Retention(interval).keeps(end, reachable)} == keys


def test_a_boundary_inside_a_block_is_kept_with_the_block_end_before_it():
    """RULES.md V20, scenario fine_partial_hit_resend: a prompt of 22 keeps 20, and 16 too."""
    reachable = reachable_boundaries(replay_boundaries(22, 4), alignment=4, block=16)
    assert reachable == {16, 20}
    assert kept(0, replay_boundaries(22, 4), block=16) == {0}


def test_a_junction_is_floored_to_what_hits_are_aligned_to():
    assert reachable_boundaries((23,), alignment=8, block=4) == {16}
    assert reachable_boundaries((3,), alignment=4, block=4) == set()


def test_l18_an_exported_state_of_a_middle_piece_is_transient_unless_dense():
    reachable = reachable_boundaries(replay_boundaries(240, 16), alignment=16, block=32)
    assert [Retention(0).keeps(n, reachable) for n in (112, 224)] == [False, True]
    assert [Retention(None).keeps(n, reachable) for n in (112, 224)] == [True, True]


@given(
    block=st.integers(1, 8),
    blocks=st.integers(1, 4),
    every=st.integers(1, 4),
    named=st.sets(st.integers(0, 200), max_size=3),
)
def test_the_mask_is_the_formula_of_4_6(block, blocks, every, named):
    """In columns: per = N / B, keep every per-th; and floor(b / alignment) alignment / B - 1."""
    alignment = block * blocks
    interval = every * alignment
    per = interval // block
    wanted = {i for i in range(30) if (i + 1) % per == 0}
    wanted |= {b // alignment * alignment // block - 1 for b in named}
    found = kept(interval, named, block=block, alignment=alignment, columns=range(30))
    assert found == {i for i in wanted if 0 <= i < 30}
