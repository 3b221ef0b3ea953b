"""Pages of latent rows: addresses, writes, and tables that do not fit."""

import itertools

import pytest
import torch

from kernels.paging import (
    Destinations,
    build_attention_metadata,
    build_destinations,
    read_rows,
    similar,
    write_rows,
)


def places(flat, page):
    """Destinations of flat row numbers."""
    return Destinations(torch.as_tensor(flat), page)


def test_row_t_lives_in_page_t_by_page_at_place_t_modulo_page():
    pool = torch.arange(8 * 3).view(8, 3, 1)
    read = read_rows(pool, torch.tensor([5, 2, 7]), 7)
    assert read.flatten().tolist() == [15, 16, 17, 6, 7, 8, 21]


@pytest.mark.parametrize("page", [1, 3, 16])
def test_what_is_written_is_read_back_and_nothing_else_changes(page):
    pages, count = 9 * 16 // page, 20
    pool = torch.full((pages, page, 4), float("nan"))
    where = torch.randperm(pages * page - page)[:count] + page  # not in the sink
    rows = torch.randn(count, 4)
    write_rows(pool, rows, places(where, page))
    assert torch.equal(pool.view(-1, 4)[where], rows)
    assert int(pool.isfinite().all(-1).sum()) == count
    every = read_rows(pool, torch.arange(pages), pages * page)
    assert torch.equal(every[where], rows)


def test_a_row_without_destination_is_dropped():
    """BR-62: index -1 is the last place of the pool to torch. A row of 3 tokens and two of padding,
    the first of them aimed at the sink."""
    step = build_attention_metadata([0, 3], [1], torch.tensor([[2, 1]]), page=2, pages=3)
    where = build_destinations(torch.tensor([-1, 2, -1, 1, -1]), step)
    pool = torch.full((3, 2, 4), 9.0)
    write_rows(pool, torch.arange(5.0)[:, None].expand(5, 4), where)
    assert pool.view(-1, 4)[:, 0].tolist() == [9, 9, 1, 9, 9, 9]


@pytest.mark.parametrize(
    ("out_rows", "message"),
    [
        ([5, 3, 3, -1, 4], "token 1 to latent row 3; its page table gives it row 2"),
        ([5, 2, 4, -1, 4], "token 2 to latent row 4; its page table gives it row 3"),
        ([5, 2, 3, 2, 4], "token 3 to latent row 2; it belongs to no running row"),
        ([5, 2, 3, -1, 3], "token 4 to latent row 3; its page table gives it row 4"),
    ],
)
def test_a_token_is_written_to_its_own_place_or_nowhere(out_rows, message):
    """A row of 3 tokens after 1, a skipped row, a decode row; pages of 2."""
    table = torch.tensor([[2, 1], [-1, -1], [2, -1]])
    step = build_attention_metadata(
        [0, 3, 4, 5], [1, 0, 0], table, page=2, pages=3, slots=[1, -1, 2]
    )
    build_destinations(torch.tensor([5, 2, 3, -1, 4]), step)
    with pytest.raises(ValueError, match=message):
        build_destinations(torch.tensor(out_rows), step)


def test_rows_take_the_dtype_of_the_pool_and_no_gradient():
    pool = torch.zeros(2, 2, 4, dtype=torch.bfloat16)
    rows = torch.randn(1, 4, requires_grad=True)
    write_rows(pool, rows, places([2], 2))
    assert not pool.requires_grad
    assert torch.equal(pool[1, 0], rows.detach().bfloat16()[0])


def test_writes_land_in_a_strided_pool():
    several = torch.zeros(4, 3, 2, 5)
    write_rows(several[:, 1], torch.ones(1, 5), places([5], 2))
    assert several[2, 1, 1].tolist() == [1] * 5
    assert float(several.sum()) == 5


def test_rows_are_shared_out_by_their_own_length():
    table = torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]])
    step = build_attention_metadata([0, 3, 3, 4, 5], [2, 9, 5, 0], table, page=4, pages=9)
    (extend,) = step.extend
    assert (extend.tokens, extend.context_len) == (slice(0, 3), 2)
    assert extend.pages.tolist() == [1, 2] and extend.total == 5
    (decode,) = step.decode
    assert decode.tokens.tolist() == [3, 4]
    assert decode.lengths.tolist() == [6, 1]
    # -1 is never looked at: what a row has no page for is its own last one again
    assert decode.pages.tolist() == [[5, 6], [7, 7]]
    assert decode.beyond.tolist() == [8 + 1, 8 + 2, 8 + 3, 8 + 4, 8 + 5]


def test_groups_depend_on_lengths_alone_and_keep_the_order_of_rows():
    assert similar([]) == []
    assert similar([500, 300, 500, 1, 64, 600, 601]) == [[3, 4], [0, 1, 2, 5], [6]]
    assert similar([7] * 5) == [[0, 1, 2, 3, 4]]
    assert similar([31, 64, 65]) == [[0, 1], [2]]
    assert similar([64, 65]) == [[0, 1]]
    assert similar([65, 130, 131]) == [[0, 1], [2]]


@pytest.mark.parametrize(
    ("lengths", "groups"),
    [
        ([16] * 15 + [16000], 2),
        ([16000] + [16] * 15, 2),
        ([1, 5, 16, 1000], 2),
        ([900] * 16, 1),
        ([70 * 2**i for i in range(8)], 4),
        ([*range(100, 4000, 130)], 5),
    ],
)
@pytest.mark.parametrize("page", [1, 3, 16])
def test_at_most_twice_the_rows_that_are_there_are_read(lengths, groups, page):
    """Rows of up to 64 count as 64, and the last page of each is read whole."""
    B, most = len(lengths), -(-max(lengths) // page)
    table = torch.ones(B, most, dtype=torch.long)
    context = [n - 1 for n in lengths]
    step = build_attention_metadata([*range(B + 1)], context, table, page=page, pages=2)
    assert len(step.decode) == groups
    pool = torch.zeros(2, page, 1)
    attended = read = 0
    for group in step.decode:
        rows = read_rows(pool, group.pages, group.longest, group.beyond)
        assert rows.shape[:2] == (len(group.lengths), int(group.lengths.max()))
        attended += rows.shape[0] * rows.shape[1]
        read += group.pages.numel() * page
    assert attended <= 2 * sum(max(n, 64) for n in lengths)
    assert read < attended + B * page
    places = [torch.arange(B)[group.tokens].tolist() for group in step.decode]
    assert sorted(itertools.chain(*places)) == [*range(B)]


@pytest.mark.parametrize("page", [1, 3, 16])
def test_what_lies_beyond_a_length_is_read_as_zero(page):
    lengths = [40, 64, 33]
    table = torch.arange(3 * 64).view(3, 64)
    pool = torch.full((3 * 64, page, 2), float("nan"))
    for b, n in enumerate(lengths):
        for t in range(n):
            pool[table[b, t // page], t % page] = 100 * b + t
    context = [n - 1 for n in lengths]
    step = build_attention_metadata([0, 1, 2, 3], context, table, page=page, pages=3 * 64)
    (group,) = step.decode
    rows = read_rows(pool, group.pages, group.longest, group.beyond)
    for b, n in enumerate(lengths):
        assert rows[b, :n, 0].tolist() == [100 * b + t for t in range(n)]
        assert not rows[b, n:].any()


@pytest.mark.parametrize(
    ("query_start", "context", "table", "message"),
    [
        ([0, 2], [3], [[1]], r"row 0 has 5 latent rows and needs 2 pages of 4"),
        ([0, 2], [3], [[1, -1]], r"names \[1, -1\], allowed: 0..8"),
        ([0, 2], [3], [[1, 9]], r"names \[1, 9\]"),
        ([0, 1, 2], [3, 0], [[1, 2]], r"page_table must be \[2, P\]"),
        ([0, 1], [0], [1], "page_table must be integers along 2 axes"),
        ([0, 1], [-1], [[1]], "none negative"),
        ([0, 1], [], [[1]], "must be 1 lengths"),
        ([], [], [[1]], "query_start must begin with 0"),
        ([0, 2, 1], [0, 0], [[1], [1]], "query_start falls from 2 to 1 at row 1"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(query_start, context, table, message):
    with pytest.raises(ValueError, match=message):
        build_attention_metadata(query_start, context, torch.tensor(table), page=4, pages=9)


def test_an_unused_entry_of_any_kind_is_never_looked_at():
    table = torch.tensor([[3, -1, 99], [-7, -7, -7]])
    step = build_attention_metadata([0, 2, 2], [1, 50], table, page=4, pages=9)
    assert step.extend[0].pages.tolist() == [3]
    assert step.decode == ()
