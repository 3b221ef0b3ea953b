"""Choosing native kernels, and doing without them."""

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from kernels import dispatcher as dispatching
from kernels.dispatcher import KDAKernelDispatcher
from kernels.native import library
from kernels.native.build import Built, cpu_level
from tests.scripts.running import as_a_command, in_this_process

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = "build_native.py"


@pytest.fixture
def without_compiler(tmp_path, monkeypatch):
    """A process that has not tried to build yet, and cannot."""
    monkeypatch.delenv("KIMI_MINI_NATIVE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    fresh = library._load.__wrapped__
    monkeypatch.setattr(library, "_load", fresh)
    monkeypatch.setattr(library, "operators", library.operators.__wrapped__)
    dispatching._warn_once.cache_clear()


def test_by_name_a_missing_backend_is_an_error_with_its_reason(without_compiler):
    with pytest.raises(ValueError, match="'native' is not available: no C\\+\\+ compiler: CXX="):
        KDAKernelDispatcher("native")
    with pytest.raises(RuntimeError, match="not available: no C\\+\\+ compiler"):
        library.operators()


def test_auto_then_takes_torch_and_warns_once(without_compiler):
    with pytest.warns(RuntimeWarning, match="torch runs instead: no C\\+\\+ compiler") as caught:
        first = KDAKernelDispatcher()
        second = KDAKernelDispatcher()
    assert len(caught) == 1
    assert first.backend.name == second.backend.name == "torch"
    assert "native: no C++ compiler" in first.describe()


def test_the_warning_says_what_to_do(without_compiler, monkeypatch):
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    with pytest.warns(RuntimeWarning, match="install g\\+\\+.*KIMI_MINI_NATIVE=0"):
        KDAKernelDispatcher()


def test_a_command_says_on_stderr_that_it_builds_and_that_it_could_not(
    without_compiler, tmp_path, monkeypatch
):
    """The line comes before the compiler runs, and what --json prints is nothing but JSON."""
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho 'a.h:1: error: too old' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    done = as_a_command("generate.py", "--model", "nano", "--max-tokens", "1", "--json")
    assert (done.returncode, json.loads(done.stdout)["backend"]) == (0, "torch")
    building, warning = done.stderr.splitlines()
    assert building.startswith("kernels: compiling the native operators")
    assert warning.startswith("warning: native kernels are not available, torch runs instead")
    assert "a.h:1: error: too old" in warning


def test_a_library_that_is_none_is_a_reason(tmp_path, monkeypatch):
    broken = tmp_path / "kda_native.so"
    broken.write_text("not a library")
    monkeypatch.delenv("KIMI_MINI_NATIVE", raising=False)
    monkeypatch.setattr(library, "build", lambda: Built(broken, "AVX2", 0.0))
    monkeypatch.setattr(library, "_load", library._load.__wrapped__)
    assert library.missing().startswith(f"{broken} cannot be loaded")


def test_the_switch_turns_it_off_by_name_too_and_quietly(monkeypatch):
    monkeypatch.setenv("KIMI_MINI_NATIVE", "0")
    with pytest.raises(ValueError, match="not available: switched off by KIMI_MINI_NATIVE=0"):
        KDAKernelDispatcher("native")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert KDAKernelDispatcher().backend.name == "torch"


@pytest.mark.parametrize("value", ["2", "yes", "-1"])
def test_the_switch_is_0_or_1(value, monkeypatch):
    monkeypatch.setenv("KIMI_MINI_NATIVE", value)
    with pytest.raises(ValueError, match=f"KIMI_MINI_NATIVE must be 0 or 1, got '{value}'"):
        KDAKernelDispatcher()


@pytest.mark.needs_native
@pytest.mark.parametrize("value", ["", "1"])
def test_auto_is_native(value, monkeypatch):
    monkeypatch.setenv("KIMI_MINI_NATIVE", value)
    dispatcher = KDAKernelDispatcher()
    assert dispatcher.backend.name == "native"
    assert dispatcher.not_taken == dict.fromkeys(("torch", "reference"), "'native' is faster")


@pytest.mark.needs_native
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_there_is_one_openmp_runtime_torchs_own():
    code = (
        "from kernels.native import library; assert library.missing() is None; "
        "print({line.split()[-1] for line in open('/proc/self/maps') if 'libgomp' in line})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        cwd=ROOT,
    )  # fmt: skip
    assert done.stdout.count("libgomp") == 1 and str(Path(torch.__file__).parent) in done.stdout


@pytest.mark.needs_native
def test_the_script_says_what_it_did(capsys, monkeypatch):
    done = in_this_process(SCRIPT, [], capsys, monkeypatch)
    assert done.returncode == 0
    assert done.stdout.startswith(f"native operators for {cpu_level()}, compiled already: ")


def test_the_script_says_why_not(without_compiler, capsys, monkeypatch):
    done = in_this_process(SCRIPT, [], capsys, monkeypatch)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("native operators are not available: no C++ compiler")
