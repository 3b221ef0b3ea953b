"""Key spaces: a salt separates everything below the root."""

from tests.cache.radix.planting import Garden, upto


def test_key_spaces_share_nothing():
    """R27"""
    garden = Garden()
    assert garden.insert(upto(4), salt="A").already == 0
    assert garden.insert(upto(4), salt="B").already == 0
    depths = [garden.match(upto(4), salt).depth for salt in ("A", "C", None, "")]
    assert depths == [4, 0, 0, 0]
    garden.insert(upto(4), salt="")
    assert [garden.match(upto(4), salt).depth for salt in (None, "")] == [0, 4]


def test_key_spaces_are_evicted_from_one_order():
    garden = Garden()
    for salt in ("A", None, "B"):
        garden.insert(upto(4), salt=salt)
    garden.match(upto(4), "A")
    assert garden.evict(tokens=1) == (4, 1)
    assert garden.evict(states=1) == (4, 1)
    assert [node.salt for node in garden.tree.nodes()] == ["A"]
