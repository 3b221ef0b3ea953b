"""Tables: where the states of a request are, column by column."""

import pytest

from cache.blocks.lease import StateBlock, StateTable
from cache.blocks.pool import Block

ONE, TWO, THREE = (Block(id) for id in (1, 2, 3))


@pytest.mark.parametrize("capacity", [1, 2])
def test_a_state_block_has_room_for_as_many_states_as_it_was_made_for(capacity):
    cell = StateBlock(capacity)
    for boundary in range(capacity):
        cell.put(boundary, Block(boundary + 1))
    with pytest.raises(ValueError, match=f"for {capacity} states has .*no room for the one at 9"):
        cell.put(9, THREE)


def test_the_running_state_is_in_one_column_at_a_time():
    table = StateTable(capacity=1)
    table.run_in(0, 3, ONE)
    assert (table.length, table.reached, table.at(3)) == (1, 3, ONE)
    table.run_in(2, 11, ONE)
    assert (table.length, table.reached, table.states()) == (3, 11, [(11, ONE)])


def test_states_are_listed_from_the_first_column_on():
    table = StateTable(capacity=2)
    table.run_in(2, 20, ONE)
    table.put(0, 8, TWO)
    table.put(2, 18, THREE)
    assert table.held() == [TWO, ONE, THREE]
    table.remove(TWO)
    assert [*table.columns] == [2] and table.at(8) is None


def test_of_two_states_at_one_boundary_the_running_one_is_known():
    table = StateTable(capacity=1)
    table.put(0, 8, TWO)
    table.run_in(1, 8, ONE)
    assert (table.at(8), table.running, table.reached) == (TWO, ONE, 8)


def test_a_copy_does_not_change_with_the_table():
    table = StateTable(capacity=1)
    table.run_in(0, 3, ONE)
    before = table.copied()
    table.run_in(1, 9, ONE)
    table.put(0, 4, TWO)
    assert before.states() == [(3, ONE)] and before.length == 1 and before.reached == 3
