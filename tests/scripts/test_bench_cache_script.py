"""scripts/bench_cache.py: what it prints for a small model and small trees, and its errors."""

import json

import pytest

from kimi_mini.workbench import bench
from tests.scripts.running import as_a_command, in_this_process

SCRIPT = "bench_cache.py"
TINY = ["--model", "nano", "--prefixes", "32", "64", "--suffix", "4", "--nodes", "10", "300",
        "--repeats", "1"]  # fmt: skip
MANAGERS = ["radix", "blocks"]
CALLS = ["lookup", "admit", "plan", "commit", "decode", "finish"]
OPERATIONS = ["match", "insert", "publish", "evict_kv", "evict_state"]


@pytest.fixture(autouse=True)
def small_machine(monkeypatch):
    monkeypatch.setattr(bench, "SIDE", 32)
    monkeypatch.setattr(bench, "COPIED", 1 << 10)


def test_as_a_command_from_anywhere_it_prints_all_tables(tmp_path):
    done = as_a_command(SCRIPT, *TINY, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.split() for line in done.stdout.splitlines()]
    firsts = [line[:3] for line in lines if len(line) == 8 and line[1] == "4"]
    assert firsts == [[n, "4", name] for n in ("32", "64") for name in MANAGERS]
    assert ["cached", "manager", "hit", *CALLS] in lines
    calls = [line[1:3] for line in lines if len(line) == 9 and line[1] in MANAGERS]
    assert calls == 2 * [[name, "2,048"] for name in MANAGERS]
    assert ["nodes", "shape", *OPERATIONS] in lines
    trees = [line[:2] for line in lines if len(line) == 7 and line[1] in ("bushy", "chains")]
    assert trees == [["10", "bushy"], ["300", "bushy"], ["256", "chains"], ["256", "chains"]]


def test_json_has_every_figure(capsys, monkeypatch):
    done = in_this_process(SCRIPT, [*TINY, "--json"], capsys, monkeypatch)
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert [*report] == ["model", "machine", "first_token", "calls", "index"]
    firsts = [(f["manager"], f["prefix"], f["cached_tokens"]) for f in report["first_token"]]
    assert firsts == [(name, n, n) for n in (32, 64) for name in MANAGERS]
    assert [*report["first_token"][0]] == [
        "manager", "prefix", "suffix", "cold", "hit", "cached_tokens", "cached_bytes", "ratio",
    ]  # fmt: skip
    assert all([*c] == ["manager", "prompt", "cached", "hit", *CALLS] for c in report["calls"])
    assert all([*t] == ["nodes", "shape", *OPERATIONS] for t in report["index"])
    for rows, names in ((report["calls"], CALLS), (report["index"], OPERATIONS)):
        assert all(row[name] > 0 for row in rows for name in names)


@pytest.mark.parametrize(
    "args, words",
    [
        (["--prefixes", "0"], "--prefixes must be at least 1, got 0"),
        (["--nodes", "10", "-1"], "--nodes must be at least 1, got -1"),
        (["--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["--suffix", "0"], "--suffix must be at least 1, got 0"),
        (["--prefixes", "2000"], "this model's"),
        (["--model", "k4"], "neither a folder nor a preset"),
        (["--threads", "0"], "--threads must be 1.."),
        (["--seed", "-1"], "--seed must be 0.."),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(args, words, capsys, monkeypatch):
    done = in_this_process(SCRIPT, [*TINY, *args], capsys, monkeypatch)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr and len(done.stderr.splitlines()) == 1
