"""Files on processors whose int8 kernels saturate: those without VNNI."""

import platform
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import qtoolkit as qt
from qtoolkit.export.files.files import OpenedFile
from qtoolkit.export.verification.runtimes import onnxruntime_cpu, openvino_cpu, saturating_sums

WITHOUT = saturating_sums.processor_saturates()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(2048, 8)
    )


IMAGES = torch.rand(2, 16, 12, 12, generator=torch.Generator().manual_seed(0))


def written(folder: Path, axis: int | None = 0, backend: str = "onnxruntime", **options) -> tuple[str, nn.Module]:
    """Return a file whose weights use all codes, and the model that it must agree with."""
    config = qt.QConfig(qt.QuantSpec(signed=False, symmetric=False), qt.QuantSpec(axis=axis))
    mapping = None if backend == "openvino" else qt.QConfigMapping().set_global(config)
    prepared = qt.prepare(network(), (IMAGES,), backend=backend, qconfig_mapping=mapping)
    qt.calibrate(prepared, [IMAGES], progress=False)
    path = str(folder / "m.onnx")
    qt.export_onnx(qt.convert(prepared), IMAGES, path, progress=False, **options)
    return path, qt.convert(prepared, arithmetic="integer")


@pytest.mark.skipif(
    platform.machine() != "x86_64" or not Path("/proc/cpuinfo").exists(), reason="reads Linux's x86 flags"
)
def test_the_trial_finds_what_the_processor_says() -> None:
    flags = Path("/proc/cpuinfo").read_text().split("flags", 1)[1].partition("\n")[0].split()
    assert (not {"avx512_vnni", "avx_vnni"} & set(flags)) == WITHOUT


@pytest.mark.parametrize("axis", [0, None])
@pytest.mark.parametrize("integer_weights", [True, False])
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_every_code_with_exact_sums(axis, integer_weights, exporter, tmp_path) -> None:
    path, model = written(tmp_path, axis, integer_weights=integer_weights, exporter=exporter)
    found = qt.export.verify(path, model, IMAGES)
    found.check()
    assert found.runtimes["onnxruntime"].codes.differing == 0
    assert {layer.kernel for layer in found.runtimes["onnxruntime"].integer_layers} == {"QLinearConv", "QGemm"}
    assert ("x64quantprecision" in str(found)) == WITHOUT


@pytest.mark.parametrize("axis", [0, None])
def test_each_weight_has_a_zero_point_of_its_own(axis, tmp_path) -> None:
    graph = onnx.load(written(tmp_path, axis)[0]).graph
    stored = {tensor.name for tensor in graph.initializer if tensor.data_type == onnx.TensorProto.INT8}
    zeros = [node.input[2] for node in graph.node if node.op_type == "DequantizeLinear" and node.input[0] in stored]
    assert len(zeros) == len(set(zeros)) == 3


@pytest.mark.skipif(not WITHOUT, reason="this processor has VNNI: its sums are exact")
def test_default_sessions_saturate_here_and_the_option_helps(tmp_path) -> None:
    path, model = written(tmp_path)

    def outputs(*entries: tuple[str, str]) -> torch.Tensor:
        options = onnxruntime.SessionOptions()
        for entry in entries:
            options.add_session_config_entry(*entry)
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: IMAGES.numpy()})[0])

    expected = model(IMAGES)
    assert (outputs() - expected).abs().max() > 100 * (outputs(onnxruntime_cpu.EXACT_SUMS) - expected).abs().max()


@pytest.mark.skipif(not WITHOUT, reason="this processor has VNNI: the option changes nothing")
def test_a_file_that_cannot_be_loaded_with_the_option_is_compared_without(tmp_path) -> None:
    path, model = written(tmp_path)
    file = onnx.load(path)
    stored = {tensor.name: tensor for tensor in file.graph.initializer if tensor.data_type == onnx.TensorProto.INT8}
    convolutions = [n for n in file.graph.node if n.op_type == "DequantizeLinear" and n.input[0] in stored][:2]
    convolutions[1].input[2] = convolutions[0].input[2]
    onnx.save(file, path)
    found = qt.export.verify(path, model, IMAGES).runtimes["onnxruntime"]
    assert found.codes.differing > 0
    assert found.remark == onnxruntime_cpu.NO_REMEDY
    with pytest.raises(RuntimeError, match="sums of uint8 times int8 codes saturate at 16 bits, and it cannot load"):
        found.check()


def test_weights_of_seven_bits_are_safe(tmp_path) -> None:
    assert saturating_sums.has_wide_weights(OpenedFile.of(written(tmp_path)[0]))
    for integer_weights in (True, False):
        path, _ = written(tmp_path, backend="openvino", integer_weights=integer_weights)
        assert not saturating_sums.has_wide_weights(OpenedFile.of(path))


def test_openvinos_remark_names_the_cause(tmp_path, monkeypatch) -> None:
    pytest.importorskip("openvino")
    for saturates in (True, False):
        monkeypatch.setattr(openvino_cpu, "processor_saturates", lambda saturates=saturates: saturates)
        path, model = written(tmp_path)
        found = qt.export.verify(path, model, IMAGES, runtimes=("openvino",)).runtimes["openvino"]
        assert ("7 bits" in found.remark) == saturates
