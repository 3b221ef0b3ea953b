"""Every fault that is put into the books by hand is found, and named."""

import pytest

from cache.audit import AuditError
from cache.blocks.manager import BlockCache
from cache.blocks.vllm import VLLMCache
from tests.cache.blocks.served import Served
from tests.cache.blocks.test_manager import ANY, PROMPT


class World:
    """One request that has finished, one that reads what it left, one in the middle of a step."""

    def __init__(self, make=BlockCache):
        self.served = Served(make, pages=40, slots=40)
        self.cache = self.served.cache
        self.served.run(PROMPT[:30])
        self.reader = self.served.run(PROMPT[:30], name="reader", end=None)
        self.flying = self.served.admit(ANY[:15], "flying")
        self.cache.begin_step()
        self.plan = self.cache.plan(self.flying, 9)
        self.rows, self.states = self.cache.groups
        self.cache.audit()

    @property
    def kept(self):
        """A block that nobody holds."""
        return next(b for b in self.states.pool.blocks if b.keys and not b.refs)


def a_holder_too_many(w):
    w.kept.refs += 1


def a_holder_too_few(w):
    w.reader.rows[0].blocks[0].refs -= 1


def a_held_block_in_the_queue(w):
    w.rows.pool.queue.push_back([w.flying.rows[0].blocks[0].id])


def a_free_block_out_of_the_queue(w):
    w.states.pool.queue.remove(w.kept.id)


def a_key_that_finds_nothing(w):
    w.kept.keys[b"k" * 36] = 4


def a_key_that_the_block_does_not_have(w):
    w.kept.keys.clear()


def memory_that_no_block_knows_of(w):
    w.kept.pool = None


def a_page_that_is_not_in_the_table(w):
    w.reader.pages[0].reverse()


def a_page_to_be_written_that_is_shared(w):
    w.rows.pool.donate(w.flying.rows[0].blocks[-1:])


def a_full_page_that_may_be_written(w):
    table = w.flying.rows[0]
    w.flying.computed = 9
    table.full = 2


def more_columns_registered_than_there_are(w):
    w.flying.rows[0].keyed = 99


def a_slot_that_is_not_the_running_state(w):
    w.reader.slots[0] = w.kept.id


def a_running_state_at_another_boundary(w):
    table = w.reader.states[0]
    table.run_in(table.length - 1, 7, table.running)


def a_state_beyond_the_table(w):
    w.reader.states[0].length = 0


def a_state_in_flight_that_others_may_read(w):
    w.states.pool.donate([w.flying.states[0].running])


def a_state_that_stands_for_two_boundaries(w):
    w.states.pool.register(w.kept, w.flying.chain.key(4, w.states.number), 4)


def a_block_of_rows_found_as_a_state(w):
    key = w.flying.chain.key(4, w.states.number)
    w.rows.pool.register(w.flying.rows[0].blocks[0], key, 4)


FAULTS = {
    a_holder_too_many: "I-10: .* has 0 holders",
    a_holder_too_few: "I-10: .* has . holders",
    a_held_block_in_the_queue: "I-36: .* not one of both",
    a_free_block_out_of_the_queue: "I-36: .* not one of both",
    a_key_that_finds_nothing: "I-33: .* other keys than it has",
    a_key_that_the_block_does_not_have: "I-33: .* other keys than it has",
    memory_that_no_block_knows_of: "in use or of a block, not both",
    a_page_that_is_not_in_the_table: "I-10: pages .* of reader are not its blocks",
    a_page_to_be_written_that_is_shared: "I-35: .* of flying is to be written, and may not be",
    a_full_page_that_may_be_written: "I-35: .* of flying is full, and may still be written",
    more_columns_registered_than_there_are: "I-33: flying has registered columns",
    a_slot_that_is_not_the_running_state: "I-10: reader runs in slot",
    a_running_state_at_another_boundary: "I-34: reader is at 30, its running state at 7",
    a_state_beyond_the_table: "I-34: reader has states beyond its 0 columns",
    a_state_in_flight_that_others_may_read: "I-35: flying writes to .*, which others may read",
    a_state_that_stands_for_two_boundaries: "I-33: .* holds one state, and is found as several",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault):
    world = World()
    fault(world)
    with pytest.raises(AuditError, match=FAULTS[fault]):
        world.cache.audit()


def test_a_block_is_found_by_keys_of_its_own_group_alone():
    world = World(VLLMCache)
    a_block_of_rows_found_as_a_state(world)
    with pytest.raises(AuditError, match="I-33: .* has keys of a group that it is not of"):
        world.cache.audit()


def test_nothing_is_fresh_between_steps():
    world = World()
    world.cache.cancel(world.plan)
    world.cache.end_step()
    world.states.pool.fresh[b"key"] = [world.kept]
    with pytest.raises(AuditError, match="I-41: 1 keys are fresh, and no step is open"):
        world.cache.audit()
