"""Files of large models: the weights are in a file of their own, which the checker, onnxruntime and the verification read."""

import os

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import qtoolkit as qt
from qtoolkit.export import files, verify_onnx
from tests import nets

SHAPE = (4, 3, 8, 8)


@pytest.fixture(autouse=True)
def a_small_limit(monkeypatch) -> None:
    monkeypatch.setattr(files, "LARGEST_FILE", 1000)


def converted_net(backend: str) -> nn.Module:
    prepared = qt.prepare(nets.trained(nets.ConvNet(), *SHAPE), backend=backend)
    qt.calibrate(prepared, [torch.randn(SHAPE)], progress=False)
    return qt.convert(prepared)


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize("backend", ["tensorrt", "onnxruntime"])
def test_weights_in_a_file_of_their_own(tmp_path, backend: str, exporter: str) -> None:
    model, x = converted_net(backend), torch.randn(SHAPE)
    path = tmp_path / "net.onnx"
    result = qt.export_onnx(model, x, path, exporter=exporter)
    assert sorted(os.listdir(tmp_path)) == ["net.onnx", "net.onnx.data"]
    assert result.bytes == path.stat().st_size + (tmp_path / "net.onnx.data").stat().st_size
    kept = onnx.load(str(path), load_external_data=False).graph.initializer
    assert {entry.value for t in kept for entry in t.external_data if entry.key == "location"} == {"net.onnx.data"}
    assert all(t.data_location == onnx.TensorProto.EXTERNAL for t in kept if np.prod(t.dims) > 256)
    assert result.verification.weight_codes.differing == 0
    assert result.verification.weight_codes.compared == sum(
        p.numel() for n, p in model.named_parameters() if "weight" in n
    )
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    np.testing.assert_allclose(y, model(x).detach().numpy(), rtol=1e-4, atol=0.05)


def test_the_file_verifies_again_and_a_changed_weight_is_noticed(tmp_path) -> None:
    model, x = converted_net("onnxruntime"), torch.randn(SHAPE)
    path = qt.export_onnx(model, x, tmp_path / "net.onnx").path
    verify_onnx(model, path, x).check()
    weights = tmp_path / "net.onnx.data"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 64
    weights.write_bytes(data)
    with pytest.raises(RuntimeError):
        verify_onnx(model, path, x).check()


def test_a_failure_leaves_both_files_alone(tmp_path, monkeypatch) -> None:
    model, x = converted_net("onnxruntime"), torch.randn(SHAPE)
    qt.export_onnx(model, x, tmp_path / "net.onnx")
    before = {entry: (tmp_path / entry).read_bytes() for entry in os.listdir(tmp_path)}

    def fail(*args: object) -> None:
        raise RuntimeError("refused")

    monkeypatch.setattr("qtoolkit.export.onnx.check_file", fail)
    with pytest.raises(RuntimeError, match="refused"):
        qt.export_onnx(model, 2 * x, tmp_path / "net.onnx", verify=False)
    assert {entry: (tmp_path / entry).read_bytes() for entry in os.listdir(tmp_path)} == before


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize("backend", ["tensorrt", "onnxruntime"])
def test_verification_needs_no_string_of_all_weights(tmp_path, monkeypatch, backend: str, exporter: str) -> None:
    monkeypatch.setattr(files, "LARGEST_FILE", 1 << 30)
    monkeypatch.setattr(files, "KEPT_INSIDE", 256)
    opened, given = [], onnxruntime.InferenceSession

    def session(model: object, *args: object, **kwargs: object) -> object:
        opened.append(model)
        return given(model, *args, **kwargs)

    model, x = converted_net(backend), torch.randn(SHAPE)
    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    result = qt.export_onnx(model, x, tmp_path / "net.onnx", exporter=exporter)
    assert os.listdir(tmp_path) == ["net.onnx"]
    assert result.verification.weight_codes.differing == 0
    weights = sum(p.numel() * (4 if backend == "tensorrt" else 1) for n, p in model.named_parameters() if "weight" in n)
    (string,) = opened
    assert len(string) < result.bytes - 0.9 * weights
    with torch.no_grad():
        model.get_submodule("conv2").weight[0, 0, 0, 0] *= -1.5
    assert verify_onnx(model, result.path, x).weight_codes.differing == 1
