"""The model's shape: `KimiConfig` with the published field names, and the presets.

Layers are 0-based in this code; the two published layer lists are 1-based, as in the file.

    layer i is KDA   iff  i + 1 in linear_attn_config.kda_layers            (else MLA)
    layer i is MoE   iff  num_experts > 0, i >= first_k_dense_replace, i mod moe_layer_freq = 0

Every field carries the rule for its value. A field missing from a file means 'the feature is
absent' where a default stands below; any other missing field, and any unknown one, is an error.
"""

from __future__ import annotations

import copy
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from kimi_mini.config_file import (
    ConfigError,
    FileFields,
    check_names,
    k3_form,
    kimi_linear_form,
    read_fields,
    read_json_object,
    shown,
)


class Rule(NamedTuple):
    """What a field may hold: in words for the message, and as a test."""

    allowed: str
    test: Callable[[Any], bool]


def _whole(low: int) -> Rule:
    return Rule(f"an integer >= {low}", lambda v: type(v) is int and v >= low)


def _real(words: str, test: Callable[[float], bool]) -> Rule:
    return Rule(
        words, lambda v: type(v) in (int, float) and abs(v) <= sys.float_info.max and test(v)
    )


def _one_of(*values: Any) -> Rule:
    words = " or ".join(json.dumps(v) for v in values)
    return Rule(words, lambda v: any(type(v) is type(x) and v == x for x in values))


def _or_null(rule: Rule) -> Rule:
    return Rule(f"{rule.allowed} or null", lambda v: v is None or rule.test(v))


def _all_whole(low: int, words: str) -> Rule:
    each = _whole(low).test
    return Rule(words, lambda v: type(v) is tuple and all(map(each, v)))


COUNT, SIZE = _whole(0), _whole(1)
FLAG = _one_of(True, False)
POSITIVE = _real("a number > 0", lambda v: v > 0)
NOT_NEGATIVE = _real("a number >= 0", lambda v: v >= 0)
LAYERS = _all_whole(1, "a list of integers >= 1 (layers are counted from 1)")
ID = _or_null(_whole(0))
IDS = _all_whole(0, "an integer >= 0, a list of them, or null")
ID_OR_IDS = Rule(IDS.allowed, lambda v: ID.test(v) or IDS.test(v))
# both serving engines assume this range; below -5 a tile of 16 tokens overflows fp32
GATE_BOUND = _real("a number in [-5, 0)", lambda v: -5 <= v < 0)
OBJECT = _or_null(Rule("an object", lambda v: isinstance(v, dict)))
_AS_READ = {"metadata": {"rule": OBJECT}, "hash": False, "repr": False}


def _field(rule: Rule, default: Any = MISSING, **options: Any) -> Any:
    return field(default=default, metadata={"rule": rule}, **options)


def _optional(rule: Rule) -> Any:
    return _field(_or_null(rule), None)


def _set(config: Any, name: str, value: Any) -> None:
    object.__setattr__(config, name, value)  # the one way into a frozen dataclass


def _check(config: Any, section: str) -> None:
    """Raises ConfigError naming every field of the dataclass that breaks its rule."""
    for f in fields(config):
        if isinstance(value := getattr(config, f.name), list):
            _set(config, f.name, tuple(value))
    broken = [
        f"{section}{f.name} is {shown(value)}, allowed: {rule.allowed}"
        for f in fields(config)
        if (rule := f.metadata.get("rule")) and not rule.test(value := getattr(config, f.name))
    ]
    if broken:
        raise ConfigError("; ".join(broken))


@dataclass(frozen=True, kw_only=True)
class LinearAttnConfig:
    """Layer schedule (1-based lists) and the KDA heads. K = V = head_dim."""

    full_attn_layers: tuple[int, ...] = _field(LAYERS)
    kda_layers: tuple[int, ...] = _field(LAYERS)
    num_heads: int = _field(SIZE)
    head_dim: int = _field(SIZE)
    short_conv_kernel_size: int = _field(SIZE)
    gate_lower_bound: float | None = _optional(GATE_BOUND)
    use_full_rank_gate: bool = _field(FLAG, False)

    def __post_init__(self) -> None:
        _check(self, "linear_attn_config.")


@dataclass(frozen=True, kw_only=True)
class KimiConfig:
    """A text model, and as plain objects what is published around it. Raises ConfigError."""

    vocab_size: int = _field(SIZE)
    hidden_size: int = _field(SIZE)
    num_hidden_layers: int = _field(SIZE)
    linear_attn_config: LinearAttnConfig
    attn_res_block_size: int | None = _optional(SIZE)

    num_attention_heads: int = _field(SIZE)
    num_key_value_heads: int = _field(SIZE)
    q_lora_rank: int | None = _optional(SIZE)
    kv_lora_rank: int = _field(SIZE)
    qk_nope_head_dim: int = _field(SIZE)
    qk_rope_head_dim: int = _field(SIZE)
    v_head_dim: int = _field(SIZE)
    mla_use_nope: bool = _field(_one_of(True))
    mla_use_output_gate: bool = _field(FLAG, False)

    intermediate_size: int = _field(SIZE)
    hidden_act: str = _field(_one_of("situ", "silu"))
    activation_situ_beta: float | None = _optional(NOT_NEGATIVE)  # null or 0 count as 1
    activation_situ_linear_beta: float | None = _optional(POSITIVE)

    num_experts: int = _field(COUNT, 0)
    num_experts_per_token: int | None = _optional(SIZE)
    num_shared_experts: int = _field(COUNT, 0)
    moe_intermediate_size: int | None = _optional(SIZE)
    routed_expert_hidden_size: int | None = _optional(SIZE)
    latent_moe_use_norm: bool = _field(FLAG, False)
    first_k_dense_replace: int | None = _optional(COUNT)
    moe_layer_freq: int | None = _optional(SIZE)
    moe_router_activation_func: str | None = _optional(_one_of("sigmoid"))
    moe_renormalize: bool | None = _optional(FLAG)
    routed_scaling_factor: float | None = _optional(POSITIVE)
    use_grouped_topk: bool = _field(FLAG, False)
    num_expert_group: int = _field(SIZE, 1)
    topk_group: int = _field(SIZE, 1)
    topk_method: str | None = _optional(_one_of("noaux_tc"))

    rms_norm_eps: float = _field(POSITIVE)
    latent_norm_eps: float = _field(POSITIVE, 1e-6)  # ours: eps of q_a and kv_a layernorm
    tie_word_embeddings: bool = _field(FLAG, False)
    max_position_embeddings: int = _field(SIZE)
    initializer_range: float = _field(POSITIVE, 0.02)
    num_nextn_predict_layers: int = _field(_one_of(0), 0)
    dtype: str = _field(_one_of("float32", "bfloat16", "float16", "float64"), "float32")
    bos_token_id: int | None = _field(ID, None)
    eos_token_id: int | tuple[int, ...] | None = _field(ID_OR_IDS, None)
    pad_token_id: int | None = _field(ID, None)
    media_placeholder_token_id: int | None = _field(ID, None)

    quantization_config: dict[str, Any] | None = field(default=None, **_AS_READ)
    vision_config: dict[str, Any] | None = field(default=None, **_AS_READ)
    ignored_text_fields: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    ignored_top_fields: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.num_experts is None:  # the published class writes null for 'no MoE'
            _set(self, "num_experts", 0)
        if not isinstance(self.linear_attn_config, LinearAttnConfig):
            kind = type(self.linear_attn_config).__name__
            raise ConfigError(f"linear_attn_config is a {kind}, allowed: LinearAttnConfig")
        _check(self, "")
        if faults := [*_layer_faults(self), *_feature_faults(self), *_expert_faults(self)]:
            raise ConfigError("; ".join(faults))

    def is_kda_layer(self, i: int) -> bool:
        """Whether 0-based layer i is a KDA layer; otherwise it is MLA."""
        return i + 1 in self.linear_attn_config.kda_layers

    def is_moe_layer(self, i: int) -> bool:
        """Whether 0-based layer i has experts; otherwise it has the dense MLP."""
        if not self.num_experts:
            return False
        return i >= self.first_k_dense_replace and i % self.moe_layer_freq == 0

    @property
    def kda_layer_ids(self) -> tuple[int, ...]:
        """0-based indices of the KDA layers, ascending."""
        return tuple(sorted(i - 1 for i in self.linear_attn_config.kda_layers))

    @property
    def mla_layer_ids(self) -> tuple[int, ...]:
        """0-based indices of the MLA layers, ascending."""
        return tuple(sorted(i - 1 for i in self.linear_attn_config.full_attn_layers))

    @property
    def kda_width(self) -> int:
        """Channels of q, of k and of v in a KDA layer: heads * head_dim."""
        return self.linear_attn_config.num_heads * self.linear_attn_config.head_dim

    @property
    def latent_width(self) -> int:
        """Values an MLA layer caches per token: kv_lora_rank + qk_rope_head_dim."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        """Query and key width of an MLA head: nope + rope (the rope part is never rotated)."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def expert_width(self) -> int:
        """Width in which routed experts work: the latent, or hidden_size without one."""
        return self.routed_expert_hidden_size or self.hidden_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends a sequence; empty when none is given."""
        eos = self.eos_token_id
        return () if eos is None else eos if isinstance(eos, tuple) else (eos,)

    @property
    def is_k3(self) -> bool:
        """Whether a feature is used that the older Kimi-Linear form cannot say."""
        kda = self.linear_attn_config
        features = (
            self.attn_res_block_size,
            self.routed_expert_hidden_size,
            self.mla_use_output_gate,
            self.hidden_act == "situ",
            kda.gate_lower_bound,
            kda.use_full_rank_gate,
            self.vision_config,
            self.media_placeholder_token_id is not None,
        )
        return any(features)

    @classmethod
    def from_json(cls, source: str | Path | Mapping[str, Any]) -> KimiConfig:
        """Reads a parsed object, a `config.json`, or the folder that holds one.

        Raises ConfigError. Warns where the top level contradicts `text_config`, which wins.
        """
        if isinstance(source, Mapping):
            return _from_object(source)
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        try:
            return _from_object(read_json_object(path))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    def to_json_dict(self) -> dict[str, Any]:
        """The published form: K3 nesting, or the older flat one for a Kimi-Linear model.

        Reading it again gives an equal config.
        """
        values = _plain(self)
        ignored = FileFields(
            {}, values.pop("ignored_text_fields"), values.pop("ignored_top_fields")
        )
        values["linear_attn_config"] = _plain(self.linear_attn_config)
        if self.latent_norm_eps == KimiConfig.latent_norm_eps:
            del values["latent_norm_eps"]
        return copy.deepcopy((k3_form if self.is_k3 else kimi_linear_form)(values, ignored))


def _plain(config: Any) -> dict[str, Any]:
    values = {f.name: getattr(config, f.name) for f in fields(config)}
    return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}


def _from_object(raw: Mapping[str, Any]) -> KimiConfig:
    values, ignored_text, ignored_top = read_fields(raw)
    _check_names(values, KimiConfig, "")
    kda = values.pop("linear_attn_config")
    if not isinstance(kda, dict):
        raise ConfigError(f"linear_attn_config is {shown(kda)}, allowed: an object")
    _check_names(kda, LinearAttnConfig, "linear_attn_config.")
    return KimiConfig(
        **values,
        linear_attn_config=LinearAttnConfig(**kda),
        ignored_text_fields=ignored_text,
        ignored_top_fields=ignored_top,
    )


def _check_names(values: Mapping[str, Any], kind: type, section: str) -> None:
    known = [f for f in fields(kind) if not f.name.startswith("ignored_")]
    needed = [f.name for f in known if f.default is MISSING]
    check_names(values, [f.name for f in known], needed, section)


def _layer_faults(c: KimiConfig) -> Iterator[str]:
    kda, full = c.linear_attn_config.kda_layers, c.linear_attn_config.full_attn_layers
    last, listed = c.num_hidden_layers, [*kda, *full]
    lists = "linear_attn_config.kda_layers and full_attn_layers"
    if beyond := sorted({i for i in listed if i > last}):
        yield f"{lists} name {shown(beyond)}, allowed: 1..{last} (num_hidden_layers)"
    absent = (i for i in range(1, last + 1) if i not in listed)
    if missing := [*itertools.islice(absent, 10)]:  # `last` may be any number
        yield f"{lists} leave out {shown(missing)}, but each layer of 1..{last} needs a kind"
    if twice := sorted({i for i in listed if listed.count(i) > 1}):
        yield f"{lists} name {shown(twice)} more than once"


def _feature_faults(c: KimiConfig) -> Iterator[str]:
    if c.num_key_value_heads != c.num_attention_heads:
        yield (
            f"num_key_value_heads is {c.num_key_value_heads}, allowed: {c.num_attention_heads} "
            "(num_attention_heads)"
        )
    if c.hidden_act == "silu" and (c.activation_situ_beta or c.activation_situ_linear_beta):
        yield 'activation_situ_beta or activation_situ_linear_beta is given, but hidden_act "silu"'
    ids = [("eos_token_id", i) for i in c.eos_token_ids]
    for name in ("bos_token_id", "pad_token_id", "media_placeholder_token_id"):
        ids.append((name, getattr(c, name)))
    for name, i in ids:
        if i is not None and i >= c.vocab_size:
            yield f"{name} is {i}, allowed: less than vocab_size = {c.vocab_size}"


def _expert_faults(c: KimiConfig) -> Iterator[str]:
    if c.latent_moe_use_norm and not c.routed_expert_hidden_size:
        yield "latent_moe_use_norm is true, but routed_expert_hidden_size is null"
    if not c.num_experts:
        return
    needed = (
        "num_experts_per_token",
        "moe_intermediate_size",
        "first_k_dense_replace",
        "moe_layer_freq",
        "moe_router_activation_func",
        "moe_renormalize",
        "routed_scaling_factor",
    )
    if missing := [f"missing field {name}" for name in needed if getattr(c, name) is None]:
        yield f"{'; '.join(missing)} (num_experts is {c.num_experts})"
        return
    groups = c.num_expert_group
    size, left = divmod(c.num_experts, groups)
    if groups > 1 and not c.use_grouped_topk:
        yield f"num_expert_group is {groups}, but use_grouped_topk is false"
    if left or (groups > 1 and size < 2):  # a group is scored by its two best experts
        yield (
            f"num_expert_group is {groups}, allowed: a divisor of num_experts = {c.num_experts} "
            "that leaves at least 2 experts in a group"
        )
    elif c.topk_group > groups:
        yield f"topk_group is {c.topk_group}, allowed: 1..{groups} (num_expert_group)"
    elif c.num_experts_per_token > size * c.topk_group:
        yield (
            f"num_experts_per_token is {c.num_experts_per_token}, allowed: "
            f"1..{size * c.topk_group} (experts in topk_group = {c.topk_group} groups)"
        )


_TABLE = """
                            nano    mini    deep   bench       k3
vocab_size                   320    1024    1024    4096   163840
hidden_size                   64     256     256     512     7168
num_hidden_layers              5      13      21       8       93
attn_res_block_size            4       4       8       4       12
kda_heads                      3       6       6       8       96
kda_head_dim                  32      64      64      64      128
num_attention_heads            3       6       6       8       96
q_lora_rank                   24      96      96     256     1536
kv_lora_rank                  16      32      32     128      512
qk_nope_head_dim              32      64      64      64      128
qk_rope_head_dim              16      32      32      32       64
v_head_dim                    32      64      64      64      128
intermediate_size            304    1216    1216    1536    33792
num_experts                    8      32      32      16      896
num_experts_per_token          2       4       4       4       16
num_shared_experts             2       2       2       1        2
moe_intermediate_size         64      96      96     256     3072
routed_expert_hidden_size     32     128     128     256     3584
max_position_embeddings     1024   65536   65536   65536  1048576
bos_token_id                   1       1       1       1   163584
eos_token_id                   2       2       2       2   163586
pad_token_id                   0       0       0       0   163839
"""

_K3_VISION = """{
    "patch_size": 14, "merge_kernel_size": [2, 2], "merge_type": "sd2_tpool",
    "vt_hidden_size": 1024, "vt_num_hidden_layers": 27, "vt_num_attention_heads": 12,
    "qkv_hidden_size": 1536, "vt_intermediate_size": 4096, "activation_func": "gelu_pytorch_tanh",
    "init_pos_emb_height": 64, "init_pos_emb_width": 64, "init_pos_emb_time": 4,
    "pos_emb_type": "divided_fixed", "pos_emb_interpolation_mode": "bilinear",
    "norm_type": "rmsnorm", "mlp_type": "mlp2", "attn_bias": false, "linear_bias": false,
    "patch_embed_proj_bias": false, "mm_projector_type": "patchmergerv2", "mm_hidden_size": 1024,
    "projector_hidden_act": "gelu", "projector_ln_eps": 1e-05, "text_hidden_size": 7168
}"""


def _k3_like(layers: int, heads: int, head_dim: int, **values: Any) -> KimiConfig:
    full = [*range(4, layers, 4), layers]  # in K3 the last two layers are both MLA
    kda = LinearAttnConfig(
        full_attn_layers=tuple(full),
        kda_layers=tuple(i for i in range(1, layers + 1) if i not in full),
        num_heads=heads,
        head_dim=head_dim,
        short_conv_kernel_size=4,
        gate_lower_bound=-5.0,
        use_full_rank_gate=True,
    )
    return KimiConfig(
        num_hidden_layers=layers,
        linear_attn_config=kda,
        num_key_value_heads=values["num_attention_heads"],
        mla_use_nope=True,
        mla_use_output_gate=True,
        hidden_act="situ",
        activation_situ_beta=4.0,
        activation_situ_linear_beta=25.0,
        latent_moe_use_norm=True,
        first_k_dense_replace=1,
        moe_layer_freq=1,
        moe_router_activation_func="sigmoid",
        moe_renormalize=True,
        routed_scaling_factor=1.0,
        use_grouped_topk=True,
        topk_method="noaux_tc",
        rms_norm_eps=1e-5,
        **values,
    )


def _read_presets() -> dict[str, KimiConfig]:
    names, *rows = [line.split() for line in _TABLE.strip().splitlines()]
    columns = {name: {row[0]: int(row[1 + j]) for row in rows} for j, name in enumerate(names)}
    columns["k3"] |= {
        "dtype": "bfloat16",
        "media_placeholder_token_id": 163605,
        "vision_config": json.loads(_K3_VISION),
    }
    return {
        name: _k3_like(
            column.pop("num_hidden_layers"),
            column.pop("kda_heads"),
            column.pop("kda_head_dim"),
            **column,
        )
        for name, column in columns.items()
    }


# nano: unit tests. mini: integration. deep: AttnRes blocks open with KDA and the last is short, as
# in K3. bench: the whole-model measurements, 43,700,080 parameters. k3: arithmetic only.
PRESETS: Mapping[str, KimiConfig] = MappingProxyType(_read_presets())


def preset(name: str) -> KimiConfig:
    """A named shape for random weights. Raises ConfigError for an unknown name."""
    if name not in PRESETS:
        raise ConfigError(f"unknown preset {name!r}, allowed: {', '.join(PRESETS)}")
    return PRESETS[name]
