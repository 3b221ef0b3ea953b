"""Bytes and FLOPs from a config: serving.md 8.1, exactly."""

from dataclasses import replace

import pytest
import torch

from kimi_mini import preset
from kimi_mini.batch import state_form
from kimi_mini.config import KimiConfig
from kimi_mini.costs import (
    break_even_tokens,
    checkpoint_bytes,
    cost_model,
    density,
    prefix_flops,
    state_sizes,
    used_parameters,
)

K3 = preset("k3")


def kimi_linear() -> KimiConfig:
    """Kimi-Linear-48B as far as state goes: 20 KDA and 7 MLA layers, 32 heads of 128."""
    full = (4, 8, 12, 16, 20, 24, 27)
    kda = replace(
        K3.linear_attn_config,
        full_attn_layers=full,
        kda_layers=tuple(n for n in range(1, 28) if n not in full),
        num_heads=32,
    )
    return replace(K3, num_hidden_layers=27, linear_attn_config=kda)


CONFIGS = {
    "k3": K3,
    "Kimi-Linear-48B": kimi_linear(),
    "mini": preset("mini"),
    "nano": preset("nano"),
}
# row, recurrent, conv, checkpoint in fp32 / bf16 / int8 with fp32 scales / with bf16 scales
TABLE = {
    "k3": (
        *(27_648, 434_110_464, 15_261_696),
        *(449_372_160, 232_316_928, 127_180_800, 125_485_056),
    ),
    "Kimi-Linear-48B": (
        *(8_064, 41_943_040, 1_474_560),
        *(43_417_600, 22_446_080, 12_288_000, 12_124_160),
    ),
    "mini": (512, 884_736, 62_208, 946_944, 504_576, 297_216, 290_304),
    "nano": (128, 36_864, 5_184, 42_048, 23_616, 15_552, 14_976),
}
BREAK_EVEN = {
    "k3": (16_253.3, 8_402.7, 4_600.0),
    "Kimi-Linear-48B": (5_384.1, 2_783.5, 1_523.8),
    "mini": (1_849.5, 985.5, 580.5),
    "nano": (328.5, 184.5, 121.5),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_table_of_bytes(name):
    kept = checkpoint_bytes(CONFIGS[name])
    row = cost_model(CONFIGS[name]).row_bytes
    assert (row, kept.recurrent, kept.conv, kept.full, *kept[2:]) == TABLE[name]
    even = break_even_tokens(CONFIGS[name], torch.bfloat16)
    assert tuple(round(tokens, 1) for tokens in even.values())[:3] == BREAK_EVEN[name]


def test_nano_all_in_float32():
    model = cost_model(preset("nano"), torch.float32)
    kept = checkpoint_bytes(preset("nano"), torch.float32)
    assert (model.row_bytes, kept.conv, model.checkpoint_bytes) == (256, 10_368, 47_232)
    assert break_even_tokens(preset("nano"), torch.float32)["float32"] == 184.5


def test_a_float64_model_keeps_float64_states():
    kept = checkpoint_bytes(preset("nano"), torch.float64)
    assert kept.recurrent == 2 * checkpoint_bytes(preset("nano")).recurrent
    assert cost_model(preset("nano"), torch.float64).checkpoint_bytes == kept.full


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_checkpoint_weighs_what_a_slot_does(name, dtype):
    """What policies count is what the pools take."""
    sizes = state_sizes(CONFIGS[name], dtype, 16)
    model = cost_model(CONFIGS[name], dtype)
    assert (sizes.slot_bytes, sizes.row_bytes) == (model.checkpoint_bytes, model.row_bytes)
    assert sizes.page_bytes == 16 * model.row_bytes


@pytest.mark.parametrize("tp, size, even", [(8, 56_171_520, 2_031.7), (16, 28_085_760, 1_015.8)])
def test_state_divides_by_the_ranks_and_rows_do_not(tp, size, even):
    kept = checkpoint_bytes(K3)
    assert kept.full // tp == size
    assert round(size / cost_model(K3).row_bytes, 1) == even


def test_a_path_of_a_million_tokens():
    """The second table of 8.1."""
    path, intervals = 1_048_576, (64, 256, 4096, 8192, 16384, 65536)
    assert round(path * cost_model(K3).row_bytes / 1e9, 1) == 29.0
    table = [density(K3, torch.bfloat16, path, k) for k in intervals]
    assert [d.checkpoints for d in table] == [16_384, 4_096, 256, 128, 64, 16]
    gigabytes = [(round(d.bytes / 1e9, 1), round(d.int8_bytes / 1e9, 1)) for d in table]
    assert gigabytes == [
        *((7_362.5, 2_083.7), (1_840.6, 520.9), (115.0, 32.6)),
        *((57.5, 16.3), (28.8, 8.1), (7.2, 2.0)),
    ]
    assert [float(f"{d.of_rows:.2g}") for d in table] == [250, 63, 4.0, 2.0, 0.99, 0.25]


def test_flops_of_k3():
    """8.2: 104.19 billion parameters used by a token; 24 layers of 96 heads of 192 + 128."""
    model = cost_model(K3)
    assert model.flops == pytest.approx(2 * 104.19e9, rel=1e-4)
    assert model.attention_flops == 24 * 96 * (192 + 128) * 2


def test_flops_of_a_prefix():
    """4.11 for K3: parameters, 8 a number of 69 states, and 24 layers of 96 heads of 192 + 128."""
    flops = prefix_flops(K3)
    assert flops.linear == 2 * used_parameters(K3) + 8 * 69 * 96 * 128**2
    assert flops.quadratic == 24 * 96 * (192 + 128)
    assert flops.of(5000) == pytest.approx(1.04e15 + 24 * 96 * 320 * 5000**2, rel=0.01)


def test_parameters_that_a_token_uses_are_those_of_the_model_without_idle_experts_and_table():
    """bench has 43,700,080 parameters."""
    bench = preset("bench")
    expert = 3 * bench.moe_intermediate_size * bench.expert_width
    layers = sum(map(bench.is_moe_layer, range(bench.num_hidden_layers)))
    idle = layers * (bench.num_experts - bench.num_experts_per_token) * expert
    table = bench.vocab_size * bench.hidden_size
    assert used_parameters(bench) == 43_700_080 - idle - table


def test_a_shape_matches_the_state_that_is_allocated():
    """The formulas of the docstring, from another side."""
    shapes = [shape for shape, _ in state_form(K3, 1, 1, 1, torch.bfloat16)]
    assert shapes == [(69, 1, 96, 128, 128), (69, 1, 3, 3 * 96 * 128), (24, 1, 1, 576)]
