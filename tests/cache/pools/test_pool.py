"""Memory behind indices: all layers move together, and poison finds who touches what is free."""

import pytest
import torch

from cache.pools.allocator import PRIVATE, Ownership, OwnershipError
from cache.pools.pool import Pool

SHAPES = {  # the two kinds of the real model, slot-major states, and the least there can be
    "latent rows": ([(3, 5, 4, 6)], 3 * 4 * 6 * 4),
    "states": ([(2, 5, 2, 3, 4), (2, 5, 3, 7)], 2 * (24 + 21) * 4),
    "one number": ([(2, 5)], 8),
    "no layers": ([(0, 5, 4, 6)], 0),
}


def make_pool(kind: str = "states", *, poison: bool = True) -> Pool:
    shapes, unit_bytes = SHAPES[kind]
    return Pool(4, "slot", unit_bytes, [torch.zeros(shape) for shape in shapes], poison=poison)


def filled(pool: Pool, index: int) -> float:
    """Write a number into all memory of an index; returns it."""
    for tensor in pool.tensors:
        tensor[:, index] = float(index)
    return float(index)


def is_nan(pool: Pool, index: int) -> bool:
    return all(bool(tensor[:, index].isnan().all()) for tensor in pool.tensors)


@pytest.mark.parametrize("kind", SHAPES)
def test_memory_is_nan_from_the_start_and_the_books_are_clean(kind):
    pool = make_pool(kind)
    assert all(is_nan(pool, index) for index in range(5))
    assert pool.audit() == []


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("verb", ["free", "evict", "clear", "reclaim"])
def test_br08_memory_that_comes_back_is_nan_until_its_new_owner_writes_it(kind, verb):
    pool = make_pool(kind)
    (index,) = pool.alloc(1)
    filled(pool, index)
    pool.alloc(3)
    if verb == "evict":
        pool.allocator.donate([index])
    if verb in ("clear", "reclaim"):
        getattr(pool, verb)()
    else:
        getattr(pool, verb)([index])
    assert is_nan(pool, index)
    assert pool.alloc(1) == [index] and is_nan(pool, index)
    assert pool.audit() == []


def test_reclaim_poisons_all_but_what_stays_even_what_was_free_before():
    """It may have been given back just before a failure, and not yet been poisoned."""
    pool = make_pool()
    kept, private = pool.alloc(2)
    pool.allocator.donate([kept])
    for index in (kept, private, 3):
        filled(pool, index)
    pool.reclaim([kept])
    assert [is_nan(pool, index) for index in range(1, 5)] == [False, True, True, True]
    assert pool.audit() == []


@pytest.mark.parametrize("kind", ["latent rows", "states", "one number"])
def test_i17_whoever_writes_what_it_has_given_back_is_found(kind):
    pool = make_pool(kind)
    pool.alloc(2)
    pool.free([2])
    filled(pool, 1)
    assert pool.audit() == []
    pool.tensors[-1].view(-1, 5, pool.tensors[-1][0, 0].numel())[-1, 2, -1] = 0.0
    assert pool.audit() == ["I-13: slot 2 was written while it was free"]


def test_a_late_write_to_any_layer_and_any_tensor_is_found():
    pool = make_pool()
    for tensor in pool.tensors:
        for layer in range(tensor.shape[0]):
            keep = tensor.clone()
            tensor[layer, 3] = 1.0
            assert pool.audit() == ["I-13: slot 3 was written while it was free"], layer
            tensor.copy_(keep)
    assert pool.audit() == []


def test_without_poison_the_memory_is_left_as_it_was():
    pool = make_pool(poison=False)
    (index,) = pool.alloc(1)
    value = filled(pool, index)
    pool.free([index])
    assert all(bool((tensor[:, index] == value).all()) for tensor in pool.tensors)
    pool.clear()
    assert all(bool((tensor[:, index] == value).all()) for tensor in pool.tensors)
    assert pool.audit() == []


def test_owners_keep_what_they_wrote_while_others_come_and_go():
    pool = make_pool()
    a, b, c = pool.alloc(3)
    for index in (a, b, c):
        filled(pool, index)
    pool.free([b])
    pool.allocator.donate([c])
    assert all(bool((tensor[:, a] == a).all()) for tensor in pool.tensors)
    assert all(bool((tensor[:, c] == c).all()) for tensor in pool.tensors)
    assert is_nan(pool, b)


def test_a_refused_free_poisons_nothing():
    pool = make_pool()
    pool.alloc(2)
    filled(pool, 1)
    with pytest.raises(OwnershipError):
        pool.free([1, 3])
    with pytest.raises(OwnershipError):
        pool.evict([1])
    assert all(bool((tensor[:, 1] == 1).all()) for tensor in pool.tensors)


def test_the_sink_may_be_written_by_padding_at_any_time():
    pool = make_pool()
    filled(pool, 0)
    pool.tensors[0][:, 0] = 7.0
    pool.clear()
    assert pool.audit() == []
    assert bool((pool.tensors[0][:, 0] == 7.0).all())


def test_a_copy_moves_all_layers_of_all_tensors_and_nothing_else():
    pool = make_pool()
    torch.manual_seed(0)
    for tensor in pool.tensors:
        tensor.copy_(torch.randn(tensor.shape))
    before = [tensor.clone() for tensor in pool.tensors]
    pool.copy(2, 4)
    for tensor, old in zip(pool.tensors, before, strict=True):
        assert torch.equal(tensor[:, 4], old[:, 2])
        assert torch.equal(tensor[:, :4], old[:, :4])
        assert not torch.equal(old[:, 4], old[:, 2])


def test_a_copy_is_no_alias():
    pool = make_pool()
    filled(pool, 1)
    pool.copy(1, 2)
    filled(pool, 1)
    pool.tensors[0][:, 1] = 9.0
    assert bool((pool.tensors[0][:, 2] == 1.0).all())


@pytest.mark.parametrize("shape", [(5,), (2, 4, 3), (5, 2, 3), (2, 6, 3)])
def test_memory_of_another_size_is_refused_with_the_shape_seen(shape):
    with pytest.raises(ValueError, match=rf"4 pages must have 5 entries.*got \[{shape[0]}"):
        Pool(4, "page", 24, [torch.zeros(shape)])


@pytest.mark.parametrize("unit_bytes", [0, 23, 48])
def test_br24_bytes_that_are_accounted_are_those_that_are_there(unit_bytes):
    with pytest.raises(
        ValueError, match=rf"a page counts {unit_bytes} bytes, but its memory is 24"
    ):
        Pool(4, "page", unit_bytes, [torch.zeros(2, 5, 3)])
    pool = Pool(4, "page", 24, [torch.zeros(2, 5, 3)])
    held = sum(tensor.untyped_storage().nbytes() for tensor in pool.tensors)
    assert held == (pool.size + 1) * pool.unit_bytes


def test_bytes_are_counted_by_state_and_without_tensors_too():
    pool = Pool(6, "page", 1000)
    pool.alloc(2)
    pool.alloc(1, Ownership.TRACKED)
    pool.alloc(1, Ownership.INFLIGHT)
    pool.allocator.donate([1])
    assert [pool.bytes_in(s) for s in (Ownership.FREE, *PRIVATE, Ownership.CACHED)] == [
        2000,
        1000,
        1000,
        1000,
        1000,
    ]
    assert (pool.size, pool.unit, pool.free_count) == (6, "page", 2)


def test_the_audit_of_a_pool_reads_no_memory_that_is_not_there():
    """A free list that names what does not exist is a fault to report, not one to fall over."""
    pool = make_pool()
    pool.allocator._free[99] = None
    (fault,) = pool.audit()
    assert "99" in fault
