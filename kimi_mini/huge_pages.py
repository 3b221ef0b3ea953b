"""Memory in huge pages, for what a step reads from end to end: weights and state.

A matrix that no cache holds is read as fast as its addresses are translated and as far ahead as the
hardware looks, and both end at a page. In pages of 4 KB, scattered over the address space, products
of one row ran at half the speed that they have in one piece of 2 MB pages (docs/performance.md).
Where the system has no such pages, or there is little to hold, memory is torch's own.
"""

from __future__ import annotations

import itertools
import math
import mmap
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

HUGE = 2 << 20  # bytes of a huge page
WORTH_IT = 2 * HUGE  # bytes: below, it is torch's own memory
_ALIGNMENT = 64  # bytes: a line of the cache


class Memory(NamedTuple):
    """Zero bytes that begin with a huge page."""

    whole: mmap.mmap
    begin: int

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """What lies `offset` bytes behind the begin, as a tensor with a storage of its own."""
        count = math.prod(shape)
        flat = torch.frombuffer(self.whole, dtype=dtype, count=count, offset=self.begin + offset)
        return flat.view(shape)


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """torch.zeros on the CPU, in huge pages if it is large."""
    memory = take(math.prod(shape) * dtype.itemsize)
    if memory is None:
        return torch.zeros(shape, dtype=dtype)
    return memory.tensor(0, shape, dtype)


def gather(parameters: Iterable[nn.Parameter]) -> None:
    """Move parameters behind each other, in their order, into huge pages; they stay the same
    objects with the same values. Parameters that are not on the CPU stay where they are."""
    moved = [p for p in parameters if p.device.type == "cpu" and p.numel()]
    sizes = [-(-p.nbytes // _ALIGNMENT) * _ALIGNMENT for p in moved]
    memory = take(sum(sizes))
    if memory is None:
        return
    for parameter, end, size in zip(moved, itertools.accumulate(sizes), sizes, strict=True):
        place = memory.tensor(end - size, parameter.shape, parameter.dtype)
        parameter.data = place.copy_(parameter.data)


def take(size: int) -> Memory | None:
    """At least `size` bytes; None where torch's own memory is as good."""
    if size < WORTH_IT or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:
        whole = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        return None
    return Memory(whole, -torch.frombuffer(whole, dtype=torch.uint8).data_ptr() % HUGE)
