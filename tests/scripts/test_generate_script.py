"""scripts/generate.py as a person runs it."""

import json
import subprocess
import sys

import pytest
from safetensors.torch import load_file, save_file

from kimi_mini import KimiForCausalLM, preset
from kimi_mini.serving.single import Run
from tests.kimi_mini.golden_cases import FOLDER, goldens
from tests.scripts.running import FOLDER as FOLDER_OF_SCRIPTS
from tests.scripts.running import as_a_command, in_this_process, load


@pytest.fixture
def generate(capsys, monkeypatch):
    return lambda *args: in_this_process("generate.py", args, capsys, monkeypatch)


def test_without_arguments_it_streams_text_and_closes_with_the_figures(tmp_path):
    """From another folder, nothing installed but the libraries."""
    done = as_a_command("generate.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    *text, last = done.stdout.strip().split("\n")
    assert len("\n".join(text)) > 20
    assert last.startswith("prefill 55 tokens, ")
    assert "decode 63 tokens, " in last
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
        (("--model", ""), "model '' is neither"),
        (("--prompt-ids", "[1,2"), "whole numbers"),
        (("--prompt-ids", "1_0"), "whole numbers"),
        (("--prompt-ids", "1,,2"), "whole numbers"),
        (("--prompt-ids", "true"), "whole numbers"),
        (("--seed", "-1"), "--seed must be 0.."),
        (("--seed", str(2**64)), "--seed must be 0.."),
        (("--threads", "1000000"), "--threads must be 1.."),
        (("--threads", "0"), "--threads must be 1.."),
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


def test_a_prompt_may_hold_any_bytes(generate):
    """A command line that is not UTF-8 arrives as surrogates; its bytes are tokens all the same."""
    done = generate(
        "--model", "nano", "--prompt", b"a\xff".decode("utf-8", "surrogateescape"), "--json"
    )
    assert json.loads(done.stdout)["prompt_ids"] == [1, 100, 258]


def test_nothing_run_is_nothing_counted(generate):
    done = generate("--model", "nano", "--max-tokens", "0", "--json")
    out = json.loads(done.stdout)
    assert out["finish_reason"] == "length" and out["output_ids"] == []
    assert out["state_bytes"]["latent"] == 0 and out["prefill_tokens_per_second"] == 0


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_damaged_weights_are_named_when_their_logits_are_not_finite(
    generate, temperature, tmp_path
):
    model = KimiForCausalLM.from_config(preset("nano"), seed=0)
    model.save_pretrained(tmp_path / "ok")
    path = tmp_path / "ok" / "model.safetensors"
    tensors = load_file(path)
    tensors["language_model.model.norm.weight"][3] = float("nan")
    save_file(tensors, path)
    (tmp_path / "ok" / "checksums.json").unlink()
    done = generate("--model", str(tmp_path / "ok"), "--temperature", temperature)
    assert done.returncode == 2
    assert "the logits are not finite" in done.stderr.splitlines()[-1]


def test_tokens_are_shown_as_they_come(monkeypatch, capsys):
    """Every token is flushed before the next is computed."""
    script = load("generate.py")
    seen = []
    tokens = Run.tokens

    def watched(self):
        for token in tokens(self):
            seen.append(len(capsys.readouterr().out))
            yield token

    monkeypatch.setattr(Run, "tokens", watched)
    script.main(["--model", "nano", "--prompt-ids", "5", "--max-tokens", "30"])
    assert sum(n > 0 for n in seen[1:]) > 10


def test_a_reader_that_goes_away_is_no_error_of_ours(tmp_path):
    command = f"{sys.executable} {FOLDER_OF_SCRIPTS / 'generate.py'} --model nano --max-tokens 400"
    shell = f"{command} | head -c 5 > /dev/null; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 141
    assert "Traceback" not in done.stderr
