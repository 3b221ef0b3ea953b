"""From the C++ sources to a shared library in the user's cache.

A library is kept under a key of everything that its code depends on: sources, torch version and
ABI, compiler flags and CPU level. Another machine, another torch or another source asks for another
key, so that nothing foreign is ever loaded; what has been compiled once needs no compiler again.
Builds of several processes wait for each other, and a library appears whole or not at all.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch

SOURCES = Path(__file__).resolve().parent / "csrc"

# Products are never contracted to fused ones behind the source's back (-ffp-contract=off): the same
# expression must have the same bits wherever it is inlined.
_LANGUAGE = ("-std=c++20", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
_FLAGS = ("-O3", "-fPIC", "-fopenmp", "-Wno-psabi")

# What torch's own report of this CPU allows; any other level is compiled for the baseline.
LEVELS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "AVX512": ("-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mavx2", "-mfma"),
        "AVX2": ("-mavx2", "-mfma"),
    }
)

_TIMEOUT = 900.0  # seconds


class NotBuilt(RuntimeError):
    """There is no library, and the message is the reason."""


class Built(NamedTuple):
    """A library, and the seconds its build took; 0 if it was there already."""

    path: Path
    level: str
    seconds: float


def cpu_level() -> str:
    """The widest instructions that this CPU has, as torch found them when it was imported."""
    return torch.backends.cpu.get_cpu_capability()


def level_flags(level: str) -> tuple[str, ...]:
    """What the mathematics must be compiled with, for a CPU level."""
    return (*_LANGUAGE, *LEVELS.get(level, ()))


def find_compiler() -> str:
    """CXX, or the first C++ compiler on the path. Raises NotBuilt if there is none."""
    asked = os.environ.get("CXX")
    for name in (asked,) if asked else ("c++", "g++"):
        found = shutil.which(name)
        if found:
            return found
    if asked:
        raise NotBuilt(f"no C++ compiler: CXX={asked} is not a program")
    raise NotBuilt("no C++ compiler: install g++, or name one in CXX")


def build() -> Built:
    """The library for this machine, compiled if the cache does not have it.

    Says so in one line on stderr before it compiles, or waits for who does. Raises NotBuilt with
    the reason: no compiler, a failed build, a folder that cannot be read or written.
    """
    level = cpu_level()
    path = cache_folder() / _key(level) / "kda_native.so"
    try:
        if path.exists():
            return Built(path, level, 0.0)
        compiler = find_compiler()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _alone(path.parent / "lock"):
            if path.exists():
                return Built(path, level, 0.0)
            _say(
                f"compiling the native operators for {level} with {compiler}, once, about a "
                f"minute, into {path.parent}"
            )
            return Built(path, level, _compile(compiler, level, path))
    except OSError as error:
        raise NotBuilt(
            f"cannot use {path.parent}: {error}; XDG_CACHE_HOME may name another place"
        ) from error


def cache_folder() -> Path:
    """Where libraries are kept: kimi_mini/native under XDG_CACHE_HOME, or ~/.cache. Raises NotBuilt
    where there is no home."""
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError as error:
        raise NotBuilt("no home folder; XDG_CACHE_HOME may name another place") from error
    return caches / "kimi_mini/native"


def _key(level: str) -> str:
    """Raises NotBuilt if the sources are not there, as in an install that leaves them out."""
    digest = hashlib.sha256()
    about = (torch.__version__, torch.compiled_with_cxx11_abi(), platform.machine(), sys.platform)
    digest.update(repr((about, level, level_flags(level), _FLAGS)).encode())
    try:
        for path in sorted(path for path in SOURCES.iterdir() if path.is_file()):
            digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
    except OSError as error:
        raise NotBuilt(f"cannot read the sources: {error}") from error
    return digest.hexdigest()[:24]


def _compile(compiler: str, level: str, path: Path) -> float:
    """Seconds taken. Sources side by side, then the library, which gets its name when complete."""
    torch_folder = Path(torch.__file__).resolve().parent
    libraries = torch_folder / "lib"
    command = [
        compiler,
        *level_flags(level),
        *_FLAGS,
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-isystem{torch_folder / 'include' / part}" for part in ("", "torch/csrc/api/include")),
    ]
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        objects = {source: f"{folder}/{source.stem}.o" for source in SOURCES.glob("*.cpp")}
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            jobs = [[*command, "-c", str(source), "-o", to] for source, to in objects.items()]
            list(pool.map(_run, jobs))
        library = f"{folder}/{path.name}"
        _run(
            [
                *command,
                "-shared",
                *objects.values(),
                *("-o", library, f"-L{libraries}", "-lc10", "-ltorch_cpu", "-ltorch"),
                # torch's own OpenMP before the system's, for there must be one thread pool
                *map(str, sorted(libraries.glob("libgomp*"))),
            ]
        )
        os.replace(library, path)
    return time.perf_counter() - begin


def _run(command: list[str]) -> None:
    """Raises NotBuilt if the compiler fails, with the first error that it names."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT)
    except OSError as error:
        raise NotBuilt(f"{command[0]} cannot be run: {error}") from error
    except subprocess.TimeoutExpired:
        raise NotBuilt(f"{command[0]} did not end within {_TIMEOUT:.0f} s") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line]
        said = (lines or done.stderr.splitlines() or ["no message"])[0]
        raise NotBuilt(f"{shlex.quote(command[0])} failed with {done.returncode}: {said}")


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Wait until no other process holds the lock file. Raises NotBuilt where none can."""
    try:
        import fcntl
    except ImportError:
        raise NotBuilt(f"this system ({sys.platform}) cannot lock files") from None
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"waiting for another process that compiles into {lock.parent}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _say(news: str) -> None:
    print(f"kernels: {news}", file=sys.stderr, flush=True)
