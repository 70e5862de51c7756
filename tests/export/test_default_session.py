"""Files run in onnxruntime's default session, with the model's values; or the export says that they do not."""

import copy
from collections.abc import Callable
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt

X = torch.randn(4, 16, 16, generator=torch.Generator().manual_seed(5))
EXPORTERS = ["dynamo", "torchscript"]


def in_default_session(path: Path, x: Tensor) -> Tensor:
    session = onnxruntime.InferenceSession(str(path))
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


def assert_close(y: Tensor, converted: nn.Module, x: Tensor, error: float = 0.02) -> None:
    """Integer kernels of layers in front may change a code by a step."""
    wanted = converted(x).detach()
    assert (y - wanted).abs().max() < error * wanted.abs().max()


class Product(nn.Module):
    """A product with a weight of its own, without a bias, behind a layer."""

    def __init__(self, product: Callable[[Tensor, Tensor], Tensor], *sizes: int) -> None:
        super().__init__()
        self.first, self.product = nn.Linear(16, 16), product
        rows = torch.logspace(-1, 1, 16).reshape(16, *[1] * (len(sizes) - 1)) if sizes[0] == 16 else torch.ones(())
        self.weight = nn.Parameter(torch.randn(sizes, generator=torch.Generator().manual_seed(1)) * rows)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(F.relu(self.first(x)), self.weight)


# Weights of 7 bits, whose sums no processor saturates.
SMALL = qt.QConfigMapping().set_global(qt.QConfig(qt.QuantSpec(bits=8), qt.QuantSpec(bits=7, axis=0)))


def converted(model: nn.Module, backend: str, mapping: qt.QConfigMapping = SMALL) -> nn.Module:
    torch.manual_seed(0)
    prepared = qt.prepare(model.eval(), X, backend=backend, qconfig_mapping=mapping)
    qt.calibrate(prepared, [X], progress=False)
    return qt.convert(prepared)


# ---- scales that an integer product does not take

EXPERTS = {
    "batch": (torch.bmm, (4, 16, 8)),
    "broadcast": (lambda x, w: x.unsqueeze(1) @ w, (3, 16, 8)),
    "transposed": (lambda x, w: torch.bmm(x, w.transpose(1, 2)), (4, 8, 16)),
    "einsum": (lambda x, w: torch.einsum("bij,bjk->bik", x, w), (4, 16, 8)),
}


@pytest.mark.parametrize("experts", EXPERTS)
def test_openvino_computes_batches_of_weights(tmp_path, experts: str) -> None:
    """With a scale for each column it returned what its memory held before."""
    openvino = pytest.importorskip("openvino", reason="the file is not executed: install the extra [openvino]")
    product, sizes = EXPERTS[experts]
    model = converted(Product(product, *sizes), "openvino")
    path = qt.export_onnx(model, X, tmp_path / "m.onnx").path
    compiled = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    assert_close(torch.from_numpy(compiled(X.numpy())[0]), model, X)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("backend", ["tensorrt10", "openvino"])
@pytest.mark.parametrize("experts", EXPERTS)
def test_batches_of_weights_with_a_scale_for_each_column(tmp_path, experts: str, backend: str, exporter: str) -> None:
    product, sizes = EXPERTS[experts]
    model = converted(Product(product, *sizes), backend)
    result = qt.export_onnx(model, X, tmp_path / "m.onnx", exporter=exporter)
    assert result.verification.refused == ""
    assert_close(in_default_session(result.path, X), model, X)
    assert qt.export.lint(result.path, backend) == ()


PER_ROW, PER_INPUT = (qt.QConfig(qt.QuantSpec(bits=8), qt.QuantSpec(bits=7, axis=axis)) for axis in (0, 1))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("backend", ["tensorrt10", "onnxruntime"])
@pytest.mark.parametrize(
    ("product", "sizes", "name", "qconfig"),
    [
        (torch.matmul, (16, 16), "matmul", PER_ROW),
        (torch.matmul, (16, 8), "matmul", PER_ROW),
        (F.linear, (16, 16), "linear", PER_INPUT),
        (lambda x, w: F.conv1d(x, w).relu() * 2, (16, 16, 1), "conv1d", PER_INPUT),
    ],
    ids=["square matrix", "matrix", "linear", "conv"],
)
def test_scales_along_another_axis_than_the_output_channels(
    tmp_path, product, sizes: tuple[int, ...], name: str, qconfig: qt.QConfig, backend: str
) -> None:
    mapping = copy.deepcopy(SMALL).set_module_name(name, qconfig)
    model = converted(Product(product, *sizes), backend, mapping)
    result = qt.export_onnx(model, X, tmp_path / "m.onnx")
    assert_close(in_default_session(result.path, X), model, X)


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_a_weight_in_front_with_a_scale_for_each_row(tmp_path, exporter: str) -> None:
    """onnxruntime computes it in float, and fails at a zero point for each row: the codes stay int8."""
    model = converted(Product(lambda x, w: w @ x, 8, 16), "onnxruntime", qt.QConfigMapping())
    path = qt.export_onnx(model, X, tmp_path / "m.onnx", exporter=exporter).path
    assert_close(in_default_session(path, X), model, X)


def test_experts_with_scales_of_columns_are_float_in_integer_arithmetic(tmp_path) -> None:
    qconfig = qt.QConfig(qt.QuantSpec(signed=False, symmetric=False), qt.QuantSpec(bits=7, axis=2))
    prepared = qt.prepare(
        Product(*EXPERTS["batch"][:1], *EXPERTS["batch"][1]).eval(),
        X,
        backend="onnxruntime",
        qconfig_mapping=qt.QConfigMapping().set_module_name("bmm", qconfig),
    )
    qt.calibrate(prepared, [X], progress=False)
    integer = qt.convert(prepared, arithmetic="integer")
    path = qt.export_onnx(integer, X, tmp_path / "m.onnx").path
    qt.export.verify(integer, X, path).check()


# ---- small floats


def of_floats(backend: str, format: str = "e4m3") -> nn.Module:
    model = nn.Sequential(
        nn.Conv1d(16, 8, 3), nn.ReLU(), nn.Conv1d(8, 8, 3), nn.ReLU6(), nn.Flatten(), nn.Linear(96, 4)
    )
    qconfig = qt.QConfig(qt.QuantSpec(format=format), qt.QuantSpec(format=format, axis=0))
    return converted(model, backend, qt.QConfigMapping().set_global(qconfig))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_onnxruntime_runs_its_files_with_8_bit_floats(tmp_path, format: str, exporter: str) -> None:
    """It made integer kernels of their layers, which take no floats, and dropped the ReLU in front of a quantizer."""
    model = of_floats("onnxruntime", format)
    result = qt.export_onnx(model, X, tmp_path / "m.onnx", exporter=exporter)
    assert result.verification.refused == ""
    assert_close(in_default_session(result.path, X), model, X, 1e-6)
    assert not any("only if all its inputs" in str(finding) for finding in qt.export.lint(result.path, "onnxruntime"))


def test_the_result_says_that_onnxruntime_runs_a_file_without_optimizations_alone(tmp_path) -> None:
    result = qt.export_onnx(of_floats("tensorrt10"), X, tmp_path / "m.onnx")
    assert result.verification.refused
    assert "onnxruntime without graph optimizations (ORT_DISABLE_ALL); not in its default session" in str(result)
    with pytest.raises(Exception, match="ONNXRuntimeError"):
        in_default_session(result.path, X)


def test_a_file_in_float16_with_8_bit_floats_is_written_without_verification(tmp_path) -> None:
    """onnxruntime has no kernels for its quantizers, which TensorRT has."""
    model = of_floats("tensorrt")
    with pytest.raises(RuntimeError, match="no kernels for fp8 in float16, which TensorRT has.*verify=False"):
        qt.export_onnx(model, X, tmp_path / "m.onnx")
    graph = onnx.load(qt.export_onnx(model, X, tmp_path / "m.onnx", verify=False).path).graph
    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    quantizers = [node for node in graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
    assert {types[node.input[2]] for node in quantizers} == {onnx.TensorProto.FLOAT8E4M3FN}
    assert {types[node.input[1]] for node in quantizers} == {onnx.TensorProto.FLOAT16}


def test_a_file_for_onnxruntime_that_it_does_not_run_is_an_error(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("qtoolkit.export.passes.onnxruntime.keep_small_floats", lambda model: None)
    path = tmp_path / "m.onnx"
    with pytest.raises(RuntimeError, match="not in its default session: .+"):
        qt.export_onnx(of_floats("onnxruntime"), X, path)
    assert not path.exists()
