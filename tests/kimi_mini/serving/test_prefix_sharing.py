"""Many read what one has left, while it goes on: nothing that is shared changes, by any rules.

And what that is worth: with each of the faults that such a cache can have, it does not pass.
"""

from collections.abc import Callable

import pytest

from cache.blocks.groups import StateGroup
from cache.pools.allocator import OwnershipError
from kimi_mini import Engine
from tests.kimi_mini.serving.reuse import (
    HASHED,
    RULES,
    STRATEGIES,
    TREE,
    Rules,
    a_few,
    assert_all_comes_back,
    checkpoints,
    greedy,
    hybrid_model,
    reusing,
    run,
)
from tests.kimi_mini.serving.toy import fresh
from tests.kimi_mini.serving.witness import Truth, Witness, assert_as_cold

TRUTH = Truth(hybrid_model())


def others_read_while_the_writer_goes_on(engine: Engine, witness: Witness) -> None:
    """A writes and decodes on; meanwhile four resume from what it left, two of them with the same
    prompt at once, sampled; then A's prompt and all that it said, once more."""
    prompt = fresh(1, 100)
    writer = engine.add_request(prompt, greedy(24))
    while engine.has_unfinished and len(writer.sequences[0].output_ids) < 3:
        engine.step()
    assert checkpoints(engine), "nothing to read"
    readers = [
        engine.add_request(prompt, greedy(15, n=2, temperature=1.0, seed=7)),
        engine.add_request([*prompt[:97], *fresh(5, 9)], greedy(12)),
        engine.add_request([*prompt, *fresh(6, 1)], greedy(12)),
    ]
    run(engine, writer, *readers)
    talk = [*prompt, *writer.output().outputs[0].token_ids]
    readers += [engine.add_request(ids, greedy(6)) for ids in (prompt, [*talk, 9], talk[:-1])]
    run(engine)
    for request in (writer, *readers):
        assert_as_cold(request, witness, TRUTH)
    hits = [own.cached_tokens for request in readers for own in request.output().outputs]
    assert all(hits), hits
    assert sorted(witness.restored) == sorted(hits)
    assert hits[-2] > 100, "nothing of what was decoded"
    assert_all_comes_back(engine)


def roomy(rules: Rules) -> Engine:
    tree = dict(state_chunk=16, track_interval=16)
    own = dict(state_block=16, hash_unit=8, retention="none") if rules.blocks else tree
    return reusing(
        None, rules, prefill_chunk=80, state_slots=30, kv_pages=1600 // rules.page, **own
    )  # fmt: skip


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_checkpoints_stay_what_they_were_while_many_read_them_and_go_on(rules):
    engine = roomy(rules)
    others_read_while_the_writer_goes_on(engine, Witness(engine, truth=TRUTH))


# --- what these tests are worth -------------------------------------------------------------------


def no_copy(engine: Engine) -> None:
    engine.cache.storage.states[0].copy = lambda *_: None


def copy_without_conv(engine: Engine) -> None:
    recurrent = engine.memory.state.recurrent

    def copy(source: int, destination: int) -> None:
        recurrent[:, destination] = recurrent[:, source]

    engine.cache.storage.states[0].copy = copy


def copy_of_one_layer(engine: Engine) -> None:
    def copy(source: int, destination: int) -> None:
        for tensor in engine.cache.storage.states[0].tensors:
            tensor[:, destination] = tensor[:1, source]

    engine.cache.storage.states[0].copy = copy


def one_boundary_off(engine: Engine) -> None:
    take_slot = engine.cache._take_slot

    def off(lease):
        take_slot(lease)
        if lease.copies:
            above = (node.state for node in lease.receipt.node.parent.path())
            state = next((state for state in above if state is not None), lease.copies[0].source)
            lease.copies = (lease.copies[0]._replace(source=state),)

    engine.cache._take_slot = off


def live_slot_published(engine: Engine) -> None:
    insert = engine.cache._insert

    def live(lease, boundary, slot):
        if boundary == lease.computed and slot != lease.slots[0]:
            engine.cache.storage.states[0].free([slot])
            slot = lease.slots[0]
        return insert(lease, boundary, slot)

    engine.cache._insert = live


def partly_filled_page_shared(engine: Engine) -> None:
    restore = engine.cache._restore

    def shared(lease):
        wait = restore(lease)
        node = lease.receipt and lease.receipt.node
        if node and node.children:
            lease.pages[0].append(next(iter(node.children.values())).pages[0])
        return wait

    engine.cache._restore = shared


def window_of_another(engine: Engine) -> None:
    """Exports keep the state of their boundary, but the conv state of the end of the piece."""
    run_plans = engine.executor.run

    def run(plans, wanted):
        logits = run_plans(plans, wanted)
        for plan in plans:
            for export in plan.exports:
                conv = engine.memory.state.conv
                conv[:, export.slots[0]] = conv[:, plan.slots[0]]
        return logits

    engine.executor.run = run


def no_copy_of_rows(engine: Engine) -> None:
    engine.cache.storage.pages[0].copy = lambda *_: None


def states_of(engine: Engine) -> StateGroup:
    (states,) = (group for group in engine.cache.groups if isinstance(group, StateGroup))
    return states


def state_of_another_boundary(engine: Engine) -> None:
    find, states = engine.cache.coordinator.find, states_of(engine)

    def off(*args):
        found = find(*args)
        for _, boundary, block in states.pool.entries():
            if found.joint and block.pool.unit == "slot" and boundary != found.joint:
                found.columns[states.number][-1] = block
        return found

    engine.cache.coordinator.find = off


def kept_state_overwritten(engine: Engine) -> None:
    states_of(engine).pool.writable = lambda block: True


ANYWHERE = [no_copy, copy_without_conv, copy_of_one_layer, window_of_another]
FAULTS = [
    *((TREE, fault) for fault in (*ANYWHERE, one_boundary_off)),
    *((HASHED, fault) for fault in (*ANYWHERE, no_copy_of_rows, state_of_another_boundary)),
]
UNDER_WAY = [
    *((Rules(strategy), live_slot_published) for strategy in STRATEGIES),
    *((Rules(strategy), partly_filled_page_shared) for strategy in STRATEGIES),
    (HASHED, kept_state_overwritten),
]


def named(value: Rules | Callable) -> str:
    return str(value) if isinstance(value, Rules) else value.__name__


WRONG = [(rules, fault, strict) for strict in (True, False) for rules, fault in FAULTS]


def wrong_id(wrong: tuple[Rules, Callable, bool]) -> str:
    rules, fault, strict = wrong
    return f"{rules}-{fault.__name__}-{'states' if strict else 'answers'}"


@pytest.mark.parametrize("wrong", a_few(WRONG, 3), ids=wrong_id)
def test_a_wrong_restore_shows_in_what_is_compared(wrong):
    """By the witness, and, were it blind, by tokens and logits alone."""
    rules, fault, strict = wrong
    engine = roomy(rules)
    fault(engine)
    with pytest.raises(AssertionError):
        others_read_while_the_writer_goes_on(engine, Witness(engine, strict=strict))


@pytest.mark.parametrize("rules, fault", UNDER_WAY, ids=named)
def test_a_shared_place_that_is_written_shows(rules, fault):
    """In the books where they can tell, else as I-12."""
    engine = roomy(rules)
    fault(engine)
    with pytest.raises((AssertionError, OwnershipError, ValueError)):
        others_read_while_the_writer_goes_on(engine, Witness(engine))
