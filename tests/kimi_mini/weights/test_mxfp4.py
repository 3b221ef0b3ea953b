"""MXFP4 against the format's definition, value by value."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from kimi_mini.weights.mxfp4 import decode, encode, packed_shapes

MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def by_definition(nibble: int, scale: int) -> float:
    return (-1.0 if nibble & 8 else 1.0) * MAGNITUDES[nibble & 7] * 2.0 ** (scale - 127)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_nibble_under_every_ordinary_scale_has_its_value(dtype):
    packed = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).expand(250, 16, 16)
    scales = torch.arange(250, dtype=torch.uint8)
    weight = decode(packed, scales.view(-1, 1, 1).expand(250, 16, 1), dtype)
    assert weight.shape == (250, 16, 32) and weight.dtype == dtype
    unit = torch.tensor([by_definition(n, 127) for b in range(256) for n in (b & 15, b >> 4)])
    powers = torch.tensor([2.0 ** (s - 127) for s in range(250)], dtype=torch.float64)
    expected = (unit.double() * powers[:, None]).view(250, 16, 32)
    assert torch.equal(weight.double(), expected)


def test_the_low_nibble_comes_first():
    packed = torch.zeros(1, 16, dtype=torch.uint8)
    packed[0, 3] = 0xF2  # input 6 is 1, input 7 is -6
    weight = decode(packed, torch.tensor([[128]], dtype=torch.uint8))
    assert weight[0, 6:8].tolist() == [2.0, -12.0] and weight.count_nonzero() == 2


def test_each_group_of_32_inputs_has_its_own_scale():
    packed = torch.full((1, 32), 0x22, dtype=torch.uint8)  # ones
    weight = decode(packed, torch.tensor([[127, 130]], dtype=torch.uint8))
    assert weight[0].tolist() == [1.0] * 32 + [8.0] * 32


def test_scale_255_is_not_a_number():
    scale = torch.tensor([[255]], dtype=torch.uint8)
    assert decode(torch.zeros(1, 16, dtype=torch.uint8), scale).isnan().all()


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_what_can_be_represented_is_encoded_without_loss(seed):
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (3, 5, 32), dtype=torch.uint8, generator=generator)
    scale = torch.randint(0, 255, (3, 5, 2), dtype=torch.uint8, generator=generator)
    weight = decode(packed, scale, torch.float64)
    again = decode(*encode(weight), torch.float64)
    assert torch.equal(again, weight) and torch.equal(again.signbit(), weight.signbit())


@pytest.mark.parametrize("value", [*MAGNITUDES[1:], -0.5, -6.0])
@pytest.mark.parametrize("exponent", [-127, -3, 0, 100, 127])
def test_a_group_with_one_kind_of_value_is_kept_at_the_ends_of_the_range(value, exponent):
    weight = torch.full((1, 32), value * 2.0**exponent, dtype=torch.float64)
    assert torch.equal(decode(*encode(weight), torch.float64), weight)


def test_a_zero_group_and_a_negative_zero_are_kept():
    weight = torch.zeros(1, 64)
    weight[0, 1] = -0.0
    weight[0, 40] = 3.0
    again = decode(*encode(weight))
    assert torch.equal(again, weight) and torch.equal(again.signbit(), weight.signbit())


def test_other_values_go_to_the_nearest_one_and_halves_to_the_even_nibble():
    points = [0.2, 0.25, 0.3, 0.74, 0.75, 1.25, 1.26, 1.75, 2.5, 2.6, 3.5, 5.0, 5.01, 6.4]
    nearest = [0.0, 0.0, 0.5, 0.5, 1.0, 1.0, 1.5, 2.0, 2.0, 3.0, 4.0, 4.0, 6.0, 6.0]
    weight = torch.zeros(2, 32)
    weight[0, : len(points)] = torch.tensor(points)
    weight[1] = -weight[0]
    expected = torch.zeros(2, 32)
    expected[0, : len(nearest)] = torch.tensor(nearest)
    expected[1] = -expected[0]
    assert torch.equal(decode(*encode(weight)), expected)


def test_no_value_of_a_random_matrix_is_further_off_than_its_group_allows():
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
    off = (decode(*encode(weight)) - weight).abs().unflatten(-1, (-1, 32))
    largest = weight.abs().unflatten(-1, (-1, 32)).amax(-1, keepdim=True)
    # the largest comes to [3.5, 7) steps, where values are 2 apart: at most one step off
    assert (off <= largest / 3.5).all()
    assert off.square().mean().sqrt() < 0.13 * weight.square().mean().sqrt()


@pytest.mark.parametrize("width", [1, 16, 31, 33, 40])
def test_a_width_that_is_no_multiple_of_32_is_refused(width):
    assert packed_shapes((4, width)) is None
    with pytest.raises(ValueError, match=f"width {width} is not a multiple of 32"):
        encode(torch.ones(4, width))


def test_packed_shapes_are_the_published_ones():
    assert packed_shapes((3072, 3584)) == ((3072, 1792), (3072, 112))
    assert packed_shapes((3584, 3072)) == ((3584, 1536), (3584, 96))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_refused(bad):
    weight = torch.ones(2, 32)
    weight[1, 5] = bad
    with pytest.raises(ValueError, match="not finite"):
        encode(weight)


def test_the_golden_experts_decode_to_their_definition(golden):
    tensors = load_file(golden / "k3-tiny-mxfp4" / "model-00003-of-000010.safetensors")
    stem = "language_model.model.layers.2.block_sparse_moe.experts.5.w2.weight_"
    packed, scale = tensors[stem + "packed"], tensors[stem + "scale"]
    weight = decode(packed, scale)
    for o, i in itertools.product(range(0, 32, 5), range(32)):
        nibble = int(packed[o, i // 2]) >> (4 * (i % 2)) & 15
        assert weight[o, i] == by_definition(nibble, int(scale[o, i // 32]))


@pytest.mark.parametrize(("largest", "kept"), [(4.4, 4.0), (6.9, 6.0), (7.1, 8.0), (7.9, 8.0)])
def test_the_largest_value_of_a_group_is_not_cut_where_a_wider_scale_is_nearer(largest, kept):
    weight = torch.full((1, 32), 0.0)
    weight[0, 9] = largest
    assert decode(*encode(weight))[0, 9] == kept
