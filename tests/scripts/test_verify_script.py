"""scripts/verify_chunk_vs_recurrent.py: it holds, it can fail, and it says which part did."""

import json
import math

import pytest
import torch

from kernels import kda
from kernels.dispatcher import KDAKernelDispatcher
from kimi_mini import preset
from kimi_mini.workbench import verify_kernels, verify_stack
from kimi_mini.workbench.verify import Check, Tolerance, as_json, table
from tests.scripts.running import as_a_command, in_this_process

SCRIPT = "verify_chunk_vs_recurrent.py"


def test_as_a_command_from_anywhere_it_shows_three_levels_and_succeeds(tmp_path):
    done = as_a_command(SCRIPT, "--threads", "1", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    levels = ["kernel", "layer", "model"]
    gates = ["slow", "mixed", "saturated", "unbounded"]
    for words in (*levels, *gates, "equal keys", "chunks of 16", "token loop", "token by token"):
        assert words in done.stdout, words
    assert "all within what is allowed" in done.stdout
    assert "!" not in done.stdout


@pytest.mark.parametrize(
    ("dtype", "backend"),
    [("bfloat16", "native"), pytest.param("float64", "reference", marks=pytest.mark.slow)],
    ids=str,
)
def test_json_names_every_check_with_its_tolerance(dtype, backend, capsys, monkeypatch):
    args = ["--json", "--dtype", dtype, "--backend", backend, "--seed", "5"]
    done = in_this_process(SCRIPT, args, capsys, monkeypatch)
    report = json.loads(done.stdout)
    assert (done.returncode, report["ok"]) == (0, True)
    assert (report["dtype"], report["backend"], report["seed"]) == (dtype, backend, 5)
    assert {check["level"] for check in report["checks"]} == {"kernel", "layer", "model"}
    forms = {check["form"] for check in report["checks"]}
    own, other = ("native scan", "reference")[:: 1 if backend == "native" else -1]
    assert own in forms and other not in forms
    for check in report["checks"]:
        assert check["ok"] and check["error"] <= check["tolerance"], check


def test_a_wrong_chunk_scan_is_found_and_the_exit_code_is_1(capsys, monkeypatch):
    right = verify_kernels.kda_chunk_scan

    def wrong(q, k, v, g, beta, *rest, **options):
        return right(q, k, v, g.half().to(g.dtype), beta, *rest, **options)

    monkeypatch.setattr(verify_kernels, "kda_chunk_scan", wrong)
    monkeypatch.setattr(verify_kernels, "GATES", ["slow"])
    done = in_this_process(SCRIPT, ["--json"], capsys, monkeypatch)
    report = json.loads(done.stdout)
    assert (done.returncode, report["ok"]) == (1, False)
    wrong_ones = [check for check in report["checks"] if not check["ok"]]
    assert {check["level"] for check in wrong_ones} == {"kernel"}
    assert {"outputs", "recurrent", "exports"} <= {check["quantity"] for check in wrong_ones}
    assert all(check["form"].startswith("chunks") for check in wrong_ones)


def exceeding(checks):
    return {(check.form, check.quantity) for check in checks if not check.ok}


def test_a_decode_step_that_forgets_the_window_is_found(monkeypatch):
    right = kda.short_conv_step

    def wrong(x, weight, conv0):
        return right(x, weight, torch.zeros_like(conv0))

    monkeypatch.setattr(kda, "short_conv_step", wrong)
    net = verify_stack.open_subject("nano", torch.float32, 0, "torch")
    found = exceeding(verify_stack.model_checks(net, seed=0))
    for quantity in ("outputs", "recurrent", "conv", "latent"):
        assert ("pieces and decode", quantity) in found
    assert "stateless" not in {form for form, _ in found}
    layer = net.model.layers[0].self_attn
    found = exceeding(verify_stack.layer_checks(layer, "torch", torch.float32, seed=0))
    assert ("token by token", "outputs") in found


def test_states_that_change_places_are_found(monkeypatch):
    """Slots are full of NaN, so reading one that nobody has written is an infinite error."""
    right = KDAKernelDispatcher.plan

    def wrong(self, *arguments, **options):
        step = right(self, *arguments, **options)
        if step.extend is not None and self.backend.name == "torch":
            step.extend.slots.copy_(step.extend.slots.flip(0))
        return step

    monkeypatch.setattr(KDAKernelDispatcher, "plan", wrong)
    layer = verify_stack.open_subject("nano", torch.float32, 0, "torch").model.layers[0].self_attn
    found = exceeding(verify_stack.layer_checks(layer, "torch", torch.float32, seed=0))
    assert ("whole rows", "recurrent") in found


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--config", "micro"], "neither a preset (nano, mini, deep, bench, k3) nor a file"),
        (["--config", "k3"], "would take"),
        (["--backend", "native"], "'native' is not available"),
        (["--threads", "0"], "--threads must be 1.."),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(args, message, capsys, monkeypatch):
    monkeypatch.setenv("KIMI_MINI_NATIVE", "0")
    done = in_this_process(SCRIPT, args, capsys, monkeypatch)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_folder_or_a_config_file_may_stand_in_for_a_preset(tmp_path, capsys, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(preset("nano").to_json_dict()))
    for config in (tmp_path, tmp_path / "config.json"):
        net = verify_stack.open_subject(str(config), torch.float64, 3, "auto")
        assert net.config == preset("nano")
    net.save_pretrained(tmp_path / "saved")
    loaded = verify_stack.open_subject(str(tmp_path / "saved"), torch.float32, 7, "auto")
    assert torch.equal(loaded.lm_head.weight, net.lm_head.weight.float())
    (tmp_path / "config.json").write_text("{")
    done = in_this_process(SCRIPT, ["--config", str(tmp_path)], capsys, monkeypatch)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


def test_random_pieces_cover_every_token_once_and_mix_prefill_with_decode():
    lengths = [0, 1, 2, 3, 15, 49]
    mixed = 0
    for seed in range(20):
        steps = verify_stack.random_pieces(lengths, seed)
        done = [0] * len(lengths)
        for pieces in steps:
            assert len({piece.row for piece in pieces}) == len(pieces)
            counts = {piece.last - piece.first for piece in pieces}
            mixed += 1 in counts and max(counts) > 1
            for piece in pieces:
                assert piece.first == done[piece.row]
                done[piece.row] = piece.last
        assert done == lengths
        assert all(p.last - p.first <= 1 for pieces in steps for p in pieces if p.first >= 44)
    assert mixed > 20


def test_an_error_that_is_not_a_number_is_an_error():
    check = Check("kernel", "slow", "chunks of 16", "outputs", math.nan, 1e-6)
    assert not check.ok
    assert as_json([check]) == [check._asdict() | {"error": None, "ok": False}]
    assert "nan !" in table([check])


def test_the_table_has_a_line_for_each_comparison_and_marks_what_exceeds():
    tolerance = Tolerance(1e-6, 5e-6)
    shown = table(
        [
            Check("kernel", "slow", "loop", q, error, tolerance.of(q))
            for q, error in (("outputs", 2e-6), ("recurrent", 2e-6), ("cuts", 0.0))
        ]
    )
    header, line = shown.splitlines()
    assert header.split()[:5] == ["level", "case", "form", "outputs", "recurrent"]
    expected = "kernel slow loop 2.0e-06 ! 2.0e-06 - - - 0 1e-06 / 5e-06"
    assert " ".join(line.split()) == expected
