"""scripts/generate.py as a person runs it."""

import json
import runpy
import subprocess
import sys

import pytest
from safetensors.torch import load_file, save_file

from kimi_mini import KimiForCausalLM, preset
from kimi_mini.serving import options
from kimi_mini.serving.executor import ModelExecutor
from tests.kimi_mini.golden_cases import FOLDER, goldens
from tests.scripts.running import FOLDER as FOLDER_OF_SCRIPTS
from tests.scripts.running import as_a_command, in_this_process, load

RADIX = ("--model", "nano", "--prefix-cache", "radix")
BLOCKS = ("--model", "nano", "--prefix-cache", "blocks")


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
    assert "recurrent 884,736 B + conv 124,416 B (fixed), latent 1,024 B a token" in last


def test_json_holds_each_request_and_what_became_of_it(generate):
    done = generate("--model", "nano", "--prompt", "hé", "--max-tokens", "5", "--json")
    out = json.loads(done.stdout)
    (request,) = out["requests"]
    assert request["prompt"] == "hé" and request["prompt_ids"] == [1, 107, 198, 172]
    assert len(request["output_ids"]) == 5 and request["finish_reason"] == "length"
    timings = request["timings"]
    assert timings["prefill_tokens"] == 4 and timings["decode_tokens"] == 4
    assert 0 < timings["first_token_seconds"] < timings["prefill_seconds"] + 1
    assert out["totals"]["prefill_tokens"] == 4 and out["totals"]["steps"] == 5
    for pool in out["pools"].values():
        assert pool["free"] == pool["size"] > 0
    sizes = out["pools"]["slots"]
    assert sizes["unit_bytes"] == sizes["recurrent_bytes"] + sizes["conv_bytes"]


def test_prompts_of_all_kinds_run_together_in_the_order_given(generate, tmp_path):
    (tmp_path / "p.txt").write_bytes(b"from a file\n\xff")
    done = generate(
        "--model", "nano", "--prompt-ids", "[5,6]", "--prompt", "a", "--prompt-file",
        str(tmp_path / "p.txt"), "--prompt", "b", "--n", "2", "--temperature", "0.9", "--json",
        "--max-tokens", "6", "--logprobs", "2", "--prompt-logprobs", "0",
    )  # fmt: skip
    out = json.loads(done.stdout)["requests"]
    assert [(r["request_id"], r["index"]) for r in out] == [
        (f"request-{i}", k) for i in range(4) for k in range(2)
    ]
    assert [r["prompt_ids"][:3] for r in out[::2]] == [[5, 6], [1, 100], [1, 105, 117], [1, 101]]
    assert out[4]["prompt_ids"][-1] == 0xFF + 3
    for one, other in zip(out[::2], out[1::2], strict=True):
        assert one["output_ids"] != other["output_ids"]
        assert one["prompt_logprobs"] == other["prompt_logprobs"]
        assert len(one["logprobs"]) == len(one["output_ids"])
        assert {len(entry) for entry in one["logprobs"]} <= {2, 3}
        assert one["prompt_logprobs"][0] is None
        for entry, token in zip(one["prompt_logprobs"][1:], one["prompt_ids"][1:], strict=True):
            assert [e["token_id"] for e in entry] == [token]


def test_what_a_request_gets_does_not_depend_on_what_runs_with_it(generate):
    one = ("--prompt", "alone", "--temperature", "0.8", "--seed", "5", "--dtype", "float64")
    common = ("--model", "nano", "--max-tokens", "20", "--threads", "1", "--json")
    alone = json.loads(generate(*common, *one).stdout)["requests"][0]
    room = ("--state-slots", "2", "--kv-pages", "5", "--max-batch-tokens", "7")
    many = generate(*common, *one, "--prompt", "another one", "--prompt-ids", "9", *room).stdout
    assert json.loads(many)["requests"][0]["output_ids"] == alone["output_ids"]


def test_several_samples_are_printed_under_their_names(generate):
    done = generate("--model", "nano", "--prompt-ids", "5", "--n", "2", "--max-tokens", "3")
    lines = done.stdout.splitlines()
    assert "[prompt 1, sample 1, length]" in lines and "[prompt 1, sample 2, length]" in lines


def test_a_stop_string_ends_the_text_before_it(generate):
    args = ("--model", "nano", "--prompt", "stop", "--max-tokens", "30", "--json")
    whole = json.loads(generate(*args).stdout)["requests"][0]
    text = whole["text"]
    stop = text[5:7]
    (cut,) = json.loads(generate(*args, "--stop", stop, "--stop", "zzzz").stdout)["requests"]
    assert cut["text"] == text[: text.index(stop)]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
    assert whole["output_ids"][: len(cut["output_ids"])] == cut["output_ids"]
    assert len(cut["output_ids"]) < 30


@pytest.mark.parametrize("backend", ["torch", "reference", "native"])
def test_a_checkpoint_folder_gives_its_recorded_tokens(generate, backend):
    golden = goldens("k3-tiny-mxfp4")
    done = generate(
        "--model", str(FOLDER / "k3-tiny-mxfp4"), "--backend", backend, "--max-tokens", "16",
        "--prompt-ids", ",".join(map(str, golden["p17.input_ids"].tolist())), "--json",
    )  # fmt: skip
    assert json.loads(done.stdout)["requests"][0]["output_ids"] == golden["p17.greedy_ids"].tolist()


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
        json.loads(generate(*args, "--seed", seed).stdout)["requests"][0]["output_ids"]
        for seed in "334"
    )
    assert one == two != other


@pytest.mark.parametrize(
    "args, message",
    [
        (("--prompt", ""), "the prompt is empty"),
        (("--prompt-ids", ""), "the prompt is empty"),
        (("--prompt-ids", "1,x"), "whole numbers"),
        (("--prompt", "a", "--prompt", "", "--model", "nano"), "the prompt is empty"),
        (("--prompt-file", "nowhere.txt"), "nowhere.txt"),
        (("--mamba-track-interval", "16"), "prefix_cache 'none' has no options"),
        (
            ("--prefix-cache", "radix", "--mamba-max-states-per-path", "0"),
            "max_states_per_path must be -1 (no cap) or at least 1, got 0",
        ),
        (
            ("--prefix-cache", "radix", "--mamba-radix-cache-strategy", "lazy"),
            "strategy must be one of no_buffer, extra_buffer, extra_buffer_lazy, auto; got 'lazy'",
        ),
        (("--prefix-cache", "radix", "--compat", "vllm"), "must be sglang; got 'vllm'"),
        (
            ("--prefix-cache", "radix", "--state-chunk", "0"),
            "state_chunk must be at least 1, got 0",
        ),
        (("--prefix-cache", "radix", "--mamba-track-interval", "-1"), "track_interval must be at"),
        (
            ("--prefix-cache", "radix", "--mamba-radix-cache-strategy", "no_buffer"),
            "needs pages of one token, got 16",
        ),
        (
            (*RADIX, "--compat", "sglang", "--page", "4", "--state-chunk", "20"),
            "multiples of 20 tokens, which the backend cannot export",
        ),
        ((*RADIX, "--checkpoint-at", "0"), "checkpoint_at must be 1 or more tokens, got 0"),
        (("--repeat", "0"), "--repeat must be at least 1, got 0"),
        (("--turns", "chat.txt", "--repeat", "2"), "--turns is one conversation"),
        (("--turns", "chat.txt", "--n", "2"), "--turns is one conversation"),
        (("--turns", "chat.txt", "--prompt", "a", "--prompt", "b"), "--turns is one conversation"),
        ((*RADIX, "--turns", "nowhere.txt"), "nowhere.txt"),
        ((*RADIX, "--turns", "."), "directory"),
        ((*BLOCKS, "--state-chunk", "64"), "prefix_cache 'blocks' has compat"),
        ((*BLOCKS, "--compat", "sglang"), "must be vllm; got 'sglang'"),
        ((*BLOCKS, "--mamba-block-size", "0"), "state_block must be at least 1, got 0"),
        ((*BLOCKS, "--prefix-match-unit", "5"), "must divide every block, got 5 for blocks of [16"),
        ((*BLOCKS, "--prefix-match-unit", "32"), "must divide every block, got 32 for blocks"),
        (
            (*BLOCKS, "--prefix-cache-retention-interval", "40"),
            "a positive multiple of the scheduler block 64, got 40",
        ),
        (
            (*BLOCKS, "--prefix-cache-retention-interval", "-64"),
            "retention must be at least 0, got -64",
        ),
        ((*BLOCKS, "--prefix-cache-retention-interval", "all"), "or tokens from 0 on; got 'all'"),
        ((*BLOCKS, "--checkpoint-at", "0"), "checkpoint_at must be 1 or more tokens, got 0"),
        ((*BLOCKS, "--admission", "second"), "admission must be one of all, second-hit, marconi;"),
        ((*RADIX, "--eviction", "fifo"), "eviction must be one of lru, flop-aware, auto; got 'fi"),
        ((*RADIX, "--eviction-alpha", "1"), "is for eviction 'flop-aware', got 1.0 for 'lru'"),
        ((*BLOCKS, "--eviction", "flop-aware", "--eviction-alpha", "-1"), "number from 0 on, got"),
        ((*RADIX, "--compat", "sglang", "--eviction", "auto"), "own rules, which know no policies"),
        ((*BLOCKS, "--compat", "vllm", "--admission", "all"), "know no policies; got admission"),
        (("--admission", "marconi"), "prefix_cache 'none' has no options; got admission"),
        (("--prefix-cache", "tree"), "invalid choice"),
        (("--stop", ""), "stop must be"),
        (("--n", "0"), "n must be an integer in 1..16384, got 0"),
        (("--top-p", "nan"), "top_p must be a number in 0..1, got nan"),
        (("--top-k", "-2"), "top_k must be"),
        (("--min-p", "1.5"), "min_p must be"),
        (("--min-tokens", "9", "--max-tokens", "3"), "min_tokens must be at most max_tokens"),
        (("--stop-token-id", "320", "--model", "nano"), "stop token id 320 is not in"),
        (("--kv-pages", "7", "--model", "nano"), "118 tokens need 8 pages; the pool has 7"),
        (("--state-slots", "0", "--model", "nano"), "state_slots must be at least 1, got 0"),
        (("--cache-bytes", "5000", "--model", "nano"), "5,000 bytes of cache do not hold"),
        (("--max-batch-tokens", "0", "--model", "nano"), "max_batch_tokens must be at least 1"),
        (("--prefill-chunk", "-3", "--model", "nano"), "prefill_chunk must be at least 1"),
        (("--prompt-ids", str([5] * 1025), "--model", "nano"), "1,025 tokens; this model's"),
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
        (("--max-tokens", "-1", "--model", "nano"), "max_tokens must be"),
        (("--temperature", "nan", "--model", "nano"), "temperature must be 0"),
        (("--backend", "native", "--model", "nano"), "'native' is not available"),
        (("--dtype", "int8"), "invalid choice"),
        (("--max-tokens", "abc"), "invalid int value: 'abc'"),
        (("--foo",), "unrecognized arguments: --foo"),
        (("--prompt-ids", "[" * 5000), "whole numbers"),
        (("--prompt-ids", "9" * 5000), "whole numbers"),
        (("--prompt-ids", "x" * 5000), "whole numbers"),
        (("--n", "1000000000"), "n must be an integer in 1..16384"),
        (("--logprobs", "1"), "shown with --json only"),
        (("--cache-bytes", "1000000", "--state-slots", "1000", "--model", "nano"), "47,287,424"),
        (("--repeat", "0"), "--repeat must be at least 1, got 0"),
        (("--turns", "x", "--repeat", "2"), "--turns is one conversation"),
        (("--checkpoint-at", "9", "--model", "nano"), "--checkpoint-at is for a prefix cache"),
        (("--cache-salt", "", "--model", "nano"), "--cache-salt is for a prefix cache"),
        (("--skip-read", "--model", "nano"), "--skip-read is for a prefix cache"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(
    generate, monkeypatch, args, message, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KIMI_MINI_NATIVE", "0")
    done = generate(*args)
    assert done.returncode == 2
    assert done.stdout == ""
    notes = ("nano:", "mini:", "KDA ")
    lines = [line for line in done.stderr.splitlines() if not line.startswith(notes)]
    assert len(lines) == 1 and message in lines[0] and len(lines[0]) < 500
    assert not list(tmp_path.iterdir())


def test_a_prompt_may_hold_any_bytes(generate):
    """A command line that is not UTF-8 arrives as surrogates; its bytes are tokens all the same."""
    done = generate(
        "--model", "nano", "--prompt", b"a\xff".decode("utf-8", "surrogateescape"), "--json"
    )
    assert json.loads(done.stdout)["requests"][0]["prompt_ids"] == [1, 100, 258]


def test_nothing_run_is_nothing_counted(generate):
    done = generate("--model", "nano", "--max-tokens", "0", "--json")
    out = json.loads(done.stdout)
    (request,) = out["requests"]
    assert request["finish_reason"] == "length" and request["output_ids"] == []
    assert request["timings"]["prefill_tokens_per_second"] == 0
    assert out["totals"]["steps"] == 0


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
    run = ModelExecutor.run

    def watched(self, plans, wanted):
        seen.append(len(capsys.readouterr().out))
        return run(self, plans, wanted)

    monkeypatch.setattr(ModelExecutor, "run", watched)
    script.main(["--model", "nano", "--prompt-ids", "5", "--max-tokens", "30"])
    assert sum(n > 0 for n in seen[1:]) > 10


def test_a_file_is_a_prompt_byte_for_byte(generate, tmp_path):
    (tmp_path / "p").write_bytes(b"a\r\nb\rc\n")
    done = generate("--model", "nano", "--prompt-file", str(tmp_path / "p"), "--json")
    ids = json.loads(done.stdout)["requests"][0]["prompt_ids"]
    assert bytes(i - 3 for i in ids[1:]) == b"a\r\nb\rc\n"


def test_the_example_of_the_readme_does_what_the_script_does(generate, capsys, monkeypatch):
    text = generate("--max-tokens", "64", "--threads", "1").stdout.split("\nprefill ")[0]
    monkeypatch.setattr("sys.path", [str(FOLDER_OF_SCRIPTS.parent), *sys.path])
    runpy.run_path(str(FOLDER_OF_SCRIPTS.parent / "examples" / "generate.py"))
    assert capsys.readouterr().out.startswith(text)


def test_progress_of_long_prompts_is_cleared_before_the_text(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    load("generate.py").main(
        ["--model", "nano", "--prompt-ids", str([5] * 100), "--prefill-chunk", "40"]
    )
    seen = capsys.readouterr().err
    assert "prefill 40/100" in seen and "prefill 80/100" in seen
    assert seen.endswith("\r\033[K")


def test_a_reader_that_goes_away_is_no_error_of_ours(tmp_path):
    command = f"{sys.executable} {FOLDER_OF_SCRIPTS / 'generate.py'} --model nano --max-tokens 400"
    shell = f"{command} | head -c 5 > /dev/null; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 141
    assert "Traceback" not in done.stderr


# --- with a prefix cache --------------------------------------------------------------------------

EXACTLY = ("--model", "nano", "--dtype", "float64", "--threads", "1", "--json", "--ignore-eos")
LONG = "A state is what is left of all that was read, and it cannot be cut. " * 3  # 205 tokens


def requests_of(generate, *args):
    done = generate(*EXACTLY, *args)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["requests"]


@pytest.mark.parametrize("cache", ["radix", "blocks"])
def test_a_repeated_prompt_is_read_from_the_cache_and_gives_the_same_text(generate, cache):
    args = ("--prompt", LONG, "--max-tokens", "12", "--repeat", "3", "--logprobs", "1")
    cold = requests_of(generate, *args)
    hit = requests_of(generate, *args, "--prefix-cache", cache)
    assert [r["request_id"] for r in hit] == ["request-0", "request-1", "request-2"]
    for one, other in zip(hit, cold, strict=True):
        assert (one["text"], one["output_ids"]) == (other["text"], other["output_ids"])
        for mine, theirs in zip(one["logprobs"], other["logprobs"], strict=True):
            assert [e["token_id"] for e in mine] == [e["token_id"] for e in theirs]
            for a, b in zip(mine, theirs, strict=True):
                assert abs(a["logprob"] - b["logprob"]) < 1e-9
    assert [r["cache"]["cached_tokens"] for r in cold] == [0] * 3
    assert {r["cache"]["not_more_because"] for r in cold} == {"no reuse"}
    first, second, third = (r["cache"] for r in hit)
    assert first == {
        "cached_tokens": 0, "token_hit": 0, "replayed_tokens": 0, "junction": None,
        "not_more_because": "unknown prefix", "checkpoint_at": [],
    }  # fmt: skip
    assert second == third
    assert (second["cached_tokens"], second["not_more_because"]) == (192, "grid")
    assert [r["timings"]["prefill_tokens"] for r in hit] == [205, 13, 13]
    assert [r["timings"]["prefill_tokens"] for r in cold] == [205] * 3


TURNS = {
    "radix": [
        ("--mamba-radix-cache-strategy", "no_buffer", "--page", "1"),
        ("--mamba-radix-cache-strategy", "extra_buffer_lazy", "--mamba-track-interval", "32"),
        ("--compat", "sglang", "--mamba-track-interval", "64", "--prefill-chunk", "100"),
        ("--state-chunk", "16", "--mamba-max-states-per-path", "2", "--prefill-chunk", "40"),
    ],
    "blocks": [
        ("--mamba-block-size", "32", "--prefix-match-unit", "8", "--prefill-chunk", "100"),
        ("--prefix-cache-retention-interval", "none"),
        ("--prefix-cache-retention-interval", "64", "--mamba-block-size", "16", "--page", "32"),
        ("--compat", "vllm", "--prefill-chunk", "128"),
    ],
}


@pytest.mark.parametrize(
    "options",
    [("--prefix-cache", cache, *own) for cache, rows in TURNS.items() for own in rows],
    ids=lambda options: "".join(options[1:4]),
)
def test_turns_are_read_from_the_cache_by_any_rules_and_say_the_same(generate, options, tmp_path):
    (tmp_path / "chat.txt").write_text("What is cut?\nAnd what is left of it?\nThen go on.\n")
    args = ("--prompt", LONG, "--turns", str(tmp_path / "chat.txt"), "--max-tokens", "20")
    cold = requests_of(generate, *args)
    hit = requests_of(generate, *args, *options)
    assert [r["output_ids"] for r in hit] == [r["output_ids"] for r in cold]
    said = []
    for turn, request in enumerate(hit):
        ids = request["prompt_ids"]
        assert ids[: len(said)] == said and request["prompt"] is None
        assert (request["cache"]["cached_tokens"] >= 128) == (turn > 0)
        assert request["cache"]["cached_tokens"] < len(ids)
        said = [*ids, *request["output_ids"]]
    text = bytes(i - 3 for i in hit[0]["prompt_ids"][1:]).decode()
    assert text == LONG + "What is cut?"


def test_turns_may_be_all_there_is_or_follow_ids(generate, tmp_path):
    (tmp_path / "chat.txt").write_bytes(b"one\ntwo\xff")
    turns = ("--turns", str(tmp_path / "chat.txt"), "--max-tokens", "3", "--prefix-cache", "radix")
    first, second = requests_of(generate, *turns)
    assert first["prompt_ids"] == [1, *(b + 3 for b in b"one")]
    assert second["prompt_ids"] == [
        *first["prompt_ids"], *first["output_ids"], *(b + 3 for b in b"two\xff")
    ]  # fmt: skip
    first, _ = requests_of(generate, *turns, "--prompt-ids", "9,8,7")
    assert first["prompt_ids"] == [9, 8, 7, *(b + 3 for b in b"one")]


@pytest.mark.parametrize(
    "content, message",
    [(None, "chat.txt"), (b"", "there is no turn in chat.txt"), (b" \r\n\n", "there is no turn")],
)
def test_a_file_of_turns_is_read_before_the_model(
    generate, content, message, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / "chat.txt").write_bytes(content)
    monkeypatch.setattr(options, "open_engine", lambda args: pytest.fail("a model was loaded"))
    done = generate(*RADIX, "--turns", "chat.txt")
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "") and message in line


def test_blank_lines_are_no_turns_and_odd_characters_end_none(generate, tmp_path):
    (tmp_path / "chat.txt").write_bytes("\n a\u2028b\r\n\n \nc\x0cd".encode())
    args = ("--turns", str(tmp_path / "chat.txt"), "--max-tokens", "0")
    first, second = requests_of(generate, *args)
    assert first["prompt_ids"] == [1, *(b + 3 for b in " a\u2028b".encode())]
    assert second["prompt_ids"] == [*first["prompt_ids"], *(b + 3 for b in b"c\x0cd")]


def test_turns_before_one_that_does_not_fit_are_still_told(generate, tmp_path):
    """nano has 1024 tokens of context."""
    (tmp_path / "chat.txt").write_text("\n".join(["x" * 400] * 4))
    args = (*RADIX, "--turns", str(tmp_path / "chat.txt"), "--max-tokens", "5", "--json")
    done = generate(*args)
    out = json.loads(done.stdout)
    assert [len(r["prompt_ids"]) for r in out["requests"]] == [401, 806]
    assert out["error"].startswith("turn 3: ") and "1,211 tokens" in out["error"]
    (line,) = done.stderr.splitlines()
    assert (done.returncode, line) == (2, f"error: {out['error']}")
    (tmp_path / "chat.txt").write_text("x" * 2000)
    done = generate(*args)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: turn 1: ")


@pytest.mark.parametrize("cache", ["radix", "blocks"])
def test_controls_reach_the_cache(generate, cache):
    args = ("--prompt", LONG, "--max-tokens", "1", "--repeat", "2", "--prefix-cache", cache)
    unread = requests_of(generate, *args, "--skip-read")
    assert [r["cache"]["cached_tokens"] for r in unread] == [0, 0]
    assert unread[1]["cache"]["not_more_because"] == "no reuse"
    salted = requests_of(generate, *args, "--cache-salt", "a")
    assert [r["cache"]["cached_tokens"] for r in salted] == [0, 192]
    both = ("--prompt", LONG[:100], "--prompt", LONG[:60] + "else", "--max-batch-tokens", "101")
    named = requests_of(
        generate, *both, "--prefix-cache", cache, "--checkpoint-at", "60", "--max-tokens", "1"
    )
    assert [r["cache"]["cached_tokens"] for r in named] == [0, 48]
    assert named[0]["cache"]["checkpoint_at"] == [{"asked": 60, "kept": 48}]


@pytest.mark.parametrize("cache", [RADIX, BLOCKS], ids=lambda args: args[-1])
def test_a_person_is_told_what_was_cached_and_why_not_more(generate, cache):
    done = generate(*cache, "--prompt", LONG, "--max-tokens", "3", "--repeat", "2")
    lines = [line for line in done.stdout.splitlines() if "prompt tokens cached" in line]
    assert lines[0].startswith("[0 prompt tokens cached; not more: unknown prefix, first token ")
    assert lines[1].startswith("[192 prompt tokens cached; not more: grid, first token after ")
    assert all(line.endswith(" ms]") for line in lines)
    assert done.stdout.splitlines()[-1].startswith("prefill 218 tokens, ")


def test_without_a_cache_nothing_is_said_of_one(generate):
    done = generate("--model", "nano", "--prompt", "a", "--max-tokens", "3", "--repeat", "2")
    assert "cached" not in done.stdout


@pytest.mark.parametrize("cache", ["radix", "blocks"])
@pytest.mark.parametrize(
    "policies, cached",
    [
        (("--admission", "second-hit", "--eviction", "auto"), [0, 0, 192]),
        (("--eviction", "flop-aware", "--eviction-alpha", "0.5"), [0, 192, 192]),
    ],
    ids=["second hit", "flops"],
)
def test_policies_change_what_is_hit_and_not_what_is_said(generate, cache, policies, cached):
    args = ("--prompt", LONG, "--max-tokens", "12", "--repeat", "3")
    cold = requests_of(generate, *args)
    hit = requests_of(generate, *args, "--prefix-cache", cache, *policies)
    assert [r["output_ids"] for r in hit] == [r["output_ids"] for r in cold]
    assert [r["cache"]["cached_tokens"] for r in hit] == cached


def test_options_reach_the_engine_under_the_engines_own_names(generate):
    args = load("generate.py").parse(
        [
            *RADIX, "--mamba-radix-cache-strategy", "extra_buffer_lazy", "--state-chunk", "32",
            "--mamba-track-interval", "96", "--mamba-max-states-per-path", "5", "--compat",
            "sglang", "--page", "32",
        ]
    )  # fmt: skip
    cache = options.open_engine(args).cache
    assert type(cache).__name__ == "SGLangCache"
    assert (cache.strategy, cache.page, cache.tree.path_cap) == ("extra_buffer_lazy", 32, 5)
    assert (cache.grids.checkpoint, cache.decode_grid) == (32, 96)


def test_options_of_blocks_reach_the_engine_under_the_engines_own_names(generate):
    args = load("generate.py").parse(
        [
            *BLOCKS, "--mamba-block-size", "32", "--prefix-match-unit", "8",
            "--prefix-cache-retention-interval", "64", "--compat", "vllm",
        ]
    )  # fmt: skip
    cache = options.open_engine(args).cache
    assert type(cache).__name__ == "VLLMCache"
    assert (cache.sizes.states, cache.sizes.unit, cache.retention.interval) == ((32,), 8, 64)


@pytest.mark.filterwarnings("default")
def test_a_grid_that_no_piece_reaches_is_one_line_of_warning(generate):
    done = generate(
        *RADIX, "--compat", "sglang", "--prefill-chunk", "63", "--prompt", "a", "--max-tokens", "2"
    )
    assert done.returncode == 0
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("warning: "))
    assert "no piece of prefill is as long as the checkpoint grid (64 tokens" in line
