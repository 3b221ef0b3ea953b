"""Damaged safetensors files: one clear error each, in no time and no memory."""

import json
import struct
import time
import tracemalloc

import pytest
import torch
from safetensors.torch import save_file

from kimi_mini.weights.header import CheckpointError, read_header


def said(dtype="F32", shape=(2,), offsets=(0, 8), **more) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


def file_of(header, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


TWO = {"a": said(), "b": said(offsets=(8, 16))}
TWIN = f'{{"a": {json.dumps(said())}, "a": {json.dumps(said(offsets=(8, 16)))}}}'.encode()
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 2861312\n"

DAMAGED = {
    "empty file": (b"", "0 bytes"),
    "3 bytes": (b"abc", "3 bytes"),
    "8 bytes": (struct.pack("<Q", 5), "claims 5 bytes, but 0 follow"),
    "7 bytes": (b"\0" * 7, "7 bytes"),
    "no header text": (struct.pack("<Q", 0), "not JSON"),
    "header of 2^60": (file_of(TWO, b"\0" * 16, 2**60), "claims 1152921504606846976"),
    "header of 2^64-1": (file_of(TWO, b"\0" * 16, 2**64 - 1), "claims"),
    "header longer than file": (file_of(TWO, b"", 10_000), "claims 10000 bytes"),
    "data cut by one": (file_of(TWO, b"\0" * 15), "cut short: 15 bytes, the header describes 16"),
    "one byte too many": (file_of(TWO, b"\0" * 17), "bytes too many: 17"),
    "shape against span": (file_of({"a": said(shape=(3,))}, b"\0" * 8), "a is F32 [3]"),
    "overlap": (
        file_of({"a": said(), "b": said(offsets=(4, 12))}, b"\0" * 12),
        "b begins at byte 4",
    ),
    "gap": (file_of({"a": said(), "b": said(offsets=(12, 20))}, b"\0" * 20), "b begins at byte 12"),
    "gap at the start": (file_of({"a": said(offsets=(4, 12))}, b"\0" * 12), "a begins at byte 4"),
    "same span twice": (file_of({"a": said(), "b": said()}, b"\0" * 8), "b begins at byte 0"),
    "nothing inside a span": (
        file_of({"a": said(), "z": said(shape=(0,), offsets=(4, 4))}, b"\0" * 8),
        "z begins at byte 4",
    ),
    "reversed": (file_of({"a": said(offsets=(8, 0))}, b"\0" * 8), "a has the impossible data_off"),
    "one offset": (file_of({"a": said(offsets=(8,))}, b"\0" * 8), "a has the impossible data_off"),
    "negative offset": (file_of({"a": said(offsets=(-8, 0))}), "a has the impossible data_offsets"),
    "beyond the file": (file_of({"a": said(shape=(2**40,), offsets=(0, 2**42))}), "cut short"),
    "negative dimension": (
        file_of({"a": said(shape=(-2,))}, b"\0" * 8),
        "a has the impossible shape",
    ),
    "overflowing dimension": (file_of({"a": said(shape=(2**64,))}, b"\0" * 8), "impossible shape"),
    "overflowing product": (file_of({"a": said(shape=(2**62, 8))}, b"\0" * 8), "a is F32"),
    "wrapping to the span": (file_of({"a": said(shape=(2**62 + 2, 2))}, b"\0" * 16), "a is F32"),
    "fractional dimension": (file_of({"a": said(shape=(2.0,))}, b"\0" * 8), "impossible shape"),
    "true for a dimension": (file_of({"a": said(shape=(True, 2))}, b"\0" * 8), "impossible shape"),
    "too many dimensions": (file_of({"a": said(shape=[1] * 65 + [2])}, b"\0" * 8), "impossible"),
    "digits without end": (file_of(b'{"a":' + b"9" * 5000 + b"}"), "not JSON"),
    "name twice": (file_of(TWIN, b"\0" * 16), "a appears twice"),
    "unknown dtype": (
        file_of({"a": said(dtype="F33")}, b"\0" * 8),
        "a has the unknown dtype 'F33'",
    ),
    "dtype a list": (file_of({"a": said(dtype=["F32"])}, b"\0" * 8), "a has the unknown dtype"),
    "no dtype": (file_of({"a": {"shape": [2], "data_offsets": [0, 8]}}, b"\0" * 8), "a lacks"),
    "a number for a tensor": (file_of({"a": 8}), "a lacks"),
    "not UTF-8": (file_of(b'{"\xff": 1}'), "not JSON"),
    "UTF-16": (file_of(json.dumps(TWO).encode("utf-16"), b"\0" * 16), "not JSON"),
    "a list": (file_of(b"[]"), "not a JSON object"),
    "null": (file_of(b"null"), "not a JSON object"),
    "cut JSON": (file_of(b'{"a": {'), "not JSON"),
    "deep nesting": (file_of(b"[" * 200_000), "not JSON"),
    "metadata of numbers": (file_of({"__metadata__": {"format": 1}}), "__metadata__"),
    "metadata a list": (file_of({"__metadata__": []}), "__metadata__"),
    "LFS pointer": (LFS, "Git LFS pointer"),
    "a page of HTML": (b"<!DOCTYPE html><html><body>404</body></html>", "claims"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_one_error_naming_file_and_tensor(tmp_path, case):
    content, words = DAMAGED[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    tracemalloc.start()
    start = time.perf_counter()
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    took, (_, peak) = time.perf_counter() - start, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    message = str(caught.value)
    assert message.startswith("model.safetensors: ") and words in message
    assert len(message) < 300 and "\n" not in message
    assert took < 1
    # the text once as bytes and once as str, buffers and the traceback aside
    assert peak < 2 * len(content) + 300_000


@pytest.mark.parametrize(
    ("header", "data", "tensors"),
    [
        ({}, 0, {}),
        ({"__metadata__": {"format": "pt"}}, 0, {}),
        ({"a": said(shape=(), offsets=(0, 4))}, 4, {"a": ("F32", ())}),
        ({"a": said(shape=(0, 7), offsets=(0, 0))}, 0, {"a": ("F32", (0, 7))}),
        ({"b": said(offsets=(8, 16)), "a": said()}, 16, {"a": ("F32", (2,)), "b": ("F32", (2,))}),
        (
            {"z": said(shape=(0,), offsets=(8, 8)), "a": said(), "y": said("U8", (0,), (0, 0))},
            8,
            {"a": ("F32", (2,)), "y": ("U8", (0,)), "z": ("F32", (0,))},
        ),
        ({"a": said("F4", (4, 3), (0, 6))}, 6, {"a": ("F4", (4, 3))}),
        ({"a": said(comment="more keys")}, 8, {"a": ("F32", (2,))}),
    ],
)
def test_unusual_but_sound_files_are_read(tmp_path, header, data, tensors):
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_of(header, bytes(data)))
    assert read_header(path) == tensors
    path.write_bytes(file_of(json.dumps(header).encode() + b"   ", bytes(data)))
    assert read_header(path) == tensors


def test_every_float_and_byte_dtype_of_the_library_is_known(tmp_path):
    dtypes = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.int64]
    dtypes += [torch.bool, torch.int8, torch.int16, torch.int32, torch.float8_e4m3fn]
    tensors = {str(dtype): torch.zeros(3, 5, dtype=dtype) for dtype in dtypes}
    save_file(tensors, tmp_path / "x.safetensors")
    found = read_header(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys()
    assert {info.shape for info in found.values()} == {(3, 5)}


def test_a_file_that_cannot_be_opened_is_the_same_kind_of_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"gone\.safetensors: No such file"):
        read_header(tmp_path / "gone.safetensors")
    with pytest.raises(CheckpointError, match="folder"):
        (tmp_path / "folder").mkdir()
        read_header(tmp_path / "folder")
