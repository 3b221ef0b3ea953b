"""What an engine says it did."""

import json

import pytest
import torch

from kimi_mini import Engine, KimiForCausalLM, SamplingParams, preset
from kimi_mini.serving.report import closing_line, report
from tests.kimi_mini.serving.alone import oracle_engine, script, small_model


@pytest.fixture(scope="module")
def nano():
    model = KimiForCausalLM.from_config(preset("nano"), seed=0)
    engine = Engine(model, state_slots=2, kv_pages=8)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    return engine, engine.generate([[5] * 10], params)


def test_a_report_is_plain_values(nano):
    assert json.loads(json.dumps(report(*nano))) == report(*nano)


def test_state_bytes_are_those_of_the_config(nano):
    """serving 8.1 for nano: 3 layers of 3 heads 32 x 32, window 3 x 288, 2 x 32 numbers a token."""
    pools = report(*nano)["pools"]
    slots, pages = pools["slots"], pools["pages"]
    assert (slots["recurrent_bytes"], slots["conv_bytes"]) == (36_864, 10_368)
    assert slots["unit_bytes"] == 36_864 + 10_368
    assert (pages["page"], pages["row_bytes"], pages["unit_bytes"]) == (16, 256, 16 * 256)
    assert (slots["size"], pages["size"]) == (2, 8)
    for pool in (slots, pages):
        assert pool["free"] == pool["size"]
        assert pool["active"] == pool["tracked"] == pool["inflight"] == pool["cached"] == 0
    line = closing_line(nano[0])
    assert "recurrent 36,864 B + conv 10,368 B (fixed), latent 256 B a token" in line
    assert line.startswith("prefill 10 tokens, ") and "decode 3 tokens, " in line


def test_a_report_names_numbers_backend_and_notes(nano):
    said = report(*nano)
    assert (said["dtype"], said["backend"]) == ("float32", nano[0].model.dispatcher.backend.name)
    assert said["notes"] == list(nano[0].opened.notes)


def test_each_sample_has_an_entry_with_what_became_of_it():
    engine = oracle_engine(script(3, [75, 104, 49, 2]), prefill_chunk=2)
    params = SamplingParams(n=2, temperature=0, logprobs=1, prompt_logprobs=0, stop=["."])
    outputs = engine.generate(["hi"], params)
    said = json.loads(json.dumps(report(engine, outputs)))
    first, second = said["requests"]
    assert (first["request_id"], first["index"], second["index"]) == ("request-0", 0, 1)
    assert first["prompt"] == "hi" and first["prompt_ids"] == [1, 107, 108]
    assert first["output_ids"] == [75, 104, 49] and first["text"] == "He"
    assert (first["finish_reason"], first["stop_reason"]) == ("stop", ".")
    assert [entry[0]["token_id"] for entry in first["logprobs"]] == [75, 104, 49]
    assert all(entry[0]["rank"] == 1 and entry[0]["logprob"] <= 0 for entry in first["logprobs"])
    nothing, *scored = first["prompt_logprobs"]
    assert nothing is None and [entry[0]["token_id"] for entry in scored] == [107, 108]
    timings = first["timings"]
    assert (timings["prefill_tokens"], timings["decode_tokens"]) == (3, 2)
    assert 0 <= timings["queue_seconds"] <= timings["first_token_seconds"]
    assert timings["prefill_tokens_per_second"] == 3 / timings["prefill_seconds"]
    assert timings["decode_tokens_per_second"] == 2 / timings["decode_seconds"]
    totals = said["totals"]
    assert (totals["prefill_tokens"], totals["decode_tokens"]) == (6, 4)
    assert totals["preemptions"] == 0 and totals["waits"] == {}


def test_what_was_not_asked_for_or_never_came_is_none():
    engine = oracle_engine()
    outputs = engine.generate([[5]], SamplingParams(max_tokens=0))
    (entry,) = report(engine, outputs)["requests"]
    assert entry["prompt"] is None and entry["logprobs"] is entry["prompt_logprobs"] is None
    assert entry["timings"]["queue_seconds"] is entry["timings"]["first_token_seconds"] is None
    assert entry["timings"]["prefill_tokens_per_second"] == 0.0
    assert "prefill 0 tokens, 0 tokens/s" in closing_line(engine)


def test_pressure_shows_in_the_totals():
    """Two that grow out of the pages, and a third that waits for a slot."""
    engine = oracle_engine(page=1, kv_pages=20, state_slots=2)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    outputs = engine.generate([[5] * 5, [6] * 5, [7]], params)
    said = report(engine, outputs)
    given_way = [entry["timings"]["preemptions"] for entry in said["requests"]]
    assert given_way[0] == 0 < given_way[1]
    assert said["totals"]["preemptions"] == sum(given_way)
    assert said["totals"]["waits"]["pages"] >= 1 and said["totals"]["waits"]["slots"] >= 1


@pytest.mark.parametrize("cache", ["radix", "blocks"])
def test_what_the_prefix_cache_did_is_summed_up(cache):
    model = KimiForCausalLM.from_config(preset("nano"), seed=0)
    engine = Engine(model, prefix_cache=cache, state_slots=4, kv_pages=16)
    prompt, params = [[*range(5, 90)]], SamplingParams(temperature=0, max_tokens=2)
    outputs = [*engine.generate(prompt, params), *engine.generate(prompt, params)]
    said = json.loads(json.dumps(report(engine, outputs)))
    assert [sample["cache"]["cached_tokens"] for sample in said["requests"]] == [0, 80]
    whole = said["prefix_cache"]
    assert whole.pop("identity") == vars(engine.cache.identity)
    assert whole == {
        "kind": cache,
        "lookups": 2,
        "cached_tokens": 80,
        "token_hit": 80,
        "replayed_tokens": 0,
        "not_more_because": {"unknown prefix": 1, "grid": 1},
        "evicted": {"tokens": 0, "states": 0, "capped": 0},
    }
    assert report(Engine(model), [])["prefix_cache"] is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_dtype_is_said_without_its_library(dtype):
    engine = Engine(small_model(dtype), state_slots=1, kv_pages=2)
    assert report(engine, [])["dtype"] == str(dtype).split(".")[1]
