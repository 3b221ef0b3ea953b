"""Native latent attention: near float64, over pages in any order, and nothing but the row."""

import itertools

import pytest
import torch

from kernels.layer_functions import TORCH
from kernels.native.layers import NATIVE
from kernels.native.library import operators
from kernels.paging import build_attention_metadata
from kernels.reference import attention_reference
from kimi_mini.workbench.cases import relative_error
from tests.kernels.latent_rows import NOPE, ROPE, WIDTH, H, L, V, operands, paged

pytestmark = pytest.mark.needs_native

# (queries, context). Of this shape up to 20 queries are absorbed; with 64 rows in a block and 24
# queries together, each is on either side of something
ROWS = [(1, 0), (1, 64), (3, 61), (20, 0), (21, 0), (24, 40), (70, 0), (70, 60)]


def step_of(queries, contexts, table, pool, slots=None):
    starts = [0, *itertools.accumulate(queries)]
    return build_attention_metadata(
        starts, contexts, table, page=pool.shape[1], pages=pool.shape[0], slots=slots
    )


def drawn_batch(queries, contexts, page, dtype=torch.float32):
    """q, pool, kv_b, step and each row's latent rows; the pool is NaN wherever no row is."""
    kv_b = torch.randn(H, NOPE + V, L).to(dtype)
    rows = [torch.randn(c + t, WIDTH).to(dtype) for c, t in zip(contexts, queries, strict=True)]
    q = torch.randn(sum(queries), H, NOPE + ROPE).to(dtype)
    pool, table = paged(rows, page)
    return q, pool.to(dtype), kv_b, step_of(queries, contexts, table, pool), rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_every_row_agrees_with_the_formula(dtype):
    queries, contexts = zip(*ROWS, strict=True)
    q, pool, kv_b, step, rows = drawn_batch(queries, contexts, 16, dtype)
    got = NATIVE.attend(q, pool, kv_b, step)
    assert got.dtype == torch.promote_types(dtype, torch.float32)
    ends = itertools.accumulate(queries)
    for r, (end, count) in enumerate(zip(ends, queries, strict=True)):
        own = slice(end - count, end)
        true = attention_reference(q[own].double(), rows[r].double(), kv_b.double(), contexts[r])
        near = 1e-14 if dtype == torch.float64 else 1e-6
        assert relative_error(got[own], true) <= near, r
    for page in (1, 3, 64):
        other, table = paged(rows, page)
        elsewhere = step_of(queries, contexts, table, other)
        assert torch.equal(NATIVE.attend(q, other.to(dtype), kv_b, elsewhere), got), page


def test_wide_heads_agree_with_the_formula():
    """Whole vectors, and more of them than are added up together; a few queries say it for all."""
    kv_b, q = torch.randn(2, 64 + 80, 96) / 10, torch.randn(300, 2, 64 + 32)
    pool, table = torch.randn(40, 16, 96 + 32), torch.arange(40).view(1, 40)
    for queries, context in ((1, 600), (300, 340)):
        step = step_of([queries], [context], table, pool)
        got = NATIVE.attend(q[:queries], pool, kv_b, step)
        for t in {0, 23, 64, 299} & {*range(queries)}:
            seen = pool.flatten(0, 1)[: context + t + 1].double()
            true = attention_reference(q[t : t + 1].double(), seen, kv_b.double(), context + t)
            assert relative_error(got[t : t + 1], true) <= 1e-6, t


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_neighbours_threads_and_pages_change_no_bit_of_a_row(dtype, threads):
    queries, contexts = zip(*ROWS, strict=True)
    q, pool, kv_b, step, rows = drawn_batch(queries, contexts, 16, dtype)
    together = NATIVE.attend(q, pool, kv_b, step)
    starts = [0, *itertools.accumulate(queries)]
    for count, page in ((1, 16), (2, 16), (5, 3), (1, 1)):
        threads(count)
        for r, (first, end) in enumerate(itertools.pairwise(starts)):
            pages, table = paged([rows[r]], page)
            alone = step_of([end - first], [contexts[r]], table, pages)
            got = NATIVE.attend(q[first:end], pages.to(dtype), kv_b, alone)
            assert torch.equal(got, together[first:end]), r
    assert torch.equal(NATIVE.attend(q, pool, kv_b, step), together)


def test_later_rows_change_no_bit_of_earlier_outputs():
    q, rows, kv_b = operands(90, 20)
    pool, table = paged([rows], 16)
    step = step_of([90], [20], table, pool)
    before = NATIVE.attend(q, pool, kv_b, step)
    for at in (1, 24, 63, 89):
        later, changed = q.clone(), rows.clone()
        later[at:] = 30 * torch.randn_like(q[at:])
        changed[20 + at :] = 30 * torch.randn_like(rows[20 + at :])
        pool.index_put_((table[0, torch.arange(110) // 16], torch.arange(110) % 16), changed)
        after = NATIVE.attend(later, pool, kv_b, step)
        assert torch.equal(before[:at], after[:at]), at
        assert not torch.equal(before[at], after[at])


def test_tokens_of_no_row_are_zeros_and_inputs_stay():
    """A row that does not run between two that do, padding behind; parts of wider tensors."""
    q, pool, kv_b, step, _ = drawn_batch([2, 3, 30], [5, 0, 9], 4)
    table = torch.cat([step.rows.pages, step.rows.pages[:, :1]], 1)
    skipped = step_of([2, 3, 30], [5, 0, 9], table, pool, slots=[1, -1, 2])
    wider = torch.randn(40, H, NOPE + ROPE + 7)
    wider[:35, :, : NOPE + ROPE] = q
    roomy = torch.randn(pool.shape[0], 4 * pool[0].numel())[:, : pool[0].numel()]
    roomy = roomy.copy_(pool.flatten(1)).unflatten(1, pool.shape[1:])
    given = wider[..., : NOPE + ROPE], roomy, kv_b
    kept = [x.clone() for x in given]
    got = NATIVE.attend(*given, skipped)
    full = NATIVE.attend(q, pool, kv_b, step)
    assert torch.equal(got[:2], full[:2]) and torch.equal(got[5:35], full[5:])
    assert not got[2:5].any() and not got[35:].any()
    for x, before in zip(given, kept, strict=True):
        torch.testing.assert_close(x, before, rtol=0, atol=0, equal_nan=True)


def test_large_scores_do_not_overflow():
    for queries, context in ((1, 80), (60, 20)):
        q, pool, kv_b, step, _ = drawn_batch([queries], [context], 16)
        assert NATIVE.attend(1e4 * q, pool, kv_b, step).isfinite().all()


def test_gradients_and_mixed_types_are_the_twins():
    q, pool, kv_b, step, _ = drawn_batch([3, 1], [5, 9], 4)
    q.requires_grad_()
    out = NATIVE.attend(q, pool.nan_to_num(), kv_b, step)
    out.sum().backward()
    assert q.grad.isfinite().all()
    mixed = q.detach(), pool.bfloat16(), kv_b, step
    assert torch.equal(NATIVE.attend(*mixed), TORCH.attend(*mixed))


def fits():
    return dict(
        q=torch.ones(4, 2, 5), pool=torch.ones(3, 4, 8), kv_b=torch.ones(2, 7, 6),
        spans=torch.tensor([[0, 1, 5], [1, 3, 3]]), pages=torch.tensor([[1, 2], [0, -1]]),
    )  # fmt: skip


REFUSED = [
    (dict(q=torch.ones(4, 10)), "q, pool and kv_b must have three axes"),
    (dict(q=torch.ones(4, 3, 5)), "kv_b must be [3, 7, 6]"),
    (dict(q=torch.ones(4, 2, 1)), "do not fit"),
    (dict(kv_b=torch.ones(2, 7, 9)), "do not fit"),
    (
        dict(
            q=torch.ones(4, 2, 5).half(),
            pool=torch.ones(3, 4, 8).half(),
            kv_b=torch.ones(2, 7, 6).half(),
        ),
        "Float, Double or BFloat16, got Half",
    ),
    (dict(pool=torch.ones(3, 4, 8).double()), "pool must be Float"),
    (dict(kv_b=torch.ones(2, 7, 6).bfloat16()), "kv_b must be Float"),
    (dict(pool=torch.ones(3, 8, 4).mT), "contiguous inside"),
    (dict(spans=torch.tensor([[0, 1], [1, 3]])), "spans must be [2, 3]"),
    (dict(spans=torch.ones(2, 3)), "spans must be Long"),
    (dict(spans=torch.tensor([[0, 2, 5], [1, 3, 3]])), "in order, within 4 tokens; got (1, 3, 3)"),
    (dict(spans=torch.tensor([[0, 1, 5], [1, 4, 4]])), "in order, within 4 tokens; got (1, 4, 4)"),
    (dict(spans=torch.tensor([[0, 1, 0], [1, 3, 3]])), "in order, within 4 tokens; got (0, 1, 0)"),
    (dict(spans=torch.tensor([[0, 0, 5], [1, 3, 3]])), "in order, within 4 tokens; got (0, 0, 5)"),
    (dict(spans=torch.tensor([[0, 1, 9], [1, 3, 3]])), "row 0 needs 3 pages, got 2"),
    (dict(spans=torch.tensor([[0, 1, 2**63 - 1], [1, 3, 3]])), "row 0 needs 2305843009213693952"),
    (dict(pages=torch.tensor([[1, 3], [0, 0]])), "row 0 names page 3 of 0..2"),
    (dict(pages=torch.tensor([[1, 2], [-1, 0]])), "row 1 names page -1 of 0..2"),
    (dict(pages=torch.tensor([1, 2])), "pages must have two axes"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_what_does_not_fit_is_refused(change, message):
    with pytest.raises(ValueError) as refused:
        operators().latent_attention(**fits() | change)
    assert message in str(refused.value)


def test_fake_tensors_have_the_shapes_and_dtypes_of_real_ones():
    operator = operators().latent_attention.default
    utilities = ("test_schema", "test_faketensor")
    torch.library.opcheck(operator, tuple(fits().values()), test_utils=utilities)
