"""Blocks: B01 .. B06 of serving 9.6, what they are found by, and where their memory is."""

import pytest
import torch

from cache.blocks.keys import key_of
from cache.blocks.pool import NULL, BlockPool
from cache.pools.allocator import Ownership, OwnershipError
from cache.pools.pool import Pool


def key(n, group=0):
    return key_of(bytes([n]) * 32, group)


def made(size=5, groups=1, **options):
    return BlockPool({g: Pool(size, "page", 1, **options) for g in range(groups)})


def ids(blocks):
    return [block.id for block in blocks]


def keyed_and_free():
    """B02: three taken, the first two keyed, given back last one first."""
    pool = made()
    blocks = pool.take(3, 0)
    for n, block in enumerate(blocks[:2], 1):
        pool.register(block, key(n), n)
    pool.release(reversed(blocks))
    return pool, blocks


def test_b01_block_0_is_nobodys():
    pool = made()
    assert [*pool.queue] == [1, 2, 3, 4, 5] and pool.free_count == 5
    assert pool.state_of(pool.blocks[NULL]) is Ownership.RESERVED
    assert not pool.writable(pool.blocks[NULL])


def test_b02_without_a_key_to_the_front_with_one_to_the_back():
    pool, _ = keyed_and_free()
    assert [*pool.queue] == [3, 4, 5, 2, 1]


def test_b03_a_hit_takes_it_out_of_the_queue():
    pool, blocks = keyed_and_free()
    assert pool.find(key(1)) is blocks[0]
    pool.hold([blocks[0]])
    assert blocks[0].refs == 1 and [*pool.queue] == [3, 4, 5, 2]


def test_b04_keys_go_when_the_block_is_taken_not_before():
    pool, blocks = keyed_and_free()
    pool.hold([blocks[0]])
    assert ids(pool.take(2, 0)) == [3, 4]
    assert pool.find(key(2)) is blocks[1] and not pool.was_lost(key(2))
    assert ids(pool.take(2, 0)) == [5, 2]
    assert pool.find(key(2)) is None and pool.was_lost(key(2))
    assert sum(pool.reused.values()) == 1
    with pytest.raises(OwnershipError, match="1 blocks, of which 0 are free"):
        pool.take(1, 0)


def test_b05_all_keys_go_at_once_and_only_if_nobody_holds_a_block():
    pool, blocks = keyed_and_free()
    pool.hold([blocks[0]])
    with pytest.raises(OwnershipError, match="1 blocks are held"):
        pool.reset()
    pool.unhold([blocks[0]])
    order = [*pool.queue]
    pool.reset()
    assert pool.find(key(1)) is None and [*pool.queue] == order == [3, 4, 5, 2, 1]
    assert all(physical.free_count == 5 for physical in pool.pools.values())


def test_b06_only_its_one_holder_may_write_and_only_without_a_key():
    pool = made()
    (block,) = pool.take(1, 0)
    assert pool.writable(block)
    pool.hold([block])
    assert not pool.writable(block)
    pool.release([block])
    pool.register(block, key(1), 1)
    assert not pool.writable(block)
    pool.forget(block)
    assert pool.writable(block)
    pool.donate([block])
    assert not pool.writable(block)


def test_a_hold_that_is_undone_leaves_no_trace_in_the_order():
    pool, blocks = keyed_and_free()
    pool.hold(blocks[:2])
    pool.unhold(reversed(blocks[:2]))
    assert [*pool.queue] == [3, 4, 5, 2, 1]
    pool.hold([blocks[1]])
    pool.release([blocks[1]])
    assert [*pool.queue] == [3, 4, 5, 1, 2]


def test_what_is_discarded_has_no_key_and_is_the_next_to_be_taken():
    pool, blocks = keyed_and_free()
    pool.discard(blocks[0])
    assert [*pool.queue] == [1, 3, 4, 5, 2]
    assert not blocks[0].keys and pool.state_of(blocks[0]) is Ownership.FREE
    pool.hold([blocks[1]])
    pool.discard(blocks[1])
    assert not blocks[1].keys and [*pool.queue] == [1, 3, 4, 5]
    pool.release([blocks[1]])
    assert [*pool.queue] == [2, 1, 3, 4, 5]


class LastOne:
    """A choice of what was let go of last."""

    def victim(self, idle):
        return idle[-1]


def test_a_choice_is_asked_when_only_blocks_with_keys_are_left():
    pool, _ = keyed_and_free()
    pool.choice = LastOne()
    assert ids(pool.take(4, 0)) == [3, 4, 5, 1]
    assert pool.find(key(1)) is None and pool.was_lost(key(1))
    assert ids(pool.take(1, 0)) == [2]
    with pytest.raises(OwnershipError, match="1 blocks, of which 0 are free"):
        pool.take(1, 0)


def test_of_equal_blocks_the_oldest_serves_and_the_next_one_takes_over():
    pool = made()
    first, second = pool.take(2, 0)
    pool.register(first, key(1), 4)
    pool.register(second, key(1), 4)
    assert pool.find(key(1)) is first
    assert not pool.register(first, key(1), 4)
    pool.renew(first, key(1))
    assert pool.find(key(1)) is second
    pool.forget(second)
    assert pool.find(key(1)) is first and not pool.was_lost(key(1))
    pool.register(second, key(1), 4)
    pool.renew(first, key(1))
    assert pool.find(key(1)) is second
    assert [(entry.boundary, entry.block) for entry in pool.entries()] == [(4, second), (4, first)]


def test_one_block_may_stand_for_several_prefixes():
    pool = made()
    (block,) = pool.take(1, 0)
    pool.register(block, key(1), 4)
    pool.register(block, key(2), 6)
    assert pool.find(key(1)) is pool.find(key(2)) is block
    (copy,) = pool.take(1, 0)
    pool.move_keys(block, copy)
    assert not block.keys and [*copy.keys.values()] == [4, 6]
    pool.unregister(copy, key(1))
    assert pool.find(key(1)) is None and pool.find(key(2)) is copy
    pool.forget(copy)
    assert not [*pool.entries()]


def test_what_is_registered_is_fresh_until_the_step_ends():
    pool = made()
    (block,) = pool.take(1, 0)
    pool.register(block, key(1), 4)
    assert pool.fresh == {key(1): [block]}
    pool.unregister(block, key(1))
    assert not pool.fresh
    pool.register(block, key(1), 4)
    pool.end_step()
    assert not pool.fresh and pool.find(key(1)) is block


def test_memory_is_active_while_written_cached_while_kept_and_free_without_either():
    pool = made()
    (block,) = pool.take(1, 0)
    pool.register(block, key(1), 4)
    assert pool.state_of(block) is Ownership.ACTIVE
    pool.release([block])
    assert pool.state_of(block) is Ownership.CACHED
    pool.forget(block)
    assert pool.state_of(block) is Ownership.FREE and block.pool is None
    (shared,) = pool.take(1, 0, Ownership.TRACKED)
    pool.hold([shared])
    pool.donate([shared])
    pool.release([shared])
    assert pool.state_of(shared) is Ownership.CACHED and not shared.keys
    pool.release([shared])
    assert pool.state_of(shared) is Ownership.FREE
    with pytest.raises(OwnershipError, match="nobody holds"):
        pool.release([shared])


def test_a_block_has_its_memory_in_the_pool_of_the_group_that_it_was_taken_for():
    pool = made(size=2, groups=2)
    ((one,), (two,)) = pool.take(1, 0), pool.take(1, 1)
    assert one.id != two.id
    assert [one.pool, two.pool] == [pool.pools[0], pool.pools[1]]
    pool.register(one, key(1), 4)
    pool.release([one])
    (again,) = pool.take(1, 1)
    assert again is one and one.pool is pool.pools[1]
    assert pool.pools[0].free_count == 2 and pool.pools[1].free_count == 0
    assert pool.reused == {pool.pools[0]: 1, pool.pools[1]: 0}


def test_blocks_that_are_shared_are_of_one_size():
    with pytest.raises(ValueError, match=r"pools of one size, got \[3, 4\]"):
        BlockPool({0: Pool(3, "page", 1), 1: Pool(4, "slot", 1)})


def test_freed_memory_is_poisoned_and_reused_memory_too():
    physical = Pool(2, "page", 8, [torch.zeros(1, 3).double()], poison=True)
    pool = BlockPool({0: physical})
    (block,) = pool.take(1, 0)
    physical.tensors[0][:, block.id] = 5.0
    pool.register(block, key(1), 4)
    pool.release([block])
    assert physical.tensors[0][0, block.id] == 5.0
    pool.take(2, 0)
    assert physical.tensors[0][0, block.id].isnan()


def test_only_as_many_lost_keys_are_remembered_as_there_are_blocks():
    pool = made(size=2)
    for n in range(5):
        (block,) = pool.take(1, 0)
        pool.register(block, key(n), 4)
        pool.release([block])
    assert [n for n in range(5) if pool.was_lost(key(n))] == [1, 2]
    (block,) = pool.take(1, 0)
    pool.register(block, key(2), 4)
    assert not pool.was_lost(key(2))


def test_after_a_call_that_was_cut_short_what_has_been_there_before_the_step_is_left():
    pool = made(groups=2)
    old, fresh, torn, bare = (pool.take(1, 0)[0] for _ in range(4))
    pool.register(old, key(1), 4)
    pool.register(torn, key(3), 4)
    pool.end_step()
    pool.register(fresh, key(2), 4)
    del torn.keys[key(3)]  # unregistered half way
    for _ in range(2):
        assert pool.rebuild() == {pool.pools[0]: [old.id], pool.pools[1]: []}
        assert [(entry.key, entry.block) for entry in pool.entries()] == [(key(1), old)]
        assert not any(block.refs for block in pool.blocks)
        assert [*pool.queue][-1] == old.id and len(pool.queue) == 5
    assert bare.pool is None


def test_who_is_let_go_of_meanwhile_goes_where_the_released_go():
    pool = made(4)
    (block,) = pool.take(1, 0)
    pool.register(block, key(1), 4)
    pool.hold([block])  # somebody has found it, and gives it up when its producer has gone
    pool.release([block])
    pool.unhold([block])
    assert [*pool.queue] == [2, 3, 4, block.id]
