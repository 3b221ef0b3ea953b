"""Writing a checkpoint folder in the published layout, whole or not at all.

Everything is written into a hidden sibling folder and flushed to disk; then that folder is renamed
into place. Whatever interrupts it, the folder is the old one, the new one, or (for the instant
between two renames when one is replaced) both complete under hidden names.
Tied weights are stored once. Beside the weights stand `config.json`, `generation_config.json` and
`checksums.json`, the sha256 of every weight file and of the index.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save
from torch import Tensor

from kimi_mini.config import KimiConfig
from kimi_mini.weights import mxfp4
from kimi_mini.weights.folder import (
    CHECKSUMS,
    CONFIG,
    GENERATION_CONFIG,
    INDEX,
    SINGLE,
    is_checkpoint,
    is_weight_file,
)
from kimi_mini.weights.header import CheckpointError
from kimi_mini.weights.inventory import Experts, StoredTensor, stored_forms
from kimi_mini.weights.names import EMBEDDING, TensorEntry, check_parameters, model_tensors

OUR_FILES = {CONFIG, GENERATION_CONFIG, SINGLE, INDEX, CHECKSUMS}
DEFAULT_SHARD_BYTES = 5_000_000_000


class WriteReport(NamedTuple):
    """What was written: weight files, tensors in them, bytes of their data."""

    files: tuple[str, ...]
    tensors: int
    num_bytes: int


class _Unit(NamedTuple):
    """An entry with the one or two tensors that stand for it; never split over shards."""

    entry: TensorEntry
    forms: tuple[StoredTensor, ...]

    @property
    def num_bytes(self) -> int:
        return sum(form.num_bytes for form in self.forms)


def write_checkpoint(
    directory: str | Path,
    config: KimiConfig,
    parameters: Mapping[str, Tensor],
    *,
    dtype: torch.dtype | None = None,
    experts: Experts | str = Experts.PLAIN,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    overwrite: bool = False,
) -> WriteReport:
    """Writes `parameters` (as in `model.state_dict()`) as a checkpoint folder.

    `dtype` None keeps each parameter's own; the kinds that are published as float32 never get
    narrower. MXFP4 experts are rounded unless they came out of MXFP4. A checkpoint already there is
    replaced only with `overwrite`, its other files (tokenizer, notes) are kept; any other folder
    that is not empty is refused. Raises CheckpointError, ConfigError for widths MXFP4 cannot hold,
    ValueError if `parameters` are not those of `config`; the folder is then as it was.
    """
    check_parameters(parameters, config)
    if experts not in (known := [form.value for form in Experts]):
        raise CheckpointError(f"experts is {experts!r}, allowed: {', '.join(known)}")
    experts = Experts(experts)
    if max_shard_bytes < 1:
        raise CheckpointError(f"max_shard_bytes is {max_shard_bytes}, allowed: 1 or more")
    target = Path(os.path.realpath(directory))
    _check_target(target, overwrite)
    model_dtype = dtype or parameters[EMBEDDING].dtype
    units = [
        _Unit(entry, stored_forms(entry, config, experts, dtype or parameters[entry.param].dtype))
        for entry in model_tensors(config)
    ]
    quantization = None if experts is Experts.PLAIN else mxfp4.QUANTIZATION_CONFIG
    saved_config = dataclasses.replace(
        config, dtype=str(model_dtype).removeprefix("torch."), quantization_config=quantization
    )
    try:
        with _replacing(target) as folder:
            _write_json(folder / CONFIG, saved_config.to_json_dict())
            _write_json(folder / GENERATION_CONFIG, _generation_config(config))
            return _write_weights(folder, _shards(units, max_shard_bytes), parameters)
    except OSError as error:
        raise CheckpointError(f"{directory}: {error.strerror or error}") from error


def _check_target(target: Path, overwrite: bool) -> None:
    nearest = next(path for path in (target, *target.parents) if path.exists())
    if not nearest.is_dir():
        raise CheckpointError(f"{nearest}: a file is in the way")
    if nearest != target or not any(target.iterdir()):
        return
    if not is_checkpoint(target):
        raise CheckpointError(f"{target}: not empty and no checkpoint, choose another folder")
    if not overwrite:
        raise CheckpointError(f"{target}: holds a checkpoint already (overwrite replaces it)")
    if Path.cwd().is_relative_to(target):
        raise CheckpointError(f"{target}: cannot be replaced from inside, run from another folder")


@contextlib.contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """A new folder beside `target` that takes its place if the body ends without an error."""
    target.parent.mkdir(parents=True, exist_ok=True)
    stem = f".{target.name}.{secrets.token_hex(4)}"
    fresh, old = target.with_name(stem + ".new"), target.with_name(stem + ".old")
    fresh.mkdir()
    try:
        yield fresh
        _sync(fresh)
        if target.is_dir() and not any(target.iterdir()):
            _move_into(fresh, target)
            return
        if target.is_dir():
            _carry_over(target, fresh)
            shutil.copymode(target, fresh)
            target.rename(old)
        try:
            fresh.rename(target)
        except BaseException:  # Ctrl-C between the two renames must not hide the old folder
            if old.is_dir():
                old.rename(target)
            raise
        _sync(target.parent)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def _move_into(fresh: Path, target: Path) -> None:
    """Fills an empty folder, which stays the same folder: somebody may be standing in it.

    The config goes last, so that what is there before it is no checkpoint yet.
    """
    for item in sorted(fresh.iterdir(), key=lambda item: item.name == CONFIG):
        item.rename(target / item.name)
    _sync(target)


def _carry_over(source: Path, target: Path) -> None:
    """Copies what is not part of the old checkpoint itself."""
    for item in source.iterdir():
        if item.name in OUR_FILES or is_weight_file(item.name):
            continue
        if item.is_dir() and not item.is_symlink():
            shutil.copytree(item, target / item.name, symlinks=True)
        else:
            shutil.copy2(item, target / item.name, follow_symlinks=False)


def _shards(units: Sequence[_Unit], max_bytes: int) -> list[list[_Unit]]:
    """Runs of units of at most `max_bytes`; a larger unit has a shard of its own."""
    shards: list[list[_Unit]] = [[]]
    room = max_bytes
    for unit in units:
        if shards[-1] and unit.num_bytes > room:
            shards.append([])
            room = max_bytes
        shards[-1].append(unit)
        room -= unit.num_bytes
    return shards


def _write_weights(
    folder: Path, shards: list[list[_Unit]], parameters: Mapping[str, Tensor]
) -> WriteReport:
    total = len(shards)
    names = [f"model-{k:05d}-of-{total:05d}.safetensors" for k in range(1, total + 1)]
    names = [SINGLE] if total == 1 else names
    digests, weight_map = {}, {}
    for name, shard in zip(names, shards, strict=True):
        tensors = {n: t for unit in shard for n, t in _tensors(unit, parameters)}
        weight_map |= dict.fromkeys(tensors, name)
        digests[name] = _write(folder / name, save(tensors, metadata={"format": "pt"}))
    num_bytes = sum(unit.num_bytes for shard in shards for unit in shard)
    if total > 1:
        index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
        digests[INDEX] = _write_json(folder / INDEX, index)
    _write_json(folder / CHECKSUMS, {"sha256": digests})
    return WriteReport(tuple(names), len(weight_map), num_bytes)


def _tensors(unit: _Unit, parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    entry, forms = unit
    region = parameters[entry.param].detach()[entry.index].cpu()
    if len(forms) == 1:
        # a copy: the library refuses tensors that share memory
        stored = entry.to_stored(region).to(forms[0].dtype, copy=True).contiguous()
        if not bool(stored.isfinite().all()):
            raise CheckpointError(
                f"{entry.name}: not finite as {str(stored.dtype).removeprefix('torch.')} "
                "(parameters never filled, or beyond the range of the type)"
            )
        yield forms[0].name, stored
        return
    try:
        parts = mxfp4.encode(region)
    except ValueError as error:
        raise CheckpointError(f"{entry.name}: {error}") from error
    yield from ((form.name, part) for form, part in zip(forms, parts, strict=True))


def _generation_config(config: KimiConfig) -> dict[str, Any]:
    ids = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
    }
    return {name: value for name, value in ids.items() if value is not None}


def _write_json(path: Path, value: Any) -> str:
    return _write(path, (json.dumps(value, indent=2, sort_keys=True) + "\n").encode())


def _write(path: Path, data: bytes) -> str:
    """Writes and flushes a file; returns its sha256."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(data).hexdigest()


def _sync(folder: Path) -> None:
    """Flushes the names of a folder, where the system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
