"""Queries, latent rows and weights for tests of latent attention, and pages to keep the rows in."""

import torch

NAN = float("nan")
# every width different: a scale by nope or V alone, or a swap of latent and shared part, shows
H, NOPE, ROPE, V, L = 3, 8, 5, 6, 10
WIDTH = L + ROPE


def operands(T, context_len, dtype=torch.float32):
    q = torch.randn(T, H, NOPE + ROPE).to(dtype)
    return q, torch.randn(context_len + T, WIDTH).to(dtype), torch.randn(H, NOPE + V, L).to(dtype)


def paged(row_list, page, spare=3):
    """Rows of several requests in a NaN pool, pages dealt out in shuffled order.

    Returns (pool, page_table) with unused table entries -1 and the LAST page of the pool NaN, so
    that an index of -1 reads NaN.
    """
    counts = [-(-len(rows) // page) for rows in row_list]
    pages = 1 + sum(counts) + spare
    pool = torch.full((pages, page, WIDTH), NAN)
    free = (1 + torch.randperm(pages - 2)).tolist()
    table = torch.full((len(row_list), max(counts) + 2), -1)
    for b, rows in enumerate(row_list):
        for i in range(counts[b]):
            table[b, i] = free.pop()
            part = rows[i * page : (i + 1) * page]
            pool[table[b, i], : len(part)] = part
    return pool, table
