"""The order of reuse."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.blocks.free_queue import FreeQueue


def test_what_is_pushed_to_the_front_comes_first_in_the_order_given():
    queue = FreeQueue([1, 2, 3])
    queue.push_back([7, 8])
    queue.push_front([5, 6])
    assert [*queue] == [5, 6, 1, 2, 3, 7, 8]
    assert [queue.pop() for _ in range(len(queue))] == [5, 6, 1, 2, 3, 7, 8]
    with pytest.raises(IndexError):
        queue.pop()


def test_what_was_taken_out_of_the_middle_can_go_back_there():
    queue = FreeQueue([1, 2, 3])
    place = queue.remove(2)
    queue.push_back([4])
    queue.push_front([5])
    assert 2 not in queue
    queue.put_back(2, place)
    assert [*queue] == [5, 1, 2, 3, 4]
    with pytest.raises(KeyError):
        queue.remove(9)


def test_places_are_in_order_and_the_back_is_behind_them_all():
    queue = FreeQueue([4, 2])
    queue.push_front([7])
    queue.push_back([3])
    places = [queue.place(id) for id in (7, 4, 2, 3)]
    assert places == sorted({*places}) and places[-1] < queue.back
    with pytest.raises(KeyError):
        queue.place(9)


@given(st.lists(st.tuples(st.sampled_from(["front", "back", "remove", "pop"]), st.integers(1, 9))))
def test_it_is_a_list_that_is_fast_in_the_middle(calls):
    queue, model = FreeQueue([1, 2, 3]), [1, 2, 3]
    for call, id in calls * 12:  # enough for what is stale to be swept
        if call == "pop" and model:
            assert queue.pop() == model.pop(0)
        elif call == "remove" and id in model:
            queue.remove(id)
            model.remove(id)
        elif call == "front" and id not in model:
            queue.push_front([id])
            model.insert(0, id)
        elif call == "back" and id not in model:
            queue.push_back([id])
            model.append(id)
        assert [*queue] == model and len(queue) == len(model)
    assert len(queue._heap) <= 2 * len(model) + 80
