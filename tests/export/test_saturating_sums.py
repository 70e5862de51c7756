"""Files on processors whose int8 kernels saturate, those without VNNI: uint8 weights are exact there, in default sessions."""

import copy
import pickle
import platform
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import qtoolkit as qt
from qtoolkit.export import Verdict
from qtoolkit.export.verification.runtimes import onnxruntime_cpu, openvino_cpu, saturating_sums
from qtoolkit.quantizers.quantizer import UINT8_OFFSET
from tests.sessions import default_session, has_wide_weights_in

WITHOUT = saturating_sums.processor_saturates()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(2048, 8)
    )


IMAGES = torch.rand(2, 16, 12, 12, generator=torch.Generator().manual_seed(0))


def calibrated(
    backend: str = "onnxruntime", weight: qt.QuantSpec | None = None, activation: qt.QuantSpec | None = None
) -> nn.Module:
    own = qt.backends[backend].qconfig
    mapping = qt.QConfigMapping().set_global(qt.QConfig(activation or own.activation, weight or own.weight))
    prepared = qt.prepare(network(), (IMAGES,), backend=backend, qconfig_mapping=mapping)
    qt.calibrate(prepared, [IMAGES], progress=False)
    return prepared


def written(
    folder: Path,
    axis: int | None = 0,
    backend: str = "onnxruntime",
    weight: qt.QuantSpec | None = None,
    activation: qt.QuantSpec | None = None,
    exporter: str = "torchscript",
    **options,
) -> tuple[str, nn.Module]:
    """Return a file whose weights use all codes, and the model that it must agree with."""
    if axis is None:
        weight = qt.QuantSpec(axis=None)
    prepared = calibrated(backend, weight, activation)
    path = str(folder / "m.onnx")
    qt.export_onnx(qt.convert(prepared), IMAGES, path, exporter=exporter, progress=False, **options)
    return path, qt.convert(prepared, arithmetic="integer")


@pytest.mark.skipif(
    platform.machine() != "x86_64" or not Path("/proc/cpuinfo").exists(), reason="reads Linux's x86 flags"
)
def test_the_trial_finds_what_the_processor_says() -> None:
    flags = Path("/proc/cpuinfo").read_text().split("flags", 1)[1].partition("\n")[0].split()
    assert (not {"avx512_vnni", "avx_vnni"} & set(flags)) == WITHOUT


@pytest.mark.slow
@pytest.mark.sweep(1)
@pytest.mark.parametrize("axis", [0, None])
@pytest.mark.parametrize("integer_weights", [True, False])
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_no_code_differs_in_default_sessions(axis, integer_weights, exporter, tmp_path) -> None:
    path, model = written(tmp_path, axis, integer_weights=integer_weights, exporter=exporter)
    found = qt.export.verify(model, IMAGES, path).runtimes["onnxruntime"]
    assert found.check() is Verdict.EQUAL
    assert {layer.kernel for layer in found.integer_layers} == {"QLinearConv", "QGemm"}
    assert not found.float_layers
    assert not has_wide_weights_in(path)
    (y,) = default_session(path).run(None, {onnx.load(path).graph.input[0].name: IMAGES.numpy()})
    np.testing.assert_array_equal(y, model(IMAGES).detach().numpy())


def weights_in(path: str, model: nn.Module) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the stored codes and the zero points of each weight of a file, by the name of its quantizer."""
    graph = onnx.load(path).graph
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    nodes = [node for node in graph.node if node.name.endswith(".weight_quantizer.dequantize")]
    return {n.name.removesuffix(".dequantize"): (constants[n.input[0]], constants[n.input[2]]) for n in nodes}


@pytest.mark.parametrize(
    "spec", [{}, {"narrow": True}, {"symmetric": False}, {"bits": 7}, {"bits": 4}, {"axis": None}], ids=str
)
def test_only_the_file_shifts(spec: dict, tmp_path) -> None:
    """The codes of the model stay signed; those of fewer bits are stored as they are, since their sums do not saturate."""
    weight = qt.QuantSpec(**{"axis": 0, **spec})
    path, model = written(tmp_path, weight=weight)
    found = weights_in(path, model)
    assert len(found) == 3
    for name, (codes, zero_points) in found.items():
        grid, weights = model.get_submodule(name), model.get_submodule(name.rpartition(".")[0]).weight
        offset = UINT8_OFFSET if weight.bits == 8 else 0
        assert codes.dtype == zero_points.dtype == (np.uint8 if offset else np.int8)
        own = 0 if grid.zero_point is None else grid.zero_point.numpy()
        np.testing.assert_array_equal(zero_points.astype(int), np.broadcast_to(own + offset, zero_points.shape))
        np.testing.assert_array_equal(codes.astype(int) - offset, grid.codes(weights).numpy())


def replaced() -> nn.Module:
    model = qt.quant_modules.replace(network().eval(), backend="onnxruntime")
    qt.calibrate(model, [IMAGES], progress=False)
    return model


def initialized() -> nn.Module:
    with qt.quant_modules.initialize(backend="onnxruntime"):
        model = network().eval()
    qt.calibrate(model, [IMAGES], progress=False)
    return model


LEARNED = {"weight": qt.QuantSpec(quantizer="lsq")}
PLAIN = {
    "converted": lambda: qt.convert(calibrated()),
    "prepared": lambda: calibrated().eval(),
    "with learned scales": lambda: calibrated(**LEARNED).eval(),
    "replaced": replaced,
    "initialized": initialized,
    "copied and pickled": lambda: pickle.loads(pickle.dumps(copy.deepcopy(qt.convert(calibrated())))),
}


@pytest.mark.slow
@pytest.mark.sweep(1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_export_of_torch_is_exact_too(name: str, exporter: str, tmp_path) -> None:
    model, path = PLAIN[name](), str(tmp_path / "plain.onnx")
    torch.onnx.export(model, (IMAGES,), path, dynamo=exporter == "dynamo", verbose=False)
    assert not has_wide_weights_in(path)
    session = default_session(path)
    (y,) = session.run(None, {session.get_inputs()[0].name: IMAGES.numpy()})
    np.testing.assert_allclose(y, model(IMAGES).detach().numpy(), rtol=0, atol=0.02 * np.abs(y).max())


@pytest.mark.parametrize("backend", ["onnxruntime", "tensorrt10"])
def test_the_argument_wins_over_the_backend(backend: str, tmp_path) -> None:
    own = qt.backends[backend].weight_codes
    assert own == ("uint8" if backend == "onnxruntime" else "int8")
    for weight_codes in (None, "int8", "uint8"):
        path, model = written(tmp_path, backend=backend, weight_codes=weight_codes, integer_weights=True)
        types = {str(codes.dtype) for codes, _ in weights_in(path, model).values()}
        assert types == {weight_codes or own}
    with pytest.raises(ValueError, match="unknown weight_codes of export_onnx: 'int4'.* Known: int8, uint8"):
        written(tmp_path, weight_codes="int4")


def test_a_zero_point_of_another_file_is_found(tmp_path) -> None:
    """Codes are compared relative to the zero points that the file has."""
    path, model = written(tmp_path)
    file = onnx.load(path)
    nodes = [node for node in file.graph.node if node.name == "0.weight_quantizer.dequantize"]
    (zero_points,) = (tensor for tensor in file.graph.initializer if tensor.name == nodes[0].input[2])
    zero_points.CopyFrom(onnx.numpy_helper.from_array(np.full(zero_points.dims, 127, np.uint8), zero_points.name))
    onnx.save(file, path)
    with pytest.raises(RuntimeError, match="the weights of the file differ from the model's"):
        qt.export.verify(model, IMAGES, path).check()


def test_int8_weights_saturate_without_vnni(tmp_path, without_vnni) -> None:
    """Here or on the emulated processor: the reason for uint8 weights."""
    path, model = written(tmp_path, weight_codes="int8")
    expected = model(IMAGES).detach().numpy()
    (wrong,) = without_vnni.outputs(path, [IMAGES])
    (right,) = without_vnni.outputs(written(tmp_path)[0], [IMAGES])
    assert np.abs(wrong - expected).max() > 0.01 * np.abs(expected).max()
    np.testing.assert_array_equal(right, expected)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
def test_signed_activations_are_exact_too(signed: bool, symmetric: bool, tmp_path) -> None:
    """onnxruntime makes int8 activations uint8 on x86."""
    activation = qt.QuantSpec(signed=signed, symmetric=symmetric)
    path, model = written(tmp_path, activation=activation)
    assert qt.export.verify(model, IMAGES, path).check() == {"onnxruntime": Verdict.EQUAL}


class Product(nn.Module):
    """A product of two activations, of which one is never negative."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out, self.other = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(8, 8), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.b(x)
        return self.out(self.a(x).relu() @ z.transpose(1, 2)) + self.other(z)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("unsigned_after_relu", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
def test_products_of_signed_and_unsigned_activations_are_exact(unsigned_after_relu, symmetric, tmp_path) -> None:
    torch.manual_seed(0)
    backend = replace(qt.backends["onnxruntime"], unsigned_after_relu=unsigned_after_relu)
    config = qt.QConfig(qt.QuantSpec(signed=True, symmetric=symmetric), backend.qconfig.weight)
    x = 2 * torch.randn(4, 8, 64)
    prepared = qt.prepare(Product().eval(), x, backend, qt.QConfigMapping().set_global(config))
    qt.calibrate(prepared, [x], progress=False)
    integer = qt.convert(prepared, arithmetic="integer")
    path = qt.export_onnx(integer, x, tmp_path / "m.onnx").path
    found = qt.export.verify(integer, x, path).runtimes["onnxruntime"]
    assert found.check() is Verdict.EQUAL
    assert "QLinearMatMul" in {layer.kernel for layer in found.integer_layers}


@pytest.fixture
def saturating(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor without VNNI."""
    for module in (onnxruntime_cpu, openvino_cpu, saturating_sums):
        monkeypatch.setattr(module, "processor_saturates", lambda: True)


@pytest.mark.usefixtures("saturating")
def test_an_int8_file_has_a_verdict_of_its_own(tmp_path) -> None:
    with pytest.warns(
        UserWarning, match=r"m.onnx' has int8 weights at 0.weight_quantizer, .*saturate.* weight_codes='uint8'"
    ):
        path, model = written(tmp_path, weight_codes="int8")
    found = qt.export.verify(model, IMAGES, path).runtimes["onnxruntime"]
    assert found.verdict is Verdict.SATURATES
    assert found.saturating == ("0", "2", "5")
    assert "saturates on this processor" in str(found)
    with pytest.raises(
        RuntimeError, match=r"verify: .* at 0, 2, 5\. .*saturate at 16 bits on this processor.*weight_codes='uint8'"
    ):
        found.check()
    compared = qt.export.compare_runtimes(path, progress=False).runtimes["onnxruntime"]
    assert compared.saturating


@pytest.mark.usefixtures("saturating")
def test_other_files_have_none(tmp_path) -> None:
    path, model = written(tmp_path)
    assert qt.export.verify(model, IMAGES, path).check() == {"onnxruntime": Verdict.EQUAL}
    path, model = written(tmp_path, weight=qt.QuantSpec(bits=7, axis=0))
    assert qt.export.verify(model, IMAGES, path).check() == {"onnxruntime": Verdict.EQUAL}
    path, model = written(tmp_path, weight_codes="int8", backend="tensorrt10")
    unoptimized = qt.export.verify(qt.convert(calibrated("tensorrt10")), IMAGES, path, optimized=False)
    assert unoptimized.runtimes["onnxruntime"].verdict is not Verdict.SATURATES


@pytest.mark.usefixtures("saturating")
def test_a_file_for_tensorrt_has_the_verdict_too(tmp_path) -> None:
    """Without ReLUs, which onnxruntime joins to a convolution of signed codes only in float."""
    torch.manual_seed(0)
    prepared = qt.prepare(
        nn.Sequential(nn.Conv2d(16, 32, 3), nn.Conv2d(32, 32, 3)).eval(), IMAGES, backend="tensorrt10"
    )
    qt.calibrate(prepared, [IMAGES], progress=False)
    path = qt.export_onnx(prepared, IMAGES, tmp_path / "m.onnx", progress=False).path
    found = qt.export.verify(qt.convert(prepared), IMAGES, path).runtimes["onnxruntime"]
    assert found.verdict is Verdict.SATURATES
    assert found.saturating == ("0",)


def test_weights_of_seven_bits_are_safe(tmp_path) -> None:
    assert has_wide_weights_in(written(tmp_path, backend="tensorrt10")[0])
    for integer_weights in (True, False):
        path, _ = written(tmp_path, backend="openvino", integer_weights=integer_weights)
        assert not has_wide_weights_in(path)


@pytest.mark.parametrize("saturates", [True, False])
def test_openvino_has_the_verdict_too(saturates: bool, tmp_path, monkeypatch) -> None:
    pytest.importorskip("openvino")
    monkeypatch.setattr(openvino_cpu, "processor_saturates", lambda: saturates)
    path, model = written(tmp_path, weight_codes="int8")
    found = qt.export.verify(model, IMAGES, path, runtimes=("openvino",)).runtimes["openvino"]
    assert ("7 bits" in found.remark) == (found.verdict is Verdict.SATURATES) == saturates
