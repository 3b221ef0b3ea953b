"""Latent attention: two forms of one product, over pages in any order, without positions."""

import itertools

import pytest
import torch

from kernels import latent_attention
from kernels.latent_attention import attend, attend_absorbed, attend_materialised
from kernels.paging import build_attention_metadata
from kernels.reference import attention_reference
from kimi_mini.workbench.cases import relative_error
from tests.kernels.latent_rows import NAN, NOPE, ROPE, WIDTH, H, L, V, operands, paged


@pytest.mark.parametrize("context_len", [0, 1, 16, 33])
@pytest.mark.parametrize("T", [1, 2, 17, 40])
def test_the_materialised_form_agrees_with_the_formula(T, context_len):
    q, rows, kv_b = operands(T, context_len)
    got = attend_materialised(q, rows, kv_b, context_len)
    true = attention_reference(q.double(), rows.double(), kv_b.double(), context_len)
    assert got.dtype == torch.float32
    assert relative_error(got, true) <= 1e-6


def test_the_absorbed_form_agrees_with_the_formula_row_by_row():
    """Rows beyond a request's length are there only to be masked."""
    lengths = [1, 40, 7]
    q, kv_b = torch.randn(3, H, NOPE + ROPE), torch.randn(H, NOPE + V, L)
    rows = torch.randn(3, 40, WIDTH)
    got = attend_absorbed(q, rows, kv_b, torch.tensor(lengths))
    for b, length in enumerate(lengths):
        row_operands = q[b : b + 1].double(), rows[b, :length].double(), kv_b.double()
        true = attention_reference(*row_operands, length - 1)
        assert relative_error(got[b : b + 1], true) <= 1e-6, b


@pytest.mark.parametrize("S", [1, 2, 50, 300])
def test_absorbed_and_materialised_are_one_function(S):
    """BR-58."""
    q, rows, kv_b = operands(1, S - 1)
    plain = attend_materialised(q, rows, kv_b, S - 1)
    absorbed = attend_absorbed(q, rows[None], kv_b, torch.tensor([S]))
    assert relative_error(absorbed, plain) <= 1e-6
    q, rows, kv_b = (x.double() for x in (q, rows, kv_b))
    plain = attend_materialised(q, rows, kv_b, S - 1)
    assert plain.dtype == torch.float64
    assert relative_error(attend_absorbed(q, rows[None], kv_b, torch.tensor([S])), plain) < 1e-14


def test_the_order_of_visible_rows_does_not_matter_but_visibility_does():
    """BR-58: no rotation, so permuting earlier tokens changes later outputs by rounding only."""
    q, rows, kv_b = operands(6, 10)
    before = attend_materialised(q, rows, kv_b, 10)
    visible, hidden = rows.clone(), rows.clone()
    visible[[2, 7]] = rows[[7, 2]]
    hidden[[7, 15]] = rows[[15, 7]]  # row 15 is the last query's own: five queries do not see it
    assert relative_error(attend_materialised(q, visible, kv_b, 10), before) <= 1e-6
    assert relative_error(attend_materialised(q, hidden, kv_b, 10)[:5], before[:5]) > 0.01
    for permuted in (visible, hidden):
        last = attend_absorbed(q[-1:], permuted[None], kv_b, torch.tensor([16]))
        assert relative_error(last, before[-1:]) <= 1e-6


@pytest.mark.parametrize(("nope", "rope", "scale"), [(128, 64, 0.07217), (64, 64, 0.08839)])
def test_scores_are_scaled_by_the_full_query_width(nope, rope, scale):
    """BR-58: of two rows, one scores its logit times the scale, the other 0; one value is 1."""
    q = torch.ones(1, 1, nope + rope)
    kv_b = torch.zeros(1, nope + 1, 1)
    kv_b[:, -1] = 1.0
    rows = torch.zeros(2, 1 + rope)
    rows[0, 0] = 1.0  # the value
    rows[0, 1:] = 10.0 / rope  # q . k = 10
    expected = torch.sigmoid(torch.tensor(10 * scale))
    assert float(attend_materialised(q, rows, kv_b, 1)) == pytest.approx(float(expected), abs=1e-5)
    absorbed = attend_absorbed(q, rows[None], kv_b, torch.tensor([2]))
    assert float(absorbed) == pytest.approx(float(expected), abs=1e-5)


@pytest.mark.parametrize("context_len", [0, 9])
def test_later_rows_change_no_bit_of_earlier_outputs(context_len):
    q, rows, kv_b = operands(40, context_len)
    before = attend_materialised(q, rows, kv_b, context_len)
    for at in (1, 7, 16, 39):
        q2, rows2 = q.clone(), rows.clone()
        q2[at:] = 30 * torch.randn_like(q2[at:])
        rows2[context_len + at :] = 30 * torch.randn_like(rows2[context_len + at :])
        after = attend_materialised(q2, rows2, kv_b, context_len)
        assert torch.equal(before[:at], after[:at]), at
        assert not torch.equal(before[at], after[at])


@pytest.mark.parametrize("elements", [1, H * 73 * 20, H * 73 * 37])
@pytest.mark.parametrize("context_len", [0, 23])
def test_queries_in_blocks_see_what_they_see_at_once(monkeypatch, elements, context_len):
    """Blocks of 16 at least, of 20 and of 37 queries; the last one is short."""
    q, rows, kv_b = operands(50, context_len)
    at_once = attend_materialised(q, rows, kv_b, context_len)
    monkeypatch.setattr(latent_attention, "_SCORE_ELEMENTS", elements)
    assert relative_error(attend_materialised(q, rows, kv_b, context_len), at_once) <= 1e-6


def test_scores_of_a_long_prompt_are_never_held_at_once(monkeypatch):
    """The largest tensor of scores stays within the bound, whatever the prompt's length."""
    sizes = []
    softmax = torch.softmax

    def watched(x, dim):
        sizes.append(x.numel())
        return softmax(x, dim)

    monkeypatch.setattr(torch, "softmax", watched)
    monkeypatch.setattr(latent_attention, "_SCORE_ELEMENTS", 1 << 14)
    attend_materialised(*operands(200, 100), 100)
    assert max(sizes) <= 1 << 14
    assert len(sizes) > 10


@pytest.mark.parametrize("page", [1, 3, 16, 64])
def test_page_size_and_order_change_no_bit(page):
    """BR-73: 50 tokens, pages shuffled, table padded with -1, unused places and last page NaN."""
    q, rows, kv_b = operands(50, 0)
    direct = attend_materialised(q, rows, kv_b, 0)
    last = attend_absorbed(q[-1:], rows[None], kv_b, torch.tensor([50]))
    pool, table = paged([rows], page)
    pages = pool.shape[0]
    step = build_attention_metadata([0, 50], [0], table, page=page, pages=pages)
    assert torch.equal(attend(q, pool, kv_b, step), direct)
    step = build_attention_metadata([0, 1], [49], table, page=page, pages=pages)
    assert torch.equal(attend(q[-1:], pool, kv_b, step), last)


@pytest.mark.parametrize("page", [1, 16])
def test_rows_of_a_batch_are_the_rows_alone(page):
    """I-43: prefill pieces, decode rows and empty rows mixed, every request in its own pages."""
    queries, contexts = [7, 1, 0, 1, 20, 1], [0, 33, 5, 0, 12, 64]
    kv_b = torch.randn(H, NOPE + V, L)
    rows = [torch.randn(c + t, WIDTH) for c, t in zip(contexts, queries, strict=True)]
    starts = [0, *torch.tensor(queries).cumsum(0).tolist()]
    q = torch.randn(starts[-1], H, NOPE + ROPE)
    pool, table = paged(rows, page)
    pages = pool.shape[0]
    step = build_attention_metadata(starts, contexts, table, page=page, pages=pages)
    together = attend(q, pool, kv_b, step)
    assert together.shape == (starts[-1], H, V)
    for r, (first, last) in enumerate(itertools.pairwise(starts)):
        if first == last:
            continue
        true = attention_reference(
            q[first:last].double(), rows[r].double(), kv_b.double(), contexts[r]
        )
        assert relative_error(together[first:last], true) <= 1e-6, r
        alone = build_attention_metadata(
            [0, last - first], contexts[r : r + 1], table[r : r + 1], page=page, pages=pages
        )
        assert relative_error(attend(q[first:last], pool, kv_b, alone), true) <= 1e-6, r


@pytest.mark.parametrize("page", [1, 3, 16])
@pytest.mark.parametrize("depths", [[1, 5, 16, 1000], [1000, 3, 600, 0, 999, 700, 1000]])
def test_decode_rows_of_all_depths_are_the_rows_alone(depths, page):
    """Groups of similar length, a prefill piece and a padding row on the sink between them; NaN
    wherever no row is."""
    first, sink = depths[:2], len(depths) + 1
    queries = [1] * len(first) + [5] + [1] * (len(depths) - 2) + [1]
    contexts = [*first, 20, *depths[2:], 0]
    kv_b = torch.randn(H, NOPE + V, L)
    rows = [torch.randn(c + t, WIDTH) for c, t in zip(contexts, queries, strict=True)]
    starts = [0, *torch.tensor(queries).cumsum(0).tolist()]
    q = torch.randn(starts[-1], H, NOPE + ROPE)
    pool, table = paged(rows, page)
    table[sink, :] = 0  # the sink holds anything, here NaN
    slots = [*range(1, sink + 1), 0]
    options = {"page": page, "pages": pool.shape[0]}
    step = build_attention_metadata(starts, contexts, table, slots=slots, **options)
    together = attend(q, pool, kv_b, step)
    for r, (begin, end) in enumerate(itertools.pairwise(starts)):
        if r == sink:
            continue
        own = slice(r, r + 1)
        alone = build_attention_metadata([0, end - begin], contexts[own], table[own], **options)
        expected = attend(q[begin:end], pool, kv_b, alone)
        assert expected.isfinite().all()
        assert relative_error(together[begin:end], expected) <= 1e-6, r


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_rows_stored_in_bf16_are_attended_in_float32(dtype):
    q, rows, kv_b = operands(5, 20, dtype)
    got = attend_materialised(q, rows, kv_b, 20)
    assert got.dtype == torch.float32
    assert torch.equal(got, attend_materialised(q.float(), rows.float(), kv_b.float(), 20))
    one = attend_absorbed(q[-1:], rows[None], kv_b, torch.tensor([25]))
    assert one.dtype == torch.float32
    assert relative_error(one, got[-1:]) <= 1e-6


def test_large_scores_do_not_overflow():
    q, rows, kv_b = operands(4, 3)
    q = 1e4 * q
    got = attend_materialised(q, rows, kv_b, 3)
    # scores of 1e5 are known to 1e-2 in float32, but the softmax is all but a choice of one row
    assert got.isfinite().all()
    assert attend_absorbed(q[-1:], rows[None], kv_b, torch.tensor([7])).isfinite().all()


def test_inputs_are_not_changed():
    """I-42, BR-34."""
    q, rows, kv_b = operands(6, 3)
    pool, table = paged([rows], 4)
    step = build_attention_metadata([0, 6], [3], table, page=4, pages=pool.shape[0])
    kept = [x.clone() for x in (q, pool, kv_b)]
    attend(q, pool, kv_b, step).fill_(NAN)
    assert all(
        torch.equal(a.nan_to_num(7), b.nan_to_num(7))
        for a, b in zip(kept, (q, pool, kv_b), strict=True)
    )


def test_a_pool_with_any_page_stride_reads_the_same():
    """BR-44: one layer of a page-major pool."""
    q, rows, kv_b = operands(9, 4)
    pool, table = paged([rows], 4)
    step = build_attention_metadata([0, 9], [4], table, page=4, pages=pool.shape[0])
    several = torch.full((pool.shape[0], 3, 4, WIDTH), NAN)
    several[:, 1] = pool
    assert torch.equal(attend(q, several[:, 1], kv_b, step), attend(q, pool, kv_b, step))
