"""A model as one call of its backend, where that has one (`kernels.decoder`).

Modules are called one by one instead where that may be another thing: a hook is registered on the
model's parts, its layers or their sublayers, or on all modules; one of them has another class than
the model was made of; a weight is missing or has another form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from kernels.decoder import DecoderForm, StepRows
from kernels.kda_metadata import RowGroup
from kernels.routing import RouterRule
from kimi_mini.batch import ModelState, Step
from kimi_mini.config import KimiConfig
from kimi_mini.dtypes import at_least_float32
from kimi_mini.layers.mlp import glu_form

# Names in the order of `kernels.decoder`.
_FIRST = ("model.embed_tokens.weight",)
_ATTENTION_READS = (
    "self_attention_res.norm",
    "self_attention_res.proj",
    "input_layernorm.weight",
)
_KDA = (
    "self_attn.in_proj.weight",
    "self_attn.f_b_proj.weight",
    "self_attn.g_b_proj.weight",
    "self_attn.conv_weight",
    "self_attn.A_log",
    "self_attn.dt_bias",
    "self_attn.o_norm.weight",
    "self_attn.o_proj.weight",
)
_MLA = (
    "self_attn.in_proj.weight",
    "self_attn.q_a_layernorm.weight",
    "self_attn.q_b_proj.weight",
    "self_attn.kv_a_layernorm.weight",
    "self_attn.kv_b_proj.weight",
    "self_attn.o_proj.weight",
)
_FEED_FORWARD_READS = ("mlp_res.norm", "mlp_res.proj", "post_attention_layernorm.weight")
_MOE = (
    "block_sparse_moe.gate.proj.weight",
    "block_sparse_moe.gate.e_score_correction_bias",
    "block_sparse_moe.in_proj.weight",
    "block_sparse_moe.experts.w13",
    "block_sparse_moe.experts.w2",
    "block_sparse_moe.routed_expert_norm.weight",
    "block_sparse_moe.routed_expert_up_proj.weight",
    "block_sparse_moe.shared_down_proj.weight",
)
_MLP = ("mlp.gate_up_proj.weight", "mlp.down_proj.weight")
_LAST = (
    "model.output_attn_res.norm",
    "model.output_attn_res.proj",
    "model.norm.weight",
    "lm_head.weight",
)

# Those that stay float32 in a model of half precision.
_FLOAT32 = ("conv_weight", "A_log", "dt_bias", "o_norm.weight", "e_score_correction_bias")


class Handed(NamedTuple):
    """What a model hands over: its weights in order, None if its modules must be called; and the
    hooks that would see it run."""

    weights: list[Tensor | None] | None
    hooks: list[Mapping]


class DecoderCall:
    """Runs `net`, a KimiForCausalLM, at once."""

    def __init__(self, net: nn.Module) -> None:
        self._net = net
        self._form = decoder_form(net.config, net.model.layers)
        self._classes = {type(module) for module in _watchable(net)}
        self._shapes = [None if w is None else w.shape for w in self._found()]
        self._held: Handed | None = None

    def hold(self) -> None:
        """Look weights up now instead of for every call: from here on, a parameter or a module
        that is put in another's place is not seen; what changes in place is."""
        self._held = self._handed()

    def look_again(self) -> None:
        """See what has been put in another's place, if weights are held."""
        if self._held is not None:
            self.hold()

    def __call__(
        self, ids: Tensor, step: Step, state: ModelState, wanted: Tensor | None
    ) -> Tensor | None:
        """Logits [M, vocab] of the wanted tokens [M] of packed ids [N] (None: of all); None, with
        nothing done, where modules must be called."""
        decoder, slots = step.dispatcher.functions.decoder, only_group(step)
        if decoder is None or slots is None:
            return None
        weights, hooks = self._held or self._handed()
        if weights is None or any(hooks) or _has_any_global_hook():
            return None
        rows = StepRows(slots, step.attention.rows, step.destinations.out_rows)
        return decoder(ids, wanted, self._form, weights, state, rows)

    def _handed(self) -> Handed:
        modules, weights = [*_watchable(self._net)], self._found()
        hooks = [h for m in modules for h in (m._forward_hooks, m._forward_pre_hooks)]
        known = self._classes.issuperset(map(type, modules))
        whole = [None if w is None else w.shape for w in weights] == self._shapes
        return Handed(weights if known and whole and self._of_one_dtype(weights) else None, hooks)

    def _of_one_dtype(self, weights: Sequence[Tensor | None]) -> bool:
        """Whether all are in the activation dtype, but for those that stay float32."""
        dtype = self._net.dtype
        return all(
            w is None or w.dtype == (at_least_float32(dtype) if name.endswith(_FLOAT32) else dtype)
            for (_, name), w in zip(self._places(), weights, strict=True)
        )

    def _found(self) -> list[Tensor | None]:
        return [_find(module, name) for module, name in self._places()]

    def _places(self) -> Iterator[tuple[nn.Module, str]]:
        """The module and the name under which each weight is found, in order."""
        net, form = self._net, self._form
        yield from ((net, name) for name in _FIRST)
        for layer, kda, moe in zip(net.model.layers, form.is_kda, form.is_moe, strict=True):
            attention, feed_forward = _KDA if kda else _MLA, _MOE if moe else _MLP
            names = (*_ATTENTION_READS, *attention, *_FEED_FORWARD_READS, *feed_forward)
            yield from ((layer, name) for name in names)
        yield from ((net, name) for name in _LAST)


def only_group(step: Step) -> RowGroup | None:
    """The rows of a step, if they are one group and own all of its tokens."""
    groups = [rows for rows in (step.kda.extend, step.kda.decode) if rows]
    whole = len(groups) == 1 and groups[0].query_start[-1] == step.kda.num_tokens
    return groups[0] if whole else None


def decoder_form(config: KimiConfig, layers: Sequence[nn.Module]) -> DecoderForm:
    """What the layers of a config are; zeros for the sizes of a kind that it does not have."""
    kinds = [config.is_kda_layer(i) for i in range(len(layers))]
    attention = dict(zip(kinds, (layer.self_attn for layer in layers), strict=True))
    kda, mla = attention.get(True), attention.get(False)
    mixture = next((layer.block_sparse_moe for layer in layers if layer.moe), None)
    return DecoderForm(
        opens_block=[layer.opens_block for layer in layers],
        is_kda=kinds,
        is_moe=[layer.moe for layer in layers],
        eps=config.rms_norm_eps,
        kda_heads=kda.heads if kda else 0,
        kda_widths=kda.widths if kda else [],
        lower_bound=kda.lower_bound if kda else None,
        mla_heads=mla.heads if mla else 0,
        mla_widths=mla.widths if mla else [],
        mla_eps=config.latent_norm_eps,
        moe_widths=mixture.widths if mixture else [],
        rule=mixture.gate.rule if mixture else RouterRule(1),
        glu=glu_form(config),
    )


def _find(module: nn.Module, name: str) -> Tensor | None:
    """The parameter of that name; None where there is none."""
    *path, own = name.split(".")
    for child in path:
        module = module._modules.get(child)
        if module is None:
            return None
    return module._parameters.get(own)


def _watchable(net: nn.Module) -> Iterator[nn.Module]:
    """The modules that are called when the model runs one by one; linear layers, routers and the
    norms inside of them are not: their weights are read."""
    yield from (net.model, *net.children(), *net.model.children())
    for layer in net.model.layers:
        yield from (layer, *layer.children())
