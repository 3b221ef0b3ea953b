"""The header of a safetensors file, checked before a byte of data is read.

    8 bytes     length n of the header, little endian
    n bytes     JSON: {"name": {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__"}
    the rest    the data; the spans of the tensors follow each other without gap or overlap

Nothing larger than the file is ever allocated. The data itself is read by the safetensors library;
this check exists so that damage is told with the file and the tensor, and shapes and dtypes are
known before any parameter changes. Source: the format's specification.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8"), 8),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
}
LONGEST_HEADER = 100_000_000  # the format's own limit
MOST_DIMENSIONS = 64
LFS_POINTER = b"version https://git-lfs"


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written, told in one line.

    `problems` holds every single one, also those that the line leaves out.
    """

    def __init__(self, message: str, problems: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.problems = problems or (message,)


class TensorInfo(NamedTuple):
    """What the header says of a tensor; dtype in the format's spelling (BF16, F32, U8, ...)."""

    dtype: str
    shape: tuple[int, ...]


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Name → dtype and shape of every tensor of a file.

    Raises CheckpointError naming the file, and the tensor where it is one, for any header that
    does not describe exactly the bytes of the file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(len(LFS_POINTER))
            file.seek(8)
            length = int.from_bytes(start[:8], "little")
            _check_start(start, length, size)
            tensors = _parse(file.read(length))
        return _check_spans(tensors, size - 8 - length)
    except OSError as error:
        raise CheckpointError(f"{path.name}: {error.strerror or error}") from error
    except _Damage as error:
        raise CheckpointError(f"{path.name}: {error}") from error


class _Damage(Exception):
    pass


def _check_start(start: bytes, length: int, size: int) -> None:
    if start.startswith(LFS_POINTER):
        raise _Damage("a Git LFS pointer stands in place of the file (git lfs pull fetches it)")
    if size < 8:
        raise _Damage(f"{size} bytes, shorter than any safetensors file")
    if length > size - 8:
        raise _Damage(f"the header claims {length} bytes, but {size - 8} follow")
    if length > LONGEST_HEADER:
        raise _Damage(f"the header claims {length} bytes, allowed: {LONGEST_HEADER}")


def _parse(text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_without_twins)
    except (ValueError, RecursionError) as error:
        raise _Damage(f"the header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise _Damage("the header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not (isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())):
        raise _Damage("__metadata__ is not an object of strings")
    return header


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twin = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise _Damage(f"{twin} appears twice in the header")
    return found


def _check_spans(tensors: Mapping[str, Any], data_bytes: int) -> dict[str, TensorInfo]:
    spans, infos = [], {}
    for name, said in tensors.items():
        infos[name], begin, end = _check_tensor(name, said)
        spans.append((begin, end, name))
    position = 0
    for begin, end, name in sorted(spans):
        if begin != position:
            how = "leaves a gap after" if begin > position else "overlaps"
            raise _Damage(f"{name} begins at byte {begin}: it {how} what ends at {position}")
        position = end
    if position != data_bytes:
        how = "is cut short" if position > data_bytes else "has bytes too many"
        raise _Damage(f"the data {how}: {data_bytes} bytes, the header describes {position}")
    return infos


def _check_tensor(name: str, said: Any) -> tuple[TensorInfo, int, int]:
    if not isinstance(said, dict) or not {"dtype", "shape", "data_offsets"} <= said.keys():
        raise _Damage(f"{name} lacks dtype, shape or data_offsets")
    dtype, shape, offsets = said["dtype"], said["shape"], said["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise _Damage(f"{name} has the unknown dtype {dtype!r}")
    if not _are_sizes(shape) or len(shape) > MOST_DIMENSIONS:
        raise _Damage(f"{name} has the impossible shape {str(shape)[:80]}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _Damage(f"{name} has the impossible data_offsets {str(offsets)[:80]}")
    begin, end = offsets
    if prod(shape) * BITS[dtype] != (end - begin) * 8:
        raise _Damage(f"{name} is {dtype} {shape}, which its {end - begin} bytes do not hold")
    return TensorInfo(dtype, tuple(shape)), begin, end


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 2**63 for v in values)
