"""Plain torch.onnx.export of models with quantizers: Q/DQ pairs by both exporters, or a sentence that says what to do."""

import contextlib
import io
from collections import Counter
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt

SHAPE = (2, 3, 6, 6)
INPUT = torch.linspace(-1, 2, 216).sin().reshape(SHAPE)


class Net(nn.Module):
    """A convolution with batch norm, a grouped transposed convolution, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.up, self.head = nn.ConvTranspose2d(8, 6, 2, 2, groups=2), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.up(torch.relu(self.bn(self.conv(x)))).mean((2, 3)))


def prepared(backend: str = "tensorrt10", training: bool = False, **specs: Any) -> nn.Module:
    torch.manual_seed(0)
    mapping = None
    if specs:
        mapping = qt.QConfigMapping().set_global(qt.QConfig(specs.get("activation", qt.QuantSpec()), specs["weight"]))
    model = qt.prepare(Net().train(training), (INPUT,), backend=backend, qconfig_mapping=mapping)
    qt.calibrate(model, [INPUT], progress=False)
    return model.eval()


def replaced() -> nn.Module:
    torch.manual_seed(0)
    model = qt.quant_modules.replace(Net().eval(), backend="tensorrt10")
    qt.calibrate(model, [INPUT], progress=False)
    return model


INT4 = {"weight": qt.QuantSpec(bits=4, axis=0)}
E4M3 = {"activation": qt.QuantSpec(format="e4m3"), "weight": qt.QuantSpec(format="e4m3", axis=0)}
LSQ = {"activation": qt.QuantSpec(quantizer="lsq"), "weight": qt.QuantSpec(axis=0, quantizer="lsq")}
MODELS = {
    "prepared": prepared,
    "prepared for training": lambda: prepared(training=True),
    "with a learned scale": lambda: prepared(**LSQ),
    "converted": lambda: qt.convert(prepared()),
    "with integer biases": lambda: prepared("onnxruntime"),
    "integer": lambda: qt.convert(prepared("onnxruntime"), arithmetic="integer"),
    "integer, OpenVINO": lambda: qt.convert(prepared("openvino"), arithmetic="integer"),
    "replaced": replaced,
    "int4": lambda: qt.convert(prepared(**INT4)),
    "e4m3": lambda: qt.convert(prepared(**E4M3)),
}


def exported(model: nn.Module, path: Path, dynamo: bool, **options: Any) -> onnx.ModelProto:
    with contextlib.redirect_stdout(io.StringIO()):
        torch.onnx.export(model, (INPUT,), str(path), dynamo=dynamo, **options)
    file = onnx.load(str(path))
    onnx.checker.check_model(file, full_check=True)
    return file


def counted(file: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in file.graph.node)


def computed(path: Path, x: Tensor = INPUT) -> Tensor:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return torch.tensor(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


@pytest.mark.sweep(1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_the_file_has_the_pairs_of_export_onnx(tmp_path, name: str, dynamo: bool) -> None:
    model = MODELS[name]()
    file = exported(model, tmp_path / "plain.onnx", dynamo)
    result = qt.export_onnx(
        model, INPUT, tmp_path / "own.onnx", exporter="torchscript", integer_weights=False, progress=False
    )
    assert counted(file)["QuantizeLinear"] == result.quantize_nodes > 0
    assert counted(file)["DequantizeLinear"] == result.dequantize_nodes
    assert not any(node.domain for node in file.graph.node)
    with torch.no_grad():
        torch.testing.assert_close(computed(tmp_path / "plain.onnx"), computed(result.path), rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("opset", [13, 17])
def test_the_older_exporter_writes_older_opsets(tmp_path, opset: int) -> None:
    model = prepared("onnxruntime", **INT4)
    file = exported(model, tmp_path / "m.onnx", dynamo=False, opset_version=opset)
    assert file.opset_import[0].version == opset
    assert counted(file)["QuantizeLinear"] > 0
    with torch.no_grad():
        torch.testing.assert_close(computed(tmp_path / "m.onnx"), model(INPUT), rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamo", [True, False])
def test_the_batch_may_vary(tmp_path, dynamo: bool) -> None:
    names = {"input_names": ["x"], "output_names": ["y"]}
    if dynamo:
        varying: dict[str, Any] = {"dynamic_shapes": ({0: torch.export.Dim("batch")},)}
    else:
        varying = {"dynamic_axes": {"x": {0: "batch"}, "y": {0: "batch"}}}
    model = qt.convert(prepared())
    exported(model, tmp_path / "m.onnx", dynamo, **names, **varying)
    x = torch.cat([INPUT, INPUT.flip(3)])
    with torch.no_grad():
        torch.testing.assert_close(computed(tmp_path / "m.onnx", x), model(x), rtol=1e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore")
def test_half_precision_is_cast_around_the_pairs(tmp_path) -> None:
    model = qt.convert(prepared()).half()
    torch.onnx.export(model, (INPUT.half(),), str(tmp_path / "m.onnx"), dynamo=False)
    file = onnx.load(str(tmp_path / "m.onnx"))
    onnx.checker.check_model(file, full_check=True)
    assert counted(file)["QuantizeLinear"] > 0
    assert file.graph.output[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT16


def message_of(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("case", ["observing", "training", "apot", "mxfp4"])
def test_what_has_no_form_is_refused_in_a_sentence(tmp_path, case: str, dynamo: bool) -> None:
    specs: dict[str, Any] = {}
    if case == "apot":
        specs = {"weight": qt.QuantSpec(bits=4, axis=0, quantizer="apot")}
    elif case == "mxfp4":
        specs = {"weight": qt.QuantSpec(axis=0), "activation": qt.QuantSpec(bits=4, format="mxfp4")}
    if case == "training" and not dynamo:
        pytest.skip("the older exporter puts the model in eval mode")
    model = prepared(**specs) if case != "mxfp4" else blocks(specs)
    model.train(case == "training")
    if case == "observing":
        qt.calibrating(model)
    with pytest.raises(Exception) as raised:
        exported(model, tmp_path / "m.onnx", dynamo)
    assert message_of(raised.value).startswith("torch.onnx.export: ")
    assert "qtoolkit.export_onnx" in message_of(raised.value)
    assert not (tmp_path / "m.onnx").exists()


def blocks(specs: dict[str, Any]) -> nn.Module:
    mapping = qt.QConfigMapping().set_global(qt.QConfig(**specs))
    layers = nn.Sequential(nn.Linear(6, 32), nn.Linear(32, 4)).eval()
    model = qt.prepare(layers, backend="academic", qconfig_mapping=mapping.set_module_name("0", None))
    qt.calibrate(model, [INPUT], progress=False)
    return model


@pytest.mark.filterwarnings("ignore")
def test_an_opset_without_the_type_is_named(tmp_path) -> None:
    wide = {"activation": qt.QuantSpec(bits=16), "weight": qt.QuantSpec(axis=0)}
    model = qt.convert(prepared(**wide))
    with pytest.raises(
        ValueError, match=r"integers in \[-32768, 32767\] needs opset 21 or newer, got 18; .*export_onnx"
    ):
        exported(model, tmp_path / "m.onnx", dynamo=False, opset_version=18)
    with pytest.warns(UserWarning, match=r"integers in \[-32768, 32767\] needs opset 21 or newer.*export_onnx"):
        exported(model, tmp_path / "m.onnx", dynamo=True, opset_version=21)
