"""What the CUDA kernels' index arithmetic visits, checked without a GPU: their headers, compiled for the CPU."""

import os
import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


@pytest.mark.slow
def test_every_element_is_met_once_and_by_its_channel(tmp_path: Path) -> None:
    program = tmp_path / "cuda_walks"
    flags = ["-std=c++20", "-O2", "-Wall", "-Wextra", "-Werror", "-D_GLIBCXX_ASSERTIONS", "-fsanitize=undefined"]
    compiler = os.environ.get("CXX", "c++")
    built = subprocess.run(
        [compiler, *flags, "-fno-sanitize-recover=all", str(TESTS / "cuda_walks.cpp"), "-o", str(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert int(ran.stdout.split()[0]) > 400
