"""The shape of the house: where imports may point, and whose ground floor is found."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from kimi_mini import ground_floor

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("kernels", "cache", "kimi_mini", "scripts")
# from a room, the rooms below it that it may import
ALLOWED = {
    "kernels": {"kernels"},
    "cache": {"cache"},
    "kimi_mini": {"kimi_mini", "kernels", "cache"},
    "scripts": {"kimi_mini", "kernels", "cache"},
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    module_name(path): path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))
}


def imports(path: Path) -> set[str]:
    """Our modules that a file imports, at any depth of its code."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in names}
    return {name for name in found if name.split(".")[0] in (*ROOMS, "tests")}


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_downwards_only(name):
    room = name.split(".")[0]
    above = {
        target for target in imports(MODULES[name]) if target.split(".")[0] not in ALLOWED[room]
    }
    assert not above, f"{name} imports {above}"


def test_the_model_knows_neither_requests_nor_caches():
    layers = [n for n in MODULES if n.startswith("kimi_mini.layers") or n == "kimi_mini.model"]
    for name in layers:
        for target in imports(MODULES[name]):
            assert not target.startswith(("cache", "kimi_mini.serving", "kimi_mini.workbench")), (
                name
            )


def test_no_circle_of_files():
    """A package's __init__ is imported with any module in it, so only explicit edges count."""
    edges = {name: imports(path) & MODULES.keys() for name, path in MODULES.items()}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path[path.index(name) :], name))
        if name not in done:
            for target in sorted(edges[name]):
                visit(target, (*path, name))
            done.add(name)

    for name in edges:
        visit(name, ())


@pytest.mark.parametrize("room", ["kernels", "cache"])
def test_the_ground_floor_packages_are_docstrings_only(room):
    body = ast.parse((ROOT / room / "__init__.py").read_text(encoding="utf-8")).body
    assert len(body) == 1 and isinstance(body[0], ast.Expr)


def test_another_distribution_called_kernels_is_named_with_what_to_do(tmp_path):
    """The check is made in a process whose path has a foreign `kernels` in front of ours."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("__version__ = '0.18.2'\n")
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; import kimi_mini"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    message = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert message.startswith("ImportError: kimi_mini needs its own folder")
    assert str(tmp_path / "kernels") in message and "pip uninstall kernels" in message


def test_a_missing_ground_floor_says_how_to_install(tmp_path):
    with pytest.raises(ImportError, match="pip install -e"):
        ground_floor.check(("no_such_package_anywhere",), tmp_path)


def test_only_one_copy_of_each_module_is_in_use():
    import kernels.dispatcher  # noqa: F401
    import kimi_mini.model  # noqa: F401

    ours = {str(path): name for name, path in MODULES.items() if not name.startswith("scripts")}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        assert ours.get(file, name) == name
