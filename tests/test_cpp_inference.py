"""The C++ example, built with CMake against the torch that runs the tests."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import processes

EXAMPLE = Path(__file__).parents[1] / "examples" / "cpp_inference"
PLACES = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
TOOLS = {name: shutil.which(name, path=PLACES) for name in ("cmake", "make", "c++")}
MISSING = [name for name, place in TOOLS.items() if place is None]


def output_of(*command: object) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def program() -> Path:
    """The program, in a folder of its place, torch and Python, where a later run finds what it need not compile again."""
    if MISSING:
        pytest.skip(f"needs {' and '.join(MISSING)}, which is not installed")
    made_of = f"{EXAMPLE} {sys.executable} {torch.__version__}"
    folder = EXAMPLE.parents[1] / "build" / "cpp_inference" / hashlib.sha256(made_of.encode()).hexdigest()[:16]
    output_of(TOOLS["cmake"], "-S", EXAMPLE, "-B", folder, f"-DPython_EXECUTABLE={sys.executable}")
    output_of(TOOLS["cmake"], "--build", folder)
    return folder / "classify"


@pytest.mark.parametrize("arithmetic", ["integer", pytest.param("float", marks=pytest.mark.sweep)])
@pytest.mark.slow
def test_it_prints_the_classes_that_python_prints(program: Path, arithmetic: str, tmp_path) -> None:
    packaged = processes.python(EXAMPLE / "package.py", "--arithmetic", arithmetic, "--out", tmp_path)
    assert packaged.returncode == 0, packaged.stderr[-2000:]
    accuracy, classes = packaged.stdout.splitlines()
    assert float(accuracy.split()[0]) > 90
    assert len(set(classes.split()[1:])) == 10
    assert output_of(program, tmp_path / "model.pt2", tmp_path / "images.pt") == classes + "\n"

    for arguments, sentence in (
        ([tmp_path / "model.pt2", tmp_path / "none.pt"], "none.pt cannot be opened"),
        ([tmp_path / "model.pt2"], "Type: classify model.pt2 images.pt"),
    ):
        refused = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
        assert refused.returncode != 0
        assert sentence in refused.stderr
