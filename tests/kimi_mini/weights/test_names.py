"""The mapping: every published tensor has a place, every parameter is covered once."""

import dataclasses

import pytest
import torch
from safetensors import safe_open

from kimi_mini.config import KimiConfig, preset
from kimi_mini.model import KimiForCausalLM
from kimi_mini.weights.names import (
    HEAD,
    Kind,
    canonical_name,
    check_parameters,
    is_vision,
    model_tensors,
    parameter_specs,
)

GOLDEN = ["k3-tiny", "k3-variant-tiny", "kimi-linear-tiny"]


@pytest.fixture(params=["nano", *GOLDEN])
def config(request, golden) -> KimiConfig:
    if request.param == "nano":
        return preset("nano")
    return KimiConfig.from_json(golden / request.param)


@pytest.mark.parametrize("name", GOLDEN)
def test_names_and_shapes_are_those_of_the_golden_files(golden, name):
    config = KimiConfig.from_json(golden / name)
    entries = {entry.name: entry for entry in model_tensors(config)}
    with safe_open(golden / name / "model.safetensors", "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in [*file.keys()]}
    stored = {canonical_name(name): shape for name, shape in shapes.items()}
    assert stored.keys() == entries.keys()
    odd = {n for n, shape in stored.items() if shape != entries[n].shape}
    # the older form keeps A_log as [1, 1, n, 1]; all else, the padded A_log of K3 too, is exact
    assert {entries[n].kind for n in odd} == ({Kind.A_LOG} if name == "kimi-linear-tiny" else set())
    assert all(entries[n].accepts(shape) for n, shape in stored.items())


def test_the_regions_cover_every_parameter_exactly_once(config):
    counts = {name: torch.zeros(spec.shape) for name, spec in parameter_specs(config).items()}
    for entry in model_tensors(config):
        region = counts[entry.param][entry.index]
        assert tuple(region.shape) == entry.region
        region += 1
    assert all(count.eq(1).all() for count in counts.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_parameters_are_those_of_the_model(config, dtype):
    state = KimiForCausalLM(config, dtype).state_dict()
    specs = parameter_specs(config)
    tied = {HEAD} if config.tie_word_embeddings else set()
    assert state.keys() - specs.keys() == tied and specs.keys() <= state.keys()
    keep = torch.promote_types(dtype, torch.float32)
    for name, spec in specs.items():
        assert tuple(state[name].shape) == spec.shape, name
        assert state[name].dtype == (keep if spec.keeps_float32 else dtype), name
    check_parameters(state, config)


def test_fused_rows_stand_in_the_order_the_layers_split_them():
    rows = {}
    for entry in model_tensors(preset("nano")):
        rows.setdefault(entry.param, []).append(entry.name.split(".")[-2])
    kda, mla = "model.layers.0.self_attn.", "model.layers.3.self_attn."
    assert rows[kda + "in_proj.weight"] == [
        "q_proj",
        "k_proj",
        "v_proj",
        "f_a_proj",
        "b_proj",
        "g_proj",
    ]
    assert rows[kda + "conv_weight"] == ["q_conv1d", "k_conv1d", "v_conv1d"]
    assert rows[mla + "in_proj.weight"] == ["q_a_proj", "kv_a_proj_with_mqa", "g_proj"]
    assert rows["model.layers.0.mlp.gate_up_proj.weight"] == ["gate_proj", "up_proj"]
    moe = "model.layers.1.block_sparse_moe."
    assert rows[moe + "in_proj.weight"] == ["routed_expert_down_proj", "gate_proj", "up_proj"]
    assert rows[moe + "experts.w13"][:2] == ["w1", "w3"]


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("language_model.model.norm.weight", "model.norm.weight"),
        ("language_model.norm.weight", "model.norm.weight"),
        ("model.norm.weight", "model.norm.weight"),
        ("language_model.model.layers.1.mlp_res_norm.weight", "model.layers.1.mlp_res_norm.weight"),
        ("language_model.layers.1.mlp_res_norm.weight", "model.layers.1.mlp_res_norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("norm.weight", None),
        ("layers.0.input_layernorm.weight", None),
        ("transformer.norm.weight", None),
    ],
)
def test_three_prefixes_lead_to_one_name(stored, name):
    assert canonical_name(stored) == name


def test_vision_tensors_are_known_by_their_prefix_only():
    assert is_vision("vision_tower.encoder.final_layernorm.weight")
    assert is_vision("mm_projector.proj.0.weight")
    assert not is_vision("language_model.vision_tower.x") and not is_vision("vision_towers.x")


def entry_of(kind: Kind, config: KimiConfig):
    return next(entry for entry in model_tensors(config) if entry.kind is kind)


@pytest.mark.parametrize(
    ("shape", "fits"),
    [
        ((3,), True),
        ((32,), True),
        ((128,), True),
        ((1, 1, 3, 1), True),
        ((1, 1, 32, 1), True),
        ((1,), False),
        ((1, 1, 1, 1), False),
        ((), False),
        ((0,), False),
        ((2,), False),
        ((2, 2), False),
        ((3, 2), False),
    ],
)
def test_a_log_may_be_padded_but_never_broadcast_over_heads(shape, fits):
    assert entry_of(Kind.A_LOG, preset("nano")).accepts(shape) is fits  # 3 heads of 32


@pytest.mark.parametrize(
    ("shape", "fits"),
    [
        ((96, 1, 4), True),
        ((96, 4), True),
        ((4, 96), False),
        ((1, 96, 4), False),
        ((96, 4, 1), False),
    ],
)
def test_a_convolution_may_lack_its_middle_one_only(shape, fits):
    assert entry_of(Kind.CONV, preset("nano")).accepts(shape) is fits


def test_a_log_is_stored_with_as_many_entries_as_the_form_publishes(golden):
    stored = {
        name: entry_of(Kind.A_LOG, KimiConfig.from_json(golden / name)).shape for name in GOLDEN
    }
    # K3 pads 4 heads to head_dim 32; both low-rank forms store the heads alone
    assert stored == {"k3-tiny": (32,), "k3-variant-tiny": (2,), "kimi-linear-tiny": (4,)}
    kda = dataclasses.replace(preset("nano").linear_attn_config, num_heads=40)
    assert entry_of(
        Kind.A_LOG, dataclasses.replace(preset("nano"), linear_attn_config=kda)
    ).shape == (40,)


def test_stored_and_region_forms_undo_each_other(config):
    for entry in model_tensors(config):
        if entry.kind is Kind.EXPERT:
            continue
        values = torch.arange(1.0, 1 + torch.Size(entry.region).numel()).view(entry.region)
        stored = entry.to_stored(values)
        assert tuple(stored.shape) == entry.shape
        assert torch.equal(entry.to_region(stored), values)
        assert stored.sum() == values.sum()  # padding is zero


def test_parameters_of_another_config_are_refused(nano, weights):
    without = {n: p for n, p in weights.items() if n != "model.norm.weight"}
    with pytest.raises(ValueError, match=r"no model\.norm\.weight"):
        check_parameters(without, nano)
    with pytest.raises(ValueError, match="extra is unknown"):
        check_parameters(weights | {"extra": torch.ones(1)}, nano)
    with pytest.raises(ValueError, match=r"model\.norm\.weight is \[1\], allowed: \[64\]"):
        check_parameters(weights | {"model.norm.weight": torch.ones(1)}, nano)
    with pytest.raises(ValueError, match="device meta"):
        check_parameters(weights | {"model.norm.weight": torch.ones(64, device="meta")}, nano)


def test_a_tied_head_must_be_the_memory_of_the_embedding(nano, weights):
    tied = dataclasses.replace(nano, tie_word_embeddings=True)
    embedding = weights["model.embed_tokens.weight"]
    body = {name: p for name, p in weights.items() if name != HEAD}
    check_parameters(body, tied)
    check_parameters(body | {HEAD: embedding}, tied)
    with pytest.raises(ValueError, match=r"lm_head\.weight is not tied"):
        check_parameters(body | {HEAD: embedding.clone()}, tied)
