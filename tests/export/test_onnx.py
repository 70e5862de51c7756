"""ONNX files: their nodes, their integer codes in onnxruntime, names, dynamic sizes, and what happens on errors."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn

import qtoolkit as qt
from qtoolkit.quantizers.frozen import Grid
from tests import nets

SHAPE = (4, 3, 8, 8)
EXPORTERS = ["dynamo", "torchscript"]
AS_THEY_ARE = replace(qt.backends["onnxruntime"], sub_pixel=False)  # transposed convolutions


def converted_net(backend: str = "onnxruntime", bits: int = 8, **spec: object) -> nn.Module:
    model = nets.trained(nets.ConvNet(), *SHAPE)
    weight = qt.QuantSpec(bits=bits, axis=0, **spec)
    activation = qt.backends[backend].qconfig.activation
    activation = qt.QuantSpec(bits=bits, signed=activation.signed, symmetric=activation.symmetric, **spec)
    mapping = qt.QConfigMapping().set_global(qt.QConfig(activation, weight))
    prepared = qt.prepare(model, backend=backend, qconfig_mapping=mapping)
    qt.calibrate(prepared, [torch.randn(SHAPE)], progress=False)
    return qt.convert(prepared)


def run_file(path: Path, *inputs: Tensor) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    feeds = {i.name: x.numpy() for i, x in zip(session.get_inputs(), inputs, strict=True)}
    return session.run(None, feeds)[0]


def initializers(path: Path) -> dict[str, np.ndarray]:
    return {t.name: numpy_helper.to_array(t) for t in onnx.load(str(path)).graph.initializer}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("backend", ["tensorrt10", "onnxruntime"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("narrow", [False, True])
def test_codes_in_onnxruntime_are_those_of_training(
    tmp_path, exporter: str, backend: str, bits: int, narrow: bool
) -> None:
    model = converted_net(backend, bits, narrow=narrow)
    x = 3 * torch.randn(16, *SHAPE[1:])  # beyond the calibrated ranges: saturation is at the true bounds
    result = qt.export_onnx(model, x, tmp_path / "model.onnx", exporter=exporter)
    codes = result.verification
    assert codes.weight_codes.compared == sum(p.numel() for n, p in model.named_parameters() if n.endswith("weight"))
    assert codes.weight_codes.differing == 0
    assert codes.quantizer_codes.differing == 0
    assert codes.quantizer_codes.compared > 10_000
    assert codes.layer_codes.steps <= 1
    assert codes.layer_codes.share < 1e-3
    assert codes.missing == ()


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_the_pairs_are_those_of_the_plan(tmp_path, exporter: str) -> None:
    for backend, integer in (("tensorrt10", False), ("onnxruntime", True)):
        model = converted_net(backend)
        result = qt.export_onnx(model, torch.randn(SHAPE), tmp_path / "m.onnx", exporter=exporter)
        report = qt.quantization_report(model)
        weights = sum(line.weight != "" for line in report.layers)
        nodes = onnx.load(str(result.path)).graph.node
        # Behind a max pool and a reshape (`repeated_pairs`), and in front of the pixels of a transposed convolution.
        repeated = sum(node.name.endswith(("_quantize", "/quantize")) for node in nodes)
        assert repeated == 3 * int(integer)
        assert result.quantize_nodes == len(report.tensors) + repeated + (0 if integer else weights)
        biases = sum(name.endswith("bias") for name, _ in model.named_parameters()) if integer else 0
        assert result.dequantize_nodes == len(report.tensors) + repeated + weights + biases
        names = {n.name for n in onnx.load(str(result.path)).graph.node if n.op_type == "QuantizeLinear"}
        assert {f"{line.quantizer}.quantize" for line in report.tensors} <= names


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_weights_are_stored_as_integers_on_the_right_axis(tmp_path, exporter: str) -> None:
    class Up(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ConvTranspose2d(4, 6, 3, stride=2)

        def forward(self, x: Tensor) -> Tensor:
            return self.up(x)

    prepared = qt.prepare(Up().eval(), backend=AS_THEY_ARE)
    x = torch.randn(2, 4, 5, 5)
    qt.calibrate(prepared, [x], progress=False)
    converted = qt.convert(prepared)
    result = qt.export_onnx(converted, x, tmp_path / "m.onnx", exporter=exporter)
    graph = onnx.load(str(result.path)).graph
    node = next(n for n in graph.node if n.name == "up.weight_quantizer.dequantize")
    assert [a.i for a in node.attribute if a.name == "axis"] == [1]
    codes = initializers(result.path)[node.input[0]]
    layer = converted.get_submodule("up")
    assert codes.dtype == np.uint8
    assert np.array_equal(codes.astype(int) - 128, layer.weight_quantizer.codes(layer.weight).numpy())


@pytest.mark.sweep(1)
@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("groups", [2, 4])
def test_a_grouped_transposed_convolution_has_a_scale_for_each_output_channel(
    tmp_path, exporter: str, groups: int
) -> None:
    model = nn.Sequential(nn.ConvTranspose2d(8, 12, 3, stride=2, groups=groups), nn.BatchNorm2d(12), nn.ReLU()).eval()
    with torch.no_grad():  # channels of very different size, which shared scales would lose
        model[0].weight.mul_(torch.logspace(-2, 1, 8 * 12 // groups).view(8, 12 // groups, 1, 1))
    prepared = qt.prepare(model, backend=AS_THEY_ARE)
    x = torch.randn(2, 8, 5, 5)
    qt.calibrate(prepared, [x], progress=False)
    converted = qt.convert(prepared)
    assert converted.get_submodule("0").weight_quantizer.scale.numel() == 12
    result = qt.export_onnx(converted, x, tmp_path / "m.onnx", exporter=exporter)
    assert result.verification.weight_codes.compared == 8 * 12 // groups * 9
    np.testing.assert_allclose(run_file(result.path, x), converted(x).detach().numpy(), rtol=1e-5, atol=1e-5)


class Grouped(nn.Module):
    """Layers whose inputs fall into groups of 8."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(16, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.up, self.head = nn.ConvTranspose2d(8, 16, 2, stride=2), nn.Linear(16 * 64, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.flatten(self.up(torch.relu(self.bn(self.conv(x)))), 1))


def converted_groups(backend: str, **options: object) -> Any:
    model = nets.trained(Grouped(), 4, 16, 6, 6)
    weight = qt.QuantSpec(axis=1, group_size=8, **options)
    activation = qt.backends[backend].qconfig.activation
    mapping = qt.QConfigMapping().set_global(qt.QConfig(activation, weight))
    prepared = qt.prepare(model, backend=backend, qconfig_mapping=mapping)
    qt.calibrate(prepared, [torch.randn(4, 16, 6, 6)], progress=False)
    return qt.convert(prepared)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("backend", ["tensorrt10", "onnxruntime"])
@pytest.mark.parametrize("options", [{}, {"bits": 4}, {"bits": 4, "symmetric": False, "signed": False}], ids=str)
def test_groups_are_blocks_of_opset_21(tmp_path, backend: str, options: dict[str, Any]) -> None:
    model = converted_groups(backend, **options)
    x = torch.randn(4, 16, 6, 6)
    result = qt.export_onnx(model, x, tmp_path / "m.onnx")
    assert result.opset == 21
    assert result.verification.weight_codes.compared == 16 * 8 * 9 + 8 * 16 * 4 + 16 * 64 * 5
    assert result.verification.weight_codes.differing == result.verification.quantizer_codes.differing == 0
    nodes = {n.name: n for n in onnx.load(str(result.path)).graph.node}
    for name, axis in (("conv", 1), ("up", 0), ("head", 1)):
        node = nodes[f"{name}.weight_quantizer.dequantize"]
        assert {a.name: a.i for a in node.attribute} == {"axis": axis, "block_size": 8}
        assert initializers(result.path)[node.input[1]].shape == model.get_submodule(name).weight_quantizer.scale.shape
    assert result.verification.output_difference < 0.05


def test_groups_where_the_opset_has_no_blocks(tmp_path) -> None:
    model, x = converted_groups("onnxruntime"), torch.randn(4, 16, 6, 6)
    with pytest.raises(
        ValueError, match=r"opset must be at least 21 for .+, which quantizes to int8 groups of 8\(.\), got 20"
    ):
        qt.export_onnx(model, x, tmp_path / "m.onnx", opset=20)
    assert qt.export_onnx(model, x, tmp_path / "m.onnx", exporter="torchscript").opset == 21


class InBlocks(nn.Module):
    """A direct call of the op, with the scales of all blocks in one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.rand(8) + 0.1)
        self.quantizer = Grid(torch.tensor(0.1), None, qt.QuantSpec())

    def forward(self, x: Tensor) -> Tensor:
        return qt.ops.fake_quant(self.quantizer(x), self.scale, axis=1, block_size=4)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize(
    ("opset", "words"),
    [
        (20, r"block_size=4 \(a group_size\) needs opset 21 or newer, got 20"),
        (21, r"the scale of fake_quant must have the shape of the blocks, \[4, 2\], got \[8\]; reshape the scale"),
    ],
)
def test_blocks_that_cannot_be_written(tmp_path, opset: int, words: str, exporter: str) -> None:
    with pytest.raises(ValueError, match=words):
        qt.export_onnx(
            InBlocks().eval(), torch.randn(4, 8), tmp_path / "m.onnx", opset, exporter=exporter, backend="tensorrt10"
        )


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_names_and_a_dynamic_batch(tmp_path, exporter: str) -> None:
    model = converted_net()
    path = tmp_path / "model.onnx"
    qt.export_onnx(
        model, torch.randn(SHAPE), path, input_names=["image"], output_names=["logits"],
        dynamic_shapes=({0: "batch"},), exporter=exporter,
    )  # fmt: skip
    graph = onnx.load(str(path)).graph
    assert [i.name for i in graph.input] == ["image"]
    assert [o.name for o in graph.output] == ["logits"]
    for batch in (1, 7):
        x = torch.randn(batch, *SHAPE[1:])
        np.testing.assert_allclose(run_file(path, x), model(x).detach().numpy(), rtol=1e-4, atol=0.05)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "every second": lambda x: x[1::2],
    "permuted": lambda x: x.permute(0, 1, 3, 2)[::2],
    "expanded": lambda x: x[:1].expand(x.shape),
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "one sample": lambda x: x[:1],
}


@pytest.mark.parametrize("options", [{"dynamic_batch": True}, {"dynamic_shapes": ({0: "batch"},)}], ids=str)
@pytest.mark.parametrize("view", VIEWS)
def test_example_inputs_that_are_views_of_others(tmp_path, view: str, options: dict[str, Any]) -> None:
    model, x = converted_net(), torch.randn(6, SHAPE[1], 6, 6)
    path = tmp_path / "model.onnx"
    qt.export_onnx(model, VIEWS[view](x), path, **options)
    assert onnx.load(path).graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    np.testing.assert_allclose(run_file(path, x), model(x).detach().numpy(), rtol=1e-4, atol=0.05)


class Pair(nn.Module):
    """Takes a tensor and tensors in containers; the batch of one matters to the other."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 4)

    def forward(self, x: Tensor, others: dict[str, Any]) -> tuple[Tensor, Tensor]:
        return self.fc(x) + self.fc(others["list"][0]), self.fc(x.flatten(1)) * others["factor"]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("opset", [13, 18, 26])
@pytest.mark.parametrize("exporter", EXPORTERS)
def test_a_dynamic_batch_of_all_inputs(tmp_path, exporter: str, opset: int, samples: int) -> None:
    def inputs(batch: int) -> dict[str, Any]:
        others = {"list": [torch.randn(batch, 8)], "factor": torch.tensor(0.5), "none": None}
        return {"x": torch.randn(batch, 8), "others": others}

    prepared = qt.prepare(Pair().eval(), inputs(samples), "onnxruntime")
    qt.calibrate(prepared, [inputs(8)], progress=False)
    path = tmp_path / "m.onnx"
    qt.export_onnx(prepared, inputs(samples), path, opset=opset, exporter=exporter, dynamic_batch=True)
    shapes = [[d.dim_param or d.dim_value for d in i.type.tensor_type.shape.dim] for i in onnx.load(path).graph.input]
    assert shapes == [["batch", 8], ["batch", 8], []]
    for batch in (1, 5):
        given = inputs(batch)
        x, others = given["x"], given["others"]
        y = run_file(path, x, others["list"][0], others["factor"])
        np.testing.assert_allclose(y, qt.convert(prepared)(**given)[0].detach(), rtol=1e-4, atol=0.05)


class Fixed(nn.Module):
    """Its code has the size of one input as a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.fc(x).view(2, 4), self.fc(y)


@pytest.mark.parametrize(
    ("samples", "options", "error", "words"),
    [
        ((2, 2), {}, RuntimeError, r"a constant in place of a dimension .+ static shape of 2 .+'x'.+\); use the size"),
        (
            (2, 3),
            {},
            ValueError,
            "with the same batch size in dimension 0, got x: 2, y: 3; name the dynamic dimensions",
        ),
        ((2, 2), {"dynamic_shapes": ({0: "n"}, None)}, ValueError, "pass only one of them"),
    ],
)
def test_a_batch_that_cannot_be_dynamic(tmp_path, samples, options, error, words: str) -> None:
    inputs = tuple(torch.randn(size, 4) for size in samples)
    prepared = qt.prepare(Fixed().eval(), inputs, backend="onnxruntime")
    qt.calibrate(prepared, [inputs], progress=False)
    with pytest.raises(error, match=words):
        qt.export_onnx(prepared, inputs, tmp_path / "m.onnx", dynamic_batch=True, **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("bits", [9, 12, 16])
def test_wide_codes_take_a_newer_opset(tmp_path, bits: int) -> None:
    result = qt.export_onnx(converted_net("tensorrt10", bits), torch.randn(SHAPE), tmp_path / "m.onnx")
    assert result.opset == 21
    assert result.verification.weight_codes.differing == 0


def test_learned_scales_and_prepared_models_export(tmp_path) -> None:
    spec = {"bits": 4, "quantizer": "lsq"}
    mapping = qt.QConfigMapping().set_global(
        qt.QConfig(qt.QuantSpec(signed=False, symmetric=False, **spec), qt.QuantSpec(axis=0, **spec))
    )
    prepared = qt.prepare(nets.trained(nets.ConvNet(), *SHAPE), backend="onnxruntime", qconfig_mapping=mapping)
    x = torch.randn(SHAPE)
    qt.calibrate(prepared, [x], progress=False)
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        prepared.train()(x).square().sum().backward()
        optimizer.step()
    result = qt.export_onnx(prepared, x, tmp_path / "m.onnx")
    assert result.verification.weight_codes.differing == 0
    assert prepared.training


class Pyramid(nn.Module):
    """A detector head: it takes a list of feature maps and returns two lists."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.score = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 1, 1)

    def forward(self, maps: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        hidden = [torch.relu(self.conv(x)) for x in maps]
        return hidden, [self.score(x) for x in hidden]


def test_inputs_in_lists_are_verified(tmp_path) -> None:
    inputs = ([torch.randn(2, 3, side, side) for side in (8, 4)],)
    prepared = qt.prepare(Pyramid().eval(), inputs, backend="onnxruntime")
    qt.calibrate(prepared, [inputs], progress=False)
    codes = qt.export_onnx(prepared, inputs, tmp_path / "model.onnx").verification
    assert codes.quantizer_codes.differing == 0
    assert codes.quantizer_codes.compared == sum(x.numel() + 4 * x[:, 0].numel() for x in inputs[0])


class OfDict(nn.Module):
    """A layer whose inputs are in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 4)

    def forward(self, maps: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.fc(maps["a"] - maps["b"])


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_inputs_in_a_dict_are_verified(tmp_path, exporter: str) -> None:
    inputs = ({"a": torch.randn(2, 8), "b": torch.randn(2, 8)},)
    prepared = qt.prepare(OfDict().eval(), inputs, backend="onnxruntime")
    qt.calibrate(prepared, [inputs], progress=False)
    codes = qt.export_onnx(prepared, inputs, tmp_path / "model.onnx", exporter=exporter).verification
    assert codes.quantizer_codes.differing == 0
    assert codes.by_quantizer["activation_quantizers.sub"].compared == 2 * 8


def test_half_precision_inputs_pass_through_float32(tmp_path) -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU()).eval()
    prepared = qt.prepare(model, backend="onnxruntime")
    qt.calibrate(prepared, [torch.randn(16, 8)], progress=False)
    half = qt.convert(prepared).half()
    assert half.get_submodule("0").weight_quantizer.scale.dtype == torch.float32
    path = tmp_path / "half.onnx"
    qt.export_onnx(half, torch.randn(16, 8).half(), path, verify=False)
    x = torch.randn(16, 8).half()
    np.testing.assert_allclose(run_file(path, x), half(x).detach().numpy(), rtol=1e-2, atol=1e-2)


# ---- the verification itself can fail


def test_a_changed_weight_is_noticed(tmp_path) -> None:
    model, x = converted_net(), torch.randn(SHAPE)
    result = qt.export_onnx(model, x, tmp_path / "m.onnx", exporter="torchscript")
    model.get_submodule("conv1").weight.data[0, 0, 0, 0] *= -1.5
    found = qt.export.verify_onnx(model, x, result.path)
    assert found.weight_codes.differing == 1
    with pytest.raises(RuntimeError, match="onnxruntime's quantized values must equal the model's"):
        found.check()


def test_a_model_with_nothing_quantized_is_refused(tmp_path) -> None:
    everything_float = qt.QConfigMapping().set_global(None)
    model = qt.prepare(nets.ConvNet().eval(), backend="onnxruntime", qconfig_mapping=everything_float)
    with pytest.raises(ValueError, match="export_onnx: nothing in the model is quantized"):
        qt.export_onnx(model, torch.randn(SHAPE), tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


class Gated(nn.Module):
    """Adds a view of a parameter, and multiplies by a function of another, which runtimes may round differently."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.gate = nn.Parameter(torch.randn(1, 4, 1, 1)), nn.Parameter(torch.randn(1, 4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.shift.reshape(1, 4, 1, 1)) * torch.sigmoid(self.gate)


def test_a_computed_constant_counts_as_a_layer(tmp_path) -> None:
    x = torch.randn(2, 4, 5, 5)
    model = qt.prepare(Gated().eval(), (x,), backend="openvino")
    qt.calibrate(model, [(x,)], progress=False)
    found = qt.export_onnx(model, x, tmp_path / "m.onnx").verification
    assert found is not None
    gate = next(count for name, count in found.by_quantizer.items() if "sigmoid" in name)
    assert (gate.compared, found.weight_codes.compared) == (4, 4)


def test_a_changed_scale_is_noticed(tmp_path) -> None:
    model, x = converted_net(), torch.randn(SHAPE)
    result = qt.export_onnx(model, x, tmp_path / "m.onnx", exporter="torchscript")
    model.get_submodule("activation_quantizers.relu").scale.mul_(1.01)
    assert qt.export.verify_onnx(model, x, result.path).quantizer_codes.differing > 0


def test_a_changed_layer_is_noticed(tmp_path) -> None:
    model, x = converted_net(), torch.randn(SHAPE)
    result = qt.export_onnx(model, x, tmp_path / "m.onnx", exporter="torchscript")
    model.get_submodule("conv2").bias.data += 0.3
    found = qt.export.verify_onnx(model, x, result.path)
    assert found.weight_codes.differing == found.quantizer_codes.differing == 0
    with pytest.raises(
        RuntimeError, match="quantized values of layers differ in onnxruntime by more than rounding ties"
    ):
        found.check()


class ReadsData(nn.Module):
    """Pads channels as MONAI's and others' ResNets do, without a gradient for the shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return self.head(torch.cat([x.data, torch.zeros_like(x)], 1))


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_the_data_of_a_tensor_is_no_constant_in_the_file(exporter: str, tmp_path) -> None:
    x = torch.randn(2, 3, 5, 5)
    prepared = qt.prepare(ReadsData().eval(), (x,), "onnxruntime")
    qt.calibrate(prepared, [x], progress=False)
    converted = qt.convert(prepared)
    path = qt.export_onnx(converted, (x,), tmp_path / "m.onnx", exporter=exporter).path
    qt.export.verify_onnx(converted, x.flip(0), path).check()


# ---- errors


def test_export_before_calibration_says_so_and_leaves_no_file(tmp_path) -> None:
    prepared = qt.prepare(nets.ConvNet().eval(), backend="tensorrt10")
    with pytest.raises(RuntimeError, match=r"saw no data, so it has no scale: call qtoolkit\.calibrate"):
        qt.export_onnx(prepared, torch.randn(SHAPE), tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []


def test_a_failure_keeps_the_file_that_was_there(tmp_path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(b"precious")
    with pytest.raises(Exception, match=".*"):
        qt.export_onnx(converted_net(), torch.randn(1, 99, 8, 8), path)
    assert path.read_bytes() == b"precious"
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]


@pytest.mark.parametrize(
    ("kwargs", "error", "words"),
    [
        ({"opset": 12}, ValueError, "opset must be a whole number in [13, "),
        ({"exporter": "torchscrip"}, ValueError, "did you mean 'torchscript'"),
    ],
)
def test_bad_options(tmp_path, kwargs: dict[str, object], error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        qt.export_onnx(converted_net(), torch.randn(SHAPE), tmp_path / "m.onnx", **kwargs)
    assert words in str(caught.value)


def test_float_models_are_refused(tmp_path) -> None:
    with pytest.raises(TypeError, match="got ConvNet"):
        qt.export_onnx(nets.ConvNet(), torch.randn(SHAPE), tmp_path / "m.onnx")
    with pytest.raises(TypeError, match="got ConvNet"):
        qt.convert(nets.ConvNet())


# ---- convert


@pytest.mark.sweep(1)
@pytest.mark.parametrize("backend", ["tensorrt10", "onnxruntime"])
@pytest.mark.parametrize("training", [True, False])
def test_converted_equals_the_fake_quant_model_in_eval(backend: str, training: bool) -> None:
    model = nets.trained(nets.ConvNet(), *SHAPE).train(training)
    prepared = qt.prepare(model, backend=backend).double()
    x = torch.randn(SHAPE, dtype=torch.float64)
    qt.calibrate(prepared, [x], progress=False)
    converted = qt.convert(prepared)
    torch.testing.assert_close(converted(x), prepared.eval()(x), rtol=1e-9, atol=1e-9)
    assert not any(isinstance(m, nn.BatchNorm2d | qt.TensorQuantizer) for m in converted.modules())
    assert not any("observer" in name for name in converted.state_dict())
    assert not converted.training


def test_forward_fp32_is_the_folded_float_layer() -> None:
    model = nets.trained(nets.ConvNet(), *SHAPE)
    prepared = qt.prepare(model, backend="tensorrt10")
    x = torch.randn(SHAPE)
    qt.calibrate(prepared, [x], progress=False)
    layer = qt.convert(prepared).get_submodule("conv1")
    model.eval()
    torch.testing.assert_close(layer.forward_fp32(x), model.bn1(model.conv1(x)), rtol=1e-5, atol=1e-5)
    assert not torch.equal(layer(x), layer.forward_fp32(x))


def test_arithmetic_is_checked() -> None:
    with pytest.raises(ValueError, match="unknown arithmetic 'flot'; did you mean 'float'"):
        qt.convert(qt.prepare(nets.LinearNet(), backend="tensorrt10"), arithmetic="flot")


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_quantizers_with_scales_of_equal_value_keep_their_names(tmp_path, exporter: str) -> None:
    prepared = qt.prepare(
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval(),
        backend="tensorrt10",
    )
    for quantizer in prepared.activation_quantizers.children():
        quantizer.amax = 4.0
    result = qt.export_onnx(prepared, torch.randn(2, 4), tmp_path / "model.onnx", exporter=exporter)
    names = [node.name for node in onnx.load(result.path).graph.node if node.op_type == "QuantizeLinear"]
    wanted = ["activation_quantizers.input_1", "activation_quantizers._1", "activation_quantizers._3"]
    assert [name for name in names if "activation" in name] == [f"{name}.quantize" for name in wanted]
    assert result.verification.missing == ()


# ---- quantizers that are off


@pytest.mark.slow
@pytest.mark.sweep(1)
@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("backend", ["tensorrt10", "onnxruntime"])
def test_quantizers_that_are_off_have_no_nodes(tmp_path, backend: str, exporter: str) -> None:
    model, x = converted_net(backend), torch.randn(SHAPE)
    path = tmp_path / "m.onnx"
    on = qt.export_onnx(model, x, path, exporter=exporter)
    with qt.disable_quantization(model.get_submodule("conv2")):
        off = qt.export_onnx(model, x, path, exporter=exporter)
        assert not any("conv2.weight_quantizer" in node.name for node in onnx.load(path).graph.node)
        np.testing.assert_allclose(run_file(path, x), model(x).detach(), rtol=1e-4, atol=0.05)
    assert off.dequantize_nodes < on.dequantize_nodes
    assert off.verification.quantizer_codes.differing == 0
    with qt.disable_quantization(model):
        result = qt.export_onnx(model, x, path, exporter=exporter)
        assert (result.quantize_nodes, result.dequantize_nodes) == (0, 0)
        np.testing.assert_allclose(run_file(path, x), model(x).detach(), rtol=1e-4, atol=1e-4)


def test_quantizers_that_are_off_need_no_opset(tmp_path) -> None:
    model = converted_net("tensorrt10", 16)
    with qt.disable_quantization(model):
        assert qt.export_onnx(model, torch.randn(SHAPE), tmp_path / "m.onnx", opset=13).opset == 13


class Distances(nn.Module):
    """An op that torch's newer exporter does not translate."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        return torch.cdist(y, y)


def test_an_op_that_one_exporter_cannot_write_names_the_other(tmp_path: Path) -> None:
    x, path = torch.rand(2, 5, 4), tmp_path / "model.onnx"
    prepared = qt.prepare(Distances().eval(), (x,), "onnxruntime")
    qt.calibrate(prepared, [x], progress=False)
    with pytest.raises(
        RuntimeError, match=r"exporter='dynamo' cannot export the model \(.+\); use exporter='torchscript'"
    ):
        qt.export_onnx(prepared, (x,), path, progress=False)
    assert not list(tmp_path.iterdir())
    qt.export_onnx(prepared, (x,), path, exporter="torchscript", progress=False)


class Differences(nn.Module):
    """An op that torch's older exporter does not translate, as transformers uses it for packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.diff(self.fc(x), dim=-1)


def test_an_op_that_the_older_exporter_cannot_write_names_the_newer(tmp_path: Path) -> None:
    x, path = torch.rand(2, 4), tmp_path / "model.onnx"
    prepared = qt.prepare(Differences().eval(), (x,), "onnxruntime")
    qt.calibrate(prepared, [x], progress=False)
    words = (
        r"exporter='torchscript' cannot export the model \(.*aten::diff.*\); use exporter='dynamo'\. If that fails too"
    )
    with pytest.raises(RuntimeError, match=words):
        qt.export_onnx(prepared, (x,), path, exporter="torchscript", progress=False)
    assert not list(tmp_path.iterdir())
    assert qt.export_onnx(prepared, (x,), path, progress=False).verification.quantizer_codes.differing == 0


class Sorts(Differences):
    """An op that no exporter of torch writes."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sort(self.fc(x), dim=-1, stable=False).values


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_an_op_that_no_exporter_can_write_has_another_remedy(exporter: str, tmp_path: Path) -> None:
    x = torch.rand(2, 4)
    prepared = qt.prepare(Sorts().eval(), (x,), "onnxruntime")
    qt.calibrate(prepared, [x], progress=False)
    words = rf"export_onnx: exporter='{exporter}' cannot export .*[Ss]ort.* torch cannot export the op, .*prepare_parts"
    with pytest.raises(RuntimeError, match=words):
        qt.export_onnx(prepared, (x,), tmp_path / "model.onnx", exporter=exporter, progress=False)
    assert not list(tmp_path.iterdir())


def test_a_file_that_onnxruntime_cannot_run_is_described(tmp_path: Path) -> None:
    x = torch.rand(2, 4)
    prepared = qt.prepare(
        nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, (2, 3)), nn.Linear(3, 2)).eval(), x, backend="tensorrt10"
    )
    qt.calibrate(prepared, [x], progress=False)
    converted = qt.convert(prepared)
    file = onnx.load(qt.export_onnx(converted, x, tmp_path / "model.onnx", progress=False).path)
    (reshape,) = (node for node in file.graph.node if node.op_type == "Reshape")
    (sizes,) = (tensor for tensor in file.graph.initializer if tensor.name == reshape.input[1])
    sizes.CopyFrom(numpy_helper.from_array(np.array([2, 5, 3]), sizes.name))
    del file.graph.value_info[:], file.graph.output[0].type.tensor_type.shape.dim[:]
    with pytest.raises(
        RuntimeError,
        match="verify_onnx: onnxruntime cannot run the file .*[Rr]eshape.*quantize the submodules before",
    ):
        qt.export.verify_onnx(converted, x, file, progress=False)
