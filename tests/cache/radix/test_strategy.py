"""Tracked slots of one request (serving.md 3.3, 9.4)."""

import pytest

from cache.leases import Copy, CopyKind
from cache.pools.allocator import Ownership
from cache.pools.pool import Pool
from cache.radix.strategy import TRACKED, Strategy, Tracker

ACTIVE = 9


class Decoding:
    """A row that decodes over a pool of a few slots, tracked ones acquired as they come."""

    def __init__(self, limit=2, lazy=False, slots=4, at_once=0):
        self.pool = Pool(slots, "slot", 1)
        self.tracker = Tracker(limit, lazy, self.pool.alloc(at_once, Ownership.TRACKED))

    def acquire(self):
        spare = self.pool.alloc(1, Ownership.TRACKED)
        return spare and spare[0]

    def step(self, end, grid=8):
        """The slot that has got the state at `end`, None for none."""
        self.tracker.before_decode(end, grid, self.acquire)
        copies = self.tracker.after_decode(end, ACTIVE, self.pool)
        assert len(copies) <= 1
        for copy in copies:
            assert copy == Copy(CopyKind.STATE, 0, ACTIVE, copy.destination)
            return copy.destination
        return None

    def steps(self, first, last, grid=8):
        slots = {end: self.step(end, grid) for end in range(first, last + 1)}
        return {end: slot for end, slot in slots.items() if slot is not None}


def test_slots_by_strategy():
    assert TRACKED == {Strategy.NO_BUFFER: 0, Strategy.EXTRA_BUFFER: 2, Strategy.LAZY: 1}


def test_snapshots_of_decode_alternate_between_two_slots():
    """T17"""
    row = Decoding(at_once=2)
    assert row.steps(14, 24) == {16: 1, 24: 2}
    assert (row.tracker.last, row.tracker.prev) == (24, 16)
    assert row.steps(25, 40) == {32: 1, 40: 2}


@pytest.mark.parametrize("length, published", [(24, (24, 2)), (22, (16, 1)), (15, (0, 0))])
def test_the_newest_snapshot_within_the_length_is_published(length, published):
    """T19: the request has run past its end."""
    row = Decoding(at_once=2)
    row.steps(14, 24)
    assert row.tracker.to_publish(length) == published


def test_what_was_published_before_is_no_second_choice():
    """T20 and T21: without a last one, without a previous one, with one slot."""
    row = Decoding(at_once=2)
    assert row.tracker.to_publish(22) == (0, 0)
    row.steps(17, 24)
    assert row.tracker.to_publish(22) == (0, 0)
    row = Decoding(limit=1, at_once=1)
    row.steps(14, 24)
    assert row.tracker.to_publish(22) == (0, 0)
    assert row.tracker.to_publish(24) == (24, 1)


def test_after_publishing_nothing_is_left_to_publish():
    row = Decoding(at_once=2)
    row.steps(14, 24)
    (spare,) = row.pool.alloc(1, Ownership.TRACKED)
    assert row.tracker.swap(spare) == 2
    row.tracker.forget()
    assert (row.tracker.slots, row.tracker.to_publish(99)) == ([1, 3], (0, 0))
    assert row.steps(25, 40) == {32: 1, 40: 3}


def test_a_lazy_row_has_a_second_slot_only_while_a_boundary_is_passed():
    """T22"""
    row = Decoding(limit=1, lazy=True, at_once=1)
    assert row.step(9) is None
    assert (row.tracker.slots, row.pool.free_count) == ([1], 3)
    row.tracker.before_decode(16, 8, row.acquire)
    assert (row.tracker.slots, row.tracker.target) == ([1, 2], 2)
    assert row.tracker.after_decode(16, ACTIVE, row.pool)[0].destination == 2
    assert (row.tracker.slots, row.pool.free_count) == ([2], 3)
    assert row.tracker.to_publish(16) == (16, 2)


def test_a_lazy_row_without_a_spare_slot_writes_over_the_one_it_has():
    """T24, RULES S29: the boundary that was there can not be named any more."""
    row = Decoding(limit=1, lazy=True, slots=1, at_once=1)
    assert row.steps(15, 24) == {16: 1, 24: 1}
    assert row.tracker.to_publish(24) == (24, 1)
    assert row.tracker.to_publish(23) == (0, 0)


def test_a_second_slot_that_comes_late_does_not_name_what_was_written_over():
    row = Decoding(slots=1)
    assert row.steps(1, 16) == {8: 1, 16: 1}
    assert row.tracker.to_publish(15) == (0, 0)
    row.pool = Pool(3, "slot", 1)
    row.pool.alloc(1, Ownership.TRACKED)
    assert row.steps(17, 24) == {24: 2}
    assert row.tracker.to_publish(23) == (16, 1)


def test_without_any_slot_nothing_is_kept():
    row = Decoding(slots=1, limit=2)
    row.pool.alloc(1)
    assert row.steps(1, 24) == {}
    assert row.tracker.to_publish(24) == (0, 0)
    assert Decoding(limit=0).steps(1, 24) == {}


@pytest.mark.parametrize("lazy", [False, True])
def test_a_step_that_does_not_run_leaves_what_was_there(lazy):
    """Also where a snapshot was kept before."""
    row = Decoding(limit=1 if lazy else 2, lazy=lazy)
    row.steps(1, 8)
    before = [*row.tracker.slots], row.pool.free_count, row.tracker.to_publish(8)
    row.tracker.before_decode(16, 8, row.acquire)
    row.tracker.undo(row.pool)
    assert ([*row.tracker.slots], row.pool.free_count, row.tracker.to_publish(8)) == before
    assert row.steps(9, 16).keys() == {16}


def test_a_step_that_ends_elsewhere_keeps_nothing():
    row = Decoding()
    row.tracker.before_decode(16, 8, row.acquire)
    assert row.tracker.after_decode(15, ACTIVE, row.pool) == ()
    assert row.tracker.to_publish(16) == (0, 0)


def test_a_slot_that_was_written_in_vain_names_nothing():
    row = Decoding(limit=1, at_once=1)
    row.step(8)
    row.tracker.lose_target()
    assert row.tracker.to_publish(99) == (0, 0)
    row = Decoding(at_once=2)
    row.steps(1, 16)
    row.tracker.lose_target()
    assert row.tracker.to_publish(16) == (16, 2)
    assert row.tracker.to_publish(15) == (0, 0)
