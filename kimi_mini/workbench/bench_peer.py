"""transformers' kimi_linear beside ours: another implementation to be timed in the same minutes.

It is the older Kimi-Linear model, so the shape is that of our config without what only K3 has
(AttnRes, latent MoE, SiTU, the full-rank and MLA output gates): for the bench preset 62.2 million
parameters, more than ours because its experts work in the full width. Weights are random.

transformers is imported here alone, and only when a peer is asked for. It also looks for a
distribution called `kernels`; where an accepted version of that is installed, its model classes
cannot be imported from a process whose path has our folder of that name first. Where `fla` can be
imported, it would run that package's GPU kernels on a CPU as well, so it is kept from finding it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from kimi_mini.config import KimiConfig

INSTALL = "pip install -c constraints.txt -e '.[bench]'"

# fields that both configs call the same
SAME_NAMES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "intermediate_size",
    "rms_norm_eps",
    "max_position_embeddings",
    "bos_token_id",
    "pad_token_id",
)


class PeerMissing(ValueError):
    """There is nothing to compare with; the message says why and what would help."""


class TransformersPeer:
    """`KimiLinearForCausalLM` with attention "sdpa", everything else as it comes.

    Prompts run in one piece and, like ours, to the logits of the last token alone.
    Raises PeerMissing where transformers or its model cannot be had, or not in this dtype.
    """

    def __init__(self, config: KimiConfig, dtype: torch.dtype) -> None:
        if dtype == torch.float64:  # its grouped product of experts is not made for it
            raise PeerMissing("transformers' kimi_linear does not run in float64")
        transformers = import_transformers()
        options = peer_options(config) | {"attn_implementation": "sdpa"}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            shape = transformers.KimiLinearConfig(**options)
            self.model = transformers.KimiLinearForCausalLM._from_config(shape, dtype=dtype).eval()
        self.name = f"transformers {transformers.__version__} kimi_linear"
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())

    def describe(self) -> dict[str, Any]:
        """What it runs with, for a report."""
        config = self.model.config
        return {
            "parameters": self.parameters,
            "attention": config._attn_implementation,
            "experts": config._experts_implementation,
        }

    def prefill(self, ids: Tensor) -> Callable[[], object]:
        """What runs ids [1, T] from nothing into a new cache."""
        return lambda: self._run(ids, None)

    def decode(self, context: Tensor, ids: Tensor) -> Callable[[], object]:
        """What runs ids [1, n] one by one behind context [1, T], which is run here, once.

        After the last step the latent rows are cut back to T, so that every call begins at the
        same depth (within it the cache grows by n); the recurrent states move on, as ours do.
        """
        cache = self._run(context, None).cache
        growing = [cache.layers[i] for i in _attention_layers(self.model)]
        steps = ids.split(1, 1)

        def run() -> Any:
            for token in steps:
                out = self._run(token, cache)
            for layer in growing:
                layer.crop(-len(steps))
            return out

        return run

    def _run(self, ids: Tensor, cache: Any) -> Any:
        with torch.inference_mode():
            return self.model(ids, cache=cache, use_cache=True, logits_to_keep=1)


def _attention_layers(model: nn.Module) -> list[int]:
    return [i for i, kind in enumerate(model.config.layer_types) if kind == "full_attention"]


def find_peer(
    wanted: bool | None, config: KimiConfig, dtype: torch.dtype
) -> tuple[TransformersPeer | None, str | None]:
    """The peer, or why there is none. wanted None: if it can be had; True: PeerMissing if not."""
    if wanted is False:
        return None, "--no-peer was given"
    try:
        return TransformersPeer(config, dtype), None
    except PeerMissing as missing:
        if wanted:
            raise
        return None, str(missing)


def peer_options(config: KimiConfig) -> dict[str, Any]:
    """Arguments of transformers' KimiLinearConfig for a model of the same widths and layers."""
    kda, layers = config.linear_attn_config, range(config.num_hidden_layers)
    options = {name: getattr(config, name) for name in SAME_NAMES} | {
        "eos_token_id": list(config.eos_token_ids) or None,
        "layer_types": [
            "linear_attention" if config.is_kda_layer(i) else "full_attention" for i in layers
        ],
        "mlp_layer_types": ["sparse" if config.is_moe_layer(i) else "dense" for i in layers],
        "linear_num_heads": kda.num_heads,
        "linear_head_dim": kda.head_dim,
        "linear_conv_kernel_dim": kda.short_conv_kernel_size,
    }
    return options | (_expert_options(config) if config.num_experts else {})


def _expert_options(config: KimiConfig) -> dict[str, Any]:
    return {
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.num_experts_per_token,
        "n_shared_experts": config.num_shared_experts,
        "moe_intermediate_size": config.moe_intermediate_size,
        "n_group": config.num_expert_group,
        "topk_group": config.topk_group,
        "norm_topk_prob": config.moe_renormalize,
        "routed_scaling_factor": config.routed_scaling_factor,
    }


def import_transformers() -> ModuleType:
    """The module, with the model classes known to be importable and to run torch forms.

    Raises PeerMissing where it cannot be had.
    """
    if importlib.util.find_spec("transformers") is None:
        raise PeerMissing(f"transformers is not installed; to compare with it: {INSTALL}")
    try:
        with _hidden("fla"):
            import transformers

            _ = transformers.KimiLinearConfig, transformers.KimiLinearForCausalLM
    except (ImportError, AttributeError, RuntimeError) as error:
        raise PeerMissing(
            f"transformers is installed but gives no kimi_linear ({error}); the version that is "
            f"compared with: {INSTALL}; a distribution called `kernels` must not be beside it"
        ) from error
    transformers.logging.set_verbosity_error()  # it says at length that torch forms run
    return transformers


@contextlib.contextmanager
def _hidden(package: str) -> Iterator[None]:
    """A package that cannot be imported while the block runs."""
    before = {package: sys.modules[package]} if package in sys.modules else {}
    sys.modules[package] = None
    try:
        yield
    finally:
        del sys.modules[package]
        sys.modules.update(before)
