"""A whole decoder as one call, from token ids to logits, for a backend that has one.

Its twin are a model's modules, called one behind the other; they are made of the functions of their
backend, and so is the call, bit for bit. Weights come as one list, None for what a model does not
have, in this order:

    embedding
    each layer      norm, proj, weight      of the mixture that attention reads
                    KDA  in_proj, f_b, g_b, conv_weight, A_log, dt_bias, norm, o_proj
                    MLA  in_proj, q_norm, q_b, kv_norm, kv_b, o_proj
                    norm, proj, weight      of the mixture that the feed-forward reads
                    MoE  router, bias, in_proj, w13, w2, norm, up, shared_down
                    MLP  gate_up, down
    norm, proj, weight                      of the mixture that the head reads
    head

as `kernels.sublayers` describes them; norm and proj of a mixture are there with AttnRes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from kernels.glu import GLUForm
from kernels.kda_metadata import RowGroup
from kernels.paging import PagedRows
from kernels.routing import RouterRule


class DecoderForm(NamedTuple):
    """What the layers are; those of one kind are alike. widths: rows of the parts of in_proj."""

    opens_block: Sequence[bool]  # [layers]; all False without AttnRes
    is_kda: Sequence[bool]  # [layers]
    is_moe: Sequence[bool]  # [layers]
    eps: float
    kda_heads: int
    kda_widths: Sequence[int]
    lower_bound: float | None
    mla_heads: int
    mla_widths: Sequence[int]
    mla_eps: float
    moe_widths: Sequence[int]
    rule: RouterRule
    glu: GLUForm


class StepRows(NamedTuple):
    """A step whose rows are all of one kind: their slots, what they read, and out_rows [N], the
    latent row that each token is written to, -1 for none."""

    slots: RowGroup
    paged: PagedRows
    out_rows: Tensor
