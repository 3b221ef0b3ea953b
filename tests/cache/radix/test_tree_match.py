"""Look-ups: the joint boundary, how far pages alone reach, the junction (serving 9.3)."""

from tests.cache.radix.planting import Garden, upto


def test_a_match_that_leaves_an_edge_splits_it_and_makes_no_state():
    """R08"""
    garden = Garden(grid=2)
    garden.insert(upto(6))
    assert garden.seen([1, 2, 3, 4, 9]) == (0, 4, 4)
    assert garden.edges() == [([1, 2, 3, 4], False), ([5, 6], True)]


def test_the_junction_is_floored_to_the_grid_not_to_the_page():
    """R23"""
    garden = Garden(page=4, pages=32, grid=8)
    garden.insert(range(8))
    garden.insert(range(24))
    seen = [garden.seen([*range(n), 100, 101, 102, 103]) for n in (12, 16, 20, 24)]
    assert seen == [(8, 12, None), (8, 16, 16), (8, 20, 16), (24, 24, None)]


def test_the_junction_of_a_prefix_without_any_state():
    """R24"""
    garden = Garden()
    garden.insert(range(16))
    seen = [garden.seen([*range(n), 100]) for n in (3, 5, 8, 11, 12, 15)]
    assert seen == [(0, 3, None), (0, 5, 4), (0, 8, 8), (0, 11, 8), (0, 12, 12), (0, 15, 12)]


def test_the_joint_boundary_is_a_state_and_the_junction_lies_above_it():
    """R25"""
    garden = Garden()
    garden.insert(range(8))
    garden.insert(range(16))
    seen = [garden.seen([*range(n), 100]) for n in (7, 8, 9, 12, 15, 16)]
    assert seen == [
        *((0, 7, 4), (8, 8, None), (8, 9, None), (8, 12, 12), (8, 15, 12), (16, 16, None)),
    ]


def test_br04_a_repeated_prompt_hits_once_a_state_lies_below_its_last_token():
    """R26"""
    garden = Garden(grid=2)
    garden.insert(upto(8))
    assert garden.seen(upto(7)) == (0, 7, 6)
    done = garden.insert(upto(6))
    assert (done.already, done.refused) == (6, False)
    assert garden.insert(upto(8)).refused
    assert garden.seen(upto(7)) == (6, 7, None)


def test_a_match_says_whether_a_state_has_been_lost_on_the_way():
    garden = Garden(grid=2)
    for n in (2, 4, 6):
        garden.insert(upto(n))
    assert not garden.match([*upto(4), 9]).lost
    garden.tree._drop_state(garden.node(upto(4)))
    assert garden.match([*upto(4), 9]).lost
    assert not garden.match(upto(6)).lost
    garden.insert(upto(4))
    assert not garden.match([*upto(4), 9]).lost
