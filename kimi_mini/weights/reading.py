"""Reading a checkpoint folder into parameters: everything is checked before anything changes.

Names decide, tensor by tensor, never the config's quantisation section: `experts.E.wJ.weight` is
plain, `.weight_packed` with `.weight_scale` is MXFP4. Vision tensors are counted and skipped. With
tied embeddings the flag wins: a head tensor in the file is compared with the embedding, and if it
differs it is ignored with a warning.

What cannot be seen here: a square matrix stored transposed, and changed payload bytes in a folder
that records no digest.
"""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kimi_mini.config import KimiConfig
from kimi_mini.weights import mxfp4
from kimi_mini.weights.folder import Problems, Stored, survey
from kimi_mini.weights.header import CheckpointError
from kimi_mini.weights.names import (
    EMBEDDING,
    HEAD,
    Kind,
    TensorEntry,
    canonical_name,
    check_parameters,
    is_vision,
    model_tensors,
)

FLOATS = ("BF16", "F16", "F32", "F64")
PLAIN, PACKED, SCALE = ".weight", ".weight_packed", ".weight_scale"


class LoadReport(NamedTuple):
    """What was read and where: text tensors, how many of them MXFP4, vision tensors left out,
    remarks."""

    folder: Path
    tensors: int
    packed: int
    skipped_vision: int
    notes: tuple[str, ...]


class _Source(NamedTuple):
    """Where the values of an entry come from; `scale` only for MXFP4."""

    weight: Stored
    scale: Stored | None = None


def read_checkpoint(
    directory: str | Path,
    config: KimiConfig,
    parameters: Mapping[str, Tensor],
    verify: bool = True,
) -> LoadReport:
    """Fills `parameters` (as in `model.state_dict()`) in place from a checkpoint folder.

    Each parameter keeps its own dtype and device. Raises CheckpointError, all problems in one,
    before any parameter changes: damaged or missing files, missing, unexpected, doubled, misshapen
    or mistyped tensors, digests that differ (unless `verify` is false). Warns about a head that
    contradicts tied embeddings and about A_log entries beyond the heads that are not zero.
    Raises ValueError if `parameters` are not those of `config`.
    """
    directory = Path(directory)
    check_parameters(parameters, config)
    problems = Problems()
    found = survey(directory, problems, verify)
    by_name, vision = _by_name(found.tensors, problems)
    entries = {entry.name: entry for entry in model_tensors(config)}
    head = by_name.pop(HEAD, None) if config.tie_word_embeddings else None
    sources = _match(entries, by_name, found.lost, problems)
    if head:
        _check_form(entries[EMBEDDING], _Source(head), problems)
    problems.raise_any(directory)

    with ExitStack() as stack, torch.no_grad():
        read = _open(directory, {s.file for s in found.tensors}, stack)
        remarks = _Remarks()
        if head and not _same(read(head), read(sources[EMBEDDING].weight)):
            warnings.warn(
                f"{directory}: tie_word_embeddings is true, but {head.name} differs from the "
                "embedding; the embedding serves as head, the tensor is ignored",
                stacklevel=2,
            )
        for name, source in sources.items():
            entry = entries[name]
            target = parameters[entry.param][entry.index]
            target.copy_(_region(entry, source, target.dtype, read, remarks))
    if remarks.padded:
        warnings.warn(
            f"{directory}: A_log holds entries beyond the heads that are not zero, ignored: "
            + ", ".join(remarks.padded[:3]),
            stacklevel=2,
        )
    packed = sum(source.scale is not None for source in sources.values())
    return LoadReport(Path(directory), len(sources), packed, vision, remarks.notes(packed, vision))


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.double(), b.double())


class _Remarks:
    """What is worth a word after a load."""

    def __init__(self) -> None:
        self.casts: Counter[tuple[str, torch.dtype]] = Counter()
        self.padded: list[str] = []

    def notes(self, packed: int, vision: int) -> tuple[str, ...]:
        casts = [
            f"{count} stored as {stored} and loaded as {str(loaded).removeprefix('torch.')}"
            for (stored, loaded), count in sorted(self.casts.items(), key=str)
        ]
        notes = [f"tensors {', '.join(casts)}"] if casts else []
        notes += [f"{packed} expert weights decoded from MXFP4"] if packed else []
        notes += [f"{vision} vision tensors skipped"] if vision else []
        return tuple(notes)


def _by_name(tensors: Iterable[Stored], problems: Problems) -> tuple[dict[str, Stored], int]:
    """Canonical name → tensor, and the number of vision tensors."""
    by_name: dict[str, list[Stored]] = defaultdict(list)
    vision = 0
    for stored in tensors:
        if is_vision(stored.name):
            vision += 1
        elif name := canonical_name(stored.name):
            by_name[name].append(stored)
        else:
            problems.add("unexpected tensors", f"{stored.name} in {stored.file}")
    for group in by_name.values():
        if len(group) > 1:
            places = " and ".join(f"{s.name} in {s.file}" for s in group)
            problems.add("doubled tensors", places)
    return {name: group[0] for name, group in by_name.items()}, vision


def _match(
    entries: Mapping[str, TensorEntry],
    by_name: dict[str, Stored],
    lost: frozenset[str] | None,
    problems: Problems,
) -> dict[str, _Source]:
    """Finds the source of every entry; what is left over or lacking goes to `problems`."""
    left = dict(by_name)
    gone = {canonical_name(name) for name in lost or ()}
    sources = {}
    for name, entry in entries.items():
        plain = left.pop(name, None)
        stem = name.removesuffix(PLAIN)
        packed = scale = None
        if entry.kind is Kind.EXPERT:
            packed, scale = left.pop(stem + PACKED, None), left.pop(stem + SCALE, None)
        if plain and (packed or scale):
            problems.add("doubled tensors", f"{name} both plain and packed")
        elif plain:
            sources[name] = _Source(plain)
        elif packed and scale:
            sources[name] = _Source(packed, scale)
        else:
            half = (packed and stem + SCALE) or (scale and stem + PACKED) or name
            if lost is not None and gone.isdisjoint({half, name, stem + PACKED, stem + SCALE}):
                reason = " (tie_word_embeddings is false)" if name == HEAD else ""
                problems.add("missing tensors", half + reason)
        if source := sources.get(name):
            _check_form(entry, source, problems)
    for stored in left.values():
        problems.add("unexpected tensors", f"{stored.name} in {stored.file}")
    return sources


def _check_form(entry: TensorEntry, source: _Source, problems: Problems) -> None:
    if source.scale is None:
        checks = [(source.weight, FLOATS, entry.accepts, entry.shape)]
    elif shapes := mxfp4.packed_shapes(entry.shape):
        parts = zip((source.weight, source.scale), shapes, strict=True)
        checks = [(stored, ("U8",), shape.__eq__, shape) for stored, shape in parts]
    else:
        width = entry.shape[-1]
        name = source.weight.name
        problems.add("misshapen tensors", f"{name} packs a width of {width}, no multiple of 32")
        return
    for stored, dtypes, accepts, shape in checks:
        at, info = f"{stored.name} in {stored.file}", stored.info
        if not accepts(info.shape):
            problems.add("misshapen tensors", f"{at} is {[*info.shape]}, allowed: {[*shape]}")
        if info.dtype not in dtypes:
            problems.add("mistyped tensors", f"{at} is {info.dtype}, allowed: {' '.join(dtypes)}")


def _open(directory: Path, files: Iterable[str], stack: ExitStack) -> Callable[[Stored], Tensor]:
    """Opens every file; returns how to read a tensor of them."""
    try:
        handles = {
            file: stack.enter_context(safe_open(directory / file, framework="pt"))
            for file in sorted(files)
        }
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{directory}: {error}") from error
    return lambda stored: handles[stored.file].get_tensor(stored.name)


def _region(
    entry: TensorEntry,
    source: _Source,
    dtype: torch.dtype,
    read: Callable[[Stored], Tensor],
    remarks: _Remarks,
) -> Tensor:
    """The values of an entry in the shape of its region."""
    if source.scale is not None:
        return entry.to_region(mxfp4.decode(read(source.weight), read(source.scale), dtype))
    stored = read(source.weight)
    if stored.dtype != dtype:
        remarks.casts[source.weight.info.dtype, dtype] += 1
    if entry.kind is Kind.A_LOG and stored.flatten()[entry.region[0] :].any():
        remarks.padded.append(source.weight.name)
    return entry.to_region(stored)
