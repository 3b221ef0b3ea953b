"""Golden scenarios of real engines, replayed through our managers and compared.

A driver makes the calls that a file's events stand for and describes what happened in the file's
own words; this module compares the two, event by event, at one of three levels (the goldens'
README): token (hits, chunk ends, statuses), shape (what is cached, counts, tree shape), exact
(physical ids and orders).

Files are other people's. One that cannot be driven, or an event that raises, is a difference with a
message, and the other files still have theirs to be told.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from cache.pools.allocator import OwnershipError
from kimi_mini.config_file import shown

FORM = {
    "name": str,
    "engine": str,
    "config": dict,
    "construct": dict,
    "events": list,
    "observed": list,
}
WORDS = {str: "text", dict: "an object", list: "a list"}


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
    """One scenario at one level. event: index of the event that differs, or of the cut; None where
    the construction differs. Of a scenario that is ok, event and field are a remark, if any."""

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


Replay = Callable[[Mapping[str, Any], Level], Verdict]


def replay_file(file: Path, level: Level, engines: Mapping[str, Replay]) -> Verdict:
    """The verdict on one file, which has the file's path for a name if nothing of it could be
    driven. engines: who replays it, by the first word of its engine."""
    engine = "unknown"
    try:
        scenario = json.loads(file.read_text("utf-8"))
        check_scenario(scenario)
        engine = scenario["engine"]
        kind = engine.partition(" ")[0]
        if kind not in engines:
            raise ValueError(f"there is no engine {kind!r}; there are {', '.join(engines)}")
        return engines[kind](scenario, level)
    except Exception as fault:
        names = (str(file), engine, level.name.lower())
        return Verdict(*names, Status.DIFFERS, None, "error", "absent", told(fault))


def check_scenario(scenario: Any) -> None:
    """ValueError unless it has the form that all scenarios share."""
    lacks = sorted(FORM.keys() - (scenario.keys() if isinstance(scenario, dict) else ()))
    if lacks:
        raise ValueError(f"no scenario: it lacks {', '.join(lacks)}")
    for key, kind in FORM.items():
        _check_kind(key, scenario[key], kind)
    events, observed = scenario["events"], scenario["observed"]
    if len(events) != len(observed):
        raise ValueError(f"no scenario: {len(events)} events, {len(observed)} of them observed")
    for i, (event, seen) in enumerate(zip(events, observed, strict=True)):
        _check_kind(f"event {i}", event, dict)
        _check_kind(f"op of event {i}", event.get("op"), str)
        _check_kind(f"what was observed of event {i}", seen, dict)


def _check_kind(name: str, value: Any, kind: type) -> None:
    if not isinstance(value, kind):
        raise ValueError(f"no scenario: {name} must be {WORDS[kind]}, got {shown(value)}")


def told(fault: Exception) -> str:
    """An exception in one line."""
    return " ".join(f"{type(fault).__name__}: {fault}".split())


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
            return Verdict(*names, Status.DIFFERS, i, "our own invariants", "all hold", told(fault))
        except Exception as fault:  # the event's fault or ours, but never the other scenarios'
            error = want.get("error", "absent")
            return Verdict(*names, Status.DIFFERS, i, "error", error, told(fault))
        if cut is not None and i >= cut:
            continue
        found = first_difference(want, got, level, levels)
        if found:
            return Verdict(*names, Status.DIFFERS, i, *found)
    if cut is not None:
        return Verdict(*names, Status.BY_DESIGN, cut, reason)
    return Verdict(*names, Status.OK)
