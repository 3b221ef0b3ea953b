"""Who owns which index: the ownership states of serving.md 1.4, and every arrow between them.

    free ──alloc──► active ──────donate──► cached ──evict──► free
      ├────alloc──► tracked ─────donate──►   ▲
      └────alloc──► inflight ────land────────┴──► or active
    active, tracked, inflight ──free──► free            index 0 is reserved, forever

Each arrow is one method here and no other code changes ownership, so each index is in exactly one
state at any time. A method checks all its indices before it changes the first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from enum import StrEnum
from operator import index as plain
from typing import NamedTuple


class Ownership(StrEnum):
    """State of a physical index. CACHED alone may be shared, and is read-only."""

    RESERVED = "reserved"  # index 0, the sink of padding
    FREE = "free"
    ACTIVE = "active"  # private and writable, of one running request
    TRACKED = "tracked"  # private; receives a snapshot while its request goes on
    INFLIGHT = "inflight"  # being received
    CACHED = "cached"  # immutable, the index structure's


PRIVATE = (Ownership.ACTIVE, Ownership.TRACKED, Ownership.INFLIGHT)


class OwnershipError(RuntimeError):
    """An index was used against its ownership state: a fault of the program, not of its user."""


class Handle(NamedTuple):
    """An index as it was when the handle was made; stale once the index has been given back."""

    index: int
    generation: int


class Allocator:
    """Indices 1..size, plain ints, handed out from the head of a list.

    What is given back goes to its tail, or, with newest_first, to its head, in the order given (the
    engines' allocators of slots and of pages). `unit` names an index in errors.
    """

    def __init__(self, size: int, unit: str = "index", *, newest_first: bool = False) -> None:
        if size < 1:
            raise ValueError(f"a pool needs at least one {unit}, got {size}")
        self.size, self.unit, self.newest_first = size, unit, newest_first
        self._states = [Ownership.RESERVED]
        self._generations = [0] * (size + 1)
        self._fill()

    def _fill(self) -> None:
        self._states[1:] = [Ownership.FREE] * self.size
        self._free = OrderedDict.fromkeys(range(1, self.size + 1))
        self._counts = dict.fromkeys(Ownership, 0)
        self._counts |= {Ownership.FREE: self.size, Ownership.RESERVED: 1}

    @property
    def free_count(self) -> int:
        return len(self._free)

    def count(self, state: Ownership) -> int:
        """How many indices are in this state. O(1)."""
        return self._counts[state]

    def state_of(self, index: int) -> Ownership:
        """ValueError for an index outside 0..size."""
        if not 0 <= index <= self.size:
            raise ValueError(f"{self.unit} {index} does not exist; there are 0..{self.size}")
        return self._states[index]

    def free_order(self) -> tuple[int, ...]:
        """The free indices, the next one to be handed out first."""
        return tuple(self._free)

    def handle(self, index: int) -> Handle:
        """A handle of an index that is not free. OwnershipError if it is."""
        if self.state_of(index) is Ownership.FREE:
            raise OwnershipError(f"{self.unit} {index} is free: nothing to hold")
        return Handle(index, self._generations[index])

    def is_live(self, handle: Handle) -> bool:
        """False once the index has been given back, even if it is in use again by another."""
        free = self.state_of(handle.index) is Ownership.FREE
        return not free and self._generations[handle.index] == handle.generation

    def alloc(self, count: int, state: Ownership = Ownership.ACTIVE) -> list[int] | None:
        """`count` indices from the head of the free list, or None, and then nothing is taken."""
        if count < 0 or state not in PRIVATE:
            raise ValueError(
                f"alloc takes a count of 0 or more and one of {', '.join(PRIVATE)}; got {count}, "
                f"{state}"
            )
        if count > len(self._free):
            return None
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        self._move(taken, state)
        return taken

    def take(self, indices: Iterable[int], state: Ownership = Ownership.ACTIVE) -> list[int]:
        """free → active, tracked or inflight, these very indices: for whoever keeps the order of
        reuse in books of its own. OwnershipError if one is not free."""
        if state not in PRIVATE:
            raise ValueError(f"take takes one of {', '.join(PRIVATE)}, got {state}")
        taken = self._arrow("take", indices, (Ownership.FREE,), state)
        for index in taken:
            del self._free[index]
        return taken

    def donate(self, indices: Iterable[int]) -> None:
        """active or tracked → cached. The bytes stay where they are; the giver gives them up."""
        self._arrow("donate", indices, (Ownership.ACTIVE, Ownership.TRACKED), Ownership.CACHED)

    def land(self, indices: Iterable[int], state: Ownership) -> None:
        """inflight → active or cached: what was being received is there."""
        if state not in (Ownership.ACTIVE, Ownership.CACHED):
            raise ValueError(f"land takes active or cached, got {state}")
        self._arrow("land", indices, (Ownership.INFLIGHT,), state)

    def free(self, indices: Iterable[int]) -> list[int]:
        """active, tracked or inflight → free. Returns them; OwnershipError for a
        double free, for a cached index, for the reserved one."""
        return self._give_back("free", indices, PRIVATE)

    def evict(self, indices: Iterable[int]) -> list[int]:
        """cached → free."""
        return self._give_back("evict", indices, (Ownership.CACHED,))

    def clear(self) -> None:
        """Everything is free again, in ascending order; every handle is stale."""
        for index in range(1, self.size + 1):
            self._generations[index] += self._states[index] is not Ownership.FREE
        self._fill()

    def reclaim(self, keep: Iterable[int] = ()) -> list[int]:
        """Make the books anew after a call that was cut short, whatever it left: `keep` is cached,
        everything else is free, in ascending order, and handles of it are stale.

        Returns what is free. OwnershipError, changing nothing, if `keep` names an index that does
        not exist, the reserved one, or one twice. Cut short itself, it is to be called again.
        """
        kept = [plain(index) for index in keep]
        if len(set(kept)) != len(kept) or not all(1 <= index <= self.size for index in kept):
            raise OwnershipError(f"reclaim: each {self.unit} once, of 1..{self.size}; got {kept}")
        states = [Ownership.RESERVED, *[Ownership.FREE] * self.size]
        for index in kept:
            states[index] = Ownership.CACHED
        free = [i for i in range(1, self.size + 1) if states[i] is Ownership.FREE]
        for index in free:  # those that were free, too: perhaps only half given back
            self._generations[index] += 1
        self._states, self._free = states, OrderedDict.fromkeys(free)
        self._counts = {state: states.count(state) for state in Ownership}
        return free

    def audit(self) -> list[str]:
        """I-10 and I-11 as far as this list alone can tell: one sentence a violation."""
        faults = []
        free = set(self._free)
        marked = {i for i, state in enumerate(self._states) if state is Ownership.FREE}
        if free != marked:
            faults.append(f"I-10: {self.unit} in free list or free, not both: {free ^ marked}")
        if self._states[0] is not Ownership.RESERVED:
            faults.append(f"I-11: {self.unit} 0 is {self._states[0]}, not reserved")
        if 0 in free:
            faults.append(f"I-11: {self.unit} 0 is in the free list")
        recount = {state: self._states.count(state) for state in Ownership}
        if recount != self._counts:
            faults.append(f"I-10: {self.unit} counts {self._counts} against a recount {recount}")
        return faults

    def _give_back(
        self, verb: str, indices: Iterable[int], allowed: tuple[Ownership, ...]
    ) -> list[int]:
        given = self._arrow(verb, indices, allowed, Ownership.FREE)
        for index in given:
            self._generations[index] += 1
        self._free.update(dict.fromkeys(given))
        if self.newest_first:
            for index in reversed(given):
                self._free.move_to_end(index, last=False)
        return given

    def _arrow(
        self, verb: str, indices: Iterable[int], allowed: tuple[Ownership, ...], state: Ownership
    ) -> list[int]:
        # an element of a tensor is a view of it and unequal to its twin: not to be kept (BR-82)
        moved = [plain(index) for index in indices]
        for index in moved:
            if self.state_of(index) not in allowed:
                raise OwnershipError(
                    f"{verb}: {self.unit} {index} is {self._states[index]}; allowed: "
                    f"{', '.join(allowed)}"
                )
        if len(set(moved)) != len(moved):
            raise OwnershipError(f"{verb}: a {self.unit} is named twice in {moved}")
        self._move(moved, state)
        return moved

    def _move(self, indices: list[int], state: Ownership) -> None:
        for index in indices:
            self._counts[self._states[index]] -= 1
            self._states[index] = state
        self._counts[state] += len(indices)
