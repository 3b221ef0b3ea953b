"""Shared by all tests: one torch thread, so that two cores can run two test processes; tests of the
native kernels are skipped where those cannot be had, and what "auto" takes is torch there."""

import functools
import os

import pytest
import torch

from kernels.native import library

torch.set_num_threads(1)


def pytest_sessionstart():
    """Compile them, if need be, before the first test: none shall find that on its stderr."""
    native_is_missing()


@functools.cache
def native_is_missing():
    """Why there are no native kernels, or None. What cannot be built is not asked for again: a
    command that a test starts would try once more, and warn."""
    reason = library.missing()
    if reason is not None:
        os.environ[library.SWITCH] = "0"
    return reason


@pytest.fixture(autouse=True)
def native_or_skipped(request):
    """Skip a test that needs native kernels if there are none: by its marker, by a parameter, or by
    a parameter's `backend`."""
    given = getattr(request.node, "callspec", None)
    values = [getattr(v, "backend", v) for v in given.params.values()] if given else ()
    named = any(isinstance(value, str) and value.startswith("native") for value in values)
    if named or request.node.get_closest_marker("needs_native"):
        reason = native_is_missing()
        if reason is not None:
            pytest.skip(f"native kernels: {reason}")
