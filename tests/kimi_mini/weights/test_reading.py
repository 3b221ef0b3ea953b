"""Loading: all problems told at once before anything changes; published quirks read right."""

import dataclasses
import json
import random
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kimi_mini.config import KimiConfig
from kimi_mini.weights import CheckpointError, read_checkpoint, write_checkpoint
from kimi_mini.weights.folder import CHECKSUMS, INDEX, SINGLE, file_digest
from kimi_mini.weights.names import model_tensors

K3 = "language_model.model."
EXPERT = K3 + "layers.1.block_sparse_moe.experts.2.w1.weight"
EMBEDDING, HEAD = K3 + "embed_tokens.weight", "language_model.lm_head.weight"
A_LOG = K3 + "layers.0.self_attn.A_log"
CONV = K3 + "layers.0.self_attn.k_conv1d.weight"
BIAS = "model.layers.1.block_sparse_moe.gate.e_score_correction_bias"


def refused(folder, config, unfilled, **options) -> CheckpointError:
    """The error of a load, which must leave every parameter as it was and say it in one line."""
    parameters = unfilled(config)
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(folder, config, parameters, **options)
    assert all(parameter.isnan().all() for parameter in parameters.values())
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)
    return caught.value


@pytest.fixture
def sharded(tmp_path, nano, weights) -> Path:
    """The same checkpoint in several files with an index, without digests."""
    folder = tmp_path / "sharded"
    write_checkpoint(folder, nano, weights, max_shard_bytes=300_000)
    (folder / CHECKSUMS).unlink()
    return folder


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# Golden checkpoints


@pytest.mark.parametrize("name", ["k3-tiny", "k3-variant-tiny", "kimi-linear-tiny"])
def test_a_golden_checkpoint_fills_every_parameter_with_its_own_tensors(golden, unfilled, name):
    config = KimiConfig.from_json(golden / name)
    parameters = unfilled(config)
    report = read_checkpoint(golden / name, config, parameters)
    assert not any(parameter.isnan().any() for parameter in parameters.values())
    stored = {
        stored.removeprefix("language_model."): tensor
        for stored, tensor in load_file(golden / name / SINGLE).items()
    }
    assert report == (golden / name, len(stored), 0, 0, ())
    layers = "model.layers.{}.self_attn.{}"
    kda, mla = config.kda_layer_ids[-1], config.mla_layer_ids[-1]
    names = [layers.format(kda, f"{x}_proj.weight") for x in ("q", "k", "v", "f_a", "b")]
    gate = "g_proj" if config.linear_attn_config.use_full_rank_gate else "g_a_proj"
    names.append(layers.format(kda, gate + ".weight"))
    fused = parameters[layers.format(kda, "in_proj.weight")]
    assert torch.equal(fused, torch.cat([stored[n] for n in names]))
    query = "q_a_proj.weight" if config.q_lora_rank else "q_proj.weight"
    names = [layers.format(mla, n) for n in (query, "kv_a_proj_with_mqa.weight", "g_proj.weight")]
    fused = parameters[layers.format(mla, "in_proj.weight")]
    assert torch.equal(fused, torch.cat([stored[n] for n in names if n in stored]))
    conv = torch.cat([stored[layers.format(kda, f"{x}_conv1d.weight")] for x in "qkv"])
    assert torch.equal(parameters[layers.format(kda, "conv_weight")], conv.squeeze(1))
    moe = f"model.layers.{kda}.block_sparse_moe."
    w13 = parameters[moe + "experts.w13"]
    for e, half in ((0, "w1"), (3, "w3")):
        rows = w13[e].chunk(2)[half == "w3"]
        assert torch.equal(rows, stored[f"{moe}experts.{e}.{half}.weight"])
    names = ["routed_expert_down_proj", "shared_experts.gate_proj", "shared_experts.up_proj"]
    names = [f"{moe}{n}.weight" for n in names]
    fused = parameters[moe + "in_proj.weight"]
    assert torch.equal(fused, torch.cat([stored[n] for n in names if n in stored]))


def test_packed_experts_in_shards_are_decoded_and_vision_is_skipped_with_a_count(golden, unfilled):
    folder = golden / "k3-tiny-mxfp4"
    config = KimiConfig.from_json(folder)
    parameters = unfilled(config)
    report = read_checkpoint(folder, config, parameters)
    assert not any(parameter.isnan().any() for parameter in parameters.values())
    assert (report.tensors, report.packed, report.skipped_vision) == (458, 252, 8)
    notes = " / ".join(report.notes)
    assert re.search(r"169 stored as BF16 and loaded as float32", notes)
    assert "252 expert weights decoded from MXFP4" in notes and "8 vision tensors skipped" in notes


def test_a_bf16_model_keeps_published_float32_tensors_without_a_note_on_them(golden, unfilled):
    folder = golden / "k3-tiny-mxfp4"
    config = KimiConfig.from_json(folder)
    parameters = unfilled(config, torch.bfloat16)
    report = read_checkpoint(folder, config, parameters)
    assert not any("stored as" in note for note in report.notes)
    wide = {name.rsplit(".", 1)[-1] for name, p in parameters.items() if p.dtype == torch.float32}
    assert {"A_log", "dt_bias", "conv_weight", "e_score_correction_bias"} < wide
    assert parameters["model.layers.0.self_attn.o_norm.weight"].dtype == torch.float32


# Prefixes


@pytest.mark.parametrize(
    ("prefix", "head"),
    [
        ("language_model.model.", "language_model.lm_head.weight"),
        ("language_model.", "language_model.lm_head.weight"),
        ("model.", "lm_head.weight"),
    ],
)
def test_three_prefixes_load_the_same_weights(folder, nano, weights, unfilled, edit, prefix, head):
    def rename(tensors):
        renamed = {n.replace(K3, prefix, 1): t for n, t in tensors.items() if n != HEAD}
        renamed[head] = tensors[HEAD]
        tensors.clear()
        tensors.update(renamed)

    edit(folder, rename)
    parameters = unfilled(nano)
    read_checkpoint(folder, nano, parameters)
    assert same(parameters, weights)


def test_a_name_without_a_known_prefix_is_unexpected(folder, nano, unfilled, edit):
    edit(folder, lambda t: t.update({"layers.0.q": torch.ones(1), "backbone.x": torch.ones(1)}))
    message = str(refused(folder, nano, unfilled))
    assert "unexpected tensors (2)" in message and "layers.0.q in model.safetensors" in message


# Missing, extra, doubled (BR-30)


def test_one_missing_expert_weight_is_named(folder, nano, unfilled, edit):
    edit(folder, lambda tensors: tensors.pop(EXPERT))
    message = str(refused(folder, nano, unfilled))
    assert "missing tensors (1): model.layers.1.block_sparse_moe.experts.2.w1.weight" in message


@pytest.mark.parametrize(
    "name",
    [
        K3 + "layers.1.block_sparse_moe.experts.8.w1.weight",
        K3 + "layers.5.input_layernorm.weight",
        K3 + "layers.3.self_attn.q_proj.weight",
        K3 + "layers.0.self_attn.g_a_proj.weight",
        K3 + "layers.0.self_attn.q_proj.bias",
        K3 + "layers.0.mlp.down_proj.weight_packed",
        "language_model.visual.x",
    ],
)
def test_a_tensor_that_the_config_has_no_place_for_is_named(folder, nano, unfilled, edit, name):
    edit(folder, lambda tensors: tensors.update({name: torch.ones(1)}))
    assert f"unexpected tensors (1): {name} in" in str(refused(folder, nano, unfilled))


def test_one_tensor_under_two_prefixes_is_doubled_even_if_equal(folder, nano, unfilled, edit):
    edit(folder, lambda t: t.update({"model.norm.weight": t[K3 + "norm.weight"].clone()}))
    message = str(refused(folder, nano, unfilled))
    assert "doubled tensors (1)" in message
    assert f"{K3}norm.weight in model.safetensors and model.norm.weight in" in message


def test_one_tensor_in_two_shards_is_doubled(sharded, nano, unfilled, edit):
    last = sorted(sharded.glob("*.safetensors"))[-1]
    edit(last, lambda tensors: tensors.update({EMBEDDING: torch.zeros(320, 64)}))
    message = str(refused(sharded, nano, unfilled))
    assert f"doubled tensors (1): {EMBEDDING} in" in message and last.name in message


def test_a_missing_shard_is_told_once_with_its_count(sharded, nano, unfilled):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    held = len(load_file(shard))
    shard.unlink()
    message = str(refused(sharded, nano, unfilled))
    assert message.endswith(f"missing files (1): {shard.name} with {held} tensor(s)")


def test_a_damaged_shard_is_told_once_and_not_as_missing_tensors(sharded, nano, unfilled):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    message = str(refused(sharded, nano, unfilled))
    assert f"damaged files (1): {shard.name}: the data is cut short" in message
    assert "missing" not in message


def test_a_damaged_single_file_is_told_alone(folder, nano, unfilled):
    (folder / SINGLE).write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    message = str(refused(folder, nano, unfilled))
    assert "damaged files (1): model.safetensors: a Git LFS pointer" in message
    assert "missing" not in message


def test_an_index_naming_a_tensor_that_its_shard_lacks_is_refused(sharded, nano, unfilled, edit):
    edit(sorted(sharded.glob("*.safetensors"))[0], lambda tensors: tensors.pop(EMBEDDING))
    message = str(refused(sharded, nano, unfilled))
    assert f"in a file without them (1): {EMBEDDING} in model-00001" in message


def test_an_index_that_does_not_name_a_stored_tensor_is_refused(sharded, nano, unfilled, edit_json):
    edit_json(sharded / INDEX, lambda index: index["weight_map"].pop(EMBEDDING))
    message = str(refused(sharded, nano, unfilled))
    assert f"where the index has none (1): {EMBEDDING} in model-00001" in message


def test_shards_without_index_are_refused_with_a_hint(sharded, nano, unfilled):
    (sharded / INDEX).unlink()
    assert "model-00001-of-" in (said := str(refused(sharded, nano, unfilled)))
    assert "no index" in said


def test_a_single_file_beside_an_index_without_it_is_ambiguous(sharded, folder, nano, unfilled):
    shutil.copy(folder / SINGLE, sharded / SINGLE)
    assert "remove one" in str(refused(sharded, nano, unfilled))


def test_an_index_over_one_file_and_other_files_beside_are_fine(folder, nano, weights, unfilled):
    names = load_file(folder / SINGLE)
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, SINGLE)}))
    save_file({"unrelated": torch.ones(2)}, folder / "goldens.safetensors")
    parameters = unfilled(nano)
    read_checkpoint(folder, nano, parameters)
    assert same(parameters, weights)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"{}", b'{"weight_map": []}', b"\xff", b"[" * 100_000],
)
def test_a_damaged_index_is_one_error(sharded, nano, unfilled, content):
    (sharded / INDEX).write_bytes(content)
    assert INDEX in str(refused(sharded, nano, unfilled))


@pytest.mark.parametrize(
    "file", ["../out.safetensors", "/etc/passwd", "a/b.safetensors", 3, "", ".."]
)
def test_an_index_cannot_lead_out_of_the_folder(sharded, nano, unfilled, edit_json, file):
    edit_json(sharded / INDEX, lambda index: index["weight_map"].update({EMBEDDING: file}))
    assert "allowed: a file of the folder" in str(refused(sharded, nano, unfilled))


def test_a_folder_without_weights_or_no_folder_is_one_error(tmp_path, nano, unfilled):
    assert "no such folder" in str(refused(tmp_path / "none", nano, unfilled))
    assert "neither model.safetensors nor" in str(refused(tmp_path, nano, unfilled))
    (tmp_path / "file").write_text("")
    assert "not a folder" in str(refused(tmp_path / "file", nano, unfilled))


# Shapes and dtypes


def test_a_transposed_tensor_is_refused_with_both_shapes(folder, nano, unfilled, edit):
    name = K3 + "layers.0.mlp.down_proj.weight"
    edit(folder, lambda tensors: tensors.update({name: tensors[name].T}))
    message = str(refused(folder, nano, unfilled))
    assert f"{name} in model.safetensors is [304, 64], allowed: [64, 304]" in message


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (A_LOG, [2]),
        (A_LOG, [1]),
        (A_LOG, [1, 1, 1, 1]),
        (A_LOG, [4, 8]),
        (CONV, [4, 96]),
        (CONV, [96, 4, 1]),
        (K3 + "layers.0.self_attn.dt_bias", [3, 32]),
        (K3 + "layers.0.self_attn_res_proj.weight".replace("attn_res", "attention_res"), [64]),
        (EMBEDDING, [321, 64]),
        (HEAD, [319, 64]),
        (K3 + "norm.weight", []),
    ],
)
def test_a_shape_that_is_not_published_is_refused_and_never_broadcast(
    folder, nano, unfilled, edit, name, shape
):
    edit(folder, lambda tensors: tensors.update({name: torch.ones(shape)}))
    message = str(refused(folder, nano, unfilled))
    assert f"misshapen tensors (1): {name} in model.safetensors is {shape}, allowed: [" in message


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.uint8, torch.float8_e4m3fn])
def test_a_plain_tensor_must_be_a_float(folder, nano, unfilled, edit, dtype):
    edit(folder, lambda t: t.update({EXPERT: t[EXPERT].to(dtype)}))
    message = str(refused(folder, nano, unfilled))
    assert f"mistyped tensors (1): {EXPERT}" in message and "allowed: BF16 F16 F32 F64" in message


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_float_dtypes_are_read_with_one_note(folder, nano, weights, unfilled, edit, dtype):
    edit(folder, lambda t: t.update({name: tensor.to(dtype) for name, tensor in t.items()}))
    parameters = unfilled(nano)
    report = read_checkpoint(folder, nano, parameters)
    (note,) = report.notes
    spelled = {torch.float64: "F64", torch.float16: "F16", torch.bfloat16: "BF16"}[dtype]
    assert note == f"tensors 224 stored as {spelled} and loaded as float32"
    assert same(parameters, {name: p.to(dtype).float() for name, p in weights.items()})


def test_all_problems_are_told_together_each_kind_with_its_count(folder, nano, unfilled, edit):
    def damage(tensors):
        for e in range(8):
            for w in ("w1", "w3"):
                del tensors[f"{K3}layers.1.block_sparse_moe.experts.{e}.{w}.weight"]
        tensors["language_model.model.extra"] = torch.ones(1)
        tensors["model.norm.weight"] = torch.ones(64)
        tensors[EMBEDDING] = torch.ones(64, 320)
        tensors[A_LOG] = torch.ones(3, dtype=torch.int64)

    edit(folder, damage)
    error = refused(folder, nano, unfilled)
    message = str(error)
    for words in ("missing tensors (16)", "and 6 more", "unexpected tensors (1)"):
        assert words in message
    for words in ("doubled tensors (1)", "misshapen tensors (1)", "mistyped tensors (1)"):
        assert words in message
    assert len(error.problems) == 20
    assert len([p for p in error.problems if p.startswith("missing tensors: model.layers.1")]) == 16


# MXFP4 by name


@pytest.fixture
def packed(tmp_path, nano, weights) -> Path:
    folder = tmp_path / "packed"
    write_checkpoint(folder, nano, weights, experts="mxfp4")
    (folder / CHECKSUMS).unlink()
    return folder


def test_plain_and_packed_experts_may_stand_side_by_side(packed, folder, nano, unfilled, edit):
    plain = load_file(folder / SINGLE)[EXPERT]

    def mix(tensors):
        del tensors[EXPERT + "_packed"], tensors[EXPERT + "_scale"]
        tensors[EXPERT] = plain

    edit(packed, mix)
    parameters = unfilled(nano)
    report = read_checkpoint(packed, nano, parameters)
    assert (report.tensors, report.packed) == (224, 95)
    w13 = parameters["model.layers.1.block_sparse_moe.experts.w13"]
    assert torch.equal(w13[2, :64], plain)


def test_the_quantisation_section_of_the_config_decides_nothing(packed, nano, unfilled):
    for section in (None, {"format": "nonsense"}):
        config = dataclasses.replace(nano, quantization_config=section)
        assert read_checkpoint(packed, config, unfilled(config)).packed == 96


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(EXPERT + "_scale"), "missing tensors (1): model.layers.1"),
        (lambda t: t.pop(EXPERT + "_packed"), "experts.2.w1.weight_packed"),
        (lambda t: t.update({EXPERT: torch.ones(64, 32)}), "both plain and packed"),
        (lambda t: t.update({EXPERT + "_scale": torch.ones(64, 1)}), "is F32, allowed: U8"),
        (lambda t: t.update({EXPERT + "_packed": t[EXPERT + "_packed"].char()}), "is I8, allowed"),
        (
            lambda t: t.update({EXPERT + "_scale": torch.ones(64, dtype=torch.uint8)}),
            "is [64], allowed: [64, 1]",
        ),
        (
            lambda t: t.update({EXPERT + "_packed": torch.ones(64, 32, dtype=torch.uint8)}),
            "is [64, 32], allowed: [64, 16]",
        ),
    ],
)
def test_half_or_doubtful_packed_weights_are_refused(packed, nano, unfilled, edit, change, words):
    edit(packed, change)
    assert words in str(refused(packed, nano, unfilled))


def test_packed_weights_of_an_impossible_width_are_refused(golden, tmp_path, unfilled, edit):
    folder = tmp_path / "variant"  # moe_intermediate_size is 40
    shutil.copytree(golden / "k3-variant-tiny", folder)
    config = KimiConfig.from_json(folder)
    stem = K3 + "layers.2.block_sparse_moe.experts.0.w2.weight"

    def pack(tensors):
        del tensors[stem]
        tensors[stem + "_packed"] = torch.zeros(32, 20, dtype=torch.uint8)
        tensors[stem + "_scale"] = torch.zeros(32, 2, dtype=torch.uint8)

    folder.chmod(0o755)
    (folder / SINGLE).chmod(0o644)
    edit(folder, pack)
    assert "width of 40" in str(refused(folder, config, unfilled))


# Tied embeddings (BR-29)


def tied_config(nano: KimiConfig, flag: bool | None) -> KimiConfig:
    raw = nano.to_json_dict()
    for section in (raw, raw["text_config"]):
        section.pop("tie_word_embeddings")
        if flag is not None:
            section["tie_word_embeddings"] = flag
    return KimiConfig.from_json(raw)


def load(folder, config, unfilled) -> dict[str, torch.Tensor]:
    parameters = unfilled(config)
    read_checkpoint(folder, config, parameters)
    assert not any(p.isnan().any() for p in parameters.values())
    return parameters


def test_tied_and_no_head_in_the_file_uses_the_embedding(folder, nano, weights, unfilled, edit):
    edit(folder, lambda tensors: tensors.pop(HEAD))
    parameters = load(folder, tied_config(nano, True), unfilled)
    assert "lm_head.weight" not in parameters
    assert torch.equal(
        parameters["model.embed_tokens.weight"], weights["model.embed_tokens.weight"]
    )


@pytest.mark.parametrize("flag", [False, None])
def test_untied_and_a_head_in_the_file_loads_the_head(folder, nano, weights, unfilled, flag):
    for _ in range(2):
        parameters = load(folder, tied_config(nano, flag), unfilled)
        assert same(parameters, weights)
    assert not torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])


@pytest.mark.parametrize("flag", [False, None])
def test_untied_and_no_head_in_the_file_is_an_error(folder, nano, unfilled, edit, flag):
    edit(folder, lambda tensors: tensors.pop(HEAD))
    message = str(refused(folder, tied_config(nano, flag), unfilled))
    assert "missing tensors (1): lm_head.weight (tie_word_embeddings is false)" in message


def test_tied_and_an_equal_head_in_the_file_is_quiet(folder, nano, unfilled, edit):
    edit(folder, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}))
    load(folder, tied_config(nano, True), unfilled)


def test_tied_and_another_head_in_the_file_warns_and_the_flag_wins(folder, nano, weights, unfilled):
    with pytest.warns(UserWarning, match="lm_head.weight differs from the embedding"):
        parameters = load(folder, tied_config(nano, True), unfilled)
    assert torch.equal(
        parameters["model.embed_tokens.weight"], weights["model.embed_tokens.weight"]
    )


def test_tied_and_a_misshapen_head_is_an_error(folder, nano, unfilled, edit):
    edit(folder, lambda tensors: tensors.update({HEAD: torch.ones(64, 320)}))
    assert "misshapen tensors (1)" in str(refused(folder, tied_config(nano, True), unfilled))


# A_log, convolution, heads (BR-59)


@pytest.mark.parametrize("shape", [(3,), (1, 1, 3, 1), (32,), (128,), (1, 1, 32, 1)])
def test_every_documented_shape_of_a_log_loads_the_same(
    folder, nano, weights, unfilled, edit, shape
):
    def reshape(tensors):
        flat = torch.zeros(torch.Size(shape).numel())
        flat[:3] = tensors[A_LOG][:3]
        tensors[A_LOG] = flat.view(shape)

    edit(folder, reshape)
    assert same(load(folder, nano, unfilled), weights)


def test_entries_of_a_log_beyond_the_heads_are_ignored_with_a_warning(
    folder, nano, weights, unfilled, edit
):
    edit(folder, lambda tensors: tensors[A_LOG][3:].fill_(9.0))
    with pytest.warns(UserWarning, match=r"beyond the heads.*layers\.0\.self_attn\.A_log"):
        parameters = load(folder, nano, unfilled)
    assert same(parameters, weights)


def test_both_documented_shapes_of_the_convolution_load_the_same(
    folder, nano, weights, unfilled, edit
):
    edit(folder, lambda t: t.update({n: x.squeeze(1) for n, x in t.items() if "conv1d" in n}))
    assert same(load(folder, nano, unfilled), weights)


# Digests


def flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_changed_payload_is_found_where_a_digest_is_recorded(tmp_path, nano, weights, unfilled):
    folder = tmp_path / "recorded"
    write_checkpoint(folder, nano, weights, max_shard_bytes=300_000)
    shard = sorted(folder.glob("*.safetensors"))[2]
    load(folder, nano, unfilled)
    flip_last_byte(shard)
    message = str(refused(folder, nano, unfilled))
    assert "sha256" in message and shard.name in message and message.count(".safetensors") == 1
    read_checkpoint(folder, nano, unfilled(nano), verify=False)


def test_a_changed_index_is_found_too_and_a_changed_config_is_not(
    tmp_path, nano, weights, unfilled
):
    folder = tmp_path / "recorded"
    write_checkpoint(folder, nano, weights, max_shard_bytes=300_000)
    (folder / "config.json").write_text("{}")
    load(folder, nano, unfilled)
    with (folder / INDEX).open("a") as file:
        file.write(" ")
    assert f": {INDEX}" in str(refused(folder, nano, unfilled))


def test_changed_payload_is_not_seen_without_a_digest(folder, nano, weights, unfilled):
    flip_last_byte(folder / SINGLE)
    assert not same(load(folder, nano, unfilled), weights)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"sha256": 3}', b"\xff"])
def test_damaged_digests_are_one_error(folder, nano, unfilled, content):
    (folder / CHECKSUMS).write_bytes(content)
    assert CHECKSUMS in str(refused(folder, nano, unfilled))


def test_digests_cover_only_the_files_they_name(folder, nano, unfilled):
    (folder / CHECKSUMS).write_text(json.dumps({"sha256": {"other.safetensors": "0"}}))
    load(folder, nano, unfilled)
    (folder / CHECKSUMS).write_text(json.dumps({"sha256": {SINGLE: file_digest(folder / SINGLE)}}))
    load(folder, nano, unfilled)


# The router bias (BR-56)


def test_the_router_bias_stays_float32_through_cast_save_and_load(
    tmp_path, nano, weights, unfilled
):
    bias = torch.linspace(6.817, 6.84, 8)
    assert bias.bfloat16().unique().numel() < 8  # bf16 would make neighbours one
    changed = {
        name: p if name == BIAS or "self_attn" in name else p.bfloat16()
        for name, p in (weights | {BIAS: bias}).items()
    }
    write_checkpoint(tmp_path / "bf16", nano, changed, dtype=torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        parameters = unfilled(nano, dtype)
        read_checkpoint(tmp_path / "bf16", nano, parameters)
        assert torch.equal(parameters[BIAS].double(), bias.double())


def test_parameters_of_another_config_are_our_own_mistake(folder, golden, nano, unfilled):
    other = unfilled(KimiConfig.from_json(golden / "k3-tiny"))
    with pytest.raises(ValueError, match="not the parameters of this config") as caught:
        read_checkpoint(folder, nano, other)
    assert not isinstance(caught.value, CheckpointError)


def test_another_config_than_the_files_is_told_as_shapes_and_names(folder, golden, unfilled):
    config = KimiConfig.from_json(golden / "k3-tiny")
    message = str(refused(folder, config, unfilled))
    assert "misshapen tensors" in message and "missing tensors" in message and len(message) < 6000
    assert len([*model_tensors(config)]) > 400


# Any damage at all


def test_random_damage_to_a_header_is_refused_or_changes_nothing_that_counts(
    folder, nano, unfilled
):
    sound = (folder / SINGLE).read_bytes()
    end = 8 + int.from_bytes(sound[:8], "little")
    chance = random.Random(0)
    for _ in range(40):
        damaged = bytearray(sound)
        damaged[chance.randrange(end)] = chance.randrange(256)
        (folder / SINGLE).write_bytes(damaged)
        parameters = unfilled(nano)
        try:
            read_checkpoint(folder, nano, parameters)
        except CheckpointError:
            assert all(parameter.isnan().all() for parameter in parameters.values())
        else:
            assert not any(parameter.isnan().any() for parameter in parameters.values())
