"""From plans to a batch and to logits, over real memory."""

import pytest
import torch

from cache.leases import CacheRequest, Copy, CopyKind, ExportTo, StepPlan
from cache.plain import PlainCache
from kimi_mini import Engine, SamplingParams
from kimi_mini.serving import memory
from kimi_mini.serving.executor import ModelExecutor, pack
from tests.kimi_mini.serving.alone import alone, assert_same, small_model, stateless


class Rows:
    """Leases planned by hand, one letter each."""

    def __init__(self, model, *, page=4, state_slots=4, kv_pages=20):
        self.memory = memory.allocate(
            model, page=page, state_slots=state_slots, kv_pages=kv_pages, poison=True
        )
        self.cache = PlainCache(self.memory.storage)
        self.executor = ModelExecutor(model, self.memory)
        self.leases = {}

    def step(self, **pieces):
        """a=([known tokens], how many to run): plans of one step, by name."""
        self.cache.begin_step()
        plans = {}
        for name, (ids, count) in pieces.items():
            if name not in self.leases:
                self.leases[name] = self.cache.admit(CacheRequest(name, ids))
            plans[name] = self.cache.plan(self.leases[name], count)
            assert isinstance(plans[name], StepPlan)
        return plans

    def commit(self, plans):
        for plan in plans.values():
            self.cache.commit(plan.lease, plan.end)
        self.cache.end_step()


A, B, C = [*range(10, 19)], [6, 7, 8], [*range(30, 36)]


@pytest.fixture
def rows():
    """a has 5 of 9 tokens in its state, c all but one."""
    made = Rows(small_model())
    plans = made.step(a=(A, 5), c=(C, 5))
    made.executor.run(list(plans.values()), [range(0), range(0)])
    made.commit(plans)
    return made


def test_a_batch_of_mixed_rows_says_where_every_token_goes(rows):
    """a goes on in prefill, b begins, c decodes; pages of 4, two taken by a and c before."""
    plans = rows.step(a=(A, 3), b=(B, 3), c=(C, 1))
    batch = pack(list(plans.values()), [range(0), range(2, 3), range(5, 6)], 4)
    assert batch.token_ids.tolist() == [15, 16, 17, 6, 7, 8, 35]
    assert batch.query_start.tolist() == [0, 3, 6, 7]
    assert batch.context_len.tolist() == [5, 0, 5]
    assert batch.slots.tolist() == [1, 3, 2]
    assert batch.page_table.tolist() == [[1, 2], [5, -1], [3, 4]]
    assert batch.out_rows.tolist() == [2 * 4 + 1, 2 * 4 + 2, 2 * 4 + 3, 20, 21, 22, 4 * 4 + 1]
    assert batch.logits_at.tolist() == [5, 6]
    assert batch.exports is None


def test_logits_come_back_row_by_row_as_wanted_and_are_those_of_the_stateless_door(rows):
    plans = rows.step(a=(A, 3), b=(B, 3), c=(C, 1))
    wanted = [range(0), range(0, 3), range(5, 6)]
    logits = rows.executor.run(list(plans.values()), wanted)
    assert [own.shape for own in logits] == [(0, 320), (3, 320), (1, 320)]
    b, c = (small_model()(torch.tensor([ids]))[0] for ids in (B, C))
    assert (logits[1] - b).abs().max() < 1e-10
    assert (logits[2] - c[5:]).abs().max() < 1e-10
    rows.commit(plans)
    plans = rows.step(a=(A, 1))
    (last,) = rows.executor.run([plans["a"]], [range(8, 9)])
    assert (last - small_model()(torch.tensor([A]))[0, 8:]).abs().max() < 1e-10


def test_nothing_is_written_but_the_rows_pages_and_slots(rows):
    state = rows.memory.state
    before = [part.clone() for part in state]
    plans = rows.step(a=(A, 3), b=(B, 3))
    rows.executor.run(list(plans.values()), [range(0), range(0)])
    flat, was = (latent.flatten(1, 2) for latent in (state.latent, before[2]))
    written = [9, 10, 11, 20, 21, 22]
    changed = ~((flat == was) | (flat.isnan() & was.isnan())).all(-1).all(0)
    assert changed.nonzero().flatten().tolist() == written
    for part, old in zip(state[:2], before[:2], strict=True):
        same = ((part == old) | (part.isnan() & old.isnan())).flatten(2).all(-1).all(0)
        assert (~same).nonzero().flatten().tolist() == [1, 3]


def test_copies_of_a_plan_run_before_it(rows):
    """c's state and second page are moved; it decodes in the new places."""
    (slot,) = rows.memory.storage.states[0].alloc(1)
    (page,) = rows.memory.storage.pages[0].alloc(1)
    lease = rows.leases["c"]
    first, second = lease.pages[0]
    rows.cache.begin_step()
    plan = StepPlan(
        lease, 5, 6, ([first, page],), (slot,),
        copies=(Copy(CopyKind.STATE, 0, 2, slot), Copy(CopyKind.PAGE, 0, second, page)),
    )  # fmt: skip
    (logits,) = rows.executor.run([plan], [range(5, 6)])
    assert (logits - small_model()(torch.tensor([C]))[0, 5:]).abs().max() < 1e-10


def test_exports_name_the_row_the_offset_and_the_slot():
    model = small_model()
    rows = Rows(model, kv_pages=40)
    plans = rows.step(a=([5] * 40, 40), b=([6] * 20, 20))
    (slot,) = rows.memory.storage.states[0].alloc(1)
    offset = model.dispatcher.export_alignment
    b = plans["b"]
    exporting = StepPlan(b.lease, b.start, b.end, b.pages, b.slots,
                         exports=(ExportTo(offset, (slot,)),))  # fmt: skip
    batch = pack([plans["a"], exporting], [range(0), range(0)], 4)
    assert batch.exports.tolist() == [[1, offset, slot]]
    rows.executor.run([plans["a"], exporting], [range(0), range(0)])
    other = Rows(model)
    plan = other.step(b=([6] * offset, offset))["b"]
    other.executor.run([plan], [range(0)])
    for part, own in zip(rows.memory.state[:2], other.memory.state[:2], strict=True):
        assert (part[:, slot] - own[:, plan.slots[0]]).abs().max() < 1e-10


def heads(engine):
    """Rows of each call of the head."""
    seen = []

    def see(module, args):
        seen.append(args[0].shape[0])

    return seen, engine.model.lm_head.register_forward_pre_hook(see)


def test_br31_the_head_sees_one_row_a_sequence_and_none_before_its_last_piece():
    engine = Engine(small_model(), state_slots=3, kv_pages=60, prefill_chunk=16)
    seen, hook = heads(engine)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    engine.generate([[5] * 40], params)
    assert seen == [0, 0, 1, 1, 1]
    seen.clear()
    engine.generate([[5] * 40, [6], [7] * 20], params)
    assert seen == [1, 2, 3, 2, 1]
    seen.clear()
    scored = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0, ignore_eos=True)
    engine.generate([[5] * 40, [6]], scored)
    hook.remove()
    assert seen == [16 + 1, 16 + 1, 8, 1]


def test_br32_no_state_remembers_how_it_came_about():
    """Parameters want gradients, as they do by default; the pool was made in inference mode or
    outside of it, and is written in both."""
    model = small_model()
    assert all(parameter.requires_grad for parameter in model.parameters())
    expected = None
    for inside in (False, True):
        with torch.inference_mode(inside):
            engine = Engine(model, state_slots=2, kv_pages=20, page=4, poison=True)
        params = SamplingParams(temperature=0, max_tokens=22, ignore_eos=True, logprobs=0)
        request = engine.add_request([5] * 9, params)
        for step in range(22):
            with torch.inference_mode(step % 2 == inside):
                engine.step()
            for part in engine.memory.state:
                assert not part.requires_grad and part.grad_fn is None
                assert not part.is_inference()
        assert request.finished
        expected = expected or alone(stateless(model), model, [5] * 9, params)
        assert_same(request.output().outputs[0], expected)
        for pool in engine.memory.storage:
            pool.copy(1, 2)
