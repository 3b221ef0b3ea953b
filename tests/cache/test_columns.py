"""Where states sit in a row of state blocks, and how the running one moves (serving.md 9.9)."""

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.columns import Move, Running, StateRow, column_of


@pytest.mark.parametrize("seq_len, first", [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_x01_the_columns_of_a_step(seq_len, first):
    assert [*StateRow(4, 2).columns(seq_len)] == [first, first + 1, first + 2]


@pytest.mark.parametrize("seq_len", [3, 4, 5, 8, 9])
def test_x02_without_positions_they_are_the_first_ones(seq_len):
    row = StateRow(None, 2)
    assert [*row.columns(seq_len)] == [0, 1, 2]
    running, move = row.before_step(Running(), seq_len)
    assert (running, move) == (Running(0), None)
    assert row.after_step(running, seq_len, 2, 3) == (Running(0, 3), None)


def test_x03_to_x06_a_row_that_verifies_two_drafts():
    row = StateRow(4, 2)
    running, move = row.before_step(Running(0, 1), 6)  # the prompt of 3 is done, 3 tokens more
    assert (running, move) == (Running(1, 1), Move(0, 0, 1))
    assert [*row.columns(6)] == [1, 2, 3]
    running, move = row.after_step(running, 6, 2, 2)  # X04: 5 tokens, past the boundary 4
    assert (running, move) == (Running(1, 2), Move(1, 0, 0))
    running, move = row.before_step(running, 8)  # X05
    assert (running, move) == (Running(1, 2), None)
    assert running.column + running.accepted - 1 == 2  # where the kernel reads
    running, move = row.after_step(running, 8, 2, 3)
    assert (running, move) == (Running(1, 1), Move(1, 2, 1))
    running, move = row.before_step(running, 11)  # X06
    assert (running, move) == (Running(2, 1), Move(1, 0, 2))


@pytest.mark.parametrize("computed, block, column", [(96, 128, 0), (128, 128, 0), (129, 128, 1)])
def test_x07_a_hit_is_admitted_in_the_column_of_its_state(computed, block, column):
    assert column_of(computed, block) == column


def test_x08_a_fresh_request_has_no_state_to_move():
    assert column_of(0, 4) == Running().column == -1
    assert StateRow(4).before_step(Running(), 9) == (Running(2), None)


def test_a_chunk_that_ends_at_a_boundary_is_where_it_belongs():
    assert StateRow(4).after_step(Running(1), 8, 0, 1) == (Running(1), None)


@pytest.mark.parametrize("block, drafts", [(2, 2), (3, 3), (0, 0)])
def test_a_block_shorter_than_a_step_of_drafts_is_refused(block, drafts):
    with pytest.raises(ValueError, match=f"verifies {drafts} drafts, got {block}"):
        StateRow(block, drafts)


WIDTH = 4  # of the convolution


class Model:
    """States as the tuples of tokens that made them, conv rows as the inputs that they hold."""

    def __init__(self, row: StateRow) -> None:
        self.row, self.running, self.tokens = row, Running(), ()
        self.recurrent = defaultdict(lambda: None)
        self.conv = defaultdict(lambda: None)

    def move(self, move: Move | None) -> None:
        if move is not None:
            self.recurrent[move.destination] = self.recurrent[move.column + move.bias]
            self.conv[move.destination] = self.conv[move.column][move.bias :]

    def step(self, confirmed: tuple[int, ...], drafts: tuple[int, ...], accepted: int) -> None:
        """The confirmed tokens and, of the drafts, the first accepted - 1 are consumed."""
        end = len(self.tokens) + len(confirmed) + len(drafts)
        self.running, move = self.row.before_step(self.running, end)
        self.move(move)
        self.run(confirmed, drafts)
        self.tokens += confirmed + drafts[: accepted - 1]
        self.running, move = self.row.after_step(self.running, end, len(drafts), accepted)
        self.move(move)

    def run(self, confirmed: tuple[int, ...], drafts: tuple[int, ...]) -> None:
        """The kernel: reads the running state, writes one column for each token that may be the
        last, and one conv row for them all."""
        (column, accepted), used = self.running, self.row.columns
        state, window = (), (None,) * (WIDTH - 1)
        if self.tokens:
            state = self.recurrent[column + accepted - 1]
            window = self.conv[column][accepted - 1 :][: WIDTH - 1]
        assert state == self.tokens
        assert window == window_of(self.tokens)
        end = len(self.tokens) + len(confirmed) + len(drafts)
        for t in range(1 + len(drafts)):
            assert column + t in used(end)
            self.recurrent[column + t] = state + confirmed + drafts[:t]
        inputs = window + confirmed + drafts
        self.conv[column] = inputs[len(inputs) - (WIDTH - 1) - len(drafts) :]

    def holds(self, boundary: int) -> bool:
        """Whether the boundary's own column has the state and window after so many tokens."""
        column, prefix = column_of(boundary, self.row.block), self.tokens[:boundary]
        window = self.conv[column] and self.conv[column][: WIDTH - 1]
        return (self.recurrent[column], window) == (prefix, window_of(prefix))


def window_of(tokens: tuple[int, ...]) -> tuple[int | None, ...]:
    return ((None,) * (WIDTH - 1) + tokens)[-(WIDTH - 1) :]


@given(st.data(), st.integers(1, 8), st.integers(0, 3))
def test_every_step_reads_its_state_and_every_boundary_passed_is_kept(data, block, drafts):
    """The token-tuple model at the end of serving 4.9."""
    model, fresh = Model(StateRow(max(block, 1 + drafts), drafts)), iter(range(10**6))
    block, kept = model.row.block, []

    def some(count: int) -> tuple[int, ...]:
        return tuple(next(fresh) for _ in range(count))

    def stepped(confirmed: int, drafted: int, accepted: int) -> None:
        before = len(model.tokens)
        model.step(some(confirmed), some(drafted), accepted)
        boundary = len(model.tokens) // block * block
        if boundary > before + confirmed - 1:  # a piece of prefill has one state, at its end
            kept.append(boundary)
        assert all(map(model.holds, kept))

    for piece in data.draw(st.lists(st.integers(1, 2 * block), min_size=1, max_size=4)):
        stepped(piece, 0, 1)
    for _ in range(25):
        drafted = data.draw(st.integers(0, drafts))
        stepped(1, drafted, data.draw(st.integers(1, 1 + drafted)))


def test_with_fewer_tokens_a_block_than_a_step_a_boundary_is_lost():
    """Why such a block is refused."""
    row = StateRow(3, 2)
    object.__setattr__(row, "block", 2)
    model = Model(row)
    model.step((0,), (), 1)
    model.step((1,), (2, 3), 3)
    assert model.holds(4) and not model.holds(2)
