"""The MLA layer: low-rank keys and values, no rotation, sigmoid output gate (architecture 6).

    q|c|r|g = in_proj x                  one product; q is q_a with q-LoRA, else the queries
    q       = q_b RMSNorm(q_a)           [N, H, nope+R]
    row     = [ RMSNorm(c) | r ]         the L+R numbers cached per token
    y       = o_proj( attend(q, rows) * sigmoid(g) )

The R "rope" columns are never rotated, yet they exist, are cached, and count in the scale.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kernels.paging import write_rows
from kernels.sublayers import MLAProjections
from kimi_mini.batch import Step
from kimi_mini.config import KimiConfig
from kimi_mini.layers.norm import RMSNorm
from kimi_mini.layers.parameters import Linear, weight_of


class LatentAttention(nn.Module):
    """x [N, hidden] → [N, hidden], writing its latent rows into `pool` and attending through it."""

    def __init__(self, config: KimiConfig, dtype: torch.dtype) -> None:
        super().__init__()
        H, nope, V = config.num_attention_heads, config.qk_nope_head_dim, config.v_head_dim
        L, R, eps = config.kv_lora_rank, config.qk_rope_head_dim, config.latent_norm_eps
        self.heads = H
        self.expand = (H, nope + V, L)
        queries = H * (nope + R)
        lora = config.q_lora_rank
        self.widths = [lora or queries, L, R, H * V if config.mla_use_output_gate else 0]
        self.in_proj = Linear(config.hidden_size, sum(self.widths), dtype)
        self.eps = eps
        self.q_a_layernorm = RMSNorm(lora, eps, dtype) if lora else None
        self.q_b_proj = Linear(lora, queries, dtype) if lora else None
        self.kv_a_layernorm = RMSNorm(L, eps, dtype)
        self.kv_b_proj = Linear(L, H * (nope + V), dtype)
        self.o_proj = Linear(H * V, config.hidden_size, dtype)

    def forward(self, x: Tensor, step: Step, pool: Tensor | None) -> Tensor:
        """pool [pages, page, L+R], changed at step.destinations; None: the batch's own rows."""
        functions = step.dispatcher.functions
        q, rows, gate = functions.mla_inputs(x, self._projections(), self.heads)
        if pool is None:
            pool = rows.unsqueeze(1)
        else:
            write_rows(pool, rows, step.destinations)
        kv_b = weight_of(self, "kv_b_proj").view(self.expand)
        o = functions.attend(q, pool, kv_b, step.attention)
        return functions.mla_output(o, gate, weight_of(self, "o_proj"))

    def _projections(self) -> MLAProjections:
        return MLAProjections(
            weight_of(self, "in_proj"),
            self.widths,
            weight_of(self, "q_a_layernorm"),
            weight_of(self, "q_b_proj"),
            weight_of(self, "kv_a_layernorm"),
            self.eps,
        )
