"""KimiConfig: three published forms, refusals by name, presets."""

import copy
import dataclasses
import json
from pathlib import Path

import pytest

from kimi_mini.config import PRESETS, ConfigError, KimiConfig, LinearAttnConfig, preset

GOLDEN = Path(__file__).parents[1] / "golden" / "model"
FORMS = ["k3-tiny", "k3-tiny-mxfp4", "k3-variant-tiny", "kimi-linear-tiny"]

# what transformers left in the published text_config of K3, and what it adds when it parses it
BOILERPLATE = {
    "_name_or_path": "",
    "add_cross_attention": False,
    "auto_map": {"AutoConfig": "configuration_kimi_k3.KimiLinearConfig"},
    "bad_words_ids": None,
    "chunk_size_feed_forward": 0,
    "head_dim": 74,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
    "max_length": 20,
    "pruned_heads": {},
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "rope_theta": 10000.0,
    "temperature": 1.0,
    "torchscript": False,
    "transformers_version": "4.56.2",
    "use_cache": True,
}


def golden(name: str) -> dict:
    return json.loads((GOLDEN / name / "config.json").read_text())


@pytest.fixture
def raw() -> dict:
    return golden("k3-tiny")


@pytest.fixture
def text(raw: dict) -> dict:
    """The text section alone: the flat form."""
    return raw["text_config"]


def refused(source: dict) -> str:
    with pytest.raises(ConfigError) as caught:
        KimiConfig.from_json(source)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Forms


@pytest.mark.parametrize("name", FORMS)
def test_a_published_config_comes_back_field_for_field(name):
    raw = golden(name)
    before = copy.deepcopy(raw)
    config = KimiConfig.from_json(raw)
    assert config.to_json_dict() == raw == before
    assert KimiConfig.from_json(config.to_json_dict()) == config


def test_a_config_reads_the_same_from_object_file_and_folder():
    folder = GOLDEN / "k3-tiny"
    configs = {KimiConfig.from_json(s) for s in (folder, str(folder / "config.json"))}
    assert configs == {KimiConfig.from_json(golden("k3-tiny"))}


def test_the_text_section_alone_reads_like_the_whole_file(raw, text):
    whole = KimiConfig.from_json(raw)
    alone = KimiConfig.from_json(text)
    assert dataclasses.replace(alone, media_placeholder_token_id=3) == whole
    assert alone.is_k3 and "text_config" in alone.to_json_dict()


def test_the_published_k3_config_with_its_boilerplate_is_the_k3_preset():
    raw = PRESETS["k3"].to_json_dict()
    raw["text_config"] |= BOILERPLATE
    raw |= {"ignore_index": -100, "image_placeholder": "<|kimi_image_placeholder|>", "auto_map": {}}
    config = KimiConfig.from_json(raw)
    assert config == PRESETS["k3"]
    assert config.to_json_dict() == raw


def test_the_older_form_means_that_the_newer_features_are_absent():
    config = KimiConfig.from_json(golden("kimi-linear-tiny"))
    kda = config.linear_attn_config
    assert (config.attn_res_block_size, config.routed_expert_hidden_size) == (None, None)
    assert (kda.gate_lower_bound, kda.use_full_rank_gate) == (None, False)
    assert (config.hidden_act, config.q_lora_rank, config.mla_use_output_gate) == (
        "silu",
        None,
        False,
    )
    assert config.max_position_embeddings == 4096  # stored as model_max_length
    assert not config.is_k3 and config.latent_norm_eps == 1e-6


def test_our_own_epsilon_is_written_only_where_it_is_not_the_default(raw):
    config = dataclasses.replace(KimiConfig.from_json(raw), latent_norm_eps=1e-5)
    written = config.to_json_dict()
    assert written["text_config"]["latent_norm_eps"] == 1e-5
    assert KimiConfig.from_json(written) == config
    assert "latent_norm_eps" not in raw["text_config"]


def test_torch_dtype_is_the_older_spelling_of_dtype(text):
    text["torch_dtype"] = text.pop("dtype")
    assert KimiConfig.from_json(text).dtype == "float32"


# Layers and widths


def test_layer_lists_count_from_one_and_layer_indices_from_zero():
    config = PRESETS["k3"]
    assert len(config.kda_layer_ids) == 69 and len(config.mla_layer_ids) == 24
    assert config.mla_layer_ids[:2] == (3, 7) and config.mla_layer_ids[-2:] == (91, 92)
    assert config.is_kda_layer(0) and not config.is_kda_layer(3) and not config.is_kda_layer(92)
    assert not config.is_moe_layer(0) and all(config.is_moe_layer(i) for i in range(1, 93))


def test_an_irregular_schedule_is_read_and_not_guessed_from_a_stride():
    config = KimiConfig.from_json(golden("k3-variant-tiny"))
    assert config.mla_layer_ids == (0, 4) and config.kda_layer_ids == (1, 2, 3, 5)
    assert [config.is_moe_layer(i) for i in range(6)] == [False, False, True, True, True, True]


def test_experts_come_in_every_nth_layer_after_the_dense_prefix(text):
    text |= {"first_k_dense_replace": 3, "moe_layer_freq": 2}
    config = KimiConfig.from_json(text)
    assert [i for i in range(8) if config.is_moe_layer(i)] == [4, 6]


def test_kda_heads_are_those_of_the_linear_attention_section(text):
    text |= {"num_attention_heads": 8, "num_key_value_heads": 8}
    config = KimiConfig.from_json(text)
    assert (config.num_attention_heads, config.linear_attn_config.num_heads) == (8, 4)
    assert config.kda_width == 128


def test_derived_widths_follow_the_published_ones():
    config = PRESETS["k3"]
    assert (config.kda_width, config.latent_width, config.qk_head_dim) == (12288, 576, 192)
    assert config.expert_width == 3584
    assert KimiConfig.from_json(golden("kimi-linear-tiny")).expert_width == 64


def test_a_model_without_experts_needs_none_of_their_fields(text):
    moe = ("num_experts_per_token", "moe_intermediate_size", "moe_layer_freq", "moe_renormalize")
    for name in (*moe, "first_k_dense_replace", "moe_router_activation_func", "topk_method"):
        del text[name]
    del text["routed_scaling_factor"], text["routed_expert_hidden_size"]
    text |= {"num_experts": None, "latent_moe_use_norm": False}
    config = KimiConfig.from_json(text)
    assert config.num_experts == 0 and not any(config.is_moe_layer(i) for i in range(8))
    assert KimiConfig.from_json(config.to_json_dict()) == config


@pytest.mark.parametrize(
    ("given", "ids"), [(5, (5,)), ([5, 9], (5, 9)), ([], ()), (None, ()), (0, (0,))]
)
def test_end_ids_may_be_one_several_or_none(text, given, ids):
    text["eos_token_id"] = given
    config = KimiConfig.from_json(text)
    assert config.eos_token_ids == ids
    assert config.to_json_dict()["text_config"].get("eos_token_id") == given
    hash(config)


# Nesting levels


@pytest.mark.parametrize("top", [True, False, None])
@pytest.mark.parametrize("inner", [True, False, None])
def test_the_tie_flag_is_read_at_both_levels_and_the_text_wins(raw, top, inner):
    for section, value in ((raw, top), (raw["text_config"], inner)):
        section.pop("tie_word_embeddings")
        if value is not None:
            section["tie_word_embeddings"] = value
    expected = inner if inner is not None else bool(top)
    if None in (top, inner) or top == inner:
        config = KimiConfig.from_json(raw)
    else:
        with pytest.warns(UserWarning, match="tie_word_embeddings.*text_config, which wins"):
            config = KimiConfig.from_json(raw)
    assert config.tie_word_embeddings is expected


def test_an_end_id_that_stands_only_at_the_top_level_is_used(raw):
    del raw["text_config"]["eos_token_id"]
    assert KimiConfig.from_json(raw).eos_token_ids == (2,)


def test_two_spellings_that_disagree_are_an_error_and_equal_ones_are_not(text):
    text["model_max_length"] = text["max_position_embeddings"]
    assert KimiConfig.from_json(text).max_position_embeddings == 4096
    text["model_max_length"] = 8192
    assert "8192" in (said := refused(text)) and "max_position_embeddings is 4096" in said


# Refusals


def test_an_unknown_field_is_named_with_its_value_and_a_guess(raw):
    raw["text_config"]["num_experts_per_tok"] = 3
    said = refused(raw)
    assert "num_experts_per_tok" in said and "3" in said
    assert "did you mean num_experts_per_token?" in said


def test_an_unknown_field_is_refused_at_every_level(raw):
    raw["top_thing"] = 1
    raw["text_config"]["linear_attn_config"]["heads"] = 2
    assert "top_thing" in refused(raw)
    del raw["top_thing"]
    assert "linear_attn_config.heads" in refused(raw)


NEEDED = sorted(
    f.name
    for f in dataclasses.fields(KimiConfig)
    if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
)
NEEDED_WITH_EXPERTS = [
    "num_experts_per_token",
    "moe_intermediate_size",
    "first_k_dense_replace",
    "moe_layer_freq",
    "moe_router_activation_func",
    "moe_renormalize",
    "routed_scaling_factor",
]


@pytest.mark.parametrize("name", NEEDED + NEEDED_WITH_EXPERTS)
def test_a_needed_field_that_is_missing_is_named(text, name):
    del text[name]
    assert f"missing field {name}" in refused(text)


@pytest.mark.parametrize(
    "name", ["full_attn_layers", "kda_layers", "num_heads", "head_dim", "short_conv_kernel_size"]
)
def test_a_needed_field_of_the_linear_attention_section_is_named(text, name):
    del text["linear_attn_config"][name]
    assert f"missing field linear_attn_config.{name}" in refused(text)


def test_several_faults_are_told_together(text):
    del text["vocab_size"]
    text["zzz"] = 1
    assert "zzz" in (said := refused(text)) and "missing field vocab_size" in said
    text = golden("k3-tiny")["text_config"] | {"hidden_size": 0, "rms_norm_eps": "x"}
    assert "hidden_size is 0" in (said := refused(text)) and 'rms_norm_eps is "x"' in said


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vocab_size", 0),
        ("vocab_size", True),
        ("hidden_size", 64.0),
        ("hidden_size", "64"),
        ("num_hidden_layers", None),
        ("q_lora_rank", 0),
        ("kv_lora_rank", -1),
        ("attn_res_block_size", 0),
        ("mla_use_output_gate", 1),
        ("mla_use_nope", False),
        ("hidden_act", "gelu"),
        ("activation_situ_beta", -1.0),
        ("activation_situ_linear_beta", float("nan")),
        ("moe_router_activation_func", "softmax"),
        ("topk_method", "greedy"),
        ("routed_scaling_factor", float("inf")),
        ("rms_norm_eps", 0),
        ("num_nextn_predict_layers", 1),
        ("dtype", "int8"),
        ("bos_token_id", -1),
        ("eos_token_id", [1, -2]),
        ("quantization_config", "mxfp4"),
        ("vision_config", []),
        ("tie_word_embeddings", "false"),
    ],
)
def test_a_wrong_value_is_refused_with_field_value_and_what_is_allowed(text, name, value):
    text[name] = value
    said = refused(text)
    assert f"{name} is {json.dumps(value)}, allowed: " in said


@pytest.mark.parametrize("bound", [0.0, 0, 1.0, -5.001, -100, "low", False])
def test_a_gate_bound_outside_its_range_is_refused(text, bound):
    text["linear_attn_config"]["gate_lower_bound"] = bound
    assert "linear_attn_config.gate_lower_bound is" in (said := refused(text))
    assert "[-5, 0)" in said


@pytest.mark.parametrize("bound", [-5, -5.0, -0.5, None])
def test_the_gate_formula_follows_the_bound(text, bound):
    text["linear_attn_config"]["gate_lower_bound"] = bound
    assert KimiConfig.from_json(text).linear_attn_config.gate_lower_bound == bound


@pytest.mark.parametrize(
    ("kda", "full", "words"),
    [
        ([0, 1, 2, 4, 5], [3, 6, 7], "counted from 1"),
        ([1, 2, 3, 5, 6], [4, 7], "leave out [8]"),
        ([1, 2, 3, 5, 6], [4, 7, 8, 9], "name [9], allowed: 1..8"),
        ([1, 2, 3, 4, 5, 6], [4, 7, 8], "name [4] more than once"),
        ([1, 2, 3, 5, 6, 6], [4, 7, 8], "name [6] more than once"),
        ("1,2,3", [4, 7, 8], "kda_layers is"),
        ([1, 2, 3, 5, 6.0], [4, 7, 8], "kda_layers is"),
    ],
)
def test_layer_lists_that_are_no_partition_of_the_layers_are_refused(text, kda, full, words):
    text["linear_attn_config"] |= {"kda_layers": kda, "full_attn_layers": full}
    assert words in refused(text)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2, allowed: 4"),
        ({"hidden_act": "silu"}, 'hidden_act "silu"'),
        ({"routed_expert_hidden_size": None}, "latent_moe_use_norm is true"),
        ({"num_experts_per_token": 13}, "num_experts_per_token is 13, allowed: 1..12"),
        ({"num_expert_group": 5}, "num_expert_group is 5, allowed: a divisor"),
        ({"num_expert_group": 12}, "at least 2 experts"),
        ({"num_expert_group": 4, "topk_group": 5}, "topk_group is 5, allowed: 1..4"),
        (
            {"num_expert_group": 6, "topk_group": 1},
            "num_experts_per_token is 3, allowed: 1..2",
        ),
        ({"num_expert_group": 2, "use_grouped_topk": False}, "use_grouped_topk is false"),
        ({"pad_token_id": 512}, "pad_token_id is 512, allowed: less than vocab_size"),
        ({"eos_token_id": [2, 600]}, "eos_token_id is 600"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(text, changes, words):
    assert words in refused(text | changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "llama"}, 'model_type is "llama", allowed: kimi_k3 or kimi_linear'),
        ({"model_type": None}, "model_type is null"),
        ({"text_config": []}, "text_config is []"),
        ({"text_config": {"model_type": "kimi_k2"}}, 'text_config.model_type is "kimi_k2"'),
    ],
)
def test_another_kind_of_model_is_refused(raw, changes, words):
    assert words in refused(raw | changes)


def test_a_linear_attention_section_that_is_no_object_is_refused(text):
    text["linear_attn_config"] = [1]
    assert "linear_attn_config is [1]" in refused(text)
    fields = {f.name: getattr(PRESETS["nano"], f.name) for f in dataclasses.fields(KimiConfig)}
    with pytest.raises(ConfigError, match="linear_attn_config is a dict"):
        KimiConfig(**fields | {"linear_attn_config": {}})


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff\xfe\x00", b"[" * 100_000])
def test_a_damaged_file_is_one_error_that_names_it(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    for source in (path, tmp_path):
        with pytest.raises(ConfigError, match=r"config\.json: "):
            KimiConfig.from_json(source)


def test_a_missing_file_or_folder_is_one_error_that_names_it(tmp_path):
    for source in (tmp_path, tmp_path / "none", tmp_path / "none.json"):
        with pytest.raises(ConfigError, match=str(source)):
            KimiConfig.from_json(source)


def test_an_error_in_a_file_names_the_file(tmp_path, raw):
    raw["text_config"]["hidden_size"] = -1
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=r"config\.json: hidden_size is -1"):
        KimiConfig.from_json(tmp_path)


# Presets


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_survives_its_file(name):
    assert KimiConfig.from_json(PRESETS[name].to_json_dict()) == preset(name)


def test_presets_have_the_sizes_that_were_decided():
    vocab = {name: config.vocab_size for name, config in PRESETS.items()}
    assert vocab == {"nano": 320, "mini": 1024, "deep": 1024, "bench": 4096, "k3": 163840}
    positions = {name: config.max_position_embeddings for name, config in PRESETS.items()}
    assert positions == {
        "nano": 1024,
        "mini": 65536,
        "deep": 65536,
        "bench": 65536,
        "k3": 1048576,
    }
    full = {n: c.linear_attn_config.full_attn_layers for n, c in PRESETS.items() if n != "k3"}
    assert full == {
        "nano": (4, 5),
        "mini": (4, 8, 12, 13),
        "deep": (4, 8, 12, 16, 20, 21),
        "bench": (4, 8),
    }


def test_every_attn_res_block_of_deep_opens_with_kda_as_in_k3():
    for name in ("deep", "k3"):
        config = PRESETS[name]
        openers = range(0, config.num_hidden_layers, config.attn_res_block_size)
        assert all(config.is_kda_layer(i) for i in openers)


def test_an_unknown_preset_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="'huge', allowed: nano, mini, deep, bench, k3"):
        preset("huge")


def test_a_config_cannot_be_changed_and_can_be_a_key():
    config = preset("nano")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.hidden_size = 1
    assert {config: 1}[dataclasses.replace(config)] == 1
    assert isinstance(config.linear_attn_config, LinearAttnConfig)
    config.to_json_dict()["text_config"]["linear_attn_config"]["kda_layers"].append(9)
    assert config.linear_attn_config.kda_layers == (1, 2, 3)


def test_a_number_beyond_all_floats_is_refused_in_few_words(text):
    text["rms_norm_eps"] = 10**400
    assert "rms_norm_eps is 1000" in refused(text) and len(refused(text)) < 200
