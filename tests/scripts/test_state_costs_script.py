"""scripts/state_costs.py: bytes, break-even lengths and intervals, as text and as JSON."""

import json

import pytest

from cache.policy.cost_model import best_interval
from kimi_mini import preset
from kimi_mini.costs import checkpoint_bytes, cost_model
from tests.scripts.running import as_a_command, in_this_process

SCRIPT = "state_costs.py"
KEYS = [
    *("model", "row_bytes", "recurrent_bytes", "conv_bytes", "checkpoint_bytes"),
    *("break_even_tokens", "flops_per_token", "flops_per_token_and_position"),
    *("best_interval", "mean_replay", "interval_within_rows", "densities"),
]


def test_as_a_command_from_anywhere_it_shows_the_three_presets(tmp_path):
    done = as_a_command(SCRIPT, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    for words in (
        "k3: latent rows 27,648 B a token",
        "434,110,464 B + 15,261,696 B conv",
        "checkpoint in float32: 449,372,160 B, as much as the rows of 16,253.3 tokens",
        "checkpoint in int8: 127,180,800 B, as much as the rows of 4,600.0 tokens",
        "checkpoint in int8, bfloat16 scales: 125,485,056 B",
        "mini: latent rows 512 B a token",
        "nano: latent rows 128 B a token",
        "as much as the rows of 328.5 tokens",
    ):
        assert words in done.stdout, words


def report(args, capsys, monkeypatch):
    done = in_this_process(SCRIPT, [*args, "--json"], capsys, monkeypatch)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_json_has_the_table_of_the_specification(capsys, monkeypatch):
    models = report([], capsys, monkeypatch)["models"]
    assert [m["model"] for m in models] == ["k3", "mini", "nano"]
    assert all([*m] == KEYS for m in models)
    k3 = models[0]
    assert k3["checkpoint_bytes"] == {
        "float32": 449_372_160,
        "bfloat16": 232_316_928,
        "int8": 127_180_800,
        "int8, bfloat16 scales": 125_485_056,
    }
    assert [round(tokens, 1) for tokens in k3["break_even_tokens"].values()] == [
        *(16_253.3, 8_402.7, 4_600.0, 4_538.7)
    ]
    assert k3["interval_within_rows"] == 16_254


def test_a_path_of_a_million_tokens(capsys, monkeypatch):
    """serving.md 8.1"""
    args = ["k3", "--path", "1048576"]
    (k3,) = report(args, capsys, monkeypatch)["models"]
    assert [*k3["densities"]] == ["64", "256", "4096", "8192", "16384", "65536"]
    columns = zip(*(d.values() for d in k3["densities"].values()), strict=True)
    checkpoints, full, int8, of_rows = columns
    assert checkpoints == (16384, 4096, 256, 128, 64, 16)
    assert [round(size / 1e9, 1) for size in full] == [7_362.5, 1_840.6, 115.0, 57.5, 28.8, 7.2]
    assert [round(size / 1e9, 1) for size in int8] == [2_083.7, 520.9, 32.6, 16.3, 8.1, 2.0]
    assert [float(f"{ratio:.3g}") for ratio in of_rows] == [254, 63.5, 3.97, 1.98, 0.992, 0.248]
    shown = in_this_process(SCRIPT, args, capsys, monkeypatch).stdout
    assert ["4,096", "256", "115.039", "32.558", "3.97"] in [*map(str.split, shown.splitlines())]


@pytest.mark.parametrize("path, grid", [(10, 64), (63, 64), (999, 1000)])
def test_on_a_path_without_a_boundary_there_is_no_best_interval(path, grid, capsys, monkeypatch):
    args = ["k3", "--path", str(path), "--grid", str(grid)]
    (k3,) = report(args, capsys, monkeypatch)["models"]
    assert (k3["best_interval"], k3["mean_replay"], k3["interval_within_rows"]) == (None,) * 3
    shown = in_this_process(SCRIPT, args, capsys, monkeypatch).stdout
    assert (
        f"path of {path}: no boundary on a grid of {grid:,}; one checkpoint weighs more than the "
        "rows" in shown
    )


@pytest.mark.parametrize("path", [64, 100, 127, 1000])
def test_no_interval_is_longer_than_its_path(path, capsys, monkeypatch):
    args = ["k3", "--path", str(path), "--flops-per-byte-hour", "1e9"]
    (k3,) = report(args, capsys, monkeypatch)["models"]
    assert k3["best_interval"] == path // 64 * 64


def test_checkpoints_weigh_no_more_than_rows_from_break_even_on(capsys, monkeypatch):
    def within(path):
        return report(["nano", "--path", str(path)], capsys, monkeypatch)["models"][0]

    assert within(328)["interval_within_rows"] is None
    assert within(329)["interval_within_rows"] == 329


def test_the_best_interval_follows_prices_and_hits(capsys, monkeypatch):
    def interval(*args):
        return report(["mini", *args], capsys, monkeypatch)["models"][0]["best_interval"]

    model, kept = cost_model(preset("mini")), checkpoint_bytes(preset("mini"))
    assert interval("--hits-per-hour", "7", "--flops-per-byte-hour", "3", "--path", "5000") == (
        best_interval(path=5000, grid=64, holding=3 * kept.full, replay=7 * model.flops)
    )
    assert interval("--hits-per-hour", "100") < interval("--hits-per-hour", "1")
    assert interval("--flops-per-byte-hour", "1e9") > interval("--flops-per-byte-hour", "1e5")
    assert interval("--grid", "1000", "--hits-per-hour", "1e9") == 1000


@pytest.mark.parametrize(
    "dtype, row, full",
    [("bfloat16", 128, 42_048), ("float32", 256, 47_232), ("float64", 512, 94_464)],
)
def test_the_dtype_is_that_of_rows_and_windows(dtype, row, full, capsys, monkeypatch):
    (nano,) = report(["nano", "--dtype", dtype], capsys, monkeypatch)["models"]
    running = "float64" if dtype == "float64" else "float32"
    assert (nano["row_bytes"], nano["checkpoint_bytes"][running]) == (row, full)


def test_a_checkpoint_folder_is_opened(capsys, monkeypatch):
    folder = "tests/golden/model/kimi-linear-tiny"
    done = in_this_process(SCRIPT, [folder], capsys, monkeypatch)
    assert done.returncode == 0 and f"{folder}: latent rows" in done.stdout


@pytest.mark.parametrize(
    "args, words",
    [
        (["no-such-model"], "no-such-model"),
        (["--path", "0"], "--path must be at least 1, got 0"),
        (["--grid", "-4"], "--grid must be at least 1, got -4"),
        (["--hits-per-hour", "0"], "--hits-per-hour must be a positive number, got 0.0"),
        (["--flops-per-byte-hour", "nan"], "--flops-per-byte-hour must be a positive number"),
        (["--flops-per-byte-hour", "inf"], "--flops-per-byte-hour must be a positive number"),
        (["--dtype", "int8"], "--dtype"),
        (["--path", "many"], "--path"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(args, words, capsys, monkeypatch):
    done = in_this_process(SCRIPT, args, capsys, monkeypatch)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
