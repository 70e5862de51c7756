"""Files from anybody, damaged or hostile, given to every command: a sentence and exit code 2, or an answer; nothing else."""

import io
import re
import zipfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from qtoolkit.cli import main
from tests.export.qdq_files import File, clean
from tests.export.test_lint_files import (
    before_a_silu,
    blocks_of_8,
    codes_for_a_float_op,
    the_longer_branch,
    two_quantizers,
)
from tests.fuzzing import examples

WHOLE = two_quantizers().model().SerializeToString()
COMMANDS = (
    ["lint", "--backend", "tensorrt", "--advice"],
    ["lint", "--backend", "onnxruntime"],
    ["info"],
    ["verify", "--runtime", "onnxruntime"],
)
PLACE, BYTE = st.integers(0, len(WHOLE) - 1), st.integers(0, 255)


def run_on(data: bytes, command: list[str], folder: Path) -> None:
    path = folder / "damaged.onnx"
    path.write_bytes(data)
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as told:
        code = main([command[0], str(path), *command[1:], "--json"])
    assert code in (0, 1, 2)
    assert code != 2 or re.fullmatch(r"qtoolkit: .*\.\n", told.getvalue()), told.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("damaged")


@pytest.mark.slow
@examples(200)
@given(st.lists(st.tuples(PLACE, BYTE), max_size=8), PLACE | st.none(), st.sampled_from(COMMANDS))
def test_damaged_files_never_crash(folder, changes: list[tuple[int, int]], end: int | None, command: list[str]) -> None:
    data = bytearray(WHOLE)
    for place, value in changes:
        data[place] = value
    run_on(bytes(data[:end]), command, folder)


def damage(model: onnx.ModelProto, what: str, first: int, second: int) -> None:
    """Make one change that a broken writer of files could make."""
    graph = model.graph
    node, other = graph.node[first % len(graph.node)], graph.node[second % len(graph.node)]
    tensor = graph.initializer[first % len(graph.initializer)]
    if what == "inputs":
        del node.input[second % 3 :]
    elif what == "op":
        node.op_type = other.op_type
    elif what == "attributes":
        node.attribute.extend(list(other.attribute))
    elif what == "no attributes":
        del node.attribute[:]
    elif what == "rewired" and node.input and other.output:
        node.input[0] = other.output[0]
    elif what == "type":
        tensor.data_type = second % 30
    elif what == "sizes":
        tensor.dims[:] = [second - 3] * (first % 4)
    elif what == "values":
        tensor.raw_data = bytes([second % 256]) * len(tensor.raw_data)  # scales of 0, -1, NaN, ...
    elif what == "input":
        for value in graph.input:
            for size in value.type.tensor_type.shape.dim:
                size.dim_value = (second - 3) ** (first % 4)
    elif what == "order":
        graph.node.append(node)
    else:
        for value in (*graph.input, *graph.output):
            value.ClearField("type")


CHANGES = (
    "inputs",
    "op",
    "attributes",
    "no attributes",
    "rewired",
    "type",
    "sizes",
    "values",
    "input",
    "order",
    "no types",
)
FILES = [
    build().model() for build in (two_quantizers, codes_for_a_float_op, before_a_silu, blocks_of_8, the_longer_branch)
]


@pytest.mark.slow
@examples(200)
@given(
    st.sampled_from(FILES),
    st.lists(st.tuples(st.sampled_from(CHANGES), st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=4),
    st.booleans(),
    st.sampled_from(COMMANDS),
)
def test_files_of_broken_writers_never_crash(
    folder, whole: onnx.ModelProto, changes: list[tuple[str, int, int]], shapeless: bool, command: list[str]
) -> None:
    model = onnx.ModelProto()
    model.CopyFrom(whole)
    if shapeless:  # which onnx's checker does not take
        model.graph.output[0].type.tensor_type.ClearField("shape")
    for change in changes:
        damage(model, *change)
    run_on(model.SerializeToString(), command, folder)


def refused(path: Path, model: onnx.ModelProto, command: list[str], capsys) -> str:
    path.write_bytes(model.SerializeToString())
    assert main([command[0], str(path), *command[1:], "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err


def outside(tensor: TensorProto, location: str) -> TensorProto:
    """Put a constant's data in a file of its own."""
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    return tensor


@pytest.mark.parametrize("location", ["../secret", "/etc/hostname", "link"])
@pytest.mark.parametrize("place", ["initializer", "Constant", "If"])
@pytest.mark.parametrize("shapes", [True, False])
@pytest.mark.parametrize("command", COMMANDS[1:], ids=lambda command: command[0])
def test_weights_outside_the_folder_are_not_read(tmp_path, capsys, location, place, shapes, command) -> None:
    (tmp_path / "secret").write_bytes(b"\x01" * 64)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path / "secret")
    model = clean().model()
    constant = outside(numpy_helper.from_array(np.ones(4, np.float32), "k"), location)
    if place == "initializer":
        model.graph.initializer.append(constant)
        model.graph.node.append(helper.make_node("Identity", ["k"], ["o"]))
    elif place == "Constant":
        model.graph.node.insert(0, helper.make_node("Constant", [], ["o"], value=constant))
    else:
        output = helper.make_tensor_value_info("p", TensorProto.FLOAT, [4])
        body = helper.make_graph([helper.make_node("Identity", ["k"], ["p"])], "body", [], [output], [constant])
        model.graph.initializer.append(numpy_helper.from_array(np.array(True), "c"))
        model.graph.node.append(helper.make_node("If", ["c"], ["o"], then_branch=body, else_branch=body))
    if not shapes:
        model.graph.output[0].type.tensor_type.ClearField("shape")
    err = refused(folder / "m.onnx", model, command, capsys)
    assert any(words in err for words in ("outside the", "relative path", "should be stored in")), err


def scaled(value: float) -> onnx.ModelProto:
    file = File()
    file.output(file.conv(file.pair(file.input("x", 1, 16, 8, 8), scale=value)))
    return file.model()


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_that_are_none(tmp_path, capsys, value: float) -> None:
    err = refused(tmp_path / "m.onnx", scaled(value), COMMANDS[3], capsys)
    assert "scale must be positive and finite" in err


def test_constants_of_another_size_or_type_than_they_say(tmp_path, capsys) -> None:
    model = scaled(0.1)
    (scale,) = (t for t in model.graph.initializer if not t.dims and t.data_type == TensorProto.FLOAT)
    scale.raw_data += b"\0\0\0\0"
    err = refused(tmp_path / "m.onnx", model, COMMANDS[3], capsys)
    assert f"the constant {scale.name!r} cannot be read" in err


def test_an_input_that_does_not_fit_in_memory(tmp_path, capsys) -> None:
    file = File()
    file.output(file.node("Relu", file.pair(file.input("x", 1 << 20, 1 << 20))))
    err = refused(tmp_path / "m.onnx", file.model(), COMMANDS[3], capsys)
    assert "input 'x' of the file has 1099511627776 values" in err
    assert err.endswith("; pass inputs.\n")


def test_a_sequence_as_input_is_described_and_not_run(tmp_path, capsys) -> None:
    model = clean().model()
    kind = helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    model.graph.input.append(helper.make_value_info("s", kind))
    assert "input 's' of the file has no known tensor type" in refused(tmp_path / "m.onnx", model, COMMANDS[3], capsys)
    assert main(["info", str(tmp_path / "m.onnx"), "--json"]) == 0


def test_arrays_larger_than_their_file(tmp_path, capsys) -> None:
    """An .npz of 300 bytes whose array says that it has a petabyte."""
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1048576, 1048576, 256)}"
    data = b"\x93NUMPY\x01\x00" + (len(header) + 1).to_bytes(2, "little") + header + b"\n"
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("x.npy", data)
    command = [*COMMANDS[3], "--inputs", str(tmp_path / "x.npz")]
    assert "is not a .npz file of arrays" in refused(tmp_path / "m.onnx", clean().model(), command, capsys)
