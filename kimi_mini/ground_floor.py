"""Make sure that `kernels` and `cache` are the folders beside this package.

Both names exist on PyPI. With the distribution `kernels` installed, a plain import may find it in
place of ours and fail much later with an obscure message; this says at once what happened.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def check(names: tuple[str, ...] = ("kernels", "cache"), root: Path = ROOT) -> None:
    """Raise ImportError, saying what to do, unless each name would be imported from `root`."""
    for name in names:
        spec = importlib.util.find_spec(name)
        found = Path(spec.origin).resolve().parent if spec and spec.origin else None
        if found == root / name:
            continue
        if found is None:
            where = "cannot be found"
            remedy = f"Run from {root}, or install the checkout with: pip install -e {root}"
        else:
            where = f"is found in {found}, another distribution of that name"
            remedy = (
                f"Use an environment of its own for kimi_mini, run `pip uninstall {name}` in this "
                f"one, or put {root} first on PYTHONPATH"
            )
        raise ImportError(
            f"kimi_mini needs its own folder {root / name}, but `{name}` {where}. {remedy}."
        )
