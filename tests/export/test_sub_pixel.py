"""Transposed convolutions between codes are a convolution and a DepthToSpace in onnxruntime's file: no code differs."""

from collections import Counter

import onnx
import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt
from qtoolkit.export import Verdict, verify
from qtoolkit.integer.onnxruntime import layer_kernel
from qtoolkit.verdicts import Cause

X = torch.randn(2, 6, 7, 9, generator=torch.Generator().manual_seed(7))


class Deconvolutions(nn.Module):
    """Two transposed convolutions, with batch norm and without bias, between convolutions and in front of a PReLU."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()
        self.first, self.last, self.act = nn.Conv2d(6, 8, 3, padding=1), nn.Conv2d(8, 4, 3), nn.PReLU(8)
        self.up, self.bn = nn.ConvTranspose2d(8, 8, *args, **kwargs), nn.BatchNorm2d(8)
        self.up2 = nn.ConvTranspose2d(8, 8, *args, bias=False, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn(self.up(torch.relu(self.first(x)))))
        return torch.tanh(self.last(self.act(self.up2(x))))


def integer_form(
    model: nn.Module, bits: int = 8, weight_axis: int | None = 0, named: tuple[str, ...] = ()
) -> nn.Module:
    config = qt.QConfig(qt.QuantSpec(bits, signed=False, symmetric=False), qt.QuantSpec(bits, axis=weight_axis))
    mapping = qt.QConfigMapping().set_global(config)
    for name in named:
        mapping.set_module_name(name, qt.QConfig(config.activation, qt.QuantSpec(bits, axis=1)))
    prepared = qt.prepare(model.eval(), X, "onnxruntime", mapping)
    qt.calibrate(prepared, [X], progress=False)
    return qt.convert(prepared, arithmetic="integer")


def kinds(path: object) -> Counter:
    return Counter(node.op_type for node in onnx.load(str(path)).graph.node)


def assert_no_code_differs(integer: nn.Module, path: object) -> None:
    codes = verify(integer, X, path).runtimes["onnxruntime"]
    codes.check()
    assert codes.codes.differing == 0, codes
    assert sum(layer.kernel == "QLinearConv" for layer in codes.integer_layers) == 4, codes
    assert not any(layer.kernel == "ConvTranspose" for layer in codes.layers)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("weight_axis", [0, None])
@pytest.mark.parametrize(
    "geometry",
    [
        *((2, 2), (4, 2, 1), (9, 2, 4, 1), (3, 2, 1, 1), (5, 3, 1), ((4, 2), 2, (1, 0)), (3, 1, 1), (8, 4, 2)),
        *((3, 2), (3, 2, 1), (3, 3, 0, 1), ((3, 2), 2), (1, 2, 1, 1), (2, 3)),  # no multiple of the stride longer
        *((2, 2, 0, 0, 4), (4, 2, 1, 0, 2), (3, 2, 1, 0, 8)),  # with groups
    ],
)
def test_no_code_differs(tmp_path, geometry: tuple, weight_axis: int | None, bits: int, exporter: str) -> None:
    integer = integer_form(Deconvolutions(*geometry), bits, weight_axis)
    computed = integer.plan.computed
    assert computed["up"].kernel == computed["up2"].kernel == "QLinearConv"
    result = qt.export_onnx(integer, X, tmp_path / "m.onnx", exporter=exporter)
    assert result.verification.weight_codes.differing == result.verification.quantizer_codes.differing == 0
    assert kinds(result.path)["DepthToSpace"] == 2
    assert_no_code_differs(integer, result.path)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("weight_axis", [0, None])
@pytest.mark.parametrize("geometry", [(3, 2, 1, 1), (4, 2, 1), (3, 2, 1, 1, 2)])
def test_weights_with_zero_points(tmp_path, geometry: tuple, weight_axis: int | None, signed: bool) -> None:
    """Padding has the code of zero; where zero points differ between channels, no kernel of integers takes the layer."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(6, 4, 1), nn.ReLU(), nn.ConvTranspose2d(4, 4, *geometry), nn.ReLU(), nn.Conv2d(4, 4, 1)
    )
    affine = qt.QuantSpec(signed=False, symmetric=False)
    weight = qt.QuantSpec(signed=signed, symmetric=False, axis=weight_axis)
    mapping = qt.QConfigMapping().set_global(qt.QConfig(affine, weight))
    prepared = qt.prepare(model.eval(), X, "onnxruntime", mapping)
    qt.calibrate(prepared, [X], progress=False)
    integer = qt.convert(prepared, arithmetic="integer")
    path = qt.export_onnx(integer, X, tmp_path / "m.onnx").path
    assert verify(integer, X, path).check() == {"onnxruntime": Verdict.EQUAL}
    assert kinds(path)["DepthToSpace"] == (weight_axis is None)


class Moved(nn.Module):
    """A transposed convolution of values that another op moves."""

    def __init__(self, move: nn.Module) -> None:
        super().__init__()
        self.first, self.move, self.up = nn.Conv2d(6, 8, 3, padding=1), move, nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.last = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.last(torch.relu(self.up(self.move(torch.relu(self.first(x)))))))


class Cut(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :, 1:, 2:].transpose(2, 3)


class Joined(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x[:, :4], x[:, :4]], 1)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize("opset", [18, 21])
@pytest.mark.parametrize(
    "move",
    [
        nn.MaxPool2d(2),
        nn.Sequential(nn.MaxPool2d(3, 1), nn.MaxPool2d(2)),
        nn.Sequential(nn.Unflatten(3, (3, 3)), nn.Flatten(2, 3)),
        Cut(),
        nn.Sequential(nn.MaxPool2d(2), nn.ZeroPad2d(1)),
        nn.Upsample(scale_factor=2),
        Joined(),
    ],
    ids=["pool", "pools", "reshapes", "slice and transpose", "padding", "resize", "concat"],
)
def test_of_moved_codes(tmp_path, move: nn.Module, opset: int, exporter: str) -> None:
    integer = integer_form(Moved(move))
    assert integer.plan.computed["up"].kernel == "QLinearConv"
    path = qt.export_onnx(integer, X, tmp_path / "m.onnx", opset=opset, exporter=exporter).path
    codes = verify(integer, X, path).runtimes["onnxruntime"]
    codes.check()
    assert codes.codes.differing == 0, codes
    assert sum(layer.kernel == "QLinearConv" for layer in codes.integer_layers) == 3, codes


@pytest.fixture(scope="module")
def deconvolutions() -> nn.Module:
    return integer_form(Deconvolutions(4, 2, 1))


@pytest.mark.slow
@pytest.mark.sweep(1)
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize("opset", [13, 17, 21, 26])
def test_in_each_opset(tmp_path, deconvolutions: nn.Module, opset: int, exporter: str) -> None:
    path = qt.export_onnx(deconvolutions, X, tmp_path / "m.onnx", opset=opset, exporter=exporter).path
    assert_no_code_differs(deconvolutions, path)


@pytest.mark.slow
def test_of_any_batch_and_size(tmp_path, deconvolutions: nn.Module) -> None:
    integer, sizes = deconvolutions, ({0: "batch", 2: "height", 3: "width"},)
    path = qt.export_onnx(integer, X, tmp_path / "m.onnx", dynamic_shapes=sizes).path
    x = torch.randn(3, 6, 11, 5)
    assert verify(integer, x, path).runtimes["onnxruntime"].codes.differing == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("geometry", "options"),
    [((3, 1), {"dilation": 2}), ((2, (2, 1)), {})],
)
def test_other_geometries_stay_as_they_are(tmp_path, geometry: tuple, options: dict) -> None:
    integer = integer_form(Deconvolutions(*geometry, **options))
    assert "no sub-pixel form" in str(integer.plan.computed["up"])
    path = qt.export_onnx(integer, X, tmp_path / "m.onnx").path
    assert kinds(path)["ConvTranspose"] == 2
    verify(integer, X, path).check()


@pytest.mark.parametrize("backend", ["tensorrt10", "openvino", "snpe"])
def test_files_of_other_backends_keep_the_op(tmp_path, backend: str) -> None:
    prepared = qt.prepare(Deconvolutions(2, 2).eval(), X, backend)
    qt.calibrate(prepared, [X], progress=False)
    found = kinds(qt.export_onnx(prepared, X, tmp_path / "m.onnx").path)
    assert (found["ConvTranspose"], found["DepthToSpace"]) == (2, 0)


@pytest.mark.parametrize("named", [False, True])
def test_one_whose_output_is_returned_stays_float(tmp_path, named: bool) -> None:
    """Without Q/DQ, which would only cost. A rule that names it quantizes it, and onnxruntime computes it in float."""
    model = nn.Sequential(nn.Conv2d(6, 8, 3), nn.PReLU(8), nn.ConvTranspose2d(8, 3, 4, 2, 1), nn.Hardtanh(0, 1))
    integer = integer_form(model, named=("2",) if named else ())
    path = qt.export_onnx(integer, X, tmp_path / "m.onnx").path
    assert kinds(path)["ConvTranspose"] == 1
    assert kinds(path)["QuantizeLinear"] == (3 if named else 2)
    assert verify(integer, X, path).runtimes["onnxruntime"].codes.differing == 0
    if named:
        refusal = layer_kernel(integer.get_submodule("2"), integer.get_submodule("activation_quantizers._1"), None)
        assert refusal.cause is Cause.OUTPUT_CODES
    else:
        assert type(integer.get_submodule("2")) is nn.ConvTranspose2d
