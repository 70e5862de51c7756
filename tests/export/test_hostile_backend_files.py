"""Damaged files of vendors' compilers: a ValueError in a sentence, or what the file says; nothing else."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import qtoolkit as qt
from qtoolkit.export.backend_files.encoding import Encoding
from qtoolkit.export.backend_files.target import with_ending
from qtoolkit.export.backend_files.targets import TARGETS, FloatModel
from tests.export.qdq_files import File
from tests.fuzzing import changed, changes, examples

BACKENDS = ("tensorrt10", "snpe", "ppl", "tengine", "nnie", "stpu", "vitis")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model and its grids for each backend."""
    folder = tmp_path_factory.mktemp("files")
    file = File()
    y = file.node("Conv", file.input("x", 1, 2, 5, 5), file.constant(np.ones((3, 2, 3, 3), np.float32)), name="conv")
    file.output(file.node("Relu", y))
    model = file.model()
    for backend in BACKENDS:
        (folder / backend).mkdir()
        target = TARGETS[backend]
        assert isinstance(target, FloatModel)
        onnx.save(model, with_ending(folder / backend / "net", target.suffix))
        ends = (0, 255) if backend == "tengine" else (-127, 127) if backend in ("nnie", "stpu") else (-128, 127)
        grid = Encoding("x", (0.5,), (0,), *ends, format="nnie" if backend == "nnie" else "int")
        kind = target.formats[0]
        with_ending(folder / backend / "net", kind.suffix).write_text(kind.write([grid], model))
        assert qt.export.read_encodings(backend, folder / backend / "net") == (grid,)
    return folder


@pytest.mark.slow
@examples(400)
@given(st.sampled_from(BACKENDS), st.integers(0, 9), changes(), st.none() | st.integers(0, 1 << 20))
def test_damaged_files(folder, backend: str, which: int, drawn, end: int | None) -> None:
    files = sorted(p for p in (folder / backend).iterdir())
    small = [p for p in files if p.suffix != ".onnx"]
    path = small[which % len(small)] if which < 8 else next(p for p in files if p.suffix == ".onnx")
    whole = path.read_bytes()
    path.write_bytes(changed(whole, drawn, end))
    told = "."
    try:
        qt.export.read_encodings(backend, folder / backend / "net")
    except ValueError as error:
        told = str(error)
    finally:
        path.write_bytes(whole)
    assert told.endswith(".")


@pytest.mark.parametrize("number", ["1" + "0" * 400, "1e999", "NaN", "-0.0", "9" * 5000])
def test_numbers_beyond_floats(folder, number: str) -> None:
    (path,) = (folder / "vitis").glob("*.json")
    whole = path.read_text()
    path.write_text('{"vitis": {"x": {"scale": ' + number + "}}}")
    try:
        with pytest.raises(ValueError, match=r"finite|JSON"):
            qt.export.read_encodings("vitis", folder / "vitis" / "net")
    finally:
        path.write_text(whole)


@pytest.mark.parametrize("bits", [-1, 0, 1, 33, 10**9])
@pytest.mark.parametrize(("backend", "key"), [("snpe", "bitwidth"), ("ppl", "bit")])
def test_widths_that_no_code_has(folder, backend: str, key: str, bits: int) -> None:
    (path,) = (folder / backend).glob("*.json")
    whole = path.read_text()
    path.write_text(whole.replace(f'"{key}": 8', f'"{key}": {bits}'))
    try:
        with pytest.raises(ValueError, match=rf"{key} must lie in \[2, 32\], got {bits}\."):
            qt.export.read_encodings(backend, folder / backend / "net")
    finally:
        path.write_text(whole)
