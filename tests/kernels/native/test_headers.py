"""The torch-free headers in a program of their own, under the address and UB sanitisers."""

import subprocess
from pathlib import Path

import pytest

from kernels.native.build import LEVELS, SOURCES, NotBuilt, cpu_level, find_compiler, level_flags

HERE = Path(__file__).parent
# what a CPU of some level can run, widest last
BELOW = {"AVX512": ["DEFAULT", *reversed(LEVELS)], "AVX2": ["DEFAULT", "AVX2"]}


@pytest.mark.slow
@pytest.mark.parametrize("level", ["DEFAULT", *reversed(LEVELS)])
@pytest.mark.parametrize("source", ["kda_headers_test.cpp", "layer_headers_test.cpp"])
def test_the_headers_agree_with_double_loops_and_no_sanitiser_objects(source, level, tmp_path):
    if level not in BELOW.get(cpu_level(), ["DEFAULT"]):
        pytest.skip(f"this CPU has {cpu_level()}")
    try:
        compiler = find_compiler()
    except NotBuilt as error:
        pytest.skip(str(error))
    program = tmp_path / "headers_test"
    checked = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    strict = ["-Wall", "-Wextra", "-Werror", "-Wno-psabi"]
    flags = [*level_flags(level), *checked, *strict, f"-I{SOURCES}"]
    subprocess.run([compiler, *flags, HERE / source, "-o", program], check=True, timeout=600)
    done = subprocess.run([program], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_headers_know_no_torch():
    for header in SOURCES.glob("*.h"):
        text = header.read_text()
        assert not any(word in text for word in ("torch/", "ATen", "c10", "at::")), header
