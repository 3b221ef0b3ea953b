"""Checkpoints to take apart: a small K3-like one of our own, and the golden ones."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kimi_mini.config import KimiConfig, preset
from kimi_mini.weights import parameter_specs, random_parameters, write_checkpoint
from kimi_mini.weights.folder import CHECKSUMS, SINGLE

Edit = Callable[[dict[str, Tensor]], None]


@pytest.fixture(scope="session")
def golden() -> Path:
    return Path(__file__).parents[2] / "golden" / "model"


@pytest.fixture(scope="session")
def nano() -> KimiConfig:
    return preset("nano")


@pytest.fixture(scope="session")
def weights(nano: KimiConfig) -> dict[str, Tensor]:
    """Random parameters of nano; not to be changed."""
    return random_parameters(nano, seed=7)


@pytest.fixture
def folder(tmp_path: Path, nano: KimiConfig, weights: dict[str, Tensor]) -> Path:
    """A checkpoint of `weights` in one file, without digests: a folder anyone could have made."""
    write_checkpoint(tmp_path / "checkpoint", nano, weights)
    (tmp_path / "checkpoint" / CHECKSUMS).unlink()
    return tmp_path / "checkpoint"


@pytest.fixture(scope="session")
def unfilled() -> Callable[..., dict[str, Tensor]]:
    """Parameters of a config, every one NaN: what a loader leaves out stays visible."""

    def make(config: KimiConfig, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        keep = torch.promote_types(dtype, torch.float32)
        return {
            name: torch.full(spec.shape, torch.nan, dtype=keep if spec.keeps_float32 else dtype)
            for name, spec in parameter_specs(config).items()
        }

    return make


@pytest.fixture(scope="session")
def edit() -> Callable[[Path, Edit], None]:
    """Rewrites the tensors of a file with the stock library; names as they are stored."""

    def apply(path: Path, change: Edit) -> None:
        path = path / SINGLE if path.is_dir() else path
        tensors = load_file(path)
        change(tensors)
        save_file({n: t.contiguous() for n, t in tensors.items()}, path, metadata={"format": "pt"})

    return apply


@pytest.fixture(scope="session")
def edit_json() -> Callable[[Path, Callable[[dict], None]], None]:
    """Rewrites a JSON file."""

    def apply(path: Path, change: Callable[[dict], None]) -> None:
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return apply
