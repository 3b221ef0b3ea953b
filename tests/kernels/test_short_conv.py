"""Short convolution: the window it carries, and that no cut or neighbour changes a bit."""

import itertools
import math

import pytest
import torch

from kernels.packing import Export
from kernels.reference import short_conv_reference
from kernels.short_conv import short_conv, short_conv_step
from kimi_mini.workbench.cases import relative_error

# channel counts that fill vector registers, leave some over, or never fill one
CHANNELS = [7, 112, 168]


def conv_case(lengths, D=7, W=4, dtype=torch.float32):
    N = sum(lengths)
    query_start = [0, *itertools.accumulate(lengths)]
    x, weight = torch.randn(N, D).to(dtype), torch.randn(D, W) / W
    return x, weight, torch.randn(len(lengths), W - 1, D).to(dtype), query_start


def compositions(total):
    """All ordered ways of cutting `total` tokens into pieces."""
    for cuts in itertools.product([False, True], repeat=total - 1):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), total]
        yield list(itertools.pairwise(edges))


def in_pieces(x, weight, window, pieces):
    outputs = []
    for first, last in pieces:
        y, window, _ = short_conv(x[first:last], weight, window, [0, last - first])
        outputs.append(y)
    return torch.cat(outputs), window


def test_the_last_tap_multiplies_the_current_token():
    x = torch.tensor([[10.0]])
    weight = torch.tensor([[1.0, 0.1, 0.01, 0.001]])
    window = torch.tensor([[[1.0], [2.0], [3.0]]])
    total = 1 * 1 + 2 * 0.1 + 3 * 0.01 + 10 * 0.001
    y = short_conv(x, weight, window, [0, 1]).y
    assert float(y) == pytest.approx(total / (1 + math.exp(-total)), abs=1e-6)


def test_a_piece_shorter_than_the_window_shifts_it():
    """BR-02, D01: [0, 0, 10] or [10] would be the last inputs of this piece alone."""
    window = torch.tensor([[[1.0], [2.0], [3.0]]])
    x, weight = torch.tensor([[10.0]]), torch.ones(1, 4)
    assert short_conv(x, weight, window, [0, 1]).conv.flatten().tolist() == [2, 3, 10]
    assert short_conv_step(x, weight, window)[1].flatten().tolist() == [2, 3, 10]
    assert short_conv_reference(x, weight, window, [0, 1]).conv.flatten().tolist() == [2, 3, 10]


@pytest.mark.parametrize("W", [1, 2, 4])
def test_every_way_of_cutting_seven_tokens_gives_the_same_bits(W):
    """BR-02, D01: among them 1, 2, 1, 3. A window of W-1 = 0 rows is empty, not the whole input."""
    x, weight, window, query_start = conv_case([7], W=W)
    whole = short_conv(x, weight, window, query_start)
    assert whole.conv.shape == (1, W - 1, 7)
    for pieces in compositions(7):
        y, final = in_pieces(x, weight, window, pieces)
        assert torch.equal(y, whole.y), pieces
        assert torch.equal(final, whole.conv), pieces


@pytest.mark.parametrize("D", CHANNELS)
@pytest.mark.parametrize("prompt", [1, 2, 3, 8])
def test_decode_steps_continue_a_prompt_with_the_same_bits(D, prompt):
    x, weight, window, query_start = conv_case([prompt + 5], D)
    whole = short_conv(x, weight, window, query_start)
    y, final, _ = short_conv(x[:prompt], weight, window, [0, prompt])
    outputs = [y]
    for t in range(prompt, prompt + 5):
        y, final = short_conv_step(x[t : t + 1], weight, final)
        outputs.append(y)
    assert torch.equal(torch.cat(outputs), whole.y)
    assert torch.equal(final, whole.conv)


@pytest.mark.parametrize("D", CHANNELS)
@pytest.mark.parametrize("W", [1, 2, 4])
def test_packed_rows_agree_with_the_formula(D, W):
    lengths = [5, 0, 1, 3, 64, 2]
    case = conv_case(lengths, D, W)
    exports = [Export(4, 1), Export(0, 5), Export(4, 63), Export(3, 2), Export(4, 1)]
    got = short_conv(*case, exports)
    x, weight, window, query_start = case
    truth = short_conv_reference(x.double(), weight.double(), window.double(), query_start, exports)
    assert got.y.dtype == torch.float32
    assert relative_error(got.y, truth.y) < 3e-7  # a handful of float32 roundings
    assert torch.equal(got.conv.double(), truth.conv)  # windows are raw inputs, never computed
    assert torch.equal(got.exported.double(), truth.exported)


@pytest.mark.parametrize("D", CHANNELS)
def test_a_row_gets_the_same_bits_alone_and_packed(D):
    """BR-66: windows and taps restart at every row; neither neighbours nor position matter."""
    lengths = [5, 64, 1, 0, 130, 3]
    x, weight, window, query_start = conv_case(lengths, D)
    packed = short_conv(x, weight, window, query_start)
    for r, (first, last) in enumerate(itertools.pairwise(query_start)):
        alone = short_conv(x[first:last], weight, window[r : r + 1], [0, last - first])
        assert torch.equal(packed.y[first:last], alone.y)
        assert torch.equal(packed.conv[r : r + 1], alone.conv)
    x[query_start[1] : query_start[2]] += 1
    changed = short_conv(x, weight, window, query_start)
    assert torch.equal(changed.y[:5], packed.y[:5])
    assert torch.equal(changed.y[69:], packed.y[69:])


def test_later_tokens_change_no_bit_of_earlier_outputs():
    x, weight, window, query_start = conv_case([40], 112)
    before = short_conv(x, weight, window, query_start).y
    x[23:] = -100 * x[23:]
    after = short_conv(x, weight, window, query_start).y
    assert torch.equal(before[:23], after[:23])
    assert not torch.equal(before[23], after[23])


@pytest.mark.parametrize("lengths", [[0], [0, 5], [5, 0], [0, 0, 0], []], ids=str)
def test_a_row_without_tokens_keeps_its_window(lengths):
    """BR-33."""
    x, weight, window, query_start = conv_case(lengths)
    got = short_conv(x, weight, window, query_start)
    assert got.y.shape == (sum(lengths), 7)
    assert got.conv.shape == (len(lengths), 3, 7)
    for r, length in enumerate(lengths):
        if length == 0:
            assert torch.equal(got.conv[r], window[r])


def test_exports_change_no_bit_of_the_outputs():
    case = conv_case([9, 4])
    plain = short_conv(*case)
    asked = short_conv(*case, [Export(r, t) for r in range(2) for t in range(1, 5)])
    assert torch.equal(plain.y, asked.y)
    assert torch.equal(plain.conv, asked.conv)
    assert plain.exported.shape == (0, 3, 7)


def test_bf16_inputs_are_convolved_in_float32_and_kept_in_bf16():
    x, weight, window, query_start = conv_case([9, 2], dtype=torch.bfloat16)
    got = short_conv(x, weight, window, query_start, [Export(0, 4)])
    assert got.y.dtype == torch.float32
    assert got.conv.dtype == got.exported.dtype == torch.bfloat16
    assert torch.equal(got.y, short_conv(x.float(), weight, window.float(), query_start).y)
    y, conv = short_conv_step(x[:2], weight, window)
    assert (y.dtype, conv.dtype) == (torch.float32, torch.bfloat16)


@pytest.mark.parametrize(
    "layout",
    [
        lambda x: torch.cat([torch.full_like(x, float("nan")), x], -1)[..., x.shape[-1] :],
        lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
        lambda x: x.repeat_interleave(2, 0)[::2],
    ],
    ids=["slice of a wider tensor", "transposed", "every second row"],
)
def test_the_layout_of_the_inputs_changes_no_bit(layout):
    """BR-44."""
    x, weight, window, query_start = conv_case([9, 4], 24)
    plain = short_conv(x, weight, window, query_start)
    other = short_conv(layout(x), layout(weight), layout(window), query_start)
    assert torch.equal(plain.y, other.y)
    assert torch.equal(plain.conv, other.conv)
    step = short_conv_step(x[:2], weight, window)
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            step, short_conv_step(layout(x[:2]), layout(weight), layout(window)), strict=True
        )
    )


def test_inputs_are_not_changed_and_results_are_no_views_of_them():
    """BR-34."""
    x, weight, window, query_start = conv_case([2, 0])
    kept = [t.clone() for t in (x, weight, window)]
    first = short_conv(x, weight, window, query_start, [Export(0, 1)])
    step = short_conv_step(x, weight, window)
    for result in (*first, *step):
        result.fill_(float("nan"))
    assert all(torch.equal(a, b) for a, b in zip(kept, (x, weight, window), strict=True))


def test_shapes_that_do_not_fit_are_refused_with_what_was_expected():
    x, weight, window, query_start = conv_case([5, 2])
    with pytest.raises(ValueError, match=r"conv0 \[2, 3, 7\]; got \[7, 7\] and \[2, 4, 7\]"):
        short_conv(x, weight, torch.zeros(2, 4, 7), query_start)
    with pytest.raises(ValueError, match=r"got \[7, 6\]"):
        short_conv(x[:, :6], weight, window, query_start)
    with pytest.raises(ValueError, match="offset must be 1..2"):
        short_conv(x, weight, window, query_start, [Export(1, 3)])
