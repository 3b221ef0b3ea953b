"""A checkpoint folder: its files, and everything that can be said of them without reading data.

    config.json                      the shape of the model
    model.safetensors                all tensors, or
    model-00001-of-00003.safetensors ... with model.safetensors.index.json = {metadata, weight_map}
    checksums.json                   {"sha256": {file: digest}}: ours, optional, covers the files
                                     above except config.json, which people may edit

Shard names are read from the index, never made up: K3 itself counts with six digits.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from kimi_mini.weights.header import CheckpointError, TensorInfo, read_header

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CHECKSUMS = "checksums.json"
MOST_SHOWN = 10


class Stored(NamedTuple):
    """A tensor in a file of the folder, under the name it has there."""

    name: str
    file: str
    info: TensorInfo


class Survey(NamedTuple):
    """The tensors found, and names known to be lost with a file (None: nobody knows which)."""

    tensors: list[Stored]
    lost: frozenset[str] | None


class Problems:
    """Collects every problem of a load by kind, so that all are told at once."""

    def __init__(self) -> None:
        self._by_kind: dict[str, list[str]] = defaultdict(list)

    def add(self, kind: str, problem: str) -> None:
        """Notes a problem under `kind`, a plural such as 'missing tensors'."""
        self._by_kind[kind].append(problem)

    def raise_any(self, directory: Path) -> None:
        """Raises CheckpointError telling each kind with its count and its first problems."""
        if not self._by_kind:
            return
        told = []
        for kind, items in self._by_kind.items():
            more = f", and {len(items) - MOST_SHOWN} more" if len(items) > MOST_SHOWN else ""
            told.append(f"{kind} ({len(items)}): {', '.join(items[:MOST_SHOWN])}{more}")
        every = [f"{kind}: {item}" for kind, items in self._by_kind.items() for item in items]
        raise CheckpointError(f"{directory}: {'; '.join(told)}", tuple(every))


def is_checkpoint(directory: Path) -> bool:
    """Whether a folder looks like one: a config and weights beside it."""
    weights = (SINGLE, INDEX)
    return (directory / CONFIG).is_file() and any((directory / w).is_file() for w in weights)


def is_weight_file(name: str) -> bool:
    """Whether a file name is one of those that weights are written under."""
    return name == SINGLE or re.fullmatch(r"model-\d+-of-\d+\.safetensors", name) is not None


def survey(directory: Path, problems: Problems, verify: bool = True) -> Survey:
    """Reads index, headers and (with `verify`) digests; what is wrong goes to `problems`.

    Raises CheckpointError at once only where there is nothing to look at.
    """
    weight_map = _weight_map(directory)
    files = [SINGLE] if weight_map is None else sorted(set(weight_map.values()))
    headers: dict[str, dict[str, TensorInfo]] = {}
    for file in files:
        if not (directory / file).is_file():
            problems.add("missing files", _with_count(file, weight_map))
            continue
        try:
            headers[file] = read_header(directory / file)
        except CheckpointError as error:
            problems.add("damaged files", str(error))
    if verify:
        _check_digests(directory, [*headers, *([INDEX] if weight_map else [])], problems)

    tensors = [
        Stored(name, f, info) for f, header in headers.items() for name, info in header.items()
    ]
    if weight_map is None:
        return Survey(tensors, frozenset() if headers else None)
    for name, file in weight_map.items():
        if file in headers and name not in headers[file]:
            problems.add(
                "tensors that the index places in a file without them", f"{name} in {file}"
            )
    for stored in tensors:
        if weight_map.get(stored.name) != stored.file:
            problems.add("tensors where the index has none", f"{stored.name} in {stored.file}")
    lost = (name for name, file in weight_map.items() if name not in headers.get(file, ()))
    return Survey(tensors, frozenset(lost))


def _weight_map(directory: Path) -> dict[str, str] | None:
    """Tensor → file from the index, or None for a folder with one file. Raises CheckpointError."""
    if not directory.is_dir():
        what = "not a folder" if directory.exists() else "no such folder"
        raise CheckpointError(f"{directory}: {what}")
    has_single = (directory / SINGLE).is_file()
    if not (directory / INDEX).is_file():
        if has_single:
            return None
        others = sorted(p.name for p in directory.glob("*.safetensors"))
        hint = f" (it has {', '.join(others[:3])}, but no index)" if others else ""
        raise CheckpointError(f"{directory}: neither {SINGLE} nor {INDEX}{hint}")
    raw = _read_json(directory / INDEX)
    weight_map = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{directory / INDEX}: no weight_map object")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or file in ("", ".."):
            raise CheckpointError(
                f"{directory / INDEX}: {name} is placed in {file!r}, allowed: a file of the folder"
            )
    if has_single and SINGLE not in weight_map.values():
        raise CheckpointError(f"{directory}: {SINGLE} and an {INDEX} without it: remove one")
    return weight_map


def _with_count(file: str, weight_map: dict[str, str] | None) -> str:
    count = 0 if weight_map is None else list(weight_map.values()).count(file)
    return f"{file} with {count} tensor(s)"


def _check_digests(directory: Path, files: list[str], problems: Problems) -> None:
    if not (directory / CHECKSUMS).is_file():
        return
    raw = _read_json(directory / CHECKSUMS)
    recorded = raw.get("sha256") if isinstance(raw, dict) else None
    if not isinstance(recorded, dict):
        raise CheckpointError(f"{directory / CHECKSUMS}: no sha256 object")
    for file in files:
        if file in recorded and recorded[file] != file_digest(directory / file):
            problems.add(
                f"files that differ from the sha256 in {CHECKSUMS} (damaged, or changed since)",
                file,
            )


def file_digest(path: Path) -> str:
    """sha256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON ({error})") from error
