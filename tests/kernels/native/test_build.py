"""Building and keeping the library, with a compiler that only pretends."""

import concurrent.futures
import fcntl
import pwd
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from kernels.native import build as building
from kernels.native.build import NotBuilt, build, cache_folder, find_compiler

ROOT = Path(__file__).resolve().parents[3]

PRETENDS = """#!/bin/sh
echo called >> "{log}"
{then}
while [ "$1" != -o ]; do shift; done
sleep 0.2
echo library > "$2"
"""


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Make CXX a script; returns (install(then), calls()). A build calls it once for every source
    and once for the library."""
    script, log = tmp_path / "compiler", tmp_path / "calls"

    def install(then=""):
        script.write_text(PRETENDS.format(log=log, then=then))
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))

    return install, lambda: len(log.read_text().splitlines()) if log.exists() else 0


ONE_BUILD = len([*building.SOURCES.glob("*.cpp")]) + 1


def files():
    return sorted(path.name for path in cache_folder().rglob("*") if path.is_file())


def test_a_library_is_compiled_once_and_then_needs_no_compiler(compiler, monkeypatch, capfd):
    install, calls = compiler
    install()
    first = build()
    said = capfd.readouterr()
    assert first.seconds > 0 and first.path.read_text() == "library\n"
    assert len(said.err.splitlines()) == 1 and said.out == ""
    assert first.level in said.err and str(first.path.parent) in said.err
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("PATH", "")
    assert build() == first._replace(seconds=0.0)
    assert calls() == ONE_BUILD
    assert capfd.readouterr().err == ""
    assert files() == ["kda_native.so", "lock"]


def test_another_cpu_torch_source_or_flag_is_another_library(compiler, tmp_path, monkeypatch):
    """A home directory shared by machines: what one of them compiled, the other never loads."""
    install, _ = compiler
    install()
    paths = [build().path]
    sources = tmp_path / "csrc"
    sources.mkdir()
    changes = [
        (torch.backends.cpu, "get_cpu_capability", lambda: "AVX2"),
        (torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT"),
        (torch.backends.cpu, "get_cpu_capability", lambda: "AVX512"),
        (torch, "__version__", "9.9.9"),
        (building, "_FLAGS", ("-O0", "-shared")),
        (building, "SOURCES", sources),
    ]
    own = building.cpu_level()
    for owner, name, value in changes:
        with monkeypatch.context() as changed:
            changed.setattr(owner, name, value)
            if name != "get_cpu_capability" or value() != own:
                paths.append(build().path)
    assert len(set(paths)) == len(paths) == len(changes)


def test_every_level_but_the_baseline_names_what_it_uses(compiler, tmp_path, monkeypatch):
    install, _ = compiler
    install(f'echo "$@" > "{tmp_path}/arguments"')
    for level, wanted in (("AVX512", "-mavx512vl"), ("AVX2", "-mfma"), ("DEFAULT", None)):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda level=level: level)
        assert build().level == level
        arguments = (tmp_path / "arguments").read_text()
        assert wanted in arguments if wanted else "-mavx" not in arguments
        assert "-ffp-contract=off" in arguments and "-march=native" not in arguments


@pytest.mark.slow
def test_processes_that_build_at_once_compile_once(compiler):
    install, calls = compiler
    install()
    code = "from kernels.native.build import build; print(build().path)"
    command = [sys.executable, "-c", code]

    def start(_):
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        paths = set(pool.map(start, range(2)))
    assert len(paths) == 1 and calls() == ONE_BUILD


def test_who_waits_for_another_build_says_so(compiler, capfd):
    install, calls = compiler
    install()
    lock = build().path.with_name("lock")
    lock.with_name("kda_native.so").unlink()
    compiled, said = calls(), ""
    waiting = threading.Thread(target=build)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        capfd.readouterr()
        waiting.start()
        while "\n" not in said:
            time.sleep(0.01)
            said += capfd.readouterr().err
        assert said.startswith("kernels: waiting for another process") and calls() == compiled
    waiting.join()
    assert calls() == compiled + ONE_BUILD


def test_no_compiler_is_a_reason(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NotBuilt, match="no C\\+\\+ compiler: install g\\+\\+"):
        build()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NotBuilt, match="CXX=no-such-compiler is not a program"):
        find_compiler()


def test_a_failed_build_names_the_first_error_and_leaves_nothing_to_load(compiler):
    install, calls = compiler
    install('echo "a.h:1: note" >&2; echo "a.h:2: error: what is this" >&2; exit 3')
    for _ in range(2):
        with pytest.raises(NotBuilt, match=re.escape("failed with 3: a.h:2: error: what is this")):
            build()
    assert 2 <= calls() < 2 * ONE_BUILD and files() == ["lock"]


def test_a_compiler_that_hangs_is_stopped(compiler, monkeypatch):
    install, _ = compiler
    install(f"exec {sys.executable} -c 'import time; time.sleep(60)'")
    monkeypatch.setattr(building, "_TIMEOUT", 0.3)
    with pytest.raises(NotBuilt, match="did not end within 0 s"):
        build()
    assert files() == ["lock"]


def test_what_is_no_program_at_all_is_a_reason(tmp_path, monkeypatch):
    (tmp_path / "compiler").write_bytes(b"\0")
    (tmp_path / "compiler").chmod(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "compiler"))
    with pytest.raises(NotBuilt, match="compiler cannot be run: .*Exec format error"):
        build()


def test_a_cache_that_cannot_be_written_is_a_reason(compiler, tmp_path):
    install, _ = compiler
    install()
    (tmp_path / "cache").write_text("a file where a folder should be")
    with pytest.raises(NotBuilt, match="cannot use .*; XDG_CACHE_HOME may name another place"):
        build()


def test_who_has_no_home_is_told_so(compiler, monkeypatch):
    install, _ = compiler
    install()

    def nobody(_):
        raise KeyError

    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    with pytest.raises(NotBuilt, match="no home folder; XDG_CACHE_HOME may name another place"):
        build()


def test_a_cache_that_cannot_be_looked_into_is_a_reason(compiler, monkeypatch):
    """Somebody else's home: the very question whether the library is there may be refused."""
    install, _ = compiler
    install()

    def refuse(_path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "exists", refuse)
    with pytest.raises(NotBuilt, match="cannot use .*Permission denied"):
        build()


def test_sources_that_are_not_there_are_a_reason_and_folders_beside_them_none(
    compiler, tmp_path, monkeypatch
):
    install, _ = compiler
    install()
    monkeypatch.setattr(building, "SOURCES", tmp_path / "csrc")
    with pytest.raises(NotBuilt, match="cannot read the sources"):
        build()
    (tmp_path / "csrc/of an editor").mkdir(parents=True)
    assert build().path.exists()
