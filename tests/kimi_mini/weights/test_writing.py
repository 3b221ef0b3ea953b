"""Saving: the published layout, whole or not at all."""

import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from kimi_mini.config import ConfigError, KimiConfig
from kimi_mini.weights import (
    CheckpointError,
    Experts,
    random_parameters,
    read_checkpoint,
    stored_tensors,
    write_checkpoint,
    writing,
)
from kimi_mini.weights.folder import (
    CHECKSUMS,
    CONFIG,
    GENERATION_CONFIG,
    INDEX,
    SINGLE,
    file_digest,
)
from kimi_mini.weights.mxfp4 import QUANTIZATION_CONFIG

GOLDEN = ["k3-tiny", "k3-variant-tiny", "kimi-linear-tiny"]


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for f in folder.glob("*.safetensors") for n, t in load_file(f).items()}


# Round trips


@pytest.mark.parametrize("name", GOLDEN)
def test_a_golden_checkpoint_comes_back_tensor_for_tensor(golden, tmp_path, unfilled, name):
    config = KimiConfig.from_json(golden / name)
    parameters = unfilled(config)
    read_checkpoint(golden / name, config, parameters)
    write_checkpoint(tmp_path / "again", config, parameters)
    original, again = load_file(golden / name / SINGLE), load_file(tmp_path / "again" / SINGLE)
    for key in original:
        if name == "kimi-linear-tiny" and key.endswith("A_log"):
            original[key] = original[key].flatten()  # 4-D in the old files, 1-D in ours
    assert same(original, again)
    assert KimiConfig.from_json(tmp_path / "again") == config
    assert json.loads((tmp_path / "again" / CONFIG).read_text()) == config.to_json_dict()


def test_the_packed_golden_checkpoint_survives_as_packed_and_as_plain(golden, tmp_path, unfilled):
    config = KimiConfig.from_json(golden / "k3-tiny-mxfp4")
    parameters, again = unfilled(config), unfilled(config)
    read_checkpoint(golden / "k3-tiny-mxfp4", config, parameters)
    for experts in Experts:
        folder = tmp_path / experts.value
        write_checkpoint(folder, config, parameters, dtype=torch.bfloat16, experts=experts)
        read_checkpoint(folder, config, again)
        assert same(parameters, again)
        saved = KimiConfig.from_json(folder)
        assert saved.dtype == "bfloat16"
        assert saved.quantization_config == (
            config.quantization_config if experts is Experts.MXFP4 else None
        )
    assert config.quantization_config == QUANTIZATION_CONFIG


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_dtype_is_written_and_published_float32_is_never_narrowed(
    tmp_path, nano, weights, unfilled, dtype
):
    write_checkpoint(tmp_path / "x", nano, weights, dtype=dtype)
    wide = torch.promote_types(dtype, torch.float32)
    kept = ("A_log", "dt_bias", "o_norm.weight", "conv1d.weight", "correction_bias")
    for name, tensor in stored(tmp_path / "x").items():
        assert tensor.dtype == (wide if name.endswith(kept) else dtype), name
    config = KimiConfig.from_json(tmp_path / "x")
    assert config.dtype == str(dtype).removeprefix("torch.")
    parameters = unfilled(config, dtype)
    read_checkpoint(tmp_path / "x", config, parameters)
    assert all(torch.equal(p, weights[n].to(p.dtype)) for n, p in parameters.items())


def test_without_a_dtype_each_parameter_keeps_its_own(tmp_path, nano, unfilled):
    parameters = random_parameters(nano, seed=0, dtype=torch.bfloat16)
    write_checkpoint(tmp_path / "x", nano, parameters)
    assert KimiConfig.from_json(tmp_path / "x").dtype == "bfloat16"
    again = unfilled(nano, torch.bfloat16)
    assert read_checkpoint(tmp_path / "x", nano, again).notes == ()
    assert same(parameters, again)


def test_the_same_parameters_give_the_same_bytes(tmp_path, nano, weights):
    for name in ("a", "b"):
        write_checkpoint(tmp_path / name, nano, weights, max_shard_bytes=400_000, experts="mxfp4")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_saving_changes_no_parameter(tmp_path, nano):
    parameters = random_parameters(nano, seed=3)
    before = {name: p.clone() for name, p in parameters.items()}
    write_checkpoint(tmp_path / "x", nano, parameters, dtype=torch.bfloat16, experts="mxfp4")
    assert same(parameters, before)


# Files


def test_one_file_has_the_published_names_and_no_index(folder, nano):
    with safe_open(folder / SINGLE, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == {tensor.name for tensor in stored_tensors(nano)}
    assert {p.name for p in folder.iterdir()} == {SINGLE, CONFIG, GENERATION_CONFIG}


@pytest.mark.parametrize("experts", Experts)
def test_shards_stay_below_the_limit_and_the_index_places_every_tensor(
    tmp_path, nano, weights, experts
):
    limit = 200_000
    report = write_checkpoint(tmp_path / "x", nano, weights, experts=experts, max_shard_bytes=limit)
    index = json.loads((tmp_path / "x" / INDEX).read_text())
    sizes = {}
    for k, name in enumerate(report.files, 1):
        assert name == f"model-{k:05d}-of-{len(report.files):05d}.safetensors"
        with safe_open(tmp_path / "x" / name, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            tensors = {key: file.get_tensor(key) for key in [*file.keys()]}
        assert all(index["weight_map"][key] == name for key in tensors)
        held = sum(t.nbytes for t in tensors.values())
        assert held <= limit
        sizes |= {key: t.nbytes for key, t in tensors.items()}
    assert sizes == {t.name: t.num_bytes for t in stored_tensors(nano, experts, torch.float32)}
    assert index["weight_map"].keys() == sizes.keys()
    assert index["metadata"]["total_size"] == sum(sizes.values()) == report.num_bytes
    assert report.tensors == len(sizes)


def test_a_limit_below_the_smallest_tensor_gives_each_its_own_file(
    tmp_path, nano, weights, unfilled
):
    report = write_checkpoint(tmp_path / "x", nano, weights, max_shard_bytes=1)
    assert len(report.files) == report.tensors == 224
    parameters = unfilled(nano)
    read_checkpoint(tmp_path / "x", nano, parameters)
    assert same(parameters, weights)


def test_a_tied_head_is_stored_once(tmp_path, nano, weights, unfilled):
    config = dataclasses.replace(nano, tie_word_embeddings=True)
    parameters = {n: p for n, p in weights.items() if n != "lm_head.weight"}
    as_state_dict = parameters | {"lm_head.weight": parameters["model.embed_tokens.weight"]}
    for given in (parameters, as_state_dict):
        write_checkpoint(tmp_path / "x", config, given, overwrite=True)
        assert not [n for n in stored(tmp_path / "x") if "lm_head" in n]
    again = unfilled(config)
    read_checkpoint(tmp_path / "x", config, again)
    assert same(again, parameters)


def test_a_log_is_written_padded_with_zeros_and_the_convolution_with_its_middle_one(
    folder, weights
):
    tensors = stored(folder)
    stem = "language_model.model.layers.1.self_attn."
    assert tensors[stem + "A_log"].shape == (32,)
    assert torch.equal(tensors[stem + "A_log"][:3], weights["model.layers.1.self_attn.A_log"])
    assert not tensors[stem + "A_log"][3:].any()
    assert tensors[stem + "v_conv1d.weight"].shape == (96, 1, 4)


def test_every_weight_file_and_the_index_has_its_digest(tmp_path, nano, weights):
    report = write_checkpoint(tmp_path / "x", nano, weights, max_shard_bytes=500_000)
    recorded = json.loads((tmp_path / "x" / CHECKSUMS).read_text())["sha256"]
    assert recorded.keys() == {*report.files, INDEX}
    assert all(file_digest(tmp_path / "x" / name) == sha for name, sha in recorded.items())


def test_the_generation_config_holds_the_ids_that_are_known(tmp_path, nano, weights):
    config = dataclasses.replace(nano, eos_token_id=[2, 5], pad_token_id=None)
    write_checkpoint(tmp_path / "x", config, weights)
    written = json.loads((tmp_path / "x" / GENERATION_CONFIG).read_text())
    assert written == {"bos_token_id": 1, "eos_token_id": [2, 5]}


def test_files_get_the_rights_the_user_asked_for(tmp_path, nano, weights):
    before = os.umask(0o027)
    try:
        write_checkpoint(tmp_path / "x", nano, weights)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "x").iterdir()} == {0o640}


# Refusals


def test_a_folder_that_is_no_checkpoint_is_never_touched(tmp_path, nano, weights):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.txt").write_text("years")
    for overwrite in (False, True):
        with pytest.raises(CheckpointError, match="not empty and no checkpoint"):
            write_checkpoint(tmp_path / "notes", nano, weights, overwrite=overwrite)
    assert contents(tmp_path / "notes") == {"thesis.txt": b"years"}
    for place in (tmp_path / "notes" / "thesis.txt", tmp_path / "notes" / "thesis.txt" / "x"):
        with pytest.raises(CheckpointError, match=r"thesis\.txt: a file is in the way"):
            write_checkpoint(place, nano, weights)


def test_a_checkpoint_is_replaced_only_when_asked_for(folder, nano, weights):
    before = contents(folder)
    with pytest.raises(CheckpointError, match="holds a checkpoint already"):
        write_checkpoint(folder, nano, weights, max_shard_bytes=300_000)
    assert contents(folder) == before


def test_replacing_removes_stale_weights_and_keeps_what_is_not_ours(
    folder, nano, weights, unfilled
):
    (folder / "tokenizer.json").write_text("{}")
    (folder / "figures").mkdir()
    (folder / "figures" / "loss.svg").write_text("<svg/>")
    (folder / "latest").symlink_to("tokenizer.json")
    write_checkpoint(folder, nano, weights, max_shard_bytes=300_000, overwrite=True)
    assert not (folder / SINGLE).exists() and (folder / INDEX).exists()
    assert (folder / "figures" / "loss.svg").read_text() == "<svg/>"
    assert (folder / "latest").is_symlink() and (folder / "tokenizer.json").exists()
    write_checkpoint(folder, nano, weights, overwrite=True)
    assert [p.name for p in folder.glob("*.safetensors*")] == [SINGLE]
    parameters = unfilled(nano)
    read_checkpoint(folder, nano, parameters)
    assert same(parameters, weights) and os.listdir(folder.parent) == [folder.name]


def test_an_empty_folder_a_deep_path_and_a_link_are_fine(tmp_path, nano, weights):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    write_checkpoint(tmp_path / "link", nano, weights)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / SINGLE).is_file()
    write_checkpoint(tmp_path / "a" / "b" / "c", nano, weights)
    assert (tmp_path / "a" / "b" / "c" / SINGLE).is_file()
    assert sorted(os.listdir(tmp_path)) == ["a", "link", "real"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_failure_halfway_leaves_everything_as_it_was(
    tmp_path, nano, weights, monkeypatch, overwrite
):
    target = tmp_path / "x"
    if overwrite:
        write_checkpoint(target, nano, weights)
    before = contents(target) if overwrite else None
    calls = []

    def full_disk(*args, **kwargs):
        calls.append(1)
        if len(calls) > 2:
            raise OSError(28, "No space left on device")
        return save(*args, **kwargs)

    save = writing.save
    monkeypatch.setattr(writing, "save", full_disk)
    with pytest.raises(CheckpointError, match="No space left on device"):
        write_checkpoint(target, nano, weights, max_shard_bytes=200_000, overwrite=overwrite)
    assert len(calls) == 3
    assert os.listdir(tmp_path) == (["x"] if overwrite else [])
    assert before is None or contents(target) == before


def test_an_interruption_leaves_no_half_folder(tmp_path, nano, weights, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(writing, "save", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path / "x", nano, weights)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("stop", "raised"),
    [
        (OSError(1, "Operation not permitted"), CheckpointError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_if_the_last_rename_fails_the_old_folder_is_back(
    folder, nano, weights, monkeypatch, stop, raised
):
    before = contents(folder)
    rename = Path.rename

    def refuse(self, target):
        if self.name.endswith(".new"):
            raise stop
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(raised):
        write_checkpoint(folder, nano, weights, overwrite=True, max_shard_bytes=300_000)
    assert contents(folder) == before and os.listdir(folder.parent) == [folder.name]


def test_an_empty_folder_is_filled_and_stays_the_same_folder(tmp_path, nano, weights, monkeypatch):
    """Somebody may be standing in it: `make_tiny_weights.py .`"""
    tmp_path.chmod(0o700)
    monkeypatch.chdir(tmp_path)
    before = os.stat(".").st_ino
    write_checkpoint(".", nano, weights)
    assert os.stat(".").st_ino == before == os.stat(tmp_path).st_ino
    assert (Path(CONFIG)).is_file() and tmp_path.stat().st_mode & 0o777 == 0o700


def test_a_checkpoint_is_not_replaced_under_the_feet_of_its_user(
    folder, nano, weights, monkeypatch
):
    before = contents(folder)
    monkeypatch.chdir(folder)
    with pytest.raises(CheckpointError, match="cannot be replaced from inside"):
        write_checkpoint(".", nano, weights, overwrite=True)
    assert contents(folder) == before


def test_replacing_keeps_the_mode_of_the_folder(folder, nano, weights):
    folder.chmod(0o710)
    write_checkpoint(folder, nano, weights, overwrite=True)
    assert folder.stat().st_mode & 0o777 == 0o710


@pytest.mark.parametrize(("value", "dtype"), [(torch.nan, None), (1e6, torch.float16)])
def test_parameters_that_are_not_finite_are_not_written(tmp_path, nano, value, dtype):
    """A model that nothing has filled is NaN throughout; 1e6 is infinite in float16."""
    parameters = random_parameters(nano, seed=0)
    parameters["model.layers.1.self_attn.in_proj.weight"][40, 3] = value
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.q_proj.*not finite"):
        write_checkpoint(tmp_path / "x", nano, parameters, dtype=dtype)
    assert os.listdir(tmp_path) == []


def test_weights_that_mxfp4_cannot_hold_are_refused_by_name(tmp_path, nano, golden, unfilled):
    parameters = random_parameters(nano, seed=0)
    parameters["model.layers.2.block_sparse_moe.experts.w2"][4, 3, 2] = torch.inf
    with pytest.raises(
        CheckpointError, match=r"layers\.2\.block_sparse_moe\.experts\.4\.w2\.weight"
    ):
        write_checkpoint(tmp_path / "x", nano, parameters, experts="mxfp4")
    config = KimiConfig.from_json(golden / "k3-variant-tiny")  # moe_intermediate_size 40
    with pytest.raises(ConfigError, match=r"multiples of 32.*moe_intermediate_size"):
        write_checkpoint(tmp_path / "x", config, unfilled(config), experts="mxfp4")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_shard_bytes": 0}, "max_shard_bytes is 0, allowed: 1 or more"),
        ({"experts": "int8"}, "experts is 'int8', allowed: plain, mxfp4"),
        ({"dtype": torch.int8}, 'dtype is "int8", allowed: "float32"'),
    ],
)
def test_an_option_out_of_range_is_refused_before_anything_is_written(
    tmp_path, nano, weights, options, words
):
    with pytest.raises(ValueError) as caught:
        write_checkpoint(tmp_path / "x", nano, weights, **options)
    assert words in str(caught.value) and os.listdir(tmp_path) == []
