"""The published `config.json`: where its fields stand, how they are spelled, which mean nothing.

    K3 form           {model_type: kimi_k3, ..., text_config: {...}, vision_config: {...}}
    text form         the text section alone, model_type kimi_linear
    Kimi-Linear form  the same with the older names, without the fields K3 added

Dictionaries in, dictionaries out; what a field may hold is `config.py`'s business.
"""

from __future__ import annotations

import copy
import difflib
import json
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple


class ConfigError(ValueError):
    """A config that cannot be used. The message names the field, the value and what is allowed."""


class FileFields(NamedTuple):
    """The fields of a file by their present names, and those without meaning per level."""

    values: dict[str, Any]
    ignored_text: dict[str, Any]
    ignored_top: dict[str, Any]


SPELLINGS = {"model_max_length": "max_position_embeddings", "torch_dtype": "dtype"}
TOP_LEVEL = ("vision_config", "media_placeholder_token_id")
REPEATED_AT_TOP = ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "tie_word_embeddings")
NEWER_THAN_KIMI_LINEAR = ("mla_use_output_gate", "latent_moe_use_norm", "use_full_rank_gate")
WRITTEN_WHEN_NULL = (
    "q_lora_rank",
    "activation_situ_linear_beta",
    "routed_expert_hidden_size",
    "attn_res_block_size",
)

_MEANINGLESS = """
    architectures auto_map transformers_version _name_or_path use_cache head_dim
    rope_theta rope_scaling rope_parameters partial_rotary_factor attention_dropout
    ignore_index image_placeholder video_placeholder use_unified_vision_chunk
    add_cross_attention bad_words_ids begin_suppress_tokens chunk_size_feed_forward
    cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id id2label is_decoder is_encoder_decoder label2id
    length_penalty max_length min_length no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_attentions output_hidden_states output_router_logits
    output_scores prefix problem_type pruned_heads remove_invalid_values repetition_penalty
    return_dict return_dict_in_generate sep_token_id suppress_tokens task_specific_params
    temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torchscript
    typical_p use_bfloat16
"""
# Rope fields of a model that never rotates, and what transformers writes into every config:
# kept and written back, never read.
IGNORED = frozenset(_MEANINGLESS.split())


def read_json_object(path: str | Path) -> dict[str, Any]:
    """Parses a file. Raises ConfigError, without the path: the caller names it."""
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not JSON text ({error})") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"holds a {type(raw).__name__}, allowed: a JSON object")
    return raw


def read_fields(raw: Mapping[str, Any]) -> FileFields:
    """Sorts out nesting, spellings and fields without meaning; raw is not changed.

    Two spellings of one text field that differ are a ConfigError. Where the top level differs from
    `text_config`, the text wins with a warning.
    """
    top = copy.deepcopy(dict(raw))
    kind = top.pop("model_type", None)
    if kind not in ("kimi_k3", "kimi_linear"):
        raise ConfigError(f"model_type is {shown(kind)}, allowed: kimi_k3 or kimi_linear")
    text = top.pop("text_config") if "text_config" in top else None
    if text is None:
        text, top = top, {}
    elif not isinstance(text, dict):
        raise ConfigError(f"text_config is {shown(text)}, allowed: an object")
    elif (inner := text.pop("model_type", "kimi_linear")) != "kimi_linear":
        raise ConfigError(f"text_config.model_type is {shown(inner)}, allowed: kimi_linear")

    text, top = _one_spelling(text), _one_spelling(top)
    ignored_text = {name: text.pop(name) for name in sorted(IGNORED & text.keys())}
    ignored_top = {name: top.pop(name) for name in sorted(IGNORED & top.keys())}
    for name in sorted(top.keys() & text.keys()):
        if top[name] != text[name]:
            warnings.warn(
                f"{name} is {shown(top[name])} at the top level of the config and "
                f"{shown(text[name])} in text_config, which wins",
                stacklevel=3,
            )
    return FileFields({**top, **text}, ignored_text, ignored_top)


def check_names(
    values: Mapping[str, Any], known: Iterable[str], needed: Iterable[str], section: str = ""
) -> None:
    """Raises ConfigError naming every unknown field (with a guess) and every missing one."""
    known = sorted(known)
    faults = []
    for name in sorted(values.keys() - set(known)):
        guess = difflib.get_close_matches(name, known, n=1)
        hint = f", did you mean {guess[0]}?" if guess else ""
        faults.append(f"unknown field {section}{name} (its value: {shown(values[name])}){hint}")
    faults += [f"missing field {section}{name}" for name in needed if name not in values]
    if faults:
        raise ConfigError("; ".join(faults))


def k3_form(values: Mapping[str, Any], fields: FileFields) -> dict[str, Any]:
    """The K3 nesting of `values`; `fields` holds the ignored ones to write back."""
    _, ignored_text, ignored_top = fields
    given = _given(values, WRITTEN_WHEN_NULL)
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        **{name: given[name] for name in (*REPEATED_AT_TOP, *TOP_LEVEL) if name in given},
        **ignored_top,
        "text_config": {
            "architectures": ["KimiLinearForCausalLM"],
            "model_type": "kimi_linear",
            **{name: value for name, value in given.items() if name not in TOP_LEVEL},
            **ignored_text,
        },
    }


def kimi_linear_form(values: Mapping[str, Any], fields: FileFields) -> dict[str, Any]:
    """The older flat form of `values`, without what K3 added (which must be absent)."""
    _, ignored_text, ignored_top = fields
    given = _given(values, ("q_lora_rank",))
    given["linear_attn_config"] = _given(given["linear_attn_config"], ())
    for section in (given, given["linear_attn_config"]):
        for name in NEWER_THAN_KIMI_LINEAR:
            section.pop(name, None)
    given["model_max_length"] = given.pop("max_position_embeddings")
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        **given,
        **ignored_top,
        **ignored_text,
    }


def shown(value: Any) -> str:
    """A value as it stands in the file, cut to the length of a message."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."


def _given(values: Mapping[str, Any], nullable: Iterable[str]) -> dict[str, Any]:
    return {k: v for k, v in values.items() if v is not None or k in nullable}


def _one_spelling(section: dict[str, Any]) -> dict[str, Any]:
    for old, name in SPELLINGS.items():
        if old in section:
            value = section.pop(old)
            if section.setdefault(name, value) != value:
                raise ConfigError(f"{old} is {shown(value)}, but {name} is {shown(section[name])}")
    return section
