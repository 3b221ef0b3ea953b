"""The block manager under policies of admission and eviction (serving.md 4.11, 9.12). Pages of 4,
state blocks of 8, hashes of 4 tokens, unless a test says otherwise."""

import random
from functools import partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from cache.blocks.keys import HashChain, key_of
from cache.blocks.manager import BlockCache
from cache.blocks.pool import BlockPool
from cache.blocks.victims import Victims
from cache.blocks.vllm import VLLMCache
from cache.policy.admission import Marconi, SecondHit
from cache.policy.alpha import ALPHAS, LearntAlpha
from cache.policy.cost_model import PrefixFlops
from cache.policy.eviction import FlopAware
from cache.policy.eviction import Served as Request
from cache.pools.pool import Pool
from cache.rehearsal import Rehearsal, without_memory
from tests.cache.blocks.served import Served
from tests.cache.machine import QUICK, machine_of
from tests.cache.memory import Shape, make_storage

FLOPS = PrefixFlops(1000, 1)


def sequence(first, count):
    return [*range(first, first + count)]


def flop_aware(alpha=0.0):
    return FlopAware(FLOPS, state_bytes=4096, row_bytes=32, alpha=alpha)


# admission


def test_m07_the_first_stores_nothing_the_second_stores_the_third_hits():
    prompt = [*sequence(0, 64), 99]
    s = Served(admission=SecondHit(), pages=90)
    assert s.run(prompt).hit.joint == 0 and s.kept(prompt) == []
    assert s.run(prompt).hit.joint == 0 and s.kept(prompt) == [64]
    assert s.run(prompt).hit.joint == 64


def test_what_two_prompts_share_is_stored_by_the_second_whose_rows_show_it():
    shared = sequence(0, 23)
    s = Served(admission=SecondHit(), pages=64)
    hits = [s.run(shared + sequence(100 * n, 9)).hit.joint for n in (1, 2, 3)]
    assert hits == [0, 0, 20]
    assert s.kept(shared) == [20]


def test_without_rows_that_show_it_the_last_whole_block_of_what_they_share():
    shared = sequence(0, 23)
    s = Served(admission=SecondHit(), page=(), hash_unit=8)
    hits = [s.run(shared + sequence(100 * n, 9)).hit.joint for n in (1, 2, 3)]
    assert hits == [0, 0, 16]
    assert s.kept(shared) == [16]


def test_milestones_are_asked_about_like_all_others():
    prompt = sequence(0, 30)
    s = Served(admission=SecondHit(), retention=8)
    s.run(prompt, new=4)
    assert s.kept([*prompt, 1000, 1001, 1002]) == []
    s.run(prompt, new=4)
    assert s.kept([*prompt, 1000, 1001, 1002]) == [8, 16, 24, 28, 32]


def test_a_request_that_waits_with_its_first_plan_is_not_its_own_second_visitor():
    prompt = sequence(0, 17)
    s = Served(admission=SecondHit(), slots=1)
    running = s.admit(sequence(50, 3), "running")
    s.step(running)
    lease = s.admit(prompt)
    for _ in range(3):
        assert s.step(lease).reason == "slots"
    s.cache.abort(running)
    while lease.remaining:
        s.step(lease)
    s.cache.finish(lease)
    assert s.kept(prompt) == []


def test_nor_is_one_that_comes_back_after_a_preemption():
    prompt = sequence(0, 66)
    s = Served(admission=SecondHit(), pages=90)
    lease = s.run(prompt, new=1, end="preempt", name="twice")
    s.run(lease.tokens, name="twice", prompt=len(prompt))
    assert s.kept(prompt) == []


def test_a_boundary_that_the_caller_names_is_no_policys_business():
    s = Served(admission=SecondHit())
    s.run(sequence(0, 17), checkpoint_at=(6,))
    assert s.kept(sequence(0, 17)) == [4]


@pytest.mark.parametrize("unit, states", [(1, [6, 12]), (4, [4, 12])])
def test_m06_marconi_stores_the_branch_point_and_the_last_token(unit, states):
    """Ten tokens are there; the next twelve, three of them decoded, begin with six of those."""
    s = Served(admission=Marconi(), page=unit, hash_unit=unit, pages=64)
    s.run(sequence(0, 10))
    other = [*range(6), 70, 71, 72]
    lease = s.run(other, new=4)
    assert lease.hit.junction == states[0] and lease.computed == 12
    assert s.kept([*other, 1000, 1001, 1002]) == states
    assert s.run([*range(6), 80, 81]).hit.joint == states[0]


@pytest.mark.parametrize("piece", [99, 5, 3])
@pytest.mark.parametrize("new, kept", [(1, [12]), (4, [16]), (12, [24])])
def test_the_newest_state_takes_the_place_of_the_one_before(new, kept, piece):
    """A prompt of 13."""
    prompt = sequence(0, 13)
    s = Served(admission=Marconi())
    s.run(prompt, new=new, piece=piece)
    assert s.kept([*prompt, *range(1000, 1012)]) == kept
    assert s.free[1] == 7


def test_in_a_pool_that_is_full_it_costs_nobody_elses_state():
    s = Served(admission=Marconi(), slots=4)
    for first in (0, 50):
        s.run(sequence(first, 13))
    s.run(sequence(100, 13), new=20)
    assert [s.kept(sequence(first, 13)) for first in (0, 50)] == [[12], [12]]


def test_one_that_others_have_resumed_from_stays():
    prompt = sequence(0, 13)
    s = Served(admission=Marconi())
    lease = s.run(prompt, new=1, end=None)
    assert s.run(prompt + sequence(70, 9)).hit.joint == 12
    for token in range(1, 5):
        s.step(lease, 1, [1000 + token])
    s.cache.finish(lease)
    assert s.kept(lease.tokens) == [12, 16]


def test_a_newer_one_that_does_not_come_leaves_the_one_before():
    prompt = sequence(0, 13)
    s = Served(admission=Marconi())
    lease = s.run(prompt, new=3, end=None)
    s.cache.begin_step()
    plan = s.cache.plan(lease, 1)
    assert plan.end == 16
    s.cache.cancel(plan)
    s.cache.end_step()
    s.cache.audit()
    s.cache.abort(lease)
    assert s.kept(lease.tokens) == [12]


@pytest.mark.parametrize("end", ["finish", "abort", "preempt"])
def test_the_newest_is_there_while_its_request_runs_and_however_it_ends(end):
    prompt = sequence(0, 13)
    s = Served(admission=Marconi())
    s.run(prompt, new=2, end=end)
    assert s.hit(prompt).joint == 12


def test_with_several_state_groups_all_have_the_newest():
    s = Served(admission=Marconi(), states=2, state_block=[8, 4])
    lease = s.run(sequence(0, 13), new=12)
    assert s.hit([*lease.tokens, 1]).joint == 24
    assert s.free[1:] == [7, 7]


@pytest.mark.parametrize("policy", [dict(admission=Marconi()), dict(eviction=flop_aware())])
@pytest.mark.parametrize("shape", [Shape(((8, 4),), (8,)), Shape((), (8,))])
def test_the_engines_own_rules_ask_no_policy(shape, policy):
    (name,) = policy
    with pytest.raises(ValueError, match=f"own rules know no policies, got .'{name}'"):
        VLLMCache(make_storage(shape), state_block=8, **policy)


# eviction


class Watched(FlopAware):
    """Remembers what it was asked, and takes the deepest."""

    asked = None

    def victim(self, candidates, now):
        self.asked = [(state.start, state.end) for state in candidates]
        used = [state.last_used for state in candidates]
        assert used == sorted(used) and used[-1] < now
        return max(range(len(candidates)), key=lambda i: candidates[i].end)


class Shelf:
    """States of sequences, with hashes of one token, and what its policy was asked last."""

    def __init__(self, slots, policy=None):
        self.pool = BlockPool({7: Pool(slots, "slot", 1)})
        self.policy = policy or Watched(FLOPS, 1, 1)
        self.pool.choice = Victims(self.pool, self.policy)
        self.there = {}  # tokens of each block

    def keep(self, *tokens):
        """The state after all of them; the tokens whose state had to go, if any had."""
        (block,) = self.pool.take(1, 7)
        gone, chain = self.there.pop(block, None), HashChain(b"", [*tokens, 0], 1)
        self.pool.choice.kept(chain.key(len(tokens), 7), len(tokens), chain)
        self.pool.register(block, chain.key(len(tokens), 7), len(tokens))
        self.pool.end_step()
        self.pool.release([block])
        self.there[block] = tokens
        return gone

    def hold(self, *tokens):
        self.pool.hold([block for block, its in self.there.items() if its == tokens])


def test_what_has_gone_is_not_remembered_for_ever():
    """Where a choice is never asked for, because there is always a block without a key."""
    shelf = Shelf(4)
    for n in range(1000):
        shelf.keep(n)
        shelf.pool.discard(shelf.pool.find(key_of(HashChain(b"", [n, 0], 1).at(1), 7)))
    assert len(shelf.pool.choice._lines) < 100


def test_the_edge_of_a_state_begins_at_the_nearest_of_its_prefix():
    shelf = Shelf(4)
    for tokens in ([1], [1, 2, 3], [9, 9], [1, 2, 3, 4, 5]):
        shelf.keep(*tokens)
    assert shelf.keep(8) == (1, 2, 3, 4, 5)
    assert shelf.policy.asked == [(0, 1), (1, 3), (0, 2), (3, 5)]


def test_a_state_that_comes_later_between_two_is_where_the_edge_begins_from_then_on():
    shelf = Shelf(3)
    for tokens in ([1, 2, 3, 4], [1, 2], [1, 3]):
        shelf.keep(*tokens)
    shelf.keep(8)
    assert shelf.policy.asked == [(2, 4), (0, 2), (0, 2)]


def test_when_that_has_gone_it_begins_where_the_one_above_is_or_at_nothing():
    shelf = Shelf(3)
    for tokens in ([1], [1, 2, 3], [1, 2, 3, 4]):
        shelf.keep(*tokens)
    shelf.hold(1, 2, 3, 4)
    assert shelf.keep(1) == (1, 2, 3)
    shelf.keep(1)
    assert shelf.policy.asked == [(1, 1), (1, 1)]
    shelf.pool.unhold([shelf.pool.blocks[3]])
    shelf.keep(1, 2)
    assert shelf.policy.asked == [(1, 4), (1, 1), (1, 1)]


def test_of_a_state_that_two_blocks_have_nothing_would_have_to_be_computed_again():
    shelf = Shelf(3)
    for tokens in ([1, 2], [1, 2], [3, 4]):
        shelf.keep(*tokens)
    shelf.keep(8)
    assert shelf.policy.asked == [(2, 2), (2, 2), (0, 2)]


def test_m04_a_fork_is_no_candidate():
    shelf = Shelf(3)
    for tokens in ([1], [1, 2, 3], [1, 4]):
        shelf.keep(*tokens)
    shelf.keep(8)
    assert shelf.policy.asked == [(1, 3), (1, 2)]


def test_a_fork_goes_if_nothing_else_may():
    shelf = Shelf(3)
    for tokens in ([1], [1, 2, 3], [1, 4]):
        shelf.keep(*tokens)
    shelf.hold(1, 2, 3)
    shelf.hold(1, 4)
    assert shelf.keep(8) == (1,)
    assert shelf.policy.asked == [(0, 1)]


def test_blocks_without_keys_go_first_wherever_they_are():
    shelf = Shelf(3)
    for tokens in ([1], [2], [3]):
        shelf.keep(*tokens)
    shelf.pool.forget(next(b for b, tokens in shelf.there.items() if tokens == (2,)))
    assert shelf.keep(4) == (2,) and shelf.policy.asked is None


def sequences(rng, count):
    """Of few tokens, so that many begin alike."""
    return [[rng.randrange(2) for _ in range(rng.randrange(1, 7))] for _ in range(count)]


class Judge(FlopAware):
    """Compares what it is asked with what the sequences say."""

    asked = 0

    def victim(self, candidates, now):
        self.asked += 1
        order = sorted(self.shelf.there, key=lambda b: self.shelf.pool.queue.place(b.id))
        states = [self.shelf.there[block] for block in order]
        above = {tokens: max(self.above(tokens, states), key=len) for tokens in states}
        forks = {t for t in above.values() if sum(t == other for other in above.values()) > 1}
        asked = [tokens for tokens in states if tokens not in forks] or states
        starts = [len(above[t]) if states.count(t) == 1 else len(t) for t in asked]
        expected = [(start, len(t)) for start, t in zip(starts, asked, strict=True)]
        assert [(c.start, c.end) for c in candidates] == expected
        return random.Random(self.asked).randrange(len(candidates))

    @staticmethod
    def above(tokens, states):
        return [(), *(other for other in states if other == tokens[: len(other)] != tokens)]


@pytest.mark.parametrize("slots", [3, 8, 20])
def test_whatever_comes_and_goes_a_policy_is_asked_what_the_sequences_say(slots):
    policy = Judge(FLOPS, 1, 1)
    policy.shelf = shelf = Shelf(slots, policy)
    for tokens in sequences(random.Random(slots), 300):
        shelf.keep(*tokens)
    assert policy.asked > 200


def test_without_weight_of_flops_states_go_in_the_order_of_the_queue():
    """Where none is a fork: each sequence is a token of its own, so many times."""

    def gone(policy):
        shelf, rng = Shelf(5, policy), random.Random(1)
        if policy is None:
            shelf.pool.choice.victim = lambda idle: idle[0]
        states = [[kind] * length for kind in range(4) for length in range(1, 5)]
        return [shelf.keep(*rng.choice(states)) for _ in range(200)]

    assert gone(flop_aware()) == gone(None)


@pytest.mark.parametrize("alpha, survives", [(0, False), (2, True)])
def test_flops_outweigh_recency_only_with_an_alpha(alpha, survives):
    """A long state that was used first against short ones that came after."""
    s = Served(eviction=flop_aware(alpha), slots=4)
    s.run(sequence(0, 65))
    for first in (100, 200, 300, 400):
        s.run(sequence(first, 9))
    assert (s.hit(sequence(0, 65)).joint == 64) == survives


def test_rows_go_by_the_queue_whatever_policy_states_have():
    s = Served(eviction=flop_aware(2.0), pages=17)
    s.run(sequence(0, 65))
    s.run(sequence(100, 9))
    assert s.hit(sequence(0, 65)).token_hit < 64


# learning alpha


def workload(count):
    """Every fifth request is of one long prompt, the short ones between are never seen again."""
    fresh = iter(range(1000, 10**6))
    for n in range(count):
        yield [*range(48), next(fresh)] if n % 5 == 0 else [next(fresh) for _ in range(9)]


def test_a_long_prompt_that_comes_back_too_late_for_recency_teaches_to_weigh_flops():
    storage, served = make_storage(Shape(((200, 4),), (5,))), [*workload(60)]
    make = partial(BlockCache, state_block=8)
    rehearse = Rehearsal(lambda policy: make(without_memory(storage), eviction=policy)).saved_flops
    requests = [Request(tokens, len(tokens)) for tokens in served]
    saved = [rehearse(flop_aware(alpha), requests) for alpha in ALPHAS]
    assert saved[0] == 0 and saved[-1] == max(saved) == 11 * FLOPS.of(48)
    policy = LearntAlpha(flop_aware(), rehearse)
    s = Served(partial(make, eviction=policy), pages=200, slots=5)
    hits = [s.run(tokens).hit.joint for tokens in served]
    assert policy.learnt and policy.alpha == ALPHAS[saved.index(max(saved))]
    learnt = hits.index(48)
    assert not any(hits[:learnt]) and hits[learnt:] == [
        48 * (n % 5 == 0) for n in range(learnt, 60)
    ]


# all together


def learning(storage):
    def again(policy):
        return BlockCache(without_memory(storage), state_block=8, eviction=policy)

    return LearntAlpha(flop_aware(), Rehearsal(again).saved_flops)


MAKERS = {
    "second hit, flops": lambda storage: BlockCache(
        storage, state_block=8, admission=SecondHit(memory=8), eviction=flop_aware(1.0)
    ),
    "marconi, learning": lambda storage: BlockCache(
        storage, state_block=8, admission=Marconi(), eviction=learning(storage)
    ),
    "marconi, fine": lambda storage: BlockCache(
        storage, state_block=8, hash_unit=1, admission=Marconi()
    ),
    "marconi, coarse exports": lambda storage: BlockCache(
        storage, state_block=8, admission=Marconi(), export_alignment=4
    ),
    "second hit, dense": lambda storage: BlockCache(
        storage, state_block=4, retention=None, admission=SecondHit(), eviction=flop_aware(0.5)
    ),
    "two state groups": lambda storage: BlockCache(
        storage, state_block=[8, 4], admission=Marconi(), eviction=flop_aware(2.0)
    ),
}


@pytest.mark.parametrize("name", MAKERS)
def test_whatever_is_called_the_books_are_right_under_every_policy(name):
    pages = st.tuples(st.tuples(st.sampled_from([8, 12, 16]), st.sampled_from([2, 4])))
    slots = st.tuples(*[st.integers(2, 6)] * (2 if name.startswith("two") else 1))
    machine = machine_of(MAKERS[name], st.builds(Shape, pages, slots), True)
    run_state_machine_as_test(machine, settings=settings(QUICK, max_examples=6))
    assert machine.happened["joint"] and machine.happened["evicted states"]
