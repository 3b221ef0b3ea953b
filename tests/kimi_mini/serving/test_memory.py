"""How much state memory an engine takes, and that what is counted is what is there."""

import random

import pytest
import torch

from kimi_mini import Engine, KimiForCausalLM, SamplingParams, preset
from kimi_mini.serving import memory
from kimi_mini.serving.memory import allocate
from tests.kimi_mini.serving.alone import small_model


def held(made):
    """Bytes of the buffers behind all pool tensors, each once, however small a view of it is."""
    buffers = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for pool in made.storage
        for tensor in pool.tensors
    }
    assert len(buffers) == 3
    return sum(buffers.values())


def counted(made):
    """Accounted bytes, and one sink a pool."""
    return sum((pool.size + 1) * pool.unit_bytes for pool in made.storage)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("page", [1, 3, 16])
def test_br24_the_buffers_behind_the_pools_are_the_accounted_bytes_and_the_sinks(dtype, page):
    made = allocate(small_model(dtype), page=page, state_slots=5, kv_pages=7)
    assert held(made) == counted(made)
    (pages,), (slots,) = made.storage.pages, made.storage.states
    assert (pages.size, slots.size, made.storage.page_tokens) == (7, 5, (page,))


def test_br24_nothing_but_the_pools_is_kept_after_a_run():
    engine = Engine(small_model(), state_slots=3, kv_pages=12)
    before = held(engine.memory)
    engine.generate([[5] * 40, [6]], SamplingParams(max_tokens=5, n=2, prompt_logprobs=0))
    assert held(engine.memory) == counted(engine.memory) == before


def test_the_pools_hand_out_the_memory_that_the_model_is_given():
    made = allocate(small_model(), state_slots=2, kv_pages=3)
    (pages,), (slots,) = made.storage.pages, made.storage.states
    assert pages.tensors == (made.state.latent,)
    assert slots.tensors == (made.state.recurrent, made.state.conv)


def test_sizes_are_those_of_the_config():
    """nano: 3 KDA layers of 3 heads 32 x 32 and windows of 3 x 288, 2 MLA layers of 32 numbers."""
    made = allocate(KimiForCausalLM.from_config(preset("nano"), seed=0), state_slots=1, kv_pages=1)
    assert made.sizes.row_bytes == 256
    assert made.sizes.slot_bytes == 36_864 + 10_368


@pytest.mark.parametrize(
    "context, given, slots, rows",
    [
        (256, {}, 16, 16 * 256),  # every slot its whole context
        (256, {"state_slots": 2}, 2, 2 * 256),
        (65536, {}, 16, 65536),  # or so many rows, whichever is less
        (256, {"kv_pages": 3}, 16, 3 * 16),
        (50, {"state_slots": 1}, 1, 64),  # whole pages
    ],
)
def test_defaults_hold_whole_contexts_up_to_a_limit(context, given, slots, rows):
    made = allocate(small_model(torch.float32, context), **given)
    assert made.storage.states[0].size == slots
    assert made.storage.pages[0].size * 16 == rows


def test_bytes_are_never_exceeded_and_what_is_given_stays():
    rng = random.Random(0)
    model = small_model()
    for _ in range(60):
        page = rng.choice([1, 3, 16])
        sizes = allocate(model, page=page, state_slots=1, kv_pages=1).sizes
        budget = rng.randrange(2 * (sizes.slot_bytes + sizes.page_bytes), 10**6)
        slots_fit = (budget - 2 * sizes.page_bytes) // sizes.slot_bytes - 1
        pages_fit = (budget - 2 * sizes.slot_bytes) // sizes.page_bytes - 1
        slots, pages = rng.randint(1, slots_fit), rng.randint(1, pages_fit)
        for given in ({}, {"state_slots": slots}, {"kv_pages": pages}):
            made = allocate(model, page=page, cache_bytes=budget, **given)
            assert held(made) <= budget, (page, budget, given)
            left = budget - held(made)
            if "kv_pages" in given:
                assert made.storage.pages[0].size == pages and left < sizes.slot_bytes
            else:
                assert made.storage.states[0].size == given.get("state_slots", slots) or not given
                assert left < sizes.page_bytes


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(state_slots=1, kv_pages=1, cache_bytes=10**6), "not all three"),
        (dict(state_slots=0), "state_slots must be at least 1, got 0"),
        (dict(kv_pages=-5), "kv_pages must be at least 1, got -5"),
        (dict(cache_bytes=0), "cache_bytes must be at least 1, got 0"),
        (dict(page=0), "page must be at least 1, got 0"),
        (dict(cache_bytes=1000), "1,000 bytes of cache do not hold .* the least is [0-9,]+"),
        (dict(cache_bytes=10**6, state_slots=10**4), "hold 10,000 state .* the least is [0-9]+,"),
        (dict(cache_bytes=10**6, kv_pages=10**6), "1,000,000 page.* the least is [0-9],"),
        (dict(state_slots=10**12), "1,000,000,000,000 state slots and .* GB; there are"),
        (dict(cache_bytes=10**18), "GB; there are"),
    ],
)
def test_numbers_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        allocate(small_model(torch.float32), **options)


def test_the_least_that_a_refusal_names_is_enough():
    model = small_model(torch.float32)
    with pytest.raises(ValueError) as refused:
        allocate(model, cache_bytes=1)
    least = int(str(refused.value).rsplit(" ", 1)[1].replace(",", ""))
    made = allocate(model, cache_bytes=least)
    assert (made.storage.states[0].size, made.storage.pages[0].size) == (1, 1)
    with pytest.raises(ValueError, match="the least is"):
        allocate(model, cache_bytes=least - 1)


def test_what_the_machine_cannot_hold_is_refused_before_it_is_allocated(monkeypatch):
    asked = []
    monkeypatch.setattr(memory, "allocate_state", lambda *a, **k: asked.append(k))
    with pytest.raises(ValueError, match="would take"):
        allocate(small_model(), state_slots=10**9)
    assert not asked


def test_poisoned_memory_is_nan_until_it_is_written_and_again_when_it_is_given_back():
    engine = Engine(small_model(), state_slots=2, kv_pages=4, poison=True)
    state = engine.memory.state
    assert all(part.isnan().all() for part in state)
    request = engine.add_request([5] * 20, SamplingParams(max_tokens=2, ignore_eos=True))
    engine.step()
    lease = request.sequences[0].lease
    assert not state.recurrent[:, lease.slots[0]].isnan().any()
    rows = state.latent[:, lease.pages[0]].flatten(1, 2)
    assert not rows[:, :20].isnan().any() and rows[:, 20:].isnan().all()
    engine.abort(request.request_id)
    assert all(part[:, 1:].isnan().all() for part in state)
