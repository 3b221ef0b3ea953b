"""scripts/bench_model.py: what it prints for a small model and tiny numbers, and its errors."""

import importlib.util
import json

import pytest

from kimi_mini.workbench import bench
from tests.scripts.running import as_a_command, in_this_process

SCRIPT = "bench_model.py"
TINY = ["--model", "nano", "--depths", "0", "40", "--batches", "1", "2", "--prompt", "24",
        "--prefill-chunk", "16", "--decode-steps", "2", "--repeats", "1"]  # fmt: skip
ONE = [*TINY, "--depths", "0", "--batches", "1", "--decode-steps", "1"]


@pytest.fixture(autouse=True)
def small_machine(monkeypatch):
    monkeypatch.setattr(bench, "SIDE", 32)
    monkeypatch.setattr(bench, "COPIED", 1 << 10)
    monkeypatch.setattr(bench, "SAMPLE_SECONDS", 1e-4)


def without_transformers(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "transformers" else find(name)
    )


def test_as_a_command_it_prints_model_and_machine(tmp_path):
    done = as_a_command(SCRIPT, *ONE, "--no-peer", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    for words in ("model nano, parameters 571,856", "1 thread(s)", "GFLOP/s", "GB/s", "overhead"):
        assert words in done.stdout, words


def test_it_prints_its_tables_and_why_nothing_is_compared(capsys, monkeypatch):
    done = in_this_process(SCRIPT, [*TINY, "--no-peer"], capsys, monkeypatch)
    assert (done.returncode, done.stderr) == (0, "")
    for words in (
        "dtype float32", "prefill_chunk 16", "tokens a row", "the last piece of a prompt", "decode",
        "preparing", "products", "attention", "recurrence", "states", "calling", "overhead",
        "at most", "(packing)", "16 and one 40", "batch 2, from depth 0 to 40: ", "all the rest",
        "no comparison: --no-peer was given",
    ):  # fmt: skip
        assert words in done.stdout, words
    assert "skipped" not in done.stdout


def test_json_has_a_figure_for_every_depth_and_batch(capsys, monkeypatch):
    args = [*TINY, "--dtype", "bfloat16", "--no-peer", "--json"]
    done = in_this_process(SCRIPT, args, capsys, monkeypatch)
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert set(report) == {
        "model", "parameters", "dtype", "backend", "prompt", "prefill_chunk", "decode_steps",
        "repeats", "machine", "peer", "no_peer", "prefill", "pieces", "decode", "compared",
        "skipped",
    }  # fmt: skip
    assert (report["dtype"], report["machine"]["threads"]) == ("bfloat16", 1)
    assert (report["peer"], report["compared"], report["skipped"]) == (None, [], [])
    grid = [(depth, batch) for depth in (0, 40) for batch in (1, 2)]
    for part in ("prefill", "decode"):
        mixed = [(40, 2)] if part == "decode" else []
        assert [(f["depth"], f["batch"]) for f in report[part]] == grid + mixed
        assert all(f["tokens_per_second"] > 0 for f in report[part])
    assert set(report["prefill"][0]) == {
        "depth", "batch", "row_tokens", "steps", "seconds", "tokens_per_second",
    }  # fmt: skip
    assert set(report["decode"][0]) == set(report["pieces"][0]) == {
        "depth", "batch", "shallow", "tokens", "tokens_per_second", "step_ms", "preparing_ms",
        "products_ms", "attention_ms", "recurrence_ms", "states_ms", "calling_ms", "overhead_ms",
        "overhead", "product_flops", "matrix_bytes", "bound_ms", "target", "pack_ms",
    }  # fmt: skip
    assert [(f["depth"], f["batch"], f["tokens"]) for f in report["pieces"]] == [
        (0, 1, 8), (40, 1, 8),
    ]  # fmt: skip
    assert [f["shallow"] for f in report["decode"]] == [None] * 4 + [16]
    assert [f["row_tokens"] for f in report["prefill"]] == [24, 12, 24, 12]


def test_without_transformers_one_line_says_how_to_get_it_and_the_rest_runs(capsys, monkeypatch):
    without_transformers(monkeypatch)
    done = in_this_process(SCRIPT, ONE, capsys, monkeypatch)
    assert done.returncode == 0
    (line,) = (line for line in done.stdout.splitlines() if "comparison" in line)
    assert line.startswith("no comparison: transformers is not installed") and "[bench]" in line
    assert "overhead" in done.stdout
    done = in_this_process(SCRIPT, [*ONE, "--peer"], capsys, monkeypatch)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: transformers is not installed")


def test_with_transformers_both_are_compared(tmp_path):
    """In a process of its own: transformers leaves traces in whatever process imports it."""
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    done = as_a_command(SCRIPT, *TINY, "--json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report["no_peer"] is None and report["peer"]["attention"] == "sdpa"
    assert [(c["work"], c["depth"]) for c in report["compared"]] == [("prefill", 0), ("decode", 40)]
    assert all(c["ratio"] == pytest.approx(c["ours"] / c["peer"]) for c in report["compared"])
    done = as_a_command(SCRIPT, *TINY, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "ours / peer" in done.stdout and "kimi_linear (parameters " in done.stdout


def test_what_is_beyond_the_context_is_named_and_the_rest_runs(capsys, monkeypatch):
    args = [*ONE, "--no-peer", "--depths", "0", "1010"]  # nano: 1024
    done = in_this_process(SCRIPT, args, capsys, monkeypatch)
    assert done.returncode == 0
    lines = [line for line in done.stdout.splitlines() if line.startswith("skipped")]
    assert lines == [
        "skipped: prefill, depth 1010, batch 1: 1010 + 24 tokens a row are beyond the context of "
        "1024 (max_position_embeddings)"
    ]


def test_a_table_may_be_empty(capsys, monkeypatch):
    args = [*ONE, "--no-peer", "--depths", "1023"]
    done = in_this_process(SCRIPT, args, capsys, monkeypatch)
    assert done.returncode == 0
    assert "prefill: nothing was measured" in done.stdout and "overhead" in done.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--depths", "0", "-1"], "--depths must be at least 0, got -1"),
        (["--batches", "0"], "--batches must be at least 1, got 0"),
        (["--prompt", "0"], "--prompt must be at least 1, got 0"),
        (["--prefill-chunk", "0"], "--prefill-chunk must be at least 1, got 0"),
        (["--decode-steps", "0"], "--decode-steps must be at least 1, got 0"),
        (["--decode-steps", str(10**30)], "--decode-steps must be 1..10000, got 1000000"),
        (["--threads", "100000"], "--threads must be 1.."),
        (["--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["--model", "no-such"], "model 'no-such' is neither a folder nor a preset"),
        (["--model", "nano", "--depths", "1024"], "nothing can be measured: 1024 + 1 tokens"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(args, message, capsys, monkeypatch):
    done = in_this_process(SCRIPT, [*args, "--no-peer", "--json"], capsys, monkeypatch)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {message}") and done.stderr.count("\n") == 1
