"""The files of vendors' compilers: each holds the model's scales and zero points, and with the float model its outputs."""

import functools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper, numpy_helper
from torch import Tensor, nn

import qtoolkit as qt
from qtoolkit.export.backend_files.encoding import Encoding
from qtoolkit.export.backend_files.targets import TARGETS, FloatModel
from qtoolkit.quantizers.frozen import Grid

SHAPE = (2, 3, 8, 8)
INTEGERS = [name for name in TARGETS if name not in ("nnie", "openvino")]
DERIVED = {"tensorrt10": (127, True), "tensorrt8": (127, True), "tengine": (255, False)}


class Block(nn.Module):
    """A layer of each kind, a residual add and a concat, with a classifier whose output may be quantized."""

    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.next, self.up = nn.Conv2d(8, 8, 3, padding=1), nn.ConvTranspose2d(8, 8, 2, 2, groups=groups)
        self.fc = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.relu6(self.bn(self.conv(x)))
        y = self.up(torch.relu(self.next(y) + y))
        return self.fc(torch.cat([y, torch.relu(y)], 1).mean((2, 3)))


def prepared_for(backend: str | qt.Backend, mapping: qt.QConfigMapping | None = None, groups: int = 1) -> nn.Module:
    prepared = qt.prepare(Block(groups).eval(), torch.randn(SHAPE), backend=backend, qconfig_mapping=mapping)
    qt.calibrate(prepared, [torch.randn(SHAPE) for _ in range(4)], progress=False)
    return prepared


def written(prepared: nn.Module, backend: str, folder: Path, **options):
    return qt.export.encodings(prepared, backend, torch.randn(SHAPE), folder / "net", **options)


@dataclass(frozen=True)
class Export:
    """A model, what was written for a target, and the folder."""

    prepared: nn.Module
    files: qt.export.BackendFiles
    folder: Path


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Export]:
    """Writes the files of a target, once for all tests that read them."""

    @functools.cache
    def once(backend: str) -> Export:
        prepared, folder = prepared_for(backend), tmp_path_factory.mktemp(backend)
        return Export(prepared, written(prepared, backend, folder, dynamic_batch=True), folder)

    return once


def assert_same_grids(model: nn.Module, encodings) -> None:
    grids = {name: grid for name, grid in qt.convert(model).named_modules() if isinstance(grid, Grid)}
    for encoding in encodings:
        grid = grids[encoding.quantizer]
        zero_point = torch.zeros_like(grid.scale) if grid.zero_point is None else grid.zero_point
        assert encoding.scale == tuple(grid.scale.reshape(-1).tolist())
        assert encoding.zero_point == tuple(int(one) for one in zero_point.reshape(-1))


def quantized(model: onnx.ModelProto, encodings) -> onnx.ModelProto:
    """Insert the rounding of each encoding, written out in float ops, behind its tensor."""
    graph, weights = model.graph, {t.name: t for t in model.graph.initializer}
    renamed = {}
    for number, encoding in enumerate(encodings):
        axis = encoding.axis
        rank = len(weights[encoding.tensor].dims) if axis is not None else 0
        shape = [-1 if d == axis else 1 for d in range(rank)]
        constants = {"s": encoding.scale, "z": encoding.zero_point, "l": (encoding.qmin,), "h": (encoding.qmax,)}
        for key, values in constants.items():
            array = np.array(values, np.float32).reshape(shape if len(values) > 1 else ())
            graph.initializer.append(numpy_helper.from_array(array, f"{key}{number}"))
        tensor, chain = encoding.tensor, []
        steps = (("Div", "s"), ("Round", ""), ("Add", "z"), ("Clip", "lh"), ("Sub", "z"), ("Mul", "s"))
        for position, (op, names) in enumerate(steps):
            inputs = [tensor, *(f"{name}{number}" for name in names)]
            chain.append(helper.make_node(op, inputs, [f"q{number}.{position}"]))
            tensor = chain[-1].output[0]
        renamed[encoding.tensor] = (tensor, chain)
    nodes = list(graph.node)
    for node in nodes:
        for index, name in enumerate(node.input):
            if name in renamed:
                node.input[index] = renamed[name][0]
    del graph.node[:]
    available = {value.name for value in graph.input} | set(weights)
    for name in available & renamed.keys():
        graph.node.extend(renamed[name][1])
    for node in nodes:
        graph.node.append(node)
        for name in node.output:
            graph.node.extend(renamed[name][1] if name in renamed else ())
    for output in graph.output:
        output.name = renamed[output.name][0] if output.name in renamed else output.name
    return model


def outputs_of(model: onnx.ModelProto, x: Tensor) -> np.ndarray:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]


def derived(model: onnx.ModelProto, backend: str, axes: dict[str, int | None]) -> list[Encoding]:
    """The grids that a target computes from the values of weights."""
    steps, symmetric = DERIVED[backend]
    found = []
    for tensor in model.graph.initializer:
        if tensor.name in axes:
            values, axis = numpy_helper.to_array(tensor), axes[tensor.name]
            rest = tuple(d for d in range(values.ndim) if d != axis)
            low, high = np.minimum(values, 0).min(rest), np.maximum(values, 0).max(rest)
            scale = (np.maximum(-low, high) / steps if symmetric else (high - low) / steps).astype(np.float32)
            zero = np.zeros_like(scale) if symmetric else np.round(-low / scale)
            ends = (-127, 127) if symmetric else (0, 255)
            found.append(Encoding(tensor.name, tuple(scale.reshape(-1)), tuple(zero.reshape(-1)), *ends, True, axis))
    return found


# ---- every backend


@pytest.mark.parametrize("backend", TARGETS)
def test_the_files_hold_the_grids_of_the_model(backend: str, export: Callable[[str], Export]) -> None:
    files, folder = export(backend).files, export(backend).folder
    assert {file.name for file in folder.iterdir()} == {path.name for path in (files.model, *files.files)}
    assert_same_grids(export(backend).prepared, files.encodings)
    read = {encoding.tensor: encoding for encoding in qt.export.read_encodings(backend, folder / "net")}
    assert read.keys() == {encoding.tensor for encoding in files.encodings}
    for encoding in files.encodings:
        assert read[encoding.tensor].has_grid_of(encoding)
        if backend != "openvino":  # whose ends are float32
            assert read[encoding.tensor].scale == encoding.scale


@pytest.mark.parametrize("backend", INTEGERS)
def test_the_float_model_with_the_grids_computes_the_converted_model(
    backend: str, export: Callable[[str], Export]
) -> None:
    prepared, files = export(backend).prepared, export(backend).files
    model, x = onnx.load(files.model), torch.randn(SHAPE)
    assert not {"QuantizeLinear", "DequantizeLinear"} & {node.op_type for node in model.graph.node}
    assert {opset.domain: opset.version for opset in model.opset_import} == {"": 13}
    read = {encoding.tensor: encoding for encoding in qt.export.read_encodings(backend, export(backend).folder / "net")}
    known = [replace(read[encoding.tensor], axis=encoding.axis) for encoding in files.encodings]
    if backend in DERIVED:
        grids = {name: grid for name, grid in qt.convert(prepared).named_modules() if isinstance(grid, Grid)}
        weights = {name: grid for name, grid in grids.items() if grid.of_weight}
        axes = {n.replace("_quantizer", ""): g.spec.axis if g.scale.numel() > 1 else None for n, g in weights.items()}
        known += derived(model, backend, axes)
    with torch.no_grad():
        expected = qt.convert(prepared)(x).numpy()
    step = max((e.scale[0] for e in files.encodings if e.tensor == model.graph.output[0].name), default=0.0)
    np.testing.assert_allclose(outputs_of(quantized(model, known), x), expected, atol=step + 1e-2, rtol=0)


@pytest.mark.parametrize("groups", [1, 2])
def test_openvino_computes_the_converted_model(groups: int, tmp_path) -> None:
    openvino = pytest.importorskip("openvino")
    prepared = prepared_for("openvino", groups=groups)
    files = written(prepared, "openvino", tmp_path)
    core = openvino.Core()
    compiled = core.compile_model(core.read_model(files.model), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    x = torch.randn(SHAPE)
    with torch.no_grad():
        expected = qt.convert(prepared)(x).numpy()
    np.testing.assert_allclose(compiled(x.numpy())[0], expected, atol=2e-2)
    weights = [encoding for encoding in files.encodings if encoding.is_weight]
    assert {(weight.qmin, weight.qmax) for weight in weights} == {(-128, 127)}


def test_a_quantized_output_has_the_name_of_the_output(tmp_path) -> None:
    files = written(prepared_for("snpe"), "snpe", tmp_path, input_names=["image"], output_names=["classes"])
    model = onnx.load(files.model)
    assert [value.name for value in model.graph.input] == ["image"]
    assert [value.name for value in model.graph.output] == ["classes"]
    assert {"image", "classes"} < {encoding.tensor for encoding in files.encodings}


def test_weights_are_clipped_to_their_range(tmp_path) -> None:
    prepared = prepared_for("tensorrt10")
    with torch.no_grad():
        prepared.get_submodule("fc").weight[0, 0] = 9.0
        prepared.get_submodule("fc.weight_quantizer").amax = torch.full((5,), 0.5)
    with pytest.warns(UserWarning, match="differ from the trained scales"):  # the other rows do not reach the end
        model = onnx.load(written(prepared, "tensorrt10", tmp_path).model)
    weight = next(numpy_helper.to_array(t) for t in model.graph.initializer if t.name == "fc.weight")
    assert weight[0, 0] == pytest.approx(0.5)


# ---- formats


def test_the_calibration_cache_is_of_the_form_that_tensorrt_reads(export: Callable[[str], Export]) -> None:
    files = export("tensorrt10").files
    head, *lines = files.files[0].read_text().splitlines()
    assert re.fullmatch(r"TRT-\d{6}-EntropyCalibration2", head)
    bits = {encoding.tensor: np.float32(encoding.scale[0]).view(np.uint32) for encoding in files.encodings}
    assert lines == [f"{tensor}: {number:08x}" for tensor, number in bits.items()]
    ranges = json.loads(files.files[1].read_text())["tensorrt"]["blob_range"]
    assert ranges == {encoding.tensor: encoding.scale[0] * 127 for encoding in files.encodings}


def test_qualcomms_encodings_follow_its_schema(tmp_path) -> None:
    mapping = qt.QConfigMapping().set_global(
        qt.QConfig(
            qt.QuantSpec(bits=16, signed=False, symmetric=False), qt.QuantSpec(signed=False, symmetric=False, axis=0)
        )
    )
    files = written(prepared_for("qnn", mapping), "qnn", tmp_path)
    content = json.loads(files.files[0].read_text())
    assert content.keys() == {"version", "activation_encodings", "param_encodings"}
    for entries in (*content["activation_encodings"].values(), *content["param_encodings"].values()):
        for entry in entries:
            assert entry["min"] == pytest.approx(entry["offset"] * entry["scale"])
            assert entry["max"] - entry["min"] == pytest.approx((2 ** entry["bitwidth"] - 1) * entry["scale"])
            assert (entry["dtype"], entry["is_symmetric"], type(entry["offset"])) == ("int", "False", int)
    assert {len(entries) for entries in content["param_encodings"].values()} == {8, 5}
    assert {entries[0]["bitwidth"] for entries in content["activation_encodings"].values()} == {16}


def test_signed_codes_of_qualcomm_are_symmetric(tmp_path) -> None:
    signed = qt.QuantSpec(signed=True, symmetric=True)
    narrow = qt.QConfig(signed, signed.with_(bits=4, narrow=True, axis=0))
    files = written(prepared_for("qnn", qt.QConfigMapping().set_global(narrow)), "qnn", tmp_path)
    read = {encoding.tensor: encoding for encoding in qt.export.read_encodings("qnn", tmp_path / "net")}
    assert (read["fc.weight"].qmin, read["fc.weight"].qmax, read["fc.weight"].zero_point) == (-7, 7, (0,) * 5)
    assert (read["x"].qmin, read["x"].qmax) == (-128, 127)
    assert len(files.encodings) == len(read)


@pytest.mark.slow
def test_ppl_has_16_bits_and_channels(export: Callable[[str], Export]) -> None:
    wide, narrow = (
        json.loads((export(name).folder / "net_clip_ranges.json").read_text())["ppl"] for name in ("ppl-w8a16", "ppl")
    )
    assert wide["x"]["bit"] == 16
    entry = narrow["fc.weight"]
    assert [len(entry[key]) for key in ("step", "zero_point", "min", "max")] == [5, 5, 5, 5]


def test_nnie_has_the_inputs_of_each_layer(export: Callable[[str], Export]) -> None:
    prepared, files = export("nnie").prepared, export("nnie").files
    layers = json.loads(files.files[0].read_text())["nnie"]["gfpq_param_dict"]
    assert {len(values) for name, values in layers.items() if "conv" in name} == {1}
    assert {len(values) for name, values in layers.items() if "add" in name} == {2}
    amax = prepared.get_submodule("activation_quantizers.x").amax.item()
    assert any(values == [pytest.approx(amax)] for values in layers.values())


def test_nnie_has_no_entry_for_grouped_convolutions(tmp_path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3, groups=4)).eval()
    prepared = qt.prepare(model, torch.randn(SHAPE), backend="nnie")
    qt.calibrate(prepared, [torch.randn(SHAPE)], progress=False)
    with pytest.warns(
        UserWarning, match="no entry for conv2d: the target accepts none for the ops that use these tensors"
    ):
        files = written(prepared, "nnie", tmp_path)
    assert len(files.encodings) == 1


def test_vitis_has_powers_of_two(export: Callable[[str], Export]) -> None:
    scales = json.loads((export("vitis").folder / "net_clip_ranges.json").read_text())["vitis"]
    assert all(np.frexp(entry["scale"])[0] == 0.5 for entry in scales.values())


def test_stpu_has_weights_by_node_and_steps_of_biases(export: Callable[[str], Export]) -> None:
    files = export("stpu").files
    ranges = json.loads(files.files[0].read_text())
    scales = {encoding.tensor: encoding.scale[0] for encoding in files.encodings}
    node = next(node for node in onnx.load(files.model).graph.node if node.op_type == "Gemm")
    assert ranges[f"{node.name}_weights"]["max"] == pytest.approx(127 * scales["fc.weight"])
    assert ranges[f"{node.name}_bias"]["alpha"] == scales[node.input[0]] * scales["fc.weight"]


class Moves(nn.Module):
    """A max pool and a reshape between a quantizer and the op that takes its values."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4 * 4 * 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(nn.functional.max_pool2d(torch.relu(self.conv(x)), 2).flatten(1))


@pytest.mark.parametrize("backend", ["tensorrt10", "tengine", "nnie"])
def test_tensors_behind_moved_values_have_their_grid(backend: str, tmp_path) -> None:
    prepared = qt.prepare(Moves().eval(), torch.randn(SHAPE), backend=backend)
    qt.calibrate(prepared, [torch.randn(SHAPE)], progress=False)
    files = written(prepared, backend, tmp_path)
    found = {encoding.tensor: encoding for encoding in files.encodings}
    made_by = {node.output[0]: node for node in onnx.load(files.model).graph.node}
    layer = next(node for node in made_by.values() if node.op_type in ("Gemm", "MatMul"))
    moved = made_by[layer.input[0]]
    pooled = made_by[moved.input[0]]
    assert found[layer.input[0]].scale == found[pooled.input[0]].scale
    assert (pooled.output[0] in found) == (backend != "nnie")  # which has an entry for ops with parameters
    relu = made_by[pooled.input[0]]
    assert (relu.input[0] in found) == (backend == "tengine")  # which computes the convolution and the ReLU as one


class Padded(nn.Module):
    """Channels of zeros between a quantizer and the op that takes its values: no exporter makes them part of the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 4, 3), nn.Conv2d(6, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(nn.functional.pad(torch.relu(self.conv(x)), (0, 0, 0, 0, 0, 2)))


def test_a_padded_tensor_has_the_grid_of_its_source(tmp_path) -> None:
    prepared = qt.prepare(Padded().eval(), torch.randn(SHAPE), backend="tengine")
    qt.calibrate(prepared, [torch.randn(SHAPE)], progress=False)
    files = written(prepared, "tengine", tmp_path)
    found = {encoding.tensor: encoding for encoding in files.encodings}
    (pad,) = (node for node in onnx.load(files.model).graph.node if node.op_type == "Pad")
    assert found[pad.output[0]].has_grid_of(found[pad.input[0]])


# ---- what a format cannot hold

AFFINE, SIGNED = qt.QuantSpec(signed=False, symmetric=False), qt.QuantSpec()
ONE, CHANNELS = Encoding("x", (0.5,), (0,), -128, 127), Encoding("x", (0.5, 0.3), (0, 0), -128, 127, axis=1)
REFUSED = {
    "tensorrt-4-bits": ("tensorrt10", replace(ONE, qmin=-8, qmax=7), "supports 8 bits, got 4"),
    "tensorrt-channels": ("tensorrt10", CHANNELS, "per-tensor scales for activations"),
    "tengine-signed": ("tengine", ONE, "unsigned integers with a zero point"),
    "vitis-scale": ("vitis", replace(ONE, scale=(0.3,)), "power-of-two scales, got 0.3"),
    "vitis-channels": ("vitis", replace(CHANNELS, is_weight=True), "per-tensor scales, got per-channel"),
    "stpu-zero-point": ("stpu", replace(ONE, zero_point=(3,)), "signed integers without a zero point"),
    "nnie-integers": ("nnie", ONE, "only logarithmic grids"),
    "snpe-6-bits": ("snpe", replace(ONE, qmin=-32, qmax=31), "4 or 8 or 16 bits, got 6"),
    "snpe-logarithmic": ("snpe", replace(ONE, format="nnie"), "only integer grids"),
    "snpe-narrow": ("snpe", replace(ONE, qmin=1, qmax=255, zero_point=(7,)), "got narrow_range=True"),
    "qnn-groups": ("qnn", replace(CHANNELS, is_weight=True, group=2), "the groups of a transposed convolution"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_format_cannot_hold_is_refused(case: str) -> None:
    backend, encoding, message = REFUSED[case]
    target = TARGETS[backend]
    assert isinstance(target, FloatModel)
    with pytest.raises(ValueError, match=message):
        target.formats[0].check(replace(encoding, quantizer="q"))


@pytest.mark.parametrize(
    ("backend", "activation", "message"),
    [
        ("tensorrt10", AFFINE, "cannot hold the grid of the activation 'x' .*signed integers without a zero point"),
        ("openvino", qt.QuantSpec(format="nnie"), "only integer grids"),
        ("snpe", qt.QuantSpec(format="e4m3"), "or a small float format"),
    ],
)
def test_nothing_is_written_then(backend: str, activation: qt.QuantSpec, message: str, tmp_path) -> None:
    prepared = prepared_for(backend, qt.QConfigMapping().set_global(qt.QConfig(activation, SIGNED)))
    with pytest.raises(ValueError, match=message):
        written(prepared, backend, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_weights_whose_scales_the_target_would_not_find_are_named(tmp_path) -> None:
    prepared = prepared_for("tensorrt10")
    prepared.get_submodule("fc.weight_quantizer").amax = torch.full((5,), 7.0)
    with pytest.warns(UserWarning, match=r"For 1 weights they differ from the trained scales: fc\.weight"):
        written(prepared, "tensorrt10", tmp_path)


class Requantized(nn.Module):
    """The first input of a concat is quantized for a layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = qt.TensorQuantizer(qt.QuantSpec()), qt.TensorQuantizer(qt.QuantSpec())

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) + self.two(x)


def test_a_tensor_with_two_grids_is_refused(tmp_path) -> None:
    model = Requantized()
    model.one.amax, model.two.amax = 1.0, 2.0
    with pytest.raises(ValueError, match="quantized by 'one' and again by 'two' on another grid"):
        qt.export.encodings(model, "tensorrt10", torch.rand(2, 3), tmp_path / "net")


def test_a_quantized_input_that_is_an_output_has_a_node(tmp_path) -> None:
    model = nn.Sequential(qt.TensorQuantizer(qt.QuantSpec()))
    model[0].amax = 1.0
    files = qt.export.encodings(model, "tensorrt10", torch.rand(2, 3), tmp_path / "net", output_names=["y"])
    graph = onnx.load(files.model).graph
    assert [(node.op_type, node.output[0]) for node in graph.node] == [("Identity", "y")]
    assert [encoding.tensor for encoding in files.encodings] == [graph.input[0].name, "y"]


def test_other_arguments_are_errors(tmp_path) -> None:
    qdq, snpe, mapping = prepared_for("onnxruntime"), prepared_for("snpe"), qt.QConfigMapping().set_global(None)
    floating = qt.prepare(Block(), torch.randn(SHAPE), backend="snpe", qconfig_mapping=mapping)
    with pytest.raises(
        ValueError, match="'onnxruntime' has no files of its own, it takes the Q/DQ file of export_onnx"
    ):
        written(qdq, "onnxruntime", tmp_path)
    with pytest.raises(ValueError, match=r"opset must be a whole number in \[13"):
        written(snpe, "snpe", tmp_path, opset=9)
    with pytest.raises(ValueError, match="encodings: nothing in the model is quantized"):
        written(floating, "snpe", tmp_path)
    model = Block()
    with pytest.raises(TypeError, match="encodings: the model must be what qtoolkit.prepare"):
        written(model, "snpe", tmp_path)


def test_errors_of_what_it_shares_with_export_onnx_name_it(tmp_path) -> None:
    model = prepared_for("snpe")

    def refused(inputs: object, kind: type[Exception] = ValueError, **options: object) -> str:
        with pytest.raises(kind) as error:
            qt.export.encodings(model, "snpe", inputs, tmp_path / "net", **options)
        return str(error.value)

    x = torch.randn(SHAPE)
    assert refused((), TypeError).startswith("encodings: example_inputs do not match")
    assert refused(x, input_names=["a", "b"]).startswith("encodings: input_names must")
    assert refused(x, output_names=["a", "b"]).startswith("encodings: output_names must")
    assert refused(x.double(), TypeError).startswith("encodings: 'x' is float64")


# ---- files that are not of the form

MALFORMED = {
    "tensorrt-head": ("tensorrt10", "_calibration.cache", "x: 3c010a14\n", "must begin with a line like"),
    "tensorrt-line": ("tensorrt10", "_calibration.cache", "TRT-8501-EntropyCalibration2\nx: 3c01\n", "eight hexadecimal"),
    "tensorrt-zero": ("tensorrt10", "_calibration.cache", "TRT-8501-EntropyCalibration2\nx: 00000000\n", "positive and finite"),
    "snpe-json": ("snpe", "_clip_ranges.json", "{", "must be JSON"),
    "snpe-key": ("snpe", "_clip_ranges.json", "{}", "must have the key 'activation_encodings', got none"),
    "snpe-list": ("snpe", "_clip_ranges.json", '{"activation_encodings": {"x": {}}}', "encodings.x: it must be a list"),
    "snpe-scale": (
        "snpe",
        "_clip_ranges.json",
        '{"activation_encodings": {"x": [{"bitwidth": 8, "is_symmetric": "False", "offset": 0, "scale": "1"}]}}',
        "scale must be a finite number, got '1'",
    ),
    "ppl-lists": (
        "ppl",
        "_clip_ranges.json",
        '{"ppl": {"x": {"step": [1], "zero_point": [], "min": [0], "max": [1]}}}',
        "lists of one length",
    ),
    "tengine-line": ("tengine", "_for_tengine.scale", "x 0.5\n", "a tensor, a scale and a zero point"),
    "vitis-key": ("vitis", "_clip_ranges.json", '{"vitis": {"x": {"step": 1}}}', "must have the key 'scale', got 'step'"),
    "nnie-node": (
        "nnie",
        "_gfpq_param_dict.json",
        '{"nnie": {"gfpq_param_dict": {"no": [1]}}}',
        "no: it must be a node of the model",
    ),
    "stpu-number": ("stpu", "_stpu_minmax.json", '{"x": {"max": null}}', "x: max must be a finite number"),
    "openvino-xml": ("openvino", ".xml", "<net>", "OpenVINO cannot read"),
}  # fmt: skip


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_file_is_an_error_that_names_the_place(case: str, tmp_path) -> None:
    backend, ending, text, message = MALFORMED[case]
    target = TARGETS[backend]
    tensors = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "graph", tensors[:1], tensors[1:])
    model = helper.make_model(graph)
    onnx.save(model, tmp_path / f"net{target.suffix}" if isinstance(target, FloatModel) else tmp_path / "model.onnx")
    (tmp_path / f"net{ending}").write_text(text)
    with pytest.raises(ValueError, match=message):
        qt.export.read_encodings(backend, tmp_path / "net")


def test_a_missing_file_is_an_error(tmp_path) -> None:
    with pytest.raises(FileNotFoundError):
        qt.export.read_encodings("snpe", tmp_path / "net")
