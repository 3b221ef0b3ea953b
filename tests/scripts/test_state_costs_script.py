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
    *("break_even_tokens", "flops_per_token", "best_interval", "mean_replay"),
    *("interval_within_rows", "densities"),
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
        *(16_253.3, 8_402.7, 4_600.0)
    ]
    assert k3["interval_within_rows"] == 16_254


def test_a_path_of_a_million_tokens(capsys, monkeypatch):
    """serving.md 8.1"""
    (k3,) = report(["k3", "--path", "1048576"], capsys, monkeypatch)["models"]
    assert [d["checkpoints"] for d in k3["densities"].values()] == [16384, 4096, 256, 128, 64, 16]
    assert [round(d["bytes"] / 1e9, 1) for d in k3["densities"].values()] == [
        *(7_362.5, 1_840.6, 115.0, 57.5, 28.8, 7.2)
    ]


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
