"""The torch forms of the KDA scan that others have published, to be timed beside ours.

    transformers   kimi_linear's loop over tokens, and its chunk form
    fla            naive_recurrent_kda and naive_chunk_kda (distribution fla-core)

All run S~ = S diag(e^g), S = S~ + beta (v - S~ k) k^T, o = S q K^-1/2 over q, k, v, g, beta
[1, T, H, ...] from a state [1, H, K, V].
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from torch import Tensor

from kimi_mini.workbench.bench_peer import INSTALL, PeerMissing, import_transformers
from kimi_mini.workbench.cases import ScanCase

Result = tuple[Tensor, Tensor]  # o [1, T, H, V] and the last state [1, H, K, V]


class PublishedScan(NamedTuple):
    """One form; the length of a row must be a multiple of `tokens`."""

    name: str
    scan: Callable[..., Result]
    tokens: int = 1


def published_forms(case: ScanCase) -> dict[str, Callable[[], Result]]:
    """By name, what runs a case of one row in each form that is here and takes its length."""
    operands = [x.unsqueeze(0) for x in case.tokens]
    options = {"initial_state": case.S0.mT.contiguous(), "output_final_state": True}

    def call(form: PublishedScan) -> Callable[[], Result]:
        return lambda: form.scan(*operands, **options)

    scans, _ = published_scans()
    return {form.name: call(form) for form in scans if len(case.q) % form.tokens == 0}


def published_scans() -> tuple[list[PublishedScan], list[str]]:
    """The forms that are here, and why others are not."""
    found, reasons = [], []
    for forms in (_of_transformers, _of_fla):
        try:
            found += forms()
        except PeerMissing as missing:
            reasons.append(str(missing))
    return found, reasons


def _of_transformers() -> list[PublishedScan]:
    import_transformers()
    from transformers.models.kimi_linear import modeling_kimi_linear as source

    return [
        PublishedScan("transformers' loop", source.recurrent_kimi_delta_attention),
        PublishedScan("transformers' chunks", source.chunk_kimi_delta_attention),
    ]


def _of_fla() -> list[PublishedScan]:
    source = _fla_naive()
    return [
        PublishedScan("fla's loop", source.naive_recurrent_kda),
        PublishedScan("fla's chunks", source.naive_chunk_kda, tokens=64),
    ]


@cache
def _fla_naive() -> ModuleType:
    """fla/ops/kda/naive.py by itself: it needs torch and einops, its package needs triton too."""
    package = importlib.util.find_spec("fla")
    if package is None or not package.submodule_search_locations:
        raise PeerMissing(f"fla is not installed; to compare with it: {INSTALL}")
    path = Path(package.submodule_search_locations[0]) / "ops" / "kda" / "naive.py"
    spec = importlib.util.spec_from_file_location("fla_ops_kda_naive", path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (OSError, ImportError) as error:
        raise PeerMissing(f"fla is installed but {path.name} cannot be loaded: {error}") from error
    return module
