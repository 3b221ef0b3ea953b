"""The engine from outside: what goes in, what comes out, what is refused."""

import time

import numpy as np
import pytest
import torch

from cache import plain, state_cache
from kimi_mini import Engine, KimiForCausalLM, SamplingParams, preset
from kimi_mini.serving import engine as engine_module
from kimi_mini.serving import executor, scheduler, sequence
from tests.kimi_mini.golden_cases import NAMES, PROMPTS, golden_model, goldens
from tests.kimi_mini.serving.alone import (
    alone,
    assert_all_free,
    assert_same,
    oracle_engine,
    prefix_hash,
    script,
    small_model,
    stateless,
)
from tests.kimi_mini.serving.interrupts import Interrupt

GREEDY = SamplingParams(temperature=0, max_tokens=10)


def small_engine(**options):
    return Engine(small_model(), **{"state_slots": 3, "kv_pages": 20, "poison": True} | options)


def tokens(engine, prompts, params=GREEDY):
    return [list(o.outputs[0].token_ids) for o in engine.generate(prompts, params)]


def seeded(**changes):
    return SamplingParams(**{"temperature": 1.0, "seed": 7, "max_tokens": 20} | changes)


# --- the tokens -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", ["torch", "native"])
def test_greedy_tokens_are_the_recorded_ones(name, backend):
    """All golden prompts at once, in pieces of 50, on pages of 16."""
    golden, model = goldens(name), golden_model(name, torch.float32, backend)
    engine = Engine(model, prefill_chunk=50, state_slots=4, poison=True)
    prompts = [golden[f"p{n}.input_ids"].tolist() for n in PROMPTS]
    params = SamplingParams(temperature=0, max_tokens=16)
    outputs = [request.outputs[0] for request in engine.generate(prompts, params)]
    for n, own in zip(PROMPTS, outputs, strict=True):
        assert list(own.token_ids) == golden[f"p{n}.greedy_ids"].tolist(), n
        assert own.finish_reason == "length"
    assert_all_free(engine)


@pytest.mark.parametrize("chunk", [1, 7, 16, 100])
def test_the_prefill_piece_does_not_change_the_tokens(chunk):
    prompt = list(range(3, 103))
    expected = alone(stateless(small_model()), small_model(), prompt, GREEDY)
    (output,) = small_engine(prefill_chunk=chunk).generate([prompt], GREEDY)
    assert_same(output.outputs[0], expected)


def test_br78_an_engine_serves_one_call_after_the_other():
    """A, B, one given up half way, one that fails in the middle, A."""
    engine = small_engine()
    (a,) = tokens(engine, [[5, 6, 7]])
    assert a == list(alone(stateless(small_model()), small_model(), [5, 6, 7], GREEDY).token_ids)
    (b,) = tokens(engine, [[80, 90]])
    assert b == list(alone(stateless(small_model()), small_model(), [80, 90], GREEDY).token_ids)
    half = engine.stream([100], GREEDY)
    next(half)
    half.close()

    def fail(*_):
        raise MemoryError

    hook = engine.model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(MemoryError):
        engine.generate([[9] * 30], GREEDY)
    hook.remove()
    assert tokens(engine, [[5, 6, 7]]) == [a]
    assert_all_free(engine)


def test_br08_one_slot_serves_a_short_request_after_a_long_one_as_if_it_were_the_first():
    """B is shorter than the convolution's window. A finishes, or is aborted half way."""
    a, b, c = [7] * 50, [8, 9], [10]
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=0)
    for poison in (True, False):
        engine = small_engine(state_slots=1, kv_pages=4, poison=poison)
        engine.generate([a], params)
        (after_finish,) = engine.generate([b], params)
        running = engine.add_request(a, params)
        for _ in range(3):
            engine.step()
        engine.abort(running.request_id)
        after_abort = engine.generate([c, b], params)
        for prompt, output in zip((b, c, b), (after_finish, *after_abort), strict=True):
            expected = alone(stateless(small_model()), small_model(), prompt, params)
            assert_same(output.outputs[0], expected)


def test_br77_the_number_of_threads_changes_no_token():
    """nano in float64, with prompts long enough for their products to be shared out."""
    model = KimiForCausalLM.from_config(preset("nano"), seed=1, dtype=torch.float64)
    prompts = [[5, 6] * 70, [7] * 9]
    params = [SamplingParams(temperature=0, max_tokens=2), seeded(max_tokens=2)]
    one = tokens(Engine(model, state_slots=2, kv_pages=32), prompts, params)
    torch.set_num_threads(2)
    try:
        assert tokens(Engine(model, state_slots=2, kv_pages=32), prompts, params) == one
    finally:
        torch.set_num_threads(1)


def test_br60_a_bfloat16_model_runs_over_a_float32_recurrent_state():
    model = KimiForCausalLM.from_config(preset("nano"), seed=1, dtype=torch.bfloat16)
    engine = Engine(model, state_slots=2, kv_pages=16, prefill_chunk=64)
    params = SamplingParams(temperature=0, max_tokens=10, logprobs=0)
    for output in engine.generate([[5] * 100, [6]], params):
        assert len(output.outputs[0].token_ids) == 10
        assert all(p.logprob < 0 for own in output.outputs[0].logprobs for p in own.values())
    assert engine.memory.state.recurrent.dtype == torch.float32
    assert engine.memory.state.latent.dtype == torch.bfloat16


# --- sampling -------------------------------------------------------------------------------------


def test_br79_a_seeded_request_does_not_feel_its_neighbours():
    """Alone; in row 0 and row 2; beside unseeded ones, of which one ends early; in pieces."""
    prompt = [11] * 21
    expected = alone(stateless(small_model()), small_model(), prompt, seeded()).token_ids
    free = SamplingParams(temperature=1.0, max_tokens=20)
    early = SamplingParams(temperature=1.0, max_tokens=2)
    for others, place in [((), 0), ((free, early), 0), ((early, free), 2), ((free, early), 2)]:
        for options in ({}, {"prefill_chunk": 4, "max_batch_tokens": 6}):
            prompts = [[50 + i] * 9 for i in range(len(others))]
            params = list(others)
            prompts.insert(place, prompt)
            params.insert(place, seeded())
            outputs = small_engine(**options).generate(prompts, params)
            assert outputs[place].outputs[0].token_ids == expected, (place, options)


def test_samples_of_one_prompt_are_those_of_consecutive_seeds():
    engine = small_engine()
    (output,) = engine.generate([[5, 6]], seeded(n=4))
    assert [own.index for own in output.outputs] == [0, 1, 2, 3]
    singles = engine.generate([[5, 6]] * 4, [seeded(seed=7 + i) for i in range(4)])
    assert [own.token_ids for own in output.outputs] == [
        single.outputs[0].token_ids for single in singles
    ]
    assert len({own.token_ids for own in output.outputs}) == 4


def test_samples_without_a_seed_differ_and_greedy_ones_do_not():
    engine = oracle_engine()
    (free,) = engine.generate([[5]], SamplingParams(n=3, max_tokens=12, ignore_eos=True))
    assert len({own.token_ids for own in free.outputs}) == 3
    (greedy,) = engine.generate([[5]], SamplingParams(n=3, temperature=0, max_tokens=12))
    assert len({own.token_ids for own in greedy.outputs}) == 1


def test_br54_token_zero_is_a_prompt_and_seed_zero_a_seed():
    engine = small_engine()
    text, zero = engine.generate(["a", [0]], seeded(seed=0))
    assert (text.prompt, text.prompt_token_ids) == ("a", (1, 100))
    assert (zero.prompt, zero.prompt_token_ids) == (None, (0,))
    for output in (text, zero):
        prompt = list(output.prompt_token_ids)
        expected = alone(stateless(small_model()), small_model(), prompt, seeded(seed=0))
        assert_same(output.outputs[0], expected)
    assert tokens(engine, [[0]], seeded(seed=0)) == [list(zero.outputs[0].token_ids)]
    assert tokens(engine, [[0]], seeded(seed=1)) != [list(zero.outputs[0].token_ids)]


def test_random_weights_never_sample_ids_that_stand_for_no_byte():
    engine = oracle_engine()
    params = SamplingParams(temperature=5.0, max_tokens=200, seed=1, ignore_eos=True)
    (own,) = tokens(engine, [[5]], params)
    assert len(own) == 200 and max(own) < 259


# --- where it ends --------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt, asked, given", [
    (31, 5, 1), (32, 5, 0), (20, 12, 12), (20, 13, 12), (20, 0, 0), (32, 0, 0), (31, None, 1),
])  # fmt: skip
def test_br28_prompt_and_output_stay_within_the_context(prompt, asked, given):
    """Limit 32, on a page edge; exactly two pages."""
    model = small_model(context=32, eos=None)
    engine = Engine(model, page=16, kv_pages=2, state_slots=1, poison=True, audit=True)
    params = SamplingParams(temperature=0, max_tokens=asked)
    (output,) = engine.generate([[5] * prompt], params)
    assert len(output.outputs[0].token_ids) == given
    assert output.outputs[0].finish_reason == "length"
    assert_same(output.outputs[0], alone(stateless(model), model, [5] * prompt, params))
    assert_all_free(engine)


def test_br28_a_prompt_beyond_the_context_is_refused():
    engine = Engine(small_model(context=32), page=16, kv_pages=9)
    with pytest.raises(ValueError, match="the prompt has 33 tokens; this model's context is 32"):
        engine.generate([[5] * 33], SamplingParams(max_tokens=1))


@pytest.mark.parametrize("prompt", [1, 17, 32])
def test_a_prompt_can_be_scored_without_sampling_up_to_the_whole_context(prompt):
    model = small_model(context=32)
    engine = Engine(model, page=16, kv_pages=2, state_slots=1, prefill_chunk=5)
    params = SamplingParams(max_tokens=0, prompt_logprobs=1)
    (output,) = engine.generate([list(range(3, 3 + prompt))], params)
    assert output.outputs[0].token_ids == () and output.outputs[0].finish_reason == "length"
    assert len(output.prompt_logprobs) == prompt and output.prompt_logprobs[0] is None
    assert all(list(range(3, 3 + prompt))[i] in own for i, own in enumerate(output.prompt_logprobs)
               if own)  # fmt: skip
    assert_all_free(engine)


@pytest.mark.parametrize("eos, ends_at", [(5, 5), ((5, 9), 9), ((), None), (None, None)])
def test_br27_a_request_ends_at_any_of_the_end_ids(eos, ends_at):
    """The model says 65, 9, 5."""
    engine = oracle_engine(script(1, [65, 9, 5, 66]), eos=eos)
    (output,) = engine.generate([[1]], SamplingParams(temperature=0, max_tokens=4))
    own = output.outputs[0]
    said = [65, 9, 5, 66]
    expected = said if ends_at is None else said[: said.index(ends_at) + 1]
    assert list(own.token_ids) == expected
    assert own.finish_reason == ("length" if ends_at is None else "stop")
    assert own.stop_reason is None
    assert own.text == engine.tokenizer.decode(expected[:-1] if ends_at else expected)


def test_br27_an_end_token_first_gives_an_empty_text_and_ignored_ones_go_on():
    engine = oracle_engine(script(1, [2, 65, 2, 66]))
    params = SamplingParams(temperature=0, max_tokens=4)
    (first,) = engine.generate([[1]], params)
    assert (first.outputs[0].text, first.outputs[0].token_ids) == ("", (2,))
    assert first.outputs[0].finish_reason == "stop"
    (other,) = engine.generate([[1]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert other.outputs[0].token_ids == (2, 65, 2, 66)
    assert (other.outputs[0].text, other.outputs[0].finish_reason) == (">?", "length")


# --- the door -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompts, message",
    [
        ("", "prompt is empty"),
        (["a", ""], "prompt is empty"),
        ([[]], "prompt is empty"),
        ([[5], [5, 320]], "token id 320 is not in this model's vocabulary, 0..319"),
        ([[-1]], "token id -1"),
        ([[1.5, 2]], "prompt token ids must be integers"),
        ([5, "a"], "prompt token ids must be integers"),
        (["a", 5], "prompt token ids must be integers"),
        (np.array([[5, 6], [7, 8]]), r"prompt token ids .* 1 axis, got shape \[2, 2\]$"),
        (torch.tensor([[5, 6], [7, 8]]), r"prompt token ids .* 1 axis, got shape \[2, 2\]$"),
        ([np.array([[5], [6]])], r"prompt token ids .* 1 axis, got shape \[2, 1\]$"),
        (torch.tensor(5), r"prompt token ids .* 1 axis, got shape \[\]$"),
        ([[5] * 300], "300 tokens; this model's context is 256"),
        ([[5], [5] * 60], "request-1 can never run: .* 60 and up to 10 .* 69 tokens need 5 pages"),
    ],
)
def test_requests_that_cannot_run_are_refused_before_any_runs(prompts, message):
    engine = oracle_engine(kv_pages=4, state_slots=2)
    for door in (engine.generate, engine.stream):
        fresh = oracle_engine(kv_pages=4, state_slots=2)
        with pytest.raises(ValueError, match=message):
            getattr(fresh, door.__name__)(prompts, GREEDY)
        assert_all_free(fresh)
        assert fresh.totals.steps == 0


def test_the_longest_request_that_fits_its_pools_is_taken_and_runs():
    """The last token that is sampled needs no room."""
    engine = oracle_engine(page=16, kv_pages=4, state_slots=1, audit=True)
    params = SamplingParams(temperature=0, max_tokens=15, ignore_eos=True)
    assert len(tokens(engine, [[5] * 50], params)[0]) == 15
    with pytest.raises(ValueError, match="65 tokens need 5 pages; the pool has 4"):
        engine.generate([[5] * 51], params)


def test_a_request_that_computes_nothing_needs_no_room_and_one_that_scores_needs_it_all():
    engine = oracle_engine(page=16, kv_pages=2, state_slots=1)
    nothing = SamplingParams(max_tokens=0)
    assert engine.generate([[5] * 100], nothing)[0].outputs[0].finish_reason == "length"
    scoring = SamplingParams(max_tokens=0, prompt_logprobs=0)
    assert len(engine.generate([[5] * 32], scoring)[0].prompt_logprobs) == 32
    with pytest.raises(ValueError, match="33 tokens need 3 pages; the pool has 2"):
        engine.generate([[5] * 33], scoring)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(max_batch_tokens=0), "max_batch_tokens must be at least 1, got 0"),
        (dict(prefill_chunk=-1), "prefill_chunk must be at least 1, got -1"),
        (dict(prefix_cache="tree"), "must be one of none, radix, blocks; got 'tree'"),
        (dict(page=0), "page must be at least 1, got 0"),
        (dict(state_slots=0), "state_slots must be at least 1, got 0"),
    ],
)
def test_an_engine_that_could_not_work_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Engine(small_model(), **options)


@pytest.mark.parametrize("value", [0, -1, 1.0, float("nan"), True, "8", [8]], ids=repr)
@pytest.mark.parametrize(
    "name",
    ["max_batch_tokens", "prefill_chunk", "page", "state_slots", "kv_pages", "cache_bytes"],
)
def test_sizes_are_integers_of_at_least_one(name, value):
    with pytest.raises(ValueError) as caught:
        Engine(small_model(), **{name: value})
    assert str(caught.value).startswith(f"{name} must be ") and repr(value) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_sizes_may_be_integers_of_any_kind():
    engine = Engine(small_model(), page=np.int64(4), kv_pages=np.int32(9), prefill_chunk=np.int8(3))
    assert type(engine.scheduler.max_chunk) is int and engine.memory.sizes.page == 4
    tokens(engine, [[5] * 8])


def test_an_option_that_no_engine_has_is_refused_in_its_name():
    with pytest.raises(TypeError, match=r"Engine.__init__\(\) got an unexpected .* 'pages'"):
        Engine(small_model(), pages=3)


@pytest.mark.parametrize(
    "params, message",
    [
        ({"max_tokens": 1}, "params must be SamplingParams or a list of them, got dict"),
        ([{"max_tokens": 1}], r"params must be SamplingParams, got \{'max_tokens': 1\}"),
        (5, "params must be SamplingParams or a list of them, got int"),
    ],
)
def test_what_are_no_params_is_refused_in_one_line(params, message):
    engine = oracle_engine()
    with pytest.raises(TypeError, match=f"^{message}$"):
        engine.generate("a", params)
    with pytest.raises(TypeError, match="control must be CacheControl or None, got 'no'"):
        engine.generate("a", control="no")
    with pytest.raises(TypeError, match="params must be SamplingParams, got"):
        engine.add_request("a", {"max_tokens": 1})
    assert not engine.has_unfinished


def test_params_are_one_for_all_or_one_each():
    engine = oracle_engine()
    lengths = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 3)]
    assert [*map(len, tokens(engine, [[5], [6]], lengths))] == [1, 3]
    assert [*map(len, tokens(engine, [[5], [6]], lengths[1]))] == [3, 3]
    with pytest.raises(ValueError, match="2 prompts need as many params, got 1"):
        engine.generate([[5], [6]], lengths[:1])
    assert engine.generate([]) == []


def test_one_prompt_needs_no_list_and_ids_may_be_of_any_integer_kind():
    engine = oracle_engine()
    forms = [[5, 6], (5, 6), [[5, 6]], torch.tensor([5, 6]), np.array([5, 6]), [*np.array([5, 6])]]
    outputs = [engine.generate(form, GREEDY) for form in forms]
    assert all(len(output) == 1 for output in outputs)
    assert {output[0].prompt_token_ids for output in outputs} == {(5, 6)}
    assert len({output[0].outputs[0].token_ids for output in outputs}) == 1


def test_of_several_samples_the_first_scores_the_prompt_and_the_others_may_read_it():
    params = seeded(n=3, prompt_logprobs=0, max_tokens=4, ignore_eos=True)
    prompt = list(range(3, 35))
    for cache, cached in (("none", 0), ("radix", 16), ("blocks", 16)):
        engine = small_engine(
            page=8, state_slots=8, kv_pages=40, prefill_chunk=16, max_batch_tokens=16,
            prefix_cache=cache, audit=True,
        )  # fmt: skip
        (request,) = engine.prepare([prompt], params)
        scoring = [len(s.logits_wanted(0, 9)) for s in request.sequences]
        assert scoring == [9, 0, 0]
        list(engine.run([request]))
        output = request.output()
        assert len(output.prompt_logprobs) == len(prompt) and None not in output.prompt_logprobs[1:]
        assert output.outputs[0].cached_tokens == 0
        assert min(own.cached_tokens for own in output.outputs[1:]) >= cached
        oracle = stateless(small_model())
        for own in output.outputs:
            assert_same(own, alone(oracle, small_model(), prompt, params, own.index))


# --- requests that come and go --------------------------------------------------------------------


def test_a_request_id_belongs_to_one_unfinished_request():
    engine = oracle_engine()
    first = engine.add_request([5], GREEDY, "mine")
    with pytest.raises(ValueError, match="request id 'mine' is in use"):
        engine.add_request([6], GREEDY, "mine")
    while engine.has_unfinished:
        engine.step()
    assert first.finished
    engine.add_request([6], GREEDY, "mine")


def test_ids_made_up_by_the_engine_go_around_those_of_its_caller():
    engine = oracle_engine()
    engine.add_request([5], GREEDY, "request-0")
    engine.add_request([5], GREEDY, "request-1")
    assert len(engine.generate([[6], [7]], GREEDY)) == 2


def test_an_id_taken_between_preparing_and_running_harms_nobody():
    engine = oracle_engine()
    (prepared,) = engine.prepare([[6]], GREEDY)
    other = engine.add_request([5], GREEDY, prepared.request_id)
    with pytest.raises(ValueError, match="is in use"):
        next(engine.run([prepared]))
    told = [delta for _ in range(20) for delta in engine.step()]
    assert [d.finish_reason for d in told if d.finish_reason] == ["length"]
    assert not engine.has_unfinished
    assert_same(other.output().outputs[0], alone(prefix_hash, engine.opened, [5], GREEDY))


def test_a_request_runs_once():
    engine = oracle_engine()
    prepared = engine.prepare([[6]], GREEDY)
    list(engine.run(prepared))
    with pytest.raises(ValueError, match="has run: a request runs once"):
        list(engine.run(prepared))
    assert_all_free(engine)


def test_a_second_run_of_what_is_running_is_refused_and_leaves_the_first_alone():
    engine = oracle_engine()
    prepared = engine.prepare([[6], [7]], GREEDY)
    first = engine.run(prepared)
    got = [next(first)]
    (more,) = engine.prepare([[8]], GREEDY)
    with pytest.raises(ValueError, match="request-0' is in use"):
        list(engine.run([more, *prepared]))
    assert more.sequences[0].finish_reason == "abort", "what the second has queued goes with it"
    got += list(first)
    for prompt, request in zip(([6], [7]), prepared, strict=True):
        assert_same(request.output().outputs[0], alone(prefix_hash, engine.opened, prompt, GREEDY))
        mine = [delta for delta in got if delta.request_id == request.request_id]
        assert sum((d.token_ids for d in mine), ()) == request.output().outputs[0].token_ids
    assert_all_free(engine)


def test_a_stream_tells_progress_then_tokens_and_leaves_nothing_behind():
    engine = small_engine(prefill_chunk=16)
    deltas = list(engine.stream([[9] * 40], GREEDY))
    assert [(d.prefilled, d.prompt_tokens, len(d.token_ids)) for d in deltas[:4]] == [
        (16, 40, 0), (32, 40, 0), (40, 40, 1), (40, 40, 1),
    ]  # fmt: skip
    assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason == "length"
    (output,) = engine.generate([[9] * 40], GREEDY)
    assert "".join(d.text for d in deltas) == output.outputs[0].text
    assert sum((d.token_ids for d in deltas), ()) == output.outputs[0].token_ids
    assert_all_free(engine)


def test_streams_and_requests_run_along_with_each_other_and_each_gets_its_own():
    """Whoever steps, the news of others wait for their readers."""
    engine = oracle_engine()
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    stepped = engine.add_request([5], params, "stepped")
    streams = {7: engine.stream([7], params), 8: engine.stream([8], params)}
    got = {7: [next(streams[7])], 8: [next(streams[8])]}
    got[7] += list(streams[7])
    got[8] += list(streams[8])
    told = engine.step()
    assert {d.request_id for d in told} == {"stepped"}
    for prompt, deltas in {5: told, **got}.items():
        expected = alone(prefix_hash, engine.opened, [prompt], params)
        assert sum((d.token_ids for d in deltas), ()) == expected.token_ids
        assert "".join(d.text for d in deltas) == expected.text
    assert stepped.finished and engine.step() == []
    assert_all_free(engine)


def test_a_request_that_asks_for_nothing_ends_with_news_all_the_same():
    engine = oracle_engine()
    engine.add_request([5], SamplingParams(max_tokens=0, n=2), "idle")
    told = []
    while engine.has_unfinished:
        told += engine.step()
    assert [(d.request_id, d.index, d.finish_reason) for d in told] == [
        ("idle", 0, "length"), ("idle", 1, "length"),
    ]  # fmt: skip
    assert [d.finish_reason for d in engine.stream([5], SamplingParams(max_tokens=0))] == ["length"]


def test_a_stream_that_is_never_started_leaves_nothing_behind():
    engine = oracle_engine()
    stream = engine.stream([5], GREEDY)
    assert not engine.has_unfinished
    del stream
    assert_all_free(engine)


def test_outputs_are_snapshots():
    engine = oracle_engine()
    request = engine.add_request([5], SamplingParams(max_tokens=5, ignore_eos=True))
    engine.step()
    before = request.output()
    seconds = before.outputs[0].timings.decode
    while engine.has_unfinished:
        engine.step()
    assert len(before.outputs[0].token_ids) == 1 and not before.finished
    assert before.outputs[0].timings.decode == seconds == 0.0
    assert request.output().finished


# --- figures --------------------------------------------------------------------------------------


def test_br70_a_step_runs_as_many_of_our_lines_late_as_early():
    """Ten tokens deep or two hundred; the first request or the fiftieth. No step opens a page."""
    engine = small_engine(kv_pages=16, page=16)
    params = SamplingParams(temperature=0, max_tokens=240, ignore_eos=True)

    def lines():
        counter = Interrupt(-1, [engine_module, executor, scheduler, sequence, plain, state_cache])
        with counter.watching():
            engine.step()
        return counter.lines

    request = engine.add_request([5] * 3, params)
    by_depth = {len(request.sequences[0].tokens): lines() for _ in range(201)}
    for _ in range(48):
        engine.generate([[5]], SamplingParams(max_tokens=1))
    engine.abort(request.request_id)
    engine.step()
    engine.add_request([5] * 3, params)
    again = [lines() for _ in range(10)]
    assert by_depth[10] == by_depth[200] == again[-1] > 50


def test_the_time_of_the_consumer_is_not_counted():
    engine = oracle_engine()
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    (request,) = engine.prepare([[5]], params)
    for _ in engine.run([request]):
        time.sleep(0.1)
    timings = request.output().outputs[0].timings
    assert 0 < timings.prefill + timings.decode < 0.1
    assert engine.totals.prefill_seconds + engine.totals.decode_seconds < 0.1


def test_every_token_is_counted_once_as_prefill_or_decode():
    engine = oracle_engine(prefill_chunk=4)
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    outputs = engine.generate([[5] * 9, [6]], params)
    counts = [(o.outputs[0].timings.prefill_tokens, o.outputs[0].timings.decode_tokens)
              for o in outputs]  # fmt: skip
    assert counts == [(9, 5), (1, 5)]
    totals = engine.totals
    assert (totals.prefill_tokens, totals.decode_tokens, totals.steps) == (10, 10, 8)
    assert totals.mixed_decode_tokens == 2  # of the second, while the first was in prefill
    assert totals.prefill_rate > 0 and totals.decode_rate > 0
    assert all(o.outputs[0].timings.queue <= o.outputs[0].timings.first_token for o in outputs)
