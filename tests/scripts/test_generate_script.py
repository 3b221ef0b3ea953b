"""scripts/generate.py as a person runs it."""

import json

import pytest

from tests.kimi_mini.golden_cases import FOLDER, goldens
from tests.scripts.running import as_a_command, in_this_process


@pytest.fixture
def generate(capsys, monkeypatch):
    return lambda *args: in_this_process("generate.py", args, capsys, monkeypatch)


def test_without_arguments_it_streams_text_and_closes_with_the_figures(tmp_path):
    """From another folder, nothing installed but the libraries."""
    done = as_a_command("generate.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 20
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("prefill 55 tokens, ")
    assert "decode 64 tokens, " in last
    assert (
        "recurrent 884,736 B + conv 124,416 B (fixed), latent 120,832 B (1,024 B a token)" in last
    )


def test_json_holds_the_request_and_what_became_of_it(generate):
    done = generate("--model", "nano", "--prompt", "hé", "--max-tokens", "5", "--json")
    out = json.loads(done.stdout)
    assert out["prompt_ids"] == [1, 107, 198, 172]
    assert len(out["output_ids"]) == 5 and out["finish_reason"] == "length"
    assert out["state_bytes"]["latent"] == 8 * out["state_bytes"]["latent_per_token"]


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_a_checkpoint_folder_gives_its_recorded_tokens(generate, backend):
    golden = goldens("k3-tiny-mxfp4")
    done = generate(
        "--model", str(FOLDER / "k3-tiny-mxfp4"), "--backend", backend, "--max-tokens", "16",
        "--prompt-ids", ",".join(map(str, golden["p17.input_ids"].tolist())), "--json",
    )  # fmt: skip
    assert json.loads(done.stdout)["output_ids"] == golden["p17.greedy_ids"].tolist()


def test_a_seed_gives_the_same_text_again(generate):
    args = (
        "--model",
        "nano",
        "--temperature",
        "1",
        "--max-tokens",
        "8",
        "--json",
        "--threads",
        "1",
    )
    one, two, other = (
        json.loads(generate(*args, "--seed", seed).stdout)["output_ids"] for seed in "334"
    )
    assert one == two != other


@pytest.mark.parametrize(
    "args, message",
    [
        (("--prompt", ""), "the prompt is empty"),
        (("--prompt-ids", ""), "the prompt is empty"),
        (("--prompt-ids", "1,x"), "whole numbers"),
        (("--prompt-ids", "1,2", "--prompt", "a"), "not both"),
        (("--prompt-ids", "5,320", "--model", "nano"), "token id 320 is not in this model's"),
        (("--model", "k4"), "neither a folder nor a preset (nano, mini, deep, bench, k3)"),
        (("--model", "k3"), "2,779,484,478,208 parameters"),
        (("--model", "."), "config.json"),
        (("--threads", "0"), "--threads must be at least 1"),
        (("--max-tokens", "-1", "--model", "nano"), "max_tokens must not be negative"),
        (("--temperature", "nan", "--model", "nano"), "temperature must be 0"),
        (("--backend", "native", "--model", "nano"), "'native' is not available"),
        (("--dtype", "int8"), "invalid choice"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(
    generate, monkeypatch, args, message, tmp_path
):
    monkeypatch.chdir(tmp_path)
    done = generate(*args)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())
