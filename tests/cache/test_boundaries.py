"""Where states are kept, as arithmetic (serving.md 9.4, 9.9)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.boundaries import (
    ChunkRule,
    Grids,
    InnerCheckpoint,
    can_export,
    chunk_end,
    floored,
    grids,
    inner_checkpoint,
    junction_above,
    piece_checkpoint,
    resend_boundary,
)


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


# state blocks


@pytest.mark.parametrize(
    "tokens, unit, drafting, boundary",
    [
        pytest.param(14, 2, {}, 12, id="K01 one token must run"),
        pytest.param(13, 2, {}, 12, id="K01 just past it"),
        pytest.param(97, 32, {}, 96, id="K01 just past three"),
        pytest.param(96, 32, {}, 64, id="K01 three whole units"),
        pytest.param(128, 32, {}, 96, id="K01 four"),
        pytest.param(5, 16, {}, 0, id="K01 below one"),
        pytest.param(128, 32, {"eagle": True}, 96, id="K02 the last unit is given up"),
        pytest.param(104, 32, {"eagle": True}, 64, id="K02 of whole ones"),
        pytest.param(4480, 128, {"eagle": True}, 4352, id="K02 wide"),
        pytest.param(9985, 32, {"lookahead": 4}, 9952, id="K03"),
        pytest.param(10000, 512, {"lookahead": 4}, 9728, id="K03 coarse"),
        pytest.param(9985, 32, {"lookahead": 1}, 9984, id="looking one ahead is what one must run"),
        pytest.param(3, 4, {"eagle": True}, 0, id="EAGLE never below zero"),
        pytest.param(3, 4, {"lookahead": 9}, 0, id="nor a look-ahead"),
        pytest.param(0, 4, {}, 0, id="nothing"),
    ],
)
def test_a_resend_resumes_at(tokens, unit, drafting, boundary):
    assert resend_boundary(tokens, unit, **drafting) == boundary


def coarse(block, limit=None, **more):
    """Hits at blocks only."""
    return ChunkRule(block, block, block, limit, **more)


def fine(block, unit, limit=None, **more):
    """Hits inside of blocks, too."""
    return ChunkRule(block, unit, unit, limit, **more)


def ends(rule, prompt, start=0, budget=None, junction=None):
    """Where the pieces of a prompt end."""
    found = [start]
    while found[-1] < prompt:
        want = min(prompt - found[-1], budget or rule.limit or prompt)
        end = chunk_end(rule, found[-1], want, prompt=prompt, tokens=prompt, junction=junction)
        if end == found[-1]:
            return [*found[1:], "waits"]
        found.append(end)
    return found[1:]


@pytest.mark.parametrize(
    "rule, prompt, more, wanted",
    [
        pytest.param(fine(512, 32, 8192), 10000, {}, [8192, 9728, 9984, 10000], id="Q01"),
        pytest.param(
            fine(512, 32, 8192), 12000, {"start": 9984}, [10240, 11776, 11968, 12000], id="Q02"
        ),
        pytest.param(fine(512, 32, 8192, export_alignment=16), 10000, {}, [8192, 10000], id="Q03"),
        pytest.param(coarse(512, 8192), 10000, {}, [8192, 9728, 10000], id="Q04"),
        pytest.param(
            coarse(512, 8192), 10000, {"junction": 5000}, [4608, 9728, 10000], id="Q04 off block"
        ),
        pytest.param(
            coarse(512, 8192), 10000, {"junction": 5120}, [5120, 9728, 10000], id="Q04 on block"
        ),
        pytest.param(
            coarse(11392, 8192), 30000, {}, [8192, 11392, 19584, 22784, 30000], id="Q05 wide block"
        ),
        pytest.param(
            coarse(512, 384), 1300, {}, [384, 512, 896, 1024, 1300], id="Q06 small pieces"
        ),
        pytest.param(coarse(8, 8), 20, {}, [8, 16, 20], id="Q07 Q8"),
        pytest.param(coarse(8, 64), 16, {}, [8, 16], id="Q07 whole blocks"),
        pytest.param(coarse(8, 64), 17, {}, [16, 17], id="Q07 one past"),
        pytest.param(coarse(8, 64, eagle=True), 24, {}, [16, 24], id="Q07 EAGLE"),
        pytest.param(fine(8, 2, 64), 15, {}, [8, 14, 15], id="Q08 15"),
        pytest.param(fine(8, 2, 64), 16, {}, [8, 14, 16], id="Q08 16"),
        pytest.param(fine(8, 2, 64), 17, {}, [16, 17], id="Q08 17"),
        pytest.param(fine(8, 2, 64), 7, {}, [6, 7], id="Q08 7"),
        pytest.param(fine(8, 2, 5), 27, {}, [5, 8, 13, 16, 21, 24, 26, 27], id="Q09 below a block"),
        pytest.param(fine(8, 2, 12), 27, {}, [8, 16, 24, 26, 27], id="Q09 between two"),
        pytest.param(
            fine(8, 2, 64), 27, {"junction": 16}, [16, 24, 26, 27], id="Q09 with a junction"
        ),
        pytest.param(fine(8, 2, 64), 40, {"start": 11}, [16, 32, 38, 40], id="Q10"),
    ],
)
def test_pieces_end_where_a_resend_will_want_a_state(rule, prompt, more, wanted):
    assert ends(rule, prompt, **more) == wanted


def test_a_budget_below_a_block_waits_for_one_that_holds_it():
    """RULES.md V24: unless no step could ever hold a whole block."""
    assert ends(coarse(8, 64), 20, budget=5) == ["waits"]
    assert ends(coarse(8), 20, budget=5) == ["waits"]
    assert ends(coarse(8, 64), 20, start=11, budget=3) == ["waits"]
    assert ends(coarse(8, 5), 20, budget=5) == [5, 8, 13, 16, 20]


def test_a_junction_inside_a_block_stops_a_piece_only_if_asked_for_exactly():
    """L05: by the engine's rule it is never materialised."""
    assert ends(fine(128, 32), 140, junction=64) == [128, 140]
    assert ends(fine(128, 32, exact_junction=True), 140, junction=64) == [64, 128, 140]


def test_a_junction_is_floored_to_blocks_from_the_start_of_the_piece():
    assert chunk_end(coarse(8, 64), 16, 40, prompt=60, tokens=60, junction=31) == 24
    assert chunk_end(fine(8, 2, 4), 4, 3, prompt=60, tokens=60, junction=6) == 7


def test_a_junction_at_the_end_of_a_piece_or_beyond_is_no_stop_even_where_its_floor_is():
    """The end of what was prefilled before a preemption: cut to blocks from 4 both would be 20."""
    rule = fine(8, 2, export_alignment=2)
    assert chunk_end(rule, 4, 22, prompt=26, tokens=26, junction=25) == 20
    assert chunk_end(rule, 4, 22, prompt=26, tokens=26, junction=26) == 26


def test_prefill_after_a_preemption_covers_what_was_sampled():
    assert chunk_end(coarse(8, 64), 0, 29, prompt=20, tokens=29) == 24
    assert chunk_end(coarse(8, 64), 24, 5, prompt=20, tokens=29) == 29
    exporting = coarse(4, 64, export_alignment=4)  # no column for an export: it stops as if cold
    assert chunk_end(exporting, 4, 5, prompt=8, tokens=9) == 8


def test_decode_is_not_clipped():
    assert chunk_end(coarse(8, 64), 20, 1, prompt=20, tokens=21) == 21
    assert chunk_end(coarse(8, 64), 20, 5, prompt=20, tokens=21, junction=22) == 25


@pytest.mark.parametrize(
    "start, end, boundary, rule, possible",
    [
        (0, 120, 112, fine(32, 16, export_alignment=16), True),
        (8, 120, 112, fine(32, 16, export_alignment=16), False),  # starts off the hash unit
        (96, 120, 112, fine(32, 16, export_alignment=16), False),  # adds no column before the last
        (0, 120, 104, fine(32, 8, export_alignment=16), False),  # 104 is off the alignment
        (0, 120, 112, fine(32, 16), False),  # the backend exports none
        (0, 120, 0, fine(32, 16, export_alignment=16), False),  # no whole unit before it
        (0, 120, 120, fine(32, 8, export_alignment=8), False),  # that is the end, not inside
    ],
)
def test_k04_what_can_be_exported(start, end, boundary, rule, possible):
    assert can_export(rule, start, end, boundary) == possible


EXPORTING = fine(32, 16, export_alignment=16)
WIDE = fine(512, 32, export_alignment=16)


@pytest.mark.parametrize(
    "rule, end, query, wanted",
    [
        pytest.param(EXPORTING, 120, 120, (112, 112, 2), id="K05 whole"),
        pytest.param(EXPORTING, 120, 88, (112, 80, 2), id="K05 from 32"),
        pytest.param(EXPORTING, 104, 104, (96, 96, 2), id="K05 at a block's end"),
        pytest.param(EXPORTING, 33, 33, (32, 32, 0), id="K05 one past"),
        pytest.param(EXPORTING, 65, 1, None, id="K05 decode"),
        pytest.param(EXPORTING, 14, 14, None, id="K05 too short"),
        pytest.param(coarse(32, export_alignment=16, eagle=True), 104, 104, (64, 64, 2), id="K06"),
        pytest.param(WIDE, 10000, 10000, (9984, 9984, 18), id="K07 whole"),
        pytest.param(WIDE, 10000, 1808, (9984, 1792, 18), id="K07 last piece"),
        pytest.param(WIDE, 10000, 272, None, id="K07 from 9728"),
    ],
)
def test_where_the_inner_checkpoint_goes(rule, end, query, wanted):
    found = inner_checkpoint(rule, end - query, end)
    assert found == (wanted if wanted is None else InnerCheckpoint(*wanted))


def test_an_exporting_piece_still_stops_at_a_junction():
    rule = fine(16, 4, export_alignment=4)
    assert ends(rule, 54) == [54]
    assert ends(rule, 54, junction=32) == [32, 54]


@given(
    ratio=st.integers(1, 4),
    unit=st.integers(1, 4),
    prompt=st.integers(1, 120),
    start=st.integers(0, 119),
    budgets=st.lists(st.integers(1, 60), min_size=1),
    junction=st.none() | st.integers(1, 119),
    kinds=st.fixed_dictionaries(
        {
            "eagle": st.booleans(),
            "lookahead": st.integers(0, 5),
            "exact_junction": st.booleans(),
            "export_alignment": st.none() | st.integers(1, 8),
        }
    ),
)
def test_a_state_exists_at_every_boundary_a_resend_wants(
    ratio, unit, prompt, start, budgets, junction, kinds
):
    """Whatever the budgets: pieces advance, none passes over a resend boundary without a state at
    it, and no state is left in a column that another boundary owns (I-34)."""
    rule = ChunkRule(unit * ratio, unit, unit, **kinds)
    at, kept = floored(min(start, prompt - 1), unit), set()
    first, budgets = at, iter([*budgets, *[prompt] * prompt])
    while at < prompt:
        want = min(next(budgets), prompt - at)
        end = chunk_end(rule, at, want, prompt=prompt, tokens=prompt, junction=junction)
        assert at <= end <= at + want
        inner = inner_checkpoint(rule, at, end) if end == prompt else None
        kept |= {end} | ({inner.boundary} if inner else set())
        if end < prompt and end > at:
            tail = rule.resend_boundary(prompt, unit)
            exact = junction if kinds["exact_junction"] else None
            from_start = rule.export_alignment is not None and (end - at) % rule.block == 0
            assert end % rule.block == 0 or end in (tail, exact) or from_start
        at = end
    last = rule.resend_boundary(prompt, rule.hits)
    assert last <= first or last in kept
