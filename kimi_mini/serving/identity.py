"""Who computes what an engine caches: the fields of `cache.identity.Identity`, read off a model.

model      digest of the config and of every parameter as it is in memory, so that a dtype, an
           edited weight or another seed is another model
tokenizer  the tokenizer's own fingerprint
numerics   backend, its export alignment and torch's version: what decides the last bits
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import torch

from cache.identity import Identity, digest_of
from kimi_mini.model import KimiForCausalLM
from kimi_mini.serving.open_model import OpenModel


def identity_of(opened: OpenModel) -> Identity:
    """The identity of everything that this model computes from now on; its weights are read once.

    Whoever changes weights afterwards makes another model, and owes the cache a `clear`.
    """
    dispatcher = opened.model.dispatcher
    return Identity(
        model=digest_of(_model_fields(opened.model), b"model").hex(),
        tokenizer=opened.tokenizer.fingerprint if opened.tokenizer else "",
        numerics=(
            f"{dispatcher.backend.name}, chunk {dispatcher.export_alignment}, "
            f"torch {torch.__version__}"
        ),
    )


def _model_fields(model: KimiForCausalLM) -> Iterator[bytes | memoryview]:
    yield json.dumps(model.config.to_json_dict(), sort_keys=True).encode()
    for name, tensor in model.state_dict().items():
        yield f"{name} {tensor.dtype} {[*tensor.shape]}".encode()
        yield tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
