"""A pool: an allocator with the memory behind its indices, or only with the bytes they stand for.

A page pool holds latent rows [MLA layers, pages+1, page, L+R]; a state pool holds the recurrent
state [KDA layers, slots+1, H, V, K] and the conv state [KDA layers, slots+1, W-1, channels] of all
KDA layers under one slot id. Both index axis 1, so both are this class.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from cache.pools.allocator import Allocator, Ownership

_NAN = float("nan")


class Pool:
    """Indices 1..size and their memory.

    unit: "page" or "slot". unit_bytes: bytes of one index. tensors: memory indexed by axis 1, of
    size+1; none at all for executors that only account. newest_first: see `Allocator`.
    poison: memory is NaN whenever it is free, so that whoever reads it unwritten, or writes it
    after giving it back, is found out.
    ValueError for tensors that are not unit_bytes an index: what is accounted is what is there.
    """

    def __init__(
        self,
        size: int,
        unit: str,
        unit_bytes: int,
        tensors: Sequence[Tensor] = (),
        *,
        poison: bool = False,
        newest_first: bool = False,
    ) -> None:
        for tensor in tensors:
            if tensor.dim() < 2 or tensor.shape[1] != size + 1:
                raise ValueError(
                    f"memory of {size} {unit}s must have {size + 1} entries on axis 1, got "
                    f"{[*tensor.shape]}"
                )
        held = sum(tensor[:, :1].nbytes for tensor in tensors)
        if tensors and held != unit_bytes:
            raise ValueError(f"a {unit} counts {unit_bytes:,} bytes, but its memory is {held:,}")
        self.allocator = Allocator(size, unit, newest_first=newest_first)
        self.unit_bytes = unit_bytes
        self.tensors = tuple(tensors)
        self.poison = poison
        if poison:
            self._poison(slice(None))

    @property
    def size(self) -> int:
        return self.allocator.size

    @property
    def unit(self) -> str:
        return self.allocator.unit

    @property
    def free_count(self) -> int:
        return self.allocator.free_count

    def bytes_in(self, state: Ownership) -> int:
        """Bytes of all indices in this state."""
        return self.allocator.count(state) * self.unit_bytes

    def alloc(self, count: int, state: Ownership = Ownership.ACTIVE) -> list[int] | None:
        """As `Allocator.alloc`; contents are whatever was there."""
        return self.allocator.alloc(count, state)

    def take(self, indices: Iterable[int], state: Ownership = Ownership.ACTIVE) -> None:
        """As `Allocator.take`; contents are whatever was there."""
        self.allocator.take(indices, state)

    def free(self, indices: Iterable[int]) -> None:
        """As `Allocator.free`."""
        self._given_back(self.allocator.free(indices))

    def evict(self, indices: Iterable[int]) -> None:
        """As `Allocator.evict`."""
        self._given_back(self.allocator.evict(indices))

    def clear(self) -> None:
        """As `Allocator.clear`."""
        self.allocator.clear()
        if self.poison:
            self._poison(slice(1, None))

    def reclaim(self, keep: Iterable[int] = ()) -> None:
        """As `Allocator.reclaim`."""
        self._given_back(self.allocator.reclaim(keep))

    def copy(self, source: int, destination: int) -> None:
        """All layers of one index to another, in place."""
        for tensor in self.tensors:
            tensor[:, destination] = tensor[:, source]

    def audit(self) -> list[str]:
        """The allocator's audit; with poison, also that free memory was left alone (I-13, I-17)."""
        faults = self.allocator.audit()
        if self.poison:
            free = [i for i in self.allocator.free_order() if 0 < i <= self.size]
            for tensor in self.tensors:
                touched = ~tensor[:, free].isnan().transpose(0, 1).flatten(1).all(1)
                faults += [
                    f"I-13: {self.unit} {free[i]} was written while it was free"
                    for i in touched.nonzero().flatten().tolist()
                ]
        return faults

    def _given_back(self, indices: list[int]) -> None:
        if self.poison:
            self._poison(indices)

    def _poison(self, where: slice | list[int]) -> None:
        for tensor in self.tensors:
            tensor[:, where] = _NAN
