"""Golden scenarios of real engines, replayed through our managers and compared.

A driver makes the calls that a file's events stand for and describes what happened in the file's
own words; this module compares the two, event by event, at one of three levels (the goldens'
README): token (hits, chunk ends, statuses), shape (what is cached, counts, tree shape), exact
(physical ids and orders).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum, StrEnum
from typing import Any, NamedTuple

from cache.pools.allocator import OwnershipError


class Level(IntEnum):
    """How strictly to compare; each includes those before it."""

    TOKEN = 1
    SHAPE = 2
    EXACT = 3


class Status(StrEnum):
    OK = "ok"
    DIFFERS = "differs"
    BY_DESIGN = "by_design"  # the file is comparable only up to a cut; the reason is in `field`


class Incomparable(Exception):
    """From this event on the engine does what nobody should copy; the reason is the message."""


class Difference(NamedTuple):
    """The first place where two observations differ."""

    field: str
    want: Any
    got: Any


class Verdict(NamedTuple):
    """One scenario at one level. event: index of the event that differs, or of the cut."""

    name: str
    engine: str
    level: str
    status: Status
    event: int | None = None
    field: str | None = None
    want: Any = None
    got: Any = None

    def as_json(self) -> dict[str, Any]:
        return self._asdict()


def first_difference(
    want: Any, got: Any, level: Level, levels: Mapping[str, Level], path: str = ""
) -> Difference | None:
    """The first difference between two observations, depth first.

    levels: from which level on a key's value counts; below EXACT a key of level EXACT counts only
    in being null or not. Keys that are not named count always.
    """
    if isinstance(want, dict) and isinstance(got, dict):
        for key in (*want, *(k for k in got if k not in want)):
            place = f"{path}.{key}" if path else key
            needed = levels.get(key, Level.TOKEN)
            if needed is Level.SHAPE and level < Level.SHAPE:
                continue
            if (key in want) != (key in got):
                return Difference(place, want.get(key, "absent"), got.get(key, "absent"))
            if needed > level:
                if (want[key] is None) != (got[key] is None):
                    return Difference(place, want[key], got[key])
                continue
            found = first_difference(want[key], got[key], level, levels, place)
            if found:
                return found
        return None
    if isinstance(want, list) and isinstance(got, list) and len(want) == len(got):
        for i, (w, g) in enumerate(zip(want, got, strict=True)):
            found = first_difference(w, g, level, levels, f"{path}[{i}]")
            if found:
                return found
        return None
    return None if want == got else Difference(path, want, got)


def compare(
    scenario: Mapping[str, Any],
    observe: Callable[[Mapping[str, Any]], dict[str, Any]],
    level: Level,
    levels: Mapping[str, Level],
    cut: int | None,
    reason: str = "",
) -> Verdict:
    """Drive all events through `observe` and compare those before `cut`. From the cut on events are
    driven for our own invariants only, which `observe` checks; what it raises ends the scenario.
    """
    names = (scenario["name"], scenario["engine"], level.name.lower())
    for i, (event, want) in enumerate(zip(scenario["events"], scenario["observed"], strict=True)):
        try:
            got = observe(event)
        except Incomparable as beyond:
            return Verdict(*names, Status.BY_DESIGN, i, str(beyond))
        except (AssertionError, OwnershipError) as fault:
            return Verdict(*names, Status.DIFFERS, i, "our own invariants", "all hold", str(fault))
        if cut is not None and i >= cut:
            continue
        found = first_difference(want, got, level, levels)
        if found:
            return Verdict(*names, Status.DIFFERS, i, *found)
    if cut is not None:
        return Verdict(*names, Status.BY_DESIGN, cut, reason)
    return Verdict(*names, Status.OK)
