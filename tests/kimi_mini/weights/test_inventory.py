"""The inventory against the published totals."""

import dataclasses
import time
from math import prod

import pytest
import torch
from safetensors import safe_open

from kimi_mini.config import PRESETS, ConfigError, KimiConfig
from kimi_mini.weights.inventory import Experts, parameter_count, stored_tensors


def test_k3_has_exactly_the_published_tensors_and_elements():
    start = time.perf_counter()
    tensors = [*stored_tensors(PRESETS["k3"], Experts.MXFP4)]
    assert len(tensors) == 497_220 == len({tensor.name for tensor in tensors})
    assert sum(prod(tensor.shape) for tensor in tensors) == 1_503_647_073_024
    assert time.perf_counter() - start < 10  # about 1 s; a bound against quadratic growth
    vision = [t for t in tensors if t.name.startswith(("vision_tower.", "mm_projector."))]
    assert len(vision) == 27 * 6 + 6


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("nano", 571_856),
        ("mini", 24_413_312),
        ("bench", 43_700_080),
        ("k3", 2_779_484_478_208),
    ],
)
def test_presets_have_the_parameters_that_were_computed_for_them(name, count):
    assert parameter_count(PRESETS[name]) == count


@pytest.mark.parametrize(
    ("name", "count"),
    [("k3-tiny", 758_060), ("k3-variant-tiny", 438_856), ("kimi-linear-tiny", 706_876)],
)
def test_golden_checkpoints_have_the_parameters_of_their_readme(golden, name, count):
    assert parameter_count(KimiConfig.from_json(golden / name)) == count


@pytest.mark.parametrize(("name", "plain", "packed"), [("nano", 224, 320), ("mini", 1492, 2644)])
def test_both_forms_of_experts_have_their_number_of_tensors(name, plain, packed):
    assert sum(1 for _ in stored_tensors(PRESETS[name])) == plain
    assert sum(1 for _ in stored_tensors(PRESETS[name], Experts.MXFP4)) == packed


def test_dtypes_are_the_published_ones():
    dtypes = {}
    for tensor in stored_tensors(PRESETS["mini"], Experts.MXFP4):
        dtypes.setdefault(tensor.dtype, set()).add(tensor.name.split(".")[-2])
    assert dtypes.keys() == {torch.bfloat16, torch.float32, torch.uint8}
    assert dtypes[torch.uint8] == {"w1", "w2", "w3"}
    assert dtypes[torch.float32] == {
        "q_conv1d",
        "k_conv1d",
        "v_conv1d",
        "o_norm",
        "self_attn",  # A_log, dt_bias
        "gate",  # e_score_correction_bias
    }


def test_vision_tensors_have_the_names_and_shapes_of_a_golden_file(golden):
    vision = {
        "patch_size": 2,
        "merge_kernel_size": [2, 2],
        "vt_hidden_size": 16,
        "vt_num_hidden_layers": 1,
        "qkv_hidden_size": 8,
        "vt_intermediate_size": 24,
        "init_pos_emb_height": 4,
        "init_pos_emb_width": 4,
        "mm_hidden_size": 4,
        "text_hidden_size": 64,
    }
    config = dataclasses.replace(
        KimiConfig.from_json(golden / "k3-tiny-mxfp4"), vision_config=vision
    )
    ours = {tensor.name: tensor.shape for tensor in stored_tensors(config, Experts.MXFP4)}
    for path in (golden / "k3-tiny-mxfp4").glob("model-*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in [*file.keys()]:
                assert ours.pop(name) == tuple(file.get_slice(name).get_shape()), name
    assert all(name.startswith("vision_tower.encoder.blocks.0.") for name in ours)  # a few only


def test_a_vision_section_that_lacks_a_size_is_refused_by_name():
    vision = dict(PRESETS["k3"].vision_config)
    del vision["qkv_hidden_size"]
    config = dataclasses.replace(PRESETS["nano"], vision_config=vision)
    with pytest.raises(ConfigError, match=r"missing field vision_config\.qkv_hidden_size"):
        list(stored_tensors(config))
