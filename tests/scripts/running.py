"""Scripts run as a person runs them, or in this process where a fresh one would only cost time."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from kimi_mini.cli import run

FOLDER = Path(__file__).resolve().parent.parent.parent / "scripts"


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def as_a_command(script, *args, cwd=None) -> Done:
    """`python scripts/SCRIPT ARGS`, in a process of its own."""
    command = [sys.executable, str(FOLDER / script), *args]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", cwd=cwd)
    return Done(done.returncode, done.stdout, done.stderr)


def load(script):
    """The script as a module."""
    spec = importlib.util.spec_from_file_location(script.removesuffix(".py"), FOLDER / script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def in_this_process(script, args, capsys, monkeypatch) -> Done:
    """What the command would print and exit with."""
    monkeypatch.setattr(sys, "argv", [script, *args])
    monkeypatch.setattr(sys, "path", list(sys.path))
    capsys.readouterr()
    try:
        run(load(script).main)
    except SystemExit as end:
        out = capsys.readouterr()
        return Done(end.code, out.out, out.err)
    raise AssertionError("run() must exit")
