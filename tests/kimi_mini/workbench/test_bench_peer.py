"""The other implementation: when it is there, and that its shape is ours."""

import importlib.util
import sys
import types

import pytest
import torch

from kimi_mini import preset
from kimi_mini.workbench import bench_peer
from kimi_mini.workbench.bench_peer import PeerMissing, find_peer, peer_options


def without_transformers(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "transformers" else find(name)
    )


def test_a_missing_peer_is_a_reason_or_if_asked_for_an_error(monkeypatch):
    without_transformers(monkeypatch)
    config = preset("nano")
    peer, reason = find_peer(None, config, torch.float32)
    assert peer is None
    assert reason.startswith("transformers is not installed") and "[bench]" in reason
    with pytest.raises(PeerMissing, match="not installed"):
        find_peer(True, config, torch.float32)
    assert find_peer(False, config, torch.float32) == (None, "--no-peer was given")
    assert "float64" in find_peer(None, config, torch.float64)[1]


def test_a_transformers_that_cannot_be_used_is_said_so(monkeypatch):
    """Too old, or its look at a distribution called `kernels` went wrong."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "transformers", types.ModuleType("transformers"))
    _, reason = find_peer(None, preset("nano"), torch.float32)
    assert "gives no kimi_linear" in reason and "kernels" in reason and "[bench]" in reason


def test_the_peer_has_our_widths_and_layers():
    options = peer_options(preset("bench"))
    attention = [i for i, kind in enumerate(options["layer_types"]) if kind == "full_attention"]
    assert attention == [3, 7]
    assert options["mlp_layer_types"] == ["dense"] + ["sparse"] * 7
    assert (options["hidden_size"], options["kv_lora_rank"], options["linear_head_dim"]) == (
        512,
        128,
        64,
    )
    assert (options["num_local_experts"], options["num_experts_per_tok"]) == (16, 4)


def test_transformers_runs_as_the_peer_of_62_million_parameters():
    pytest.importorskip("transformers")
    config = preset("nano")
    peer = bench_peer.TransformersPeer(config, torch.float32)
    assert peer.describe()["attention"] == "sdpa"
    ids = torch.arange(3, 3 + 70).unsqueeze(0)
    whole = peer.prefill(ids)()
    assert whole.logits.shape == (1, 1, config.vocab_size)
    step = peer.decode(ids[:, :-1], ids[:, -1:])
    torch.testing.assert_close(step().logits, whole.logits, rtol=1e-4, atol=1e-4)
    assert step().cache.get_seq_length() == 69  # every call starts at the same depth

    large = bench_peer.TransformersPeer(preset("bench"), torch.float32)
    assert large.parameters == 62_161_584
