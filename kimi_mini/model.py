"""KimiForCausalLM: the hybrid stack of KDA and MLA layers, and its two doors.

    model(input_ids)                   [B, T] → logits [B, T, vocab]   stateless, differentiable
    model.forward_batch(batch, state)  packed rows over slots and pages → logits [M, vocab]

Both run the same layers. A layer i, with block size b of AttnRes (architecture 2.2):

    h = norm( mix(stream; c_attn) )    the mixture is read BEFORE the block opens ...
    if i % b == 0: open a block        ... and the closing block is frozen as a source
    stream += attention(h)
    stream += ffn( norm( mix(stream; c_mlp) ) )
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.dispatcher import KDAKernelDispatcher, KDAState
from kernels.packing import check_integers
from kimi_mini import huge_pages
from kimi_mini.batch import (
    ForwardBatch,
    ModelState,
    Step,
    check_range,
    prepare_step,
    stateless_step,
)
from kimi_mini.config import KimiConfig
from kimi_mini.decoder_call import DecoderCall
from kimi_mini.dtypes import at_least_float32, torch_dtype
from kimi_mini.layers.attn_res import AttnResidual, PlainResidual, ResidualStream, start_stream
from kimi_mini.layers.kda import KimiDeltaAttention
from kimi_mini.layers.mla import LatentAttention
from kimi_mini.layers.mlp import MLP
from kimi_mini.layers.moe import SparseMoE
from kimi_mini.layers.norm import RMSNorm
from kimi_mini.layers.parameters import Linear, unfilled
from kimi_mini.machine import refuse_oversize
from kimi_mini.weights.inventory import parameter_count
from kimi_mini.weights.random_init import initialise
from kimi_mini.weights.reading import LoadReport, read_checkpoint
from kimi_mini.weights.writing import write_checkpoint


class DecoderLayer(nn.Module):
    """Attention (KDA or MLA) and feed-forward (dense or MoE) of layer i."""

    def __init__(self, config: KimiConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        width, eps, block = config.hidden_size, config.rms_norm_eps, config.attn_res_block_size
        attention = KimiDeltaAttention if config.is_kda_layer(layer) else LatentAttention
        self.opens_block = block is not None and layer % block == 0
        self.eps = eps
        self.self_attention_res = residual_reader(config, dtype)
        self.input_layernorm = RMSNorm(width, eps, dtype)
        self.self_attn = attention(config, dtype)
        self.mlp_res = residual_reader(config, dtype)
        self.post_attention_layernorm = RMSNorm(width, eps, dtype)
        self.moe = config.is_moe_layer(layer)
        if self.moe:
            self.block_sparse_moe = SparseMoE(config, dtype)
        else:
            self.mlp = MLP(config, config.intermediate_size, dtype)

    def forward(
        self, stream: ResidualStream, step: Step, state: KDAState | Tensor | None
    ) -> ResidualStream:
        functions = step.dispatcher.functions
        h = self.self_attention_res(stream, self.input_layernorm, functions)
        if self.opens_block:
            stream = stream.open_block(self.eps)
        stream = stream.add(self.self_attn(h, step, state))
        h = self.mlp_res(stream, self.post_attention_layernorm, functions)
        feed_forward = self.block_sparse_moe if self.moe else self.mlp
        return stream.add(feed_forward(h, functions))


def residual_reader(config: KimiConfig, dtype: torch.dtype) -> nn.Module:
    """A reading point of the residual stream, learned if the config has AttnRes."""
    if config.attn_res_block_size is None:
        return PlainResidual()
    return AttnResidual(config.hidden_size, dtype)


class Embedding(nn.Module):
    """Token ids [...] → rows [..., hidden]."""

    def __init__(self, vocab: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = unfilled(vocab, width, dtype=dtype)

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class KimiModel(nn.Module):
    """Embedding, decoder layers, the last mixture and norm."""

    def __init__(self, config: KimiConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = nn.ModuleList(
            DecoderLayer(config, i, dtype) for i in range(config.num_hidden_layers)
        )
        self.kinds = [config.is_kda_layer(i) for i in range(config.num_hidden_layers)]
        self.blocks = sum(layer.opens_block for layer in self.layers)
        self.output_attn_res = residual_reader(config, dtype)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)

    def forward(
        self,
        ids: Tensor,
        step: Step,
        state: ModelState | None,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Packed ids [N] → normed hidden states [N, hidden], or those of the wanted tokens [M].

        state None: every row from zeros, nothing kept.
        """
        stream = start_stream(self.embed_tokens(ids), self.blocks)
        states = [None] * len(self.layers) if state is None else self._layer_states(state)
        for layer, own in zip(self.layers, states, strict=True):
            stream = layer(stream, step, own)
        if wanted is not None:
            stream = stream.at(wanted)
        return self.output_attn_res(stream, self.norm, step.dispatcher.functions)

    def _layer_states(self, state: ModelState) -> list[KDAState | Tensor]:
        kda = iter(zip(state.recurrent, state.conv, strict=True))
        latent = iter(state.latent)
        return [KDAState(*next(kda)) if is_kda else next(latent) for is_kda in self.kinds]


class KimiForCausalLM(nn.Module):
    """Kimi K3 in miniature.

    A model made by the constructor is unfilled (every parameter NaN): use `from_config` for seeded
    random weights or `from_pretrained` for a checkpoint. dtype: one of `dtypes.DTYPES` or its
    name; backend and kernel_chunk choose the KDA kernels (`KDAKernelDispatcher`).
    Raises ValueError for a model that this machine cannot hold.
    """

    def __init__(
        self,
        config: KimiConfig,
        dtype: torch.dtype | str = "float32",
        backend: str = "auto",
        kernel_chunk: int = 16,
    ) -> None:
        super().__init__()
        dtype, count = torch_dtype(dtype), parameter_count(config)
        refuse_oversize(f"a model of {count:,} parameters", count * dtype.itemsize)
        self.config = config
        self.dispatcher = KDAKernelDispatcher(backend, kernel_chunk)
        self.model = KimiModel(config, dtype)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, dtype)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        huge_pages.gather(self.parameters())
        self._at_once = DecoderCall(self)
        self.register_load_state_dict_post_hook(_look_again)
        self.load_report: LoadReport | None = None  # what from_pretrained found

    @classmethod
    def from_config(
        cls, config: KimiConfig, *, seed: int = 0, dtype: torch.dtype | str = "float32", **kernels
    ) -> KimiForCausalLM:
        """Random weights (`weights.random_init`), the same for the same seed. kernels: backend,
        kernel_chunk."""
        model = cls(config, dtype, **kernels)
        initialise(model.state_dict(), config, seed)
        return model

    @classmethod
    def from_pretrained(
        cls,
        directory: str | Path,
        *,
        dtype: torch.dtype | str = "float32",
        verify: bool = True,
        **kernels,
    ) -> KimiForCausalLM:
        """A checkpoint folder in the published layout; dtype "auto" follows its config; verify:
        check recorded digests.

        Raises ConfigError or CheckpointError (both ValueError) naming all that is wrong.
        """
        config = KimiConfig.from_json(Path(directory) / "config.json")
        model = cls(config, config.dtype if dtype == "auto" else dtype, **kernels)
        model.load_report = read_checkpoint(directory, config, model.state_dict(), verify)
        return model

    def save_pretrained(self, directory: str | Path, **options) -> None:
        """Write a checkpoint folder in the published layout, whole or not at all.

        options: as `weights.writing.write_checkpoint` (expert format, shard size, overwrite).
        """
        write_checkpoint(directory, self.config, self.state_dict(), **options)

    @property
    def dtype(self) -> torch.dtype:
        """The activation dtype."""
        return self.model.embed_tokens.weight.dtype

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids [B, T] → logits [B, T, vocab], float32 (float64 for a float64 model).

        Every row is a sequence of its own, from zeros; no state is read or kept. Differentiable.
        Raises ValueError for ids outside the vocabulary or another number of axes.
        """
        check_integers("input_ids", input_ids, axes=2)
        ids = input_ids.flatten()
        check_range("input_ids", ids, 0, self.config.vocab_size)
        B, T = input_ids.shape
        step = stateless_step(B, T, self.dispatcher)
        hidden = self.model(ids.long(), step, None)
        return self.logits(hidden).view(B, T, self.config.vocab_size)

    @torch.inference_mode()
    def forward_batch(self, batch: ForwardBatch, state: ModelState) -> Tensor:
        """Run one step; returns logits [B, vocab] of each row's last token, zeros for rows that are
        empty or do not run, or [M, vocab] of batch.logits_at.

        In place: state.recurrent and state.conv at the rows' slots and export destinations,
        state.latent at out_rows. Raises ValueError, with the state untouched, if the batch does
        not fit the state or the model.
        """
        step = prepare_step(batch, state, self.config, self.dtype, self.dispatcher)
        spans = step.attention.spans
        if batch.logits_at is not None:
            return self._logits_of(batch.logits_at.long(), batch, step, state)
        every_token = len(spans) == batch.token_ids.shape[0]  # is the last one of a row
        ends = [s.first + s.count - 1 for s in spans]
        last = None if every_token else torch.tensor(ends, dtype=torch.long)
        logits = self._logits_of(last, batch, step, state)
        B = batch.slots.shape[0]
        if len(spans) == B:
            return logits
        out = logits.new_zeros(B, logits.shape[1])
        out[(batch.query_start.diff() > 0) & (batch.slots != -1)] = logits
        return out

    def hold_weights(self) -> None:
        """Promise that no parameter and no module will be put in another's place from now on, but
        by load_state_dict (what changes in place is seen), so that a step of the native backend
        need not look for them. An engine does it."""
        self._at_once.hold()

    def _logits_of(
        self, tokens: Tensor | None, batch: ForwardBatch, step: Step, state: ModelState
    ) -> Tensor:
        """Logits of some tokens of the step, or of all; at least float32."""
        ids = batch.token_ids.long()
        logits = self._at_once(ids, step, state, tokens)
        if logits is None:
            return self.logits(self.model(ids, step, state, tokens))
        return _wide(logits)

    def logits(self, hidden: Tensor) -> Tensor:
        """Normed hidden states [..., hidden] → logits [..., vocab], at least float32."""
        return _wide(self.lm_head(hidden, self.dispatcher.functions))


def _wide(logits: Tensor) -> Tensor:
    return logits.to(at_least_float32(logits.dtype))


def _look_again(net: KimiForCausalLM, _: object) -> None:
    """Loading may have put other parameters in the places of those that are held."""
    net._at_once.look_again()
