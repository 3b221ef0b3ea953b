"""Blocks that nobody holds, in the order of their reuse (serving 4.3)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush


class FreeQueue:
    """Ids in the order of their places, each id once.

    Places grow to the back and fall to the front, so that an id which was taken out of the middle
    can be put back where it was. Every change is O(log n).
    """

    def __init__(self, ids: Iterable[int] = ()) -> None:
        self._places: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []  # with what has been taken out since
        self._front, self._back = 0, 0
        self.push_back(ids)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, id: int) -> bool:
        return id in self._places

    def __iter__(self) -> Iterator[int]:
        """Next to be reused first."""
        return iter(sorted(self._places, key=self._places.__getitem__))

    @property
    def back(self) -> int:
        """Where the next one to be pushed to the back will be: behind all others."""
        return self._back

    def place(self, id: int) -> int:
        """Smaller is next. KeyError if it is not in."""
        return self._places[id]

    def push_front(self, ids: Iterable[int]) -> None:
        """The first of them is to be the next."""
        for id in reversed([*ids]):
            self._front -= 1
            self.put_back(id, self._front)

    def push_back(self, ids: Iterable[int]) -> None:
        for id in ids:
            self.put_back(id, self._back)
            self._back += 1

    def put_back(self, id: int, place: int) -> None:
        """To a place that `remove` has told."""
        self._places[id] = place
        heappush(self._heap, (place, id))

    def remove(self, id: int) -> int:
        """Take out; its place. KeyError if it is not in."""
        place = self._places.pop(id)
        if len(self._heap) > 2 * len(self._places) + 64:
            self._heap = [(at, other) for other, at in self._places.items()]
            heapify(self._heap)
        return place

    def pop(self) -> int:
        """Take out the next. IndexError if there is none."""
        while True:
            place, id = heappop(self._heap)
            if self._places.get(id) == place:
                del self._places[id]
                return id
