"""Attention Residuals: the mixture, and the order of reading and freezing."""

import dataclasses

import pytest
import torch

from kimi_mini import KimiForCausalLM, preset
from kimi_mini.layers.attn_res import AttnResidual, start_stream
from kimi_mini.layers.norm import RMSNorm


def reader(width=6, seed=0):
    """A reading point and the norm behind it."""
    module, norm = AttnResidual(width, torch.float64), RMSNorm(width, 1e-5, torch.float64)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in (*module.parameters(), norm.weight):
            parameter.copy_(torch.randn(width, generator=generator))
    return module, norm


@pytest.mark.parametrize("gradients", [True, False], ids=["gradients", "one bank"])
def test_the_mixture_scores_normalised_sources_and_mixes_raw_ones(gradients):
    """Pitfall 8: no 1/sqrt(width), values not normalised. Sources of very different size."""
    module, norm = reader()
    sources = torch.randn(3, 4, 6, dtype=torch.float64) * torch.tensor([0.1, 1, 50])[:, None, None]
    with torch.set_grad_enabled(gradients):
        stream = start_stream(sources[0], 2).open_block(1e-5).add(sources[1])
        stream = stream.open_block(1e-5).add(sources[2])
        got = module(stream, norm)
    query = module.norm * module.proj
    scores = torch.stack(
        [(x @ query) / (x.square().mean(-1) + 1e-5).sqrt() for x in sources]
    )  # [3, 4]
    mixture = (scores.softmax(0)[..., None] * sources).sum(0)
    torch.testing.assert_close(got, norm(mixture), rtol=0, atol=1e-12)


def test_with_one_source_the_mixture_is_that_source():
    module, norm = reader()
    x = torch.randn(5, 6, dtype=torch.float64)
    assert torch.equal(module(start_stream(x, 3), norm), norm(x))


def test_without_gradients_the_bank_has_one_place_for_all_its_blocks():
    x = torch.randn(3, 4, 6)
    with torch.no_grad():
        first = start_stream(x[0], 2).open_block(1e-5).add(x[1])
        second = first.open_block(1e-5)
    assert first.bank.data_ptr() == second.bank.data_ptr() == second.room.bank.data_ptr()
    assert torch.equal(second.bank, x[:2].transpose(0, 1))
    assert torch.equal(first.bank[:, 0], x[0])
    with torch.enable_grad():
        assert start_stream(x[0], 2).room is None


def tiny(layers, block, full):
    base = preset("nano")
    kda = tuple(i for i in range(1, layers + 1) if i not in full)
    return dataclasses.replace(
        base,
        num_hidden_layers=layers,
        attn_res_block_size=block,
        linear_attn_config=dataclasses.replace(
            base.linear_attn_config, full_attn_layers=full, kda_layers=kda
        ),
    )


@pytest.mark.parametrize("layers, block", [(5, 4), (6, 2), (7, 3), (4, 1), (5, 12)])
def test_reads_see_the_published_number_of_sources(layers, block):
    """ceil(i/B)+1 at the attention read, i//B + 2 at the FFN read, ceil(L/B)+1 at the output."""
    model = KimiForCausalLM.from_config(tiny(layers, block, (layers,)), seed=0)
    counts = {}

    def count(name):
        def hook(_, args):
            stream = args[0]
            counts[name] = stream.bank.shape[1] + (stream.prefix is not None)

        return hook

    for i, layer in enumerate(model.model.layers):
        layer.self_attention_res.register_forward_pre_hook(count(("attn", i)))
        layer.mlp_res.register_forward_pre_hook(count(("ffn", i)))
    model.model.output_attn_res.register_forward_pre_hook(count("out"))
    model(torch.tensor([[5, 6, 7]]))
    for i in range(layers):
        assert counts["attn", i] == -(-i // block) + 1
        assert counts["ffn", i] == i // block + 2
    assert counts["out"] == -(-layers // block) + 1


def test_the_bank_holds_the_embedding_then_sums_of_whole_blocks():
    """Pitfalls 5 and 6: no ordinary residual, the prefix never holds the embedding again."""
    model = KimiForCausalLM.from_config(tiny(5, 2, (3, 5)), seed=1, dtype=torch.float64)
    outputs, streams = {}, []
    for i, layer in enumerate(model.model.layers):
        ffn = layer.block_sparse_moe if layer.moe else layer.mlp
        for part, module in (("attn", layer.self_attn), ("ffn", ffn)):
            module.register_forward_hook(
                lambda _, a, out, key=(i, part): outputs.__setitem__(key, out)
            )
        layer.register_forward_hook(lambda _, a, out: streams.append(out))
    ids = torch.tensor([[9, 4, 30, 8]])
    model(ids)
    bank = streams[-1].bank
    assert torch.equal(bank[:, 0], model.model.embed_tokens(ids[0]))
    for block in (0, 1):
        total = sum(
            outputs[i, part] for i in (2 * block, 2 * block + 1) for part in ("attn", "ffn")
        )
        torch.testing.assert_close(bank[:, block + 1], total, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        streams[-1].prefix, outputs[4, "attn"] + outputs[4, "ffn"], rtol=0, atol=1e-12
    )


def test_the_first_layers_attention_reader_has_no_effect():
    """Its weights are stored, yet with an empty bank the mixture is the prefix."""
    model = KimiForCausalLM.from_config(preset("nano"), seed=0)
    ids = torch.tensor([[3, 100, 7]])
    before = model(ids)
    with torch.no_grad():
        model.model.layers[0].self_attention_res.proj.mul_(-7)
    assert torch.equal(model(ids), before)
    with torch.no_grad():
        model.model.layers[1].self_attention_res.proj.mul_(-7)
    assert not torch.equal(model(ids), before)
