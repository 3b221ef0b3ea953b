"""How large the pools are."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.pools.pool import Pool
from cache.pools.storage import WEIGHTLESS, Sizes, Storage, counts_within, one_of_each

small = st.integers(1, 60)
sizes_of = st.builds(Sizes, st.integers(1, 9), st.integers(1, 20), small)
BUDGETS = settings(max_examples=300, deadline=None, derandomize=True, database=None)


def taken(sizes: Sizes, slots: int, pages: int) -> int:
    return (slots + 1) * sizes.slot_bytes + (pages + 1) * sizes.page_bytes


def test_pages_are_rounded_up_for_each_group():
    storage = Storage((Pool(9, "page", 1), Pool(9, "page", 1)), (4, 3), ())
    assert [storage.pages_for(n) for n in (0, 1, 3, 4, 5, 12)] == [
        (0, 0),
        (1, 1),
        (1, 1),
        (1, 2),
        (2, 2),
        (3, 4),
    ]


@pytest.mark.parametrize("pages", [(), (4,), (4, 3, 1), (4, 0), (4, -1)])
def test_a_storage_wants_one_page_size_a_group(pages):
    with pytest.raises(ValueError, match="2 attention groups needs a page of at least one"):
        Storage((Pool(1, "page", 1), Pool(1, "page", 1)), pages, ())


def test_a_pool_that_two_groups_share_is_refused():
    """Each group's books are kept alone: one pool under two names would be counted twice."""
    pool = Pool(4, "page", 1)
    with pytest.raises(ValueError, match="a pool of its own"):
        Storage((pool, pool), (4, 4), ())
    with pytest.raises(ValueError, match="a pool of its own"):
        Storage((pool,), (4,), (pool,))


def test_storage_goes_through_pages_then_slots():
    storage = one_of_each(Sizes(4, 10, 100), 2, 3)
    assert [(pool.unit, pool.size, pool.unit_bytes) for pool in storage] == [
        ("page", 3, 40),
        ("slot", 2, 100),
    ]


@pytest.mark.parametrize("newest_first", [False, True])
def test_pages_may_come_again_newest_first_and_slots_never_do(newest_first):
    """As SGLang's two allocators have it."""
    storage = one_of_each(Sizes(4, 10, 100), 3, 3, newest_page_first=newest_first)
    for pool in storage:
        pool.free(pool.alloc(1))
    pages, slots = (pool.allocator.free_order() for pool in storage)
    assert pages == ((1, 2, 3) if newest_first else (2, 3, 1))
    assert slots == (2, 3, 1)


def test_the_pools_of_a_model_hold_its_tensors_and_poison_them():
    latent, recurrent, conv = torch.zeros(1, 4, 4, 5), torch.zeros(3, 3, 2), torch.zeros(3, 3, 6)
    sizes = Sizes(4, row_bytes=20, slot_bytes=96)
    storage = one_of_each(sizes, 2, 3, latent=latent, states=(recurrent, conv), poison=True)
    (page,), (slot,) = (pool.alloc(1) for pool in storage)
    latent[:, page] = recurrent[:, slot] = conv[:, slot] = 1.0
    storage.states[0].free([slot])
    assert latent[:, page].eq(1).all()
    assert recurrent[:, slot].isnan().all() and conv[:, slot].isnan().all()


def test_tensors_of_another_page_size_are_refused():
    with pytest.raises(ValueError, match="a page counts 160 bytes, but its memory is 80"):
        one_of_each(Sizes(8, row_bytes=20, slot_bytes=0), 2, 3, latent=torch.zeros(1, 4, 4, 5))


@BUDGETS
@given(st.integers(0, 3000), sizes_of)
def test_a_budget_is_spent_to_the_last_page_and_refused_only_where_nothing_fits(budget, sizes):
    least = 2 * (sizes.slot_bytes + sizes.page_bytes)
    if budget < least:
        with pytest.raises(ValueError, match=f"the least is {least:,}"):
            counts_within(budget, sizes)
        return
    slots, pages = counts_within(budget, sizes)
    assert slots >= 1 and pages >= 1
    assert taken(sizes, slots, pages) <= budget < taken(sizes, slots, pages + 1)


@BUDGETS
@given(st.integers(200, 20000), sizes_of)
def test_each_kind_gets_half_as_far_as_both_can_use_it(budget, sizes):
    if min(budget // 4, 10_000) < max(sizes.slot_bytes, sizes.page_bytes):
        return
    slots, pages = counts_within(budget, sizes)
    of_slots, of_pages = (slots + 1) * sizes.slot_bytes, (pages + 1) * sizes.page_bytes
    assert of_slots <= budget // 2 < of_slots + sizes.slot_bytes
    assert of_pages > budget // 2 - sizes.page_bytes


def test_many_slots_do_not_crowd_out_the_only_page():
    """Half of 100 would be 49 slots of one byte, and no page of 40 would fit beside them."""
    assert counts_within(100, Sizes(page=40, row_bytes=1, slot_bytes=1)) == (19, 1)
    assert counts_within(82, Sizes(page=40, row_bytes=1, slot_bytes=1)) == (1, 1)


@BUDGETS
@given(st.integers(0, 3000), sizes_of, st.integers(1, 12), st.booleans())
def test_a_number_that_is_given_stays_and_the_other_takes_the_rest(budget, sizes, given, of_slots):
    one = taken(sizes, given, 1) if of_slots else taken(sizes, 1, given)
    asked = {"num_slots": given} if of_slots else {"num_pages": given}
    if one > budget:
        with pytest.raises(ValueError, match="with their sinks"):
            counts_within(budget, sizes, **asked)
        return
    slots, pages = counts_within(budget, sizes, **asked)
    assert (slots if of_slots else pages) == given
    more = (slots, pages + 1) if of_slots else (slots + 1, pages)
    assert taken(sizes, slots, pages) <= budget < taken(sizes, *more)


def test_two_given_numbers_are_checked_against_the_budget_with_their_sinks():
    sizes = Sizes(4, 10, 100)
    assert counts_within(460, sizes, 2, 3) == (2, 3)
    with pytest.raises(ValueError, match="459 bytes"):
        counts_within(459, sizes, 2, 3)
    for slots, pages in ((0, 3), (2, 0), (-1, 3)):
        with pytest.raises(ValueError, match="do not hold"):
            counts_within(10_000, sizes, slots, pages)


@pytest.mark.parametrize(
    "sizes, expected",
    [
        (Sizes(4, 10, 0), (WEIGHTLESS, 24)),
        (Sizes(4, 0, 100), (9, WEIGHTLESS)),
        (Sizes(4, 0, 0), (WEIGHTLESS, WEIGHTLESS)),
    ],
)
def test_a_kind_that_the_model_has_no_layers_of_costs_nothing_and_leaves_all_to_the_other(
    sizes, expected
):
    assert counts_within(1000, sizes) == expected
