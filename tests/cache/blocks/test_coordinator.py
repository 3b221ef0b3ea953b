"""The joint look-up: V01 .. V11 of serving 9.7, and the one rule of what may be resumed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.blocks.coordinator import Coordinator, Member, alike
from cache.blocks.keys import HashChain
from cache.blocks.pool import BlockPool
from cache.blocks.sizes import block_sizes
from cache.identity import Identity
from cache.joint import joint_boundary
from cache.pools.pool import Pool

TOKENS = [*range(100)]


class Cached:
    """attention, states: (block, boundaries that are cached) of each group. together: groups of one
    block are found as one."""

    def __init__(self, attention=(), states=(), unit=None, together=False):
        groups = (*attention, *states)
        blocks = [block for block, _ in groups]
        self.sizes = block_sizes(blocks[: len(attention)], blocks[len(attention) :], unit)
        self.pools = [BlockPool({g: Pool(99, "block", 1)}) for g in range(len(groups))]
        kinds = ["" if together else str(g) for g in range(len(groups))]
        members = [(kinds[g], block, Member(g, self.pools[g])) for g, block in enumerate(blocks)]
        rows, state = members[: len(attention)], members[len(attention) :]
        self.coordinator = Coordinator(self.sizes, alike(rows), alike(state))
        chain = HashChain(Identity().origin(), TOKENS, self.sizes.unit)
        for g, (_, boundaries) in enumerate(groups):
            for boundary in boundaries:
                (block,) = self.pools[g].take(1, g)
                self.pools[g].register(block, chain.key(boundary, g), boundary)

    def find(self, prompt, **options):
        chain = HashChain(Identity().origin(), TOKENS[:prompt], self.sizes.unit)
        found = self.coordinator.find(chain, prompt - 1, **options)
        for columns in found.columns:
            assert bool(columns) == (found.joint > 0)
            assert not columns or max(columns[-1].keys.values()) >= found.joint
        return found

    def seen(self, prompt, **options):
        """hit, junction (0 for none), and what of each table is there: x, or . for null."""
        found = self.find(prompt, **options)
        tables = ["".join(".x"[block is not None] for block in table) for table in found.columns]
        return found.joint, found.longest if found.longest > found.joint else 0, tables


def to(end, step):
    return range(step, end + 1, step)


def test_v01_the_deepest_that_both_state_groups_have():
    cached = Cached([(4, to(24, 4))], [(8, [8, 16]), (8, [8, 24])])
    assert cached.seen(40) == (8, 24, ["xx", "x", "x"])


def test_v02_one_group_has_but_one_state():
    cached = Cached([(4, to(24, 4))], [(8, [8, 16, 24]), (8, [16])])
    assert cached.seen(40) == (16, 24, ["xxxx", ".x", ".x"])


def test_v03_states_that_do_not_meet_are_of_no_use():
    cached = Cached([(4, to(24, 4))], [(8, [16]), (8, [8])])
    assert cached.seen(40) == (0, 24, ["", "", ""])


def test_v04_rows_end_at_their_first_gap():
    cached = Cached([(4, [4, 8, 12, 16, 24])], [(8, [24]), (8, [24])])
    assert cached.seen(40) == (0, 16, ["", "", ""])


def test_v05_inside_of_blocks():
    cached = Cached([(4, to(24, 4))], [(8, [12, 24]), (8, [12])], unit=4)
    assert cached.seen(40) == (12, 24, ["xxx", ".x", ".x"])


@pytest.mark.parametrize("prompt, hit", [(70, 64), (64, 48)])
def test_v06_one_token_is_left_to_run(prompt, hit):
    cached = Cached([(16, to(64, 16))], [(16, to(64, 16))])
    columns = hit // 16
    assert cached.seen(prompt) == (hit, 0, ["x" * columns, "." * (columns - 1) + "x"])


def test_v07_eagle_gives_up_a_block_and_nobody_brings_it_back():
    cached = Cached([(16, to(64, 16))], [(16, to(64, 16))])
    assert cached.seen(70, eagle=[0]) == (48, 0, ["xxx", "..x"])


@pytest.mark.parametrize("states, hit, junction", [([64], 0, 48), ([48], 48, 0)])
def test_v08_the_state_has_to_be_where_eagle_leaves_the_rows(states, hit, junction):
    cached = Cached([(16, to(64, 16))], [(16, states)])
    assert cached.seen(70, eagle=[0])[:2] == (hit, junction)


@pytest.mark.parametrize("eagle, junction", [([], 64), ([0], 0)])
def test_v09_eagle_gives_up_a_unit_where_hits_end_inside_of_blocks(eagle, junction):
    cached = Cached([(4, to(64, 4))], [(16, [16, 32, 60])], unit=4)
    assert cached.seen(70, eagle=eagle)[:2] == (60, junction)


def test_v10_rows_that_end_earlier():
    cached = Cached([(4, to(56, 4))], [(16, [16, 32, 60])], unit=4)
    assert cached.seen(70) == (32, 56, ["x" * 8, ".x"])


@pytest.mark.parametrize(
    "block, states, seen",
    [(64, [64], (64, 0, ["xxxx", "x"])), (32, [32, 48], (48, 64, ["xxx", ".x"]))],
)
def test_v11_state_blocks_larger_than_pages(block, states, seen):
    assert Cached([(16, to(64, 16))], [(block, states)]).seen(70) == seen


def test_the_part_of_a_block_is_found_after_the_last_whole_one():
    cached = Cached([(16, [16, 20, 28])], [(16, [20, 28])], unit=4)
    assert cached.seen(40) == (28, 0, ["xx", ".x"])
    assert cached.seen(28) == (20, 0, ["xx", ".x"])  # 28 tokens of 28 are one too many
    assert cached.seen(20) == (0, 16, ["", ""])


def test_groups_of_one_kind_and_block_may_be_found_together():
    for together, junction, alone in ((True, 0, (8, 8)), (False, 16, (16, 8))):
        cached = Cached([], [(8, [8, 16]), (8, [8])], together=together)
        assert cached.seen(40) == (8, junction, ["x", "x"])
        chain = HashChain(Identity().origin(), TOKENS, 8)
        assert cached.coordinator.alone(chain, 39) == alone


def test_rows_reach_as_far_for_a_group_that_is_asked_later_unless_asked_in_turn():
    """Its tail at 10 serves 8; the engine, having lowered the limit, does not find it."""
    cached = Cached([(4, [4, 8]), (6, [6, 10])], [(4, [8])])
    assert cached.seen(20)[:2] == (8, 0)
    cached.coordinator.in_turn = True
    assert cached.seen(20)[:2] == (0, 8)


def test_each_alone():
    cached = Cached([(4, to(24, 4))], [(8, [8, 32])])
    chain = HashChain(Identity().origin(), TOKENS, 4)
    assert cached.coordinator.alone(chain, 40) == (24, 32)
    assert cached.coordinator.alone(chain, 30) == (24, 8)


@given(
    st.lists(st.tuples(st.sampled_from([4, 6, 8]), st.sets(st.integers(1, 12))), max_size=2),
    st.lists(st.tuples(st.sampled_from([4, 8, 16]), st.sets(st.integers(1, 12))), max_size=3),
    st.integers(1, 48),
)
def test_it_is_the_one_rule_of_what_may_be_resumed(attention, states, prompt):
    """joint_boundary over the same positions, in any order of the groups."""
    if not attention and not states:
        return
    sizes = block_sizes([b for b, _ in attention], [b for b, _ in states])

    def positions(block, numbers):
        fine = sizes.hits if sizes.hits < block else block
        return {n * fine for n in numbers if n * fine % sizes.unit == 0 and n * fine <= 96}

    rows = [(block, positions(block, numbers)) for block, numbers in attention]
    points = [(block, positions(block, numbers)) for block, numbers in states]
    limit = min(prompt - 1, prompt // sizes.unit * sizes.unit)
    reaches = [reach(block, own, limit, sizes.hits) for block, own in rows]
    legal = [{n for n in own if n % sizes.hits == 0} for _, own in points]
    right = joint_boundary(reaches, legal, limit) // sizes.hits * sizes.hits
    found = Cached(rows, points).find(prompt)
    assert found.joint == right
    assert found.longest >= found.joint and found.reach >= found.joint
    assert Cached(rows[::-1], points[::-1]).find(prompt).joint == right


def reach(block, positions, limit, unit):
    """Of rows: whole blocks without a gap, and the longest part of the next one."""
    end = 0
    while end + block <= limit and end + block in positions:
        end += block
    if unit < block and block % unit == 0:
        inside = [n for n in positions if end < n < end + block and n <= limit and n % unit == 0]
        end = max(inside, default=end)
    return end // unit * unit
