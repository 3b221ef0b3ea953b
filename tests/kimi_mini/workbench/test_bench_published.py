"""Other people's forms of the scan: which are here, that they compute ours, and how they load."""

import importlib.util
import sys

import pytest
import torch

from kernels.reference import kda_reference
from kimi_mini.workbench import bench_peer, bench_published
from kimi_mini.workbench.bench_published import published_forms, published_scans
from kimi_mini.workbench.cases import scan_case

NAIVE = """
def naive_recurrent_kda(q, k, v, g, beta, initial_state, output_final_state):
    assert q.shape == (1, {tokens}, 2, 8) and v.shape == (1, {tokens}, 2, 4)
    assert initial_state.shape == (1, 2, 8, 4) and output_final_state
    return "loop", initial_state

def naive_chunk_kda(*operands, **options):
    return "chunks", options["initial_state"]
"""


@pytest.fixture(autouse=True)
def forgets():
    bench_published._fla_naive.cache_clear()
    yield
    bench_published._fla_naive.cache_clear()


@pytest.fixture
def only_fla(monkeypatch, tmp_path):
    """A package called fla that cannot be imported, and nothing else; returns where its file of
    naive forms belongs."""
    (tmp_path / "fla" / "ops" / "kda").mkdir(parents=True)
    (tmp_path / "fla" / "__init__.py").write_text("raise ImportError('no triton')")
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "transformers" else find(name)
    )
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "fla" / "ops" / "kda" / "naive.py"


@pytest.mark.parametrize(("tokens", "names"), [(64, {"loop", "chunks"}), (40, {"loop"})])
def test_of_fla_one_file_is_loaded_and_its_chunks_take_whole_chunks(only_fla, tokens, names):
    only_fla.write_text(NAIVE.format(tokens=tokens))
    forms = published_forms(scan_case("mixed", [tokens], H=2, K=8, V=4))
    assert set(forms) == {f"fla's {name}" for name in names}
    assert {form()[0] for form in forms.values()} == names
    assert "fla" not in sys.modules
    assert published_scans()[1] == [f"transformers is not installed; to compare with it: "
                                    f"{bench_peer.INSTALL}"]  # fmt: skip


def test_an_fla_without_that_file_is_said_so(only_fla):
    scans, (_, reason) = published_scans()
    assert scans == [] and reason.startswith("fla is installed but naive.py cannot be loaded")


def test_without_either_there_are_reasons(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    scans, reasons = published_scans()
    assert scans == []
    assert [reason.split(";")[0] for reason in reasons] == [
        "transformers is not installed", "fla is not installed",
    ]  # fmt: skip


def test_transformers_is_kept_from_finding_fla(monkeypatch, tmp_path):
    """It would take the GPU kernels of an fla that can be imported."""
    (tmp_path / "fla.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with bench_peer._hidden("fla"):
        assert importlib.util.find_spec("fla") is None
        with pytest.raises(ImportError):
            importlib.import_module("fla")
    assert "fla" not in sys.modules
    monkeypatch.setitem(sys.modules, "fla", before := object())
    with bench_peer._hidden("fla"):
        pass
    assert sys.modules["fla"] is before


def test_forms_that_are_here_compute_what_ours_computes():
    case = scan_case("mixed", [64], H=2, K=8, V=4)
    forms = published_forms(case)
    if not forms:
        pytest.skip("; ".join(published_scans()[1]))
    o, S, _ = kda_reference(*case)
    for name, form in forms.items():
        theirs, state = form()
        torch.testing.assert_close(theirs[0], o, rtol=1e-5, atol=1e-5, msg=name)
        torch.testing.assert_close(state.mT, S, rtol=1e-5, atol=1e-5, msg=name)
