"""The tree and its manager under policies of admission and eviction (serving.md 4.11, 9.12)."""

import random
from functools import partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from cache.policy.admission import Marconi, SecondHit
from cache.policy.alpha import ALPHAS, LearntAlpha
from cache.policy.cost_model import PrefixFlops
from cache.policy.eviction import FlopAware, Served
from cache.radix.manager import RadixCache
from cache.radix.sglang import SGLangCache
from cache.rehearsal import Rehearsal, without_memory
from tests.cache.machine import QUICK, machine_of
from tests.cache.memory import Shape, make_storage
from tests.cache.radix.planting import Garden
from tests.cache.radix.served import Served as Serving

FLOPS = PrefixFlops(1000, 1)


def flop_aware(alpha=0.0, row_bytes=32):
    return FlopAware(FLOPS, state_bytes=4096, row_bytes=row_bytes, alpha=alpha)


class Watched(FlopAware):
    """Remembers what it was asked, and takes the deepest."""

    def victim(self, candidates, now):
        self.asked = [(state.start, state.end) for state in candidates]
        assert all(state.last_used < now for state in candidates)
        return max(range(len(candidates)), key=lambda i: candidates[i].end)


def watching(garden):
    garden.tree.eviction = Watched(FLOPS, 1, 1)
    return garden.tree.eviction


# eviction


def test_m03_an_inner_state_goes_alone_and_its_edge_counts_as_its_childs():
    """X ends at 4, its one child Y at 8."""
    garden = Garden()
    garden.insert(range(4))
    garden.insert(range(8))
    policy = watching(garden)
    garden.lock(garden.node(range(8)))
    assert garden.evict(states=1) == (0, 1)
    assert policy.asked == [(0, 4)]
    assert garden.edges() == [([0, 1, 2, 3], False), ([4, 5, 6, 7], True)]
    assert garden.seen(range(9)) == (8, 8, None)
    garden.insert(range(90, 93))
    garden.evict(states=1)
    assert policy.asked == [(0, 3)]


def test_an_edge_begins_where_the_state_would_be_computed_from():
    garden = Garden()
    for tokens in (range(4), range(8), range(12)):
        garden.insert(tokens)
    policy = watching(garden)
    garden.tree.thin(garden.node(range(8)))
    garden.evict(states=1)
    assert policy.asked == [(0, 4), (4, 12)]


def test_m04_a_fork_is_no_candidate():
    garden = Garden()
    garden.insert(range(4))
    garden.insert(range(8))
    garden.insert([*range(4), 77, 78])
    policy = watching(garden)
    assert garden.evict(states=1) == (4, 1)
    assert policy.asked == [(4, 8), (4, 6)]


def test_a_fork_goes_if_nothing_else_may():
    """What `has_room` has promised must be found."""
    garden = Garden(slots=3)
    garden.insert(range(4))
    leaves = [range(8), [*range(4), 77, 78]]
    for tokens in leaves:
        garden.insert(tokens)
        garden.lock(garden.node(tokens))
    policy = watching(garden)
    assert garden.tree.has_room(slots=1)
    assert garden.tree.make_room(slots=1)
    assert policy.asked == [(0, 4)]
    assert not garden.tree.make_room(slots=2)


def test_flops_outweigh_recency_only_with_an_alpha():
    """A long state that was used first against short ones that came after."""
    for alpha, survives in ((0, False), (2, True)):
        garden = Garden()
        garden.tree.eviction = flop_aware(alpha)
        garden.insert(range(64))
        for start in (100, 200, 300):
            garden.insert(range(start, start + 4))
        garden.evict(states=1)
        assert (garden.seen(range(65))[0] == 64) == survives


def test_without_weight_of_flops_states_go_as_without_a_policy():
    """But for forks, of which this growth has none."""

    def grown(eviction):
        garden, source = Garden(slots=6), random.Random(3)
        garden.tree.eviction = eviction
        chains = [[*range(100 * c, 100 * c + 40)] for c in range(4)]
        for _ in range(60):
            chain = source.choice(chains)
            tokens = chain[: source.randrange(1, 40)]
            garden.match(tokens)
            assert garden.tree.make_room(pages=len(tokens), slots=1)
            garden.insert(tokens)
        return garden.shape()

    assert grown(flop_aware()) == grown(None)


# admission


def sequence(first, count):
    return [*range(first, first + count)]


@pytest.mark.parametrize("strategy, page", [("no_buffer", 1), ("extra_buffer", 2)])
def test_m07_the_first_stores_nothing_the_second_stores_the_third_hits(strategy, page):
    prompt = [*sequence(0, 64), 99]
    serving = Serving(
        partial(RadixCache, admission=SecondHit(), strategy=strategy), pages=90, page=page, slots=9
    )
    assert serving.run(prompt).hit.joint == 0
    assert serving.kept(prompt) == []
    assert serving.run(prompt).hit.joint == 0
    assert 64 in serving.kept(prompt)
    assert serving.run(prompt).hit.joint == 64


def test_what_two_prompts_share_is_stored_by_the_second_although_no_rows_show_it():
    shared = sequence(0, 23)
    serving = Serving(partial(RadixCache, admission=SecondHit()), pages=64)
    hits = [serving.run(shared + sequence(100 * n, 9)).hit.joint for n in (1, 2, 3)]
    assert hits == [0, 0, 20]
    assert serving.kept(shared) == [20]


def test_a_request_that_waits_with_its_first_plan_is_not_its_own_second_visitor():
    prompt = sequence(0, 17)
    serving = Serving(partial(RadixCache, admission=SecondHit()), slots=1)
    running = serving.admit(sequence(50, 3), "running")
    serving.step(running)
    lease = serving.admit(prompt)
    for _ in range(3):
        assert lease is not None and serving.step(lease).reason == "slots"
    serving.cache.abort(running)
    while lease.remaining:
        serving.step(lease)
    serving.cache.finish(lease)
    assert serving.kept(prompt) == []


def test_a_boundary_that_the_caller_names_is_no_policys_business():
    prompt = sequence(0, 17)
    serving = Serving(partial(RadixCache, admission=SecondHit()))
    serving.run(prompt, checkpoint_at=(6,))
    assert serving.kept(prompt) == [6]


def test_m06_marconi_stores_the_branch_point_and_the_last_token():
    """Ten tokens are there; the next twelve, three of them decoded, begin with six of those."""
    serving = Serving(partial(RadixCache, admission=Marconi(), strategy="no_buffer"), page=1)
    serving.run(sequence(0, 10))
    assert serving.kept(sequence(0, 10)) == [10]
    other = [*range(6), 70, 71, 72]
    lease = serving.run(other, new=4)
    assert lease.hit.junction == 6 and lease.computed == 12
    assert serving.kept([*other, 1000, 1001, 1002]) == [6, 12]
    assert serving.run([*range(6), 80, 81]).hit.joint == 6


@pytest.mark.parametrize("strategy", ["extra_buffer", "extra_buffer_lazy"])
@pytest.mark.parametrize("new, kept", [(1, [12]), (2, [14]), (4, [16])])
def test_m06_the_last_token_is_floored_to_the_grid_even_into_the_prompt(strategy, new, kept):
    """Pages of 2, a prompt of 13: nothing before the finish, then one state."""
    prompt = sequence(0, 13)
    serving = Serving(partial(RadixCache, admission=Marconi(), strategy=strategy))
    lease = serving.run(prompt, new=new, end=None)
    assert serving.kept(prompt) == []
    serving.cache.finish(lease)
    serving.cache.audit()
    assert serving.kept([*prompt, *range(1000, 1009)]) == kept


def test_marconi_in_pieces_stores_no_more():
    prompt = sequence(0, 13)
    serving = Serving(partial(RadixCache, admission=Marconi()))
    serving.run(prompt, piece=4)
    assert serving.kept(prompt) == [12]
    assert serving.run(prompt, end="abort").hit.joint == 12
    assert serving.free[1] == 7


def test_the_last_state_of_a_request_is_worth_that_of_another():
    """Two slots, one of them for who runs; nothing is decoded beyond a boundary."""
    serving = Serving(partial(RadixCache, admission=Marconi()), slots=2)
    for first in (0, 50, 100):
        serving.run(sequence(first, 13), new=1)
    assert [serving.kept(sequence(first, 13)) for first in (0, 50, 100)] == [[], [], [12]]


def test_the_engines_own_rules_ask_no_admission_policy():
    with pytest.raises(ValueError, match="store every state .*, got Marconi"):
        Serving(SGLangCache, admission=Marconi())


# learning alpha


def rehearsal(pages=128, slots=7, **options):
    """Of a manager that publishes at any boundary."""
    storage = make_storage(Shape(((pages, 1),), (slots,)))
    options = dict(strategy="no_buffer", state_chunk=4) | options
    return Rehearsal(lambda policy: RadixCache(without_memory(storage), eviction=policy, **options))


def workload(count):
    """Every fifth request is of one long prompt, the short ones between are never seen again."""
    fresh = iter(range(1000, 10**6))
    for n in range(count):
        if n % 5 == 0:
            yield Served((*range(48), next(fresh)), 49)
        else:
            yield Served(tuple(next(fresh) for _ in range(4)), 4)


def test_a_rehearsal_is_what_the_manager_would_have_saved():
    """One request after the other, nothing evicted: the same hits."""
    requests = [*workload(30)]
    serving = Serving(strategy="no_buffer", page=1, pages=400, slots=60)
    hits = [serving.run(request.tokens).hit.joint for request in requests]
    assert any(hits)
    saved = rehearsal(pages=400, slots=60).saved_flops(flop_aware(), requests)
    assert saved == sum(map(FLOPS.of, hits))


def test_a_rehearsal_is_deterministic_and_leaves_the_policy_alone():
    policy, requests = flop_aware(0.5), [*workload(60)]
    once, again = (rehearsal().saved_flops(policy, requests) for _ in range(2))
    assert once == again > 0
    assert policy == flop_aware(0.5)


def test_what_does_not_fit_is_not_stored():
    too_long = Served(tuple(range(20)), 20)
    assert rehearsal(pages=8).saved_flops(flop_aware(), [too_long] * 3) == 0


def test_a_long_prompt_that_comes_back_too_late_for_recency_teaches_to_weigh_flops():
    requests = [*workload(60)]
    saved = [rehearsal().saved_flops(flop_aware(alpha), requests) for alpha in ALPHAS]
    assert saved[0] == 0 and saved[-1] == max(saved) == 11 * FLOPS.of(48)
    policy = LearntAlpha(flop_aware(), rehearsal().saved_flops)
    serving = Serving(
        partial(RadixCache, eviction=policy), strategy="no_buffer", page=1, pages=128, slots=7
    )
    hits = [serving.run(request.tokens).hit.joint for request in requests]
    assert policy.learnt and policy.alpha == ALPHAS[saved.index(max(saved))]
    # the first eviction comes with the fourth request, the window is full 15 later, all is tried
    # with the 20 requests after that
    assert hits == [0] * 40 + [48, 0, 0, 0, 0] * 4


# all together


MAKERS = {
    "second hit, flops": lambda storage: RadixCache(
        storage, state_chunk=4, admission=SecondHit(memory=8), eviction=flop_aware(1.0)
    ),
    "marconi, learning": lambda storage: RadixCache(
        storage,
        state_chunk=4,
        admission=Marconi(),
        eviction=LearntAlpha(flop_aware(), rehearsal(16, 4).saved_flops),
    ),
    "marconi, lazy": lambda storage: RadixCache(
        storage, state_chunk=4, admission=Marconi(), strategy="extra_buffer_lazy"
    ),
    "second hit, no buffer": lambda storage: RadixCache(
        storage, state_chunk=4, admission=SecondHit(), strategy="no_buffer"
    ),
    "sglang, flops": lambda storage: SGLangCache(
        storage, state_chunk=4, interval=4, eviction=flop_aware(0.5)
    ),
}


@pytest.mark.parametrize("name", MAKERS)
def test_whatever_is_called_the_books_are_right_under_every_policy(name):
    page = st.just(1) if "no buffer" in name else st.sampled_from([1, 2])
    pages = st.tuples(st.tuples(st.sampled_from([8, 12, 16]), page))
    machine = machine_of(MAKERS[name], st.builds(Shape, pages, st.tuples(st.integers(3, 8))), True)
    run_state_machine_as_test(machine, settings=settings(QUICK, max_examples=6))
    assert machine.happened["joint"] and machine.happened["evicted states"]
