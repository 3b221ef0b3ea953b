"""scripts/bench_kernels.py: what it counts, and that it runs from tiny arguments."""

import json
import time

import pytest
import torch

from kimi_mini.workbench import bench, bench_kernels, bench_operators, bench_published
from kimi_mini.workbench.bench_kernels import Figure, measure
from kimi_mini.workbench.bench_operators import Operators, chunk_flops, token_flops
from kimi_mini.workbench.bench_published import PublishedScan
from tests.scripts.running import as_a_command, in_this_process, load

SCRIPT = "bench_kernels.py"
TINY = ["--K", "8", "--T", "40", "--batches", "1", "3", "--heads", "2", "--repeats", "1"]


@pytest.fixture(autouse=True)
def small_machine(monkeypatch):
    monkeypatch.setattr(bench, "SIDE", 32)
    monkeypatch.setattr(bench, "COPIED", 1 << 10)
    monkeypatch.setattr(bench, "SAMPLE_SECONDS", 1e-4)


def test_as_a_command_it_prints_machine_and_operators(tmp_path):
    done = as_a_command(SCRIPT, *TINY, "--only", "scan", cwd=tmp_path)
    assert done.returncode == 0
    for words in ("GFLOP/s", "GB/s", "scan, T = 40", "x torch", "of bound"):
        assert words in done.stdout, words


def test_every_operator_has_a_line(capsys, monkeypatch):
    done = in_this_process(SCRIPT, TINY, capsys, monkeypatch)
    assert done.returncode == 0
    for words in (
        "1 thread(s)", "scan, T = 40", "core of a KDA layer, T = 40", "core step, 3 rows",
        "mixture and norm, 1 token ", "experts, 40 tokens", "attention step, 3 rows of 40",
        "target", "of bound",
    ):  # fmt: skip
        assert words in done.stdout, words


def test_the_fastest_published_form_is_named_and_missing_ones_have_reasons(capsys, monkeypatch):
    def slow(*operands, **options):
        time.sleep(0.01)
        return operands[0], options["initial_state"]

    scans = [PublishedScan("somebody's loop", slow), PublishedScan("chunks of 64", slow, tokens=64)]
    for module in (bench_published, script := load(SCRIPT)):
        monkeypatch.setattr(module, "published_scans", lambda: (scans, ["theirs is not there"]))
    assert script.main([*TINY, "--only", "scan"]) == 0
    printed = capsys.readouterr().out
    assert "somebody's loop" in printed and "chunks of 64" not in printed
    assert "at the bound" in printed and printed.endswith("not compared: theirs is not there\n")


def test_json_has_every_operator_at_every_width(capsys, monkeypatch):
    args = ["--K", "8", "16", "--V", "4", "8", "--T", "20", "40", "--batches", "2",
            "--heads", "2", "--repeats", "1", "--json"]  # fmt: skip
    done = in_this_process(SCRIPT, args, capsys, monkeypatch)
    assert done.returncode == 0
    report = json.loads(done.stdout)
    (machine,) = report["machines"]
    assert machine["threads"] == 1 and machine["sgemm_gflops"] > 0 and machine["copy_gbs"] > 0
    figures = report["operators"]
    cells = {(f["what"], f["threads"], f["K"], f["V"]) for f in figures}
    # scan and core at two lengths, convolution, a core step, six more of prefill and of a step,
    # attention twice
    assert len(cells) == len(figures) == 4 * (2 * 2 + 2 + 2 * 6 + 2)
    for f in figures:
        assert f["torch"] > 0 and f["bound"] > 0 and f["limit"] in ("FLOPs", "bytes")
        assert (f["native"] is None) == (report["no_native"] is not None)
        assert f["to_bound"] == pytest.approx((f["native"] or f["torch"]) / f["bound"])
        assert f["to_torch"] == pytest.approx((f["native"] or f["torch"]) / f["torch"])
        assert (f["fastest"] is None) == (not f["published"]) == (f["to_published"] is None)


def test_every_number_of_threads_has_its_machine_and_its_lines(capsys, monkeypatch):
    args = [*TINY, "--only", "router", "--threads", "1", "2"]
    before = torch.get_num_threads()
    done = in_this_process(SCRIPT, args, capsys, monkeypatch)
    assert done.returncode == 0 and torch.get_num_threads() == before
    assert "1 thread(s)" in done.stdout and "2 thread(s)" in done.stdout
    report = json.loads(in_this_process(SCRIPT, [*args, "--json"], capsys, monkeypatch).stdout)
    assert [m["threads"] for m in report["machines"]] == [1, 2]
    assert [f["threads"] for f in report["operators"]] == [1] * 3 + [2] * 3


def test_without_native_operators_torch_is_timed_alone(capsys, monkeypatch):
    monkeypatch.setenv("KIMI_MINI_NATIVE", "0")
    done = in_this_process(SCRIPT, [*TINY, "--json"], capsys, monkeypatch)
    report = json.loads(done.stdout)
    assert report["no_native"] == "switched off by KIMI_MINI_NATIVE=0"
    assert all(f["native"] is None and f["torch"] > 0 for f in report["operators"])
    done = in_this_process(SCRIPT, TINY, capsys, monkeypatch)
    assert "no native operators: switched off" in done.stdout


def test_operators_can_be_asked_for_by_the_beginning_of_their_name(capsys, monkeypatch):
    done = in_this_process(SCRIPT, [*TINY, "--only", "attention", "--json"], capsys, monkeypatch)
    report = json.loads(done.stdout)
    assert [f["what"] for f in report["operators"]] == [
        "attention, T = 40", "attention step, 1 rows of 40", "attention step, 3 rows of 40",
    ]  # fmt: skip


def test_flops_are_those_of_the_formulas():
    """The figures that the targets were derived from: 350k and 124k tokens/s of a 160 GFLOP/s
    product at 8 heads, chunks of 64; token by token, half of the product's multiply-adds a second
    for four operations on each number of the state."""
    assert 160e9 / (8 * chunk_flops(64, 64, 64)) == pytest.approx(350e3, rel=0.01)
    assert 160e9 / (8 * chunk_flops(64, 128, 128)) == pytest.approx(124e3, rel=0.02)
    assert 160e9 / (8 * token_flops(64, 64)) == (160e9 / 2) / (8 * 64 * 64 * 4)


def test_the_bound_of_a_scan_is_that_of_the_form_with_least_work(monkeypatch):
    """Token by token up to K = V = 256."""
    flops = {K: Operators(K, K, 1).scan(2).flops for K in (64, 512)}
    assert flops == {64: 2 * token_flops(64, 64), 512: 2 * chunk_flops(64, 512, 512)}


def test_the_product_has_as_many_flops_as_asked_for(monkeypatch):
    monkeypatch.setattr(bench, "SIDE", 32)
    result = bench.product(10 * 2 * 32 * 32)()
    assert result.shape == (10, 32)


def figures_of(monkeypatch, K=64, V=64, H=8, threads=1, T=10, batches=(8,)):
    """By name, on a machine where everything takes a millisecond."""
    monkeypatch.setattr(
        bench_kernels, "medians", lambda functions, repeats: dict.fromkeys(functions, 1e-3)
    )
    figures = measure(Operators(K, V, H), [T], batches, threads=threads, repeats=1)
    return {f.what: f for f in figures}


def test_targets_follow_the_machine_and_stand_only_where_they_were_set(monkeypatch):
    gflops = 2 * 32**3 / 1e-3 / 1e9
    figures = figures_of(monkeypatch)
    assert figures["scan, T = 10"].torch == 10_000
    assert figures["scan, T = 10"].target == pytest.approx(350_000 * gflops / 160)
    monkeypatch.setattr(bench_kernels, "LONG", 10)
    figures = figures_of(monkeypatch, K=128, V=128)
    assert figures["scan, T = 10"].target == pytest.approx(0.9 * 90_000 * gflops / 160)
    step = figures["core step, 8 rows"]
    assert step.limit == "bytes" and step.target == pytest.approx(step.bound / 1.5)
    assert {f.what for f in figures.values() if f.target} == {"scan, T = 10", "core step, 8 rows"}
    for other in ({"H": 4}, {"V": 32}, {"threads": 2}):
        for figure in figures_of(monkeypatch, **other).values():
            assert not figure.target and not figure.times_target
    assert not figures_of(monkeypatch, batches=(7,))["core step, 7 rows"].target


def test_a_bound_is_the_longer_of_two_times():
    limits = bench.Limits(flops=100.0, traffic=10.0)
    assert limits.least_seconds(200, 10) == 2 and limits.least_seconds(200, 50) == 5


def test_the_fastest_published_form_counts_up_to_a_length(monkeypatch):
    scans = [PublishedScan(name, lambda *operands, **options: None) for name in ("one", "other")]
    monkeypatch.setattr(bench_published, "published_scans", lambda: (scans, []))
    monkeypatch.setattr(
        bench_kernels,
        "medians",
        lambda functions, repeats: {name: 2.0 if name == "one" else 1.0 for name in functions},
    )
    monkeypatch.setattr(bench_operators, "PUBLISHED_LONGEST", 20)
    layer, options = Operators(8, 4, 2), {"threads": 1, "repeats": 1, "only": "scan"}
    short, long = measure(layer, [20, 21], [1], **options)
    assert (short.torch, short.published, short.fastest) == (20, {"one": 10, "other": 20}, "other")
    assert short.times == 1 and short.times_target is None
    assert long.published == {} and long.fastest is None and long.times is None


@pytest.mark.parametrize(("rate", "cell"), [(1801, "18"), (1799, "18 !")])
def test_a_scan_should_be_18_times_as_fast_as_the_fastest(rate, cell):
    figure = Figure("scan, T = 2048", 64, 64, 1, 500, rate, 2500, "FLOPs", None,
                    {"a loop": 100, "chunks": 50}, bench_kernels.PUBLISHED_TARGET)  # fmt: skip
    row = figure.as_comparison()
    assert (row["fastest published"], row["tokens/s"]) == ("a loop", "100")
    assert (row["x published"], row["target"], row["at the bound"]) == ("18.0", cell, "25.0")


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
    monkeypatch.setattr(bench, "SAMPLE_SECONDS", 0.01)
    short = work.taking("a", [1e-3] * 100)
    assert bench.medians({"a": short}, repeats=2) == {"a": pytest.approx(1e-3)}
    assert len(work.log) == 2 + 2 * 10


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--K", "0"], "--K must be at least 1, got 0"),
        (["--T", "64", "-1"], "--T must be at least 1, got -1"),
        (["--batches", "0"], "--batches must be at least 1, got 0"),
        (["--repeats", "0"], "--repeats must be at least 1, got 0"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(args, message, capsys, monkeypatch):
    done = in_this_process(SCRIPT, args, capsys, monkeypatch)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {message}\n")
