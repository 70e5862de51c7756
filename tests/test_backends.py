"""The target of a deployment is named: nothing assumes one."""

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from onnx import TensorProto
from torch import nn

import qtoolkit as qt
from qtoolkit.backends import REQUIRED
from qtoolkit.tuning.mixed_precision import MixedPrecision

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 2)).eval()


def of_hugging_face() -> None:
    pytest.importorskip("transformers", reason="builds a config of Hugging Face; install the extra [training]")
    from qtoolkit.integrations.transformers import QtoolkitConfig

    QtoolkitConfig()


W4 = {"w4": qt.QConfig(qt.QuantSpec(), qt.QuantSpec(bits=4, axis=0))}
ENTRIES: dict[str, Callable[[], object]] = {
    "prepare": lambda: qt.prepare(net()),
    "prepare with inputs": lambda: qt.prepare(net(), X),
    "prepare_parts": lambda: qt.prepare_parts(net(), X),
    "quantize": lambda: qt.quantize(net(), [X], progress=False),
    "replace": lambda: qt.quant_modules.replace(net()),
    "initialize": qt.quant_modules.initialize,
    "MixedPrecision": lambda: MixedPrecision(net(), X, W4),
    "Hugging Face": of_hugging_face,
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_without_a_backend_the_targets_are_listed(entry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TypeError, match=r'^backend is required: .* as in backend="onnxruntime"') as error:
        ENTRIES[entry]()
    _, *lines = str(error.value).splitlines()
    assert [line.split()[0] for line in lines] == list(qt.backends)
    assert all(len(line.split()) > 1 for line in lines), "each line says what the target is"
    assert list(tmp_path.iterdir()) == []
    assert type(nn.Linear(2, 2)) is nn.Linear  # initialize has changed no constructor


def test_the_signature_says_that_a_backend_is_required() -> None:
    for function in (qt.prepare, qt.prepare_parts, qt.quantize, qt.quant_modules.replace, qt.quant_modules.initialize):
        assert inspect.signature(function).parameters["backend"].default == REQUIRED == "<required>"


class Own(nn.Module):
    """A model with quantizers of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.take, self.give = (qt.TensorQuantizer(qt.QuantSpec(signed=False, symmetric=False)) for _ in range(2))
        self.layer = qt.nn.QuantConv2d(3, 4, 3, weight_spec=qt.QuantSpec(axis=0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.give(self.layer(self.take(x)))
        return y


def own() -> nn.Module:
    model = Own().eval()
    qt.calibrate(model, [X], progress=False)
    return model


def test_an_export_asks_for_the_backend_that_a_model_does_not_record(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="runs exported files; install the extra [onnx]")
    model, path = own(), tmp_path / "model.onnx"
    with pytest.raises(
        TypeError, match="^export_onnx: this model records no backend, .* is required: .*targets"
    ) as error:
        qt.export_onnx(model, X, path, progress=False)
    assert [line.split()[0] for line in str(error.value).splitlines()[1:]] == list(qt.backends)
    assert list(tmp_path.iterdir()) == []
    stored = {
        name: qt.export_onnx(model, X, path, progress=False, backend=name).quantize_nodes
        for name in ("tensorrt", "onnxruntime")
    }
    assert stored == {"tensorrt": 3, "onnxruntime": 2}  # weights are floats with both nodes, or codes


def test_a_layer_that_was_taken_out_of_a_model_records_no_backend(tmp_path: Path) -> None:
    """Replacement records on the model alone which target it was for."""
    pytest.importorskip("onnxruntime", reason="runs exported files; install the extra [onnx]")
    replaced = qt.quant_modules.replace(net(), backend="onnxruntime")
    qt.calibrate(replaced, [X], progress=False)
    with pytest.raises(TypeError, match="this model records no backend"):
        qt.export_onnx(replaced[0], X, tmp_path / "model.onnx", progress=False)


class Deployed(nn.Module):
    """A prepared network with what an application puts around it."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.network(x / 255)
        return y.softmax(1)


def test_a_model_around_a_prepared_one_has_its_backend(tmp_path: Path) -> None:
    """Its file has codes of weights, as that of the prepared model alone."""
    pytest.importorskip("onnxruntime", reason="runs exported files; install the extra [onnx]")
    prepared = qt.prepare(net(), backend="onnxruntime")
    qt.calibrate(prepared, [X], progress=False)
    found = qt.export_onnx(Deployed(qt.convert(prepared)).eval(), 255 * X, tmp_path / "model.onnx", progress=False)
    assert found.dequantize_nodes > found.quantize_nodes


@pytest.mark.parametrize("route", ["prepare", "replace", "initialize"])
def test_an_export_follows_the_backend_that_a_model_records(route: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="runs exported files; install the extra [onnx]")
    if route == "initialize":
        with qt.quant_modules.initialize(backend="onnxruntime"):
            model = net()
    else:
        model = (qt.prepare if route == "prepare" else qt.quant_modules.replace)(net(), backend="onnxruntime")
    qt.calibrate(model, [X], progress=False)
    path, converted = tmp_path / "model.onnx", qt.convert(model)
    found = qt.export_onnx(converted, X, path, progress=False)
    again = qt.export_onnx(converted, X, path, progress=False, backend="onnxruntime")
    assert found.quantize_nodes == again.quantize_nodes
    assert found.dequantize_nodes > found.quantize_nodes  # weights are codes
    other = dataclasses.replace(qt.backends["onnxruntime"], integer_weights=False)
    for backend in ("tensorrt", other):
        with pytest.raises(ValueError, match="^export_onnx: the model was prepared for 'onnxruntime', got backend="):
            qt.export_onnx(converted, X, path, progress=False, backend=backend)


# ---- the type of what is not quantized


FLOAT16 = ("tensorrt", "tensorrt-nlp")  # the targets whose files are float16, as TensorRT 11 takes each type as it is


def exported(
    backend: str | qt.Backend, folder: Path, model: nn.Module | None = None, **options: object
) -> onnx.ModelProto:
    prepared = qt.prepare(net() if model is None else model, X, backend=backend)
    qt.calibrate(prepared, [X], progress=False)
    result = qt.export_onnx(qt.convert(prepared), X, folder / "model.onnx", progress=False, **options)
    return onnx.load(result.path)


@pytest.mark.parametrize("backend", qt.backends)
def test_scales_are_of_the_type_of_the_files(backend: str) -> None:
    found = qt.backends[backend]
    assert found.float_type == ("float16" if backend in FLOAT16 else "float32")
    assert {spec.scale_dtype for spec in vars(found.qconfig).values()} == {found.float_type}


@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt-nlp", "tensorrt10", "tensorrt8"])
def test_a_file_is_of_the_type_of_its_target(backend: str, tmp_path: Path) -> None:
    model = exported(backend, tmp_path)
    wanted = TensorProto.FLOAT16 if backend in FLOAT16 else TensorProto.FLOAT
    floats = (TensorProto.FLOAT, TensorProto.FLOAT16)
    assert {each.data_type for each in model.graph.initializer if each.data_type in floats} == {wanted}
    assert model.opset_import[0].version == (19 if backend in FLOAT16 else 18)
    assert [node.op_type for node in model.graph.node].count("Cast") == 2 * (backend in FLOAT16)  # its input and output


def test_another_type_is_asked_for_by_an_argument_or_a_backend(tmp_path: Path) -> None:
    model = exported("tensorrt", tmp_path, float_type="float32")
    assert TensorProto.FLOAT16 not in {each.data_type for each in model.graph.initializer}
    in_float32 = dataclasses.replace(qt.backends["tensorrt"], float_type="float32")
    assert in_float32.qconfig == qt.backends["tensorrt10"].qconfig
    assert exported(in_float32, tmp_path).opset_import[0].version == 18
    in_float16 = dataclasses.replace(qt.backends["openvino"], float_type="float16")
    assert {spec.scale_dtype for spec in vars(in_float16.qconfig).values()} == {"float16"}
    with pytest.raises(ValueError, match="unknown float_type of Backend 'tensorrt': 'half'"):
        dataclasses.replace(qt.backends["tensorrt"], float_type="half")


def test_an_older_opset_needs_the_other_type(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"needs opset 19 or newer, .* got 18; leave opset out, or pass float_type="):
        exported("tensorrt", tmp_path, opset=18)
    assert exported("tensorrt", tmp_path, opset=18, float_type="float32").opset_import[0].version == 18


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_in_half_precision_keeps_its_type(dtype: torch.dtype, tmp_path: Path) -> None:
    prepared = qt.prepare(net(), X, backend="tensorrt10")
    qt.calibrate(prepared, [X], progress=False)
    model = qt.convert(prepared).to(dtype)
    runs = dtype == torch.float16  # onnxruntime's convolutions take no bfloat16
    result = qt.export_onnx(model, X.to(dtype), tmp_path / "model.onnx", progress=False, verify=runs)
    (x,) = onnx.load(result.path).graph.input
    assert x.type.tensor_type.elem_type == (TensorProto.FLOAT16 if dtype == torch.float16 else TensorProto.BFLOAT16)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("trt", "tensorrt"), ("tensorrt11", "tensorrt"), ("trt10", "tensorrt10"), ("tensorrt9", "tensorrt8")],
)
def test_names_of_versions_are_understood(name: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"unknown backend '{name}'; did you mean '{meant}'"):
        qt.prepare(net(), X, backend=name)
