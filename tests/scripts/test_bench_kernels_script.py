"""scripts/bench_kernels.py: what it counts, and that it runs from tiny arguments."""

import json
import time

import pytest
import torch

from kimi_mini.workbench import bench
from tests.scripts.running import as_a_command, in_this_process

SCRIPT = "bench_kernels.py"
TINY = ["--K", "8", "--T", "40", "--heads", "2", "--repeats", "1"]


@pytest.fixture(autouse=True)
def small_machine(monkeypatch):
    monkeypatch.setattr(bench, "SIDE", 32)
    monkeypatch.setattr(bench, "COPIED", 1 << 10)


def test_as_a_command_it_prints_machine_scan_and_other_kernels(tmp_path):
    done = as_a_command(SCRIPT, *TINY, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    for word in ("GFLOP/s", "GB/s", "chunked", "x loop", "decode step, 8 rows", "attention"):
        assert word in done.stdout, word


def test_json_has_a_row_for_every_combination(capsys, monkeypatch):
    args = ["--K", "8", "16", "--V", "4", "8", "--T", "20", "40", "--threads", "1", "2",
            "--heads", "2", "--repeats", "1", "--kernel-chunk", "8", "--json"]  # fmt: skip
    before = torch.get_num_threads()
    done = in_this_process(SCRIPT, args, capsys, monkeypatch)
    assert done.returncode == 0
    assert torch.get_num_threads() == before
    report = json.loads(done.stdout)
    assert [m["threads"] for m in report["machines"]] == [1, 2]
    assert all(m["sgemm_gflops"] > 0 and m["copy_gbs"] > 0 for m in report["machines"])
    shapes = {(f["threads"], f["K"], f["V"], f["T"]) for f in report["scans"]}
    assert len(shapes) == len(report["scans"]) == 16
    for f in report["scans"]:
        assert f["kernel_chunk"] == 8 and f["H"] == 2 and f["target"] is None
        assert f["flops_per_token"] == 2 * (4 * 8 * (f["K"] + f["V"]) + 6 * f["K"] * f["V"])
        assert f["to_loop"] == pytest.approx(f["chunked"] / f["loop"])
        assert f["to_product"] == pytest.approx(f["chunked"] / f["product"])


def test_flops_are_those_of_the_formulas():
    """The figures that the targets were derived from: 350k and 124k tokens/s of a 160 GFLOP/s
    product at 8 heads, chunks of 64."""
    assert 160e9 / (8 * bench.scan_flops(64, 64, 64)) == pytest.approx(350e3, rel=0.01)
    assert 160e9 / (8 * bench.scan_flops(64, 128, 128)) == pytest.approx(124e3, rel=0.02)


def test_the_product_has_as_many_flops_as_asked_for(monkeypatch):
    monkeypatch.setattr(bench, "SIDE", 32)
    result = bench.product(10 * 2 * 32 * 32)()
    assert result.shape == (10, 32)


def test_the_target_follows_the_machine_and_stands_only_where_it_was_set(monkeypatch):
    monkeypatch.setattr(bench, "medians", lambda functions, repeats: dict.fromkeys(functions, 1e-3))
    monkeypatch.setattr(bench, "LOOP_TOKENS", 4)
    gflops = 2 * 32**3 / 1e-3 / 1e9
    shared = {"kernel_chunk": 16, "repeats": 1}
    figures = bench.measure_scan(64, 64, 10, H=8, threads=1, **shared)
    assert figures.sgemm_gflops == pytest.approx(gflops)
    assert figures.target == pytest.approx(25_000 * gflops / 160)
    assert (figures.chunked, figures.loop, figures.loop_tokens) == (10_000, 4_000, 4)
    assert bench.measure_scan(64, 64, 10, H=4, threads=1, **shared).target is None
    assert bench.measure_scan(64, 32, 10, H=8, threads=1, **shared).target is None
    assert bench.measure_scan(64, 64, 10, H=8, threads=2, **shared).target is None


class Work:
    """A function that takes so many seconds of a clock of its own making."""

    def __init__(self, monkeypatch):
        self.now, self.log = 0.0, []
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def taking(self, name, seconds):
        durations = iter(seconds)

        def function():
            self.log.append(name)
            self.now += next(durations)

        return function


def test_what_is_compared_is_timed_in_turn_and_the_median_counts(monkeypatch):
    work = Work(monkeypatch)
    a, b = work.taking("a", [9, 1, 1, 50, 2]), work.taking("b", [9, 3, 3, 3, 4])
    assert bench.medians({"a": a, "b": b}, repeats=3) == {"a": 2, "b": 3}
    assert "".join(work.log) == "aabb" + "ababab"  # warm up, see how long it takes, then in turn


def test_short_work_is_repeated_until_it_can_be_timed(monkeypatch):
    work = Work(monkeypatch)
    short = work.taking("a", [1e-3] * 100)
    assert bench.medians({"a": short}, repeats=2) == {"a": pytest.approx(1e-3)}
    assert len(work.log) == 2 + 2 * 10


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--K", "0"], "--K must be at least 1, got 0"),
        (["--T", "64", "-1"], "--T must be at least 1, got -1"),
        (["--kernel-chunk", "0"], "--kernel-chunk must be at least 1, got 0"),
        (["--repeats", "0"], "--repeats must be at least 1, got 0"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(args, message, capsys, monkeypatch):
    done = in_this_process(SCRIPT, args, capsys, monkeypatch)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {message}\n")
