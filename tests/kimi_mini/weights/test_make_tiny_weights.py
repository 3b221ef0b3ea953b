"""The script: a checkpoint from a bare checkout, or one line and nothing half-written."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kimi_mini.config import KimiConfig
from kimi_mini.weights import CheckpointError, random_parameters, read_checkpoint
from kimi_mini.weights.folder import CONFIG, INDEX

SCRIPT = Path(__file__).parents[3] / "scripts" / "make_tiny_weights.py"


def run(cwd: Path, *args: str) -> subprocess.CompletedProcess:
    """Runs the script from a folder that is not the repository, with no help from PYTHONPATH."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, str(SCRIPT), *args]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


def test_it_writes_a_checkpoint_that_loads_the_seeded_weights(tmp_path, nano, unfilled):
    args = ("out", "--preset", "nano", "--seed", "3", "--dtype", "bfloat16", "--experts", "mxfp4")
    done = run(tmp_path, *args, "--max-shard-bytes", "300000")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("out: 571,856 parameters (seed 3) in 320 tensors")
    config = KimiConfig.from_json(tmp_path / "out")
    assert config.dtype == "bfloat16" and config.quantization_config["format"].startswith("mxfp4")
    parameters = unfilled(config, torch.bfloat16)
    assert read_checkpoint(tmp_path / "out", config, parameters).packed == 96
    expected = random_parameters(nano, seed=3)
    for name, parameter in parameters.items():
        if "experts.w" not in name:
            assert torch.equal(parameter, expected[name].to(parameter.dtype)), name
    assert (tmp_path / "out" / INDEX).is_file() and os.listdir(tmp_path) == ["out"]


@pytest.fixture(scope="module")
def main():
    """The script's main in this process; `run` turns its ValueErrors into a line and a code."""
    spec = importlib.util.spec_from_file_location("make_tiny_weights", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


def test_it_takes_a_config_file_and_replaces_only_when_asked(tmp_path, golden, main):
    args = [str(tmp_path / "out"), "--config", str(golden / "kimi-linear-tiny" / CONFIG)]
    assert main(args) == 0
    with pytest.raises(CheckpointError, match="holds a checkpoint already"):
        main(args)
    assert main([*args, "--overwrite"]) == 0
    written = json.loads((tmp_path / "out" / CONFIG).read_text())
    assert written["model_max_length"] == 4096 and "text_config" not in written


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["out", "--preset", "huge"], "unknown preset 'huge', allowed: nano"),
        (["out", "--preset", "k3"], "2,779,484,478,208 parameters"),
        (["out", "--config", "none.json"], "none.json: No such file"),
        (["out", "--preset", "nano", "--max-shard-bytes", "0"], "max_shard_bytes is 0"),
        (["file", "--preset", "nano"], "file: a file is in the way"),
        (["full", "--preset", "nano", "--overwrite"], "full: not empty and no checkpoint"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, main, args, words):
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as caught:
        main(args)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == ["file", "full"]
    assert os.listdir(tmp_path / "full") == ["notes.txt"]


def test_a_refusal_is_one_line_on_stderr_with_exit_code_2(tmp_path):
    done = run(tmp_path, "out", "--preset", "huge")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: unknown preset 'huge', allowed: nano, mini, deep, bench, k3\n"
