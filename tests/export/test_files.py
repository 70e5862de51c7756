"""Files of large models: the weights are in a file of their own, which the checker, onnxruntime and the verification read."""

import os
import resource

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import qtoolkit as qt
from qtoolkit.export import verify_onnx
from qtoolkit.export.files import files
from tests import nets, processes

SHAPE = (4, 3, 8, 8)


@pytest.fixture(autouse=True)
def a_small_limit(monkeypatch) -> None:
    monkeypatch.setattr(files, "LARGEST_FILE", 1000)


def converted_net(backend: str) -> nn.Module:
    prepared = qt.prepare(nets.trained(nets.ConvNet(), *SHAPE), backend=backend)
    qt.calibrate(prepared, [torch.randn(SHAPE)], progress=False)
    return qt.convert(prepared)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize("backend", ["tensorrt10", "onnxruntime"])
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
    path = qt.export_onnx(model, x, tmp_path / "net.onnx", exporter="torchscript").path
    verify_onnx(model, x, path).check()
    weights = tmp_path / "net.onnx.data"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 64
    weights.write_bytes(data)
    with pytest.raises(RuntimeError):
        verify_onnx(model, x, path).check()


def test_a_second_export_takes_another_file_and_removes_the_first(tmp_path) -> None:
    model, x = converted_net("onnxruntime"), torch.randn(SHAPE)
    for names in (["net.onnx", "net.onnx.data"], ["net.onnx", "net.onnx.1.data"], ["net.onnx", "net.onnx.data"]):
        path = qt.export_onnx(model, x, tmp_path / "net.onnx", exporter="torchscript").path
        assert sorted(os.listdir(tmp_path)) == sorted(names)
        verify_onnx(model, x, path).check()


def test_a_file_that_is_no_weights_of_the_model_stays(tmp_path, monkeypatch) -> None:
    model, x = converted_net("onnxruntime"), torch.randn(SHAPE)
    (tmp_path / "net.onnx.data").write_bytes(b"mine")
    monkeypatch.setattr(files, "LARGEST_FILE", 1 << 30)
    for _ in range(2):
        qt.export_onnx(model, x, tmp_path / "net.onnx", exporter="torchscript", verify=False)
        assert (tmp_path / "net.onnx.data").read_bytes() == b"mine"


KILLED = """
import os, shutil, signal, sys, torch, qtoolkit as qt, onnx
from pathlib import Path
from qtoolkit.export.files import files
files.LARGEST_FILE = int(sys.argv[2])
folder = Path(sys.argv[1])
def exported(offset):
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 64)
    with torch.no_grad():
        layer.weight.add_(offset)
    prepared = qt.prepare(torch.nn.Sequential(layer).eval(), backend="onnxruntime")
    qt.calibrate(prepared, [torch.ones(2, 64)], progress=False)
    return qt.convert(prepared)
def export(model):
    qt.export_onnx(model, torch.ones(2, 64), folder / "m.onnx", verify=False, exporter="torchscript")
def weights():
    codes = [t for t in onnx.load(folder / "m.onnx").graph.initializer if len(t.dims) == 2]
    return onnx.numpy_helper.to_array(codes[0]).tobytes()
old, new = exported(0.0), exported(0.5)
export(new)
after = weights()
export(old)
before = weights()
assert after != before
kept = {p.name: p.read_bytes() for p in folder.iterdir()}
moments = 0
while True:
    for p in folder.iterdir():
        p.unlink()
    for name, data in kept.items():
        (folder / name).write_bytes(data)
    child = os.fork()
    if child == 0:
        count = [0]
        def hook(event, args):
            if event in ("open", "os.rename", "os.remove", "os.chmod", "shutil.copyfileobj") and str(folder) in str(args):
                count[0] += 1
                if count[0] > moments:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(hook)
        export(new)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    found = weights()
    assert found in (before, after), moments
    if not os.WIFSIGNALED(status):
        assert status == 0 and found == after
        break
    moments += 1
export(old)
assert weights() == before and not list(folder.glob(".*"))
print(moments)
"""


@pytest.mark.slow
@pytest.mark.parametrize("largest", [1000, 1 << 30])
def test_a_killed_export_leaves_the_old_file_or_the_new_one(tmp_path, largest: int) -> None:
    (tmp_path / "out").mkdir()
    done = processes.python("-c", KILLED, tmp_path / "out", largest)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) >= 2


@pytest.mark.parametrize("largest", [1000, 1 << 30])
def test_a_full_disk_leaves_the_old_files(tmp_path, monkeypatch, largest: int) -> None:
    monkeypatch.setattr(files, "LARGEST_FILE", largest)
    model, x = converted_net("onnxruntime"), torch.randn(SHAPE)
    qt.export_onnx(model, x, tmp_path / "net.onnx", exporter="torchscript")
    before = {entry: (tmp_path / entry).read_bytes() for entry in os.listdir(tmp_path)}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for bytes_left in (0, 500, 3000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_left, limits[1]))
        try:
            with pytest.raises(OSError, match="export_onnx: the file could not be written|File too large"):
                qt.export_onnx(model, 2 * x, tmp_path / "net.onnx", exporter="torchscript", verify=False)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert {entry: (tmp_path / entry).read_bytes() for entry in os.listdir(tmp_path)} == before


def test_a_path_that_cannot_be_written(tmp_path) -> None:
    model, x = converted_net("onnxruntime"), torch.randn(SHAPE)
    (tmp_path / "file").write_bytes(b"mine")
    for path in (tmp_path / "file" / "net.onnx", tmp_path):
        with pytest.raises(OSError, match=str(tmp_path)):
            qt.export_onnx(model, x, path, exporter="torchscript", verify=False)
    assert os.listdir(tmp_path) == ["file"]


def test_a_failure_leaves_both_files_alone(tmp_path, monkeypatch) -> None:
    model, x = converted_net("onnxruntime"), torch.randn(SHAPE)
    qt.export_onnx(model, x, tmp_path / "net.onnx", exporter="torchscript")
    before = {entry: (tmp_path / entry).read_bytes() for entry in os.listdir(tmp_path)}

    def fail(*args: object) -> None:
        raise RuntimeError("refused")

    monkeypatch.setattr("qtoolkit.export.files.files.check_file", fail)
    with pytest.raises(RuntimeError, match="refused"):
        qt.export_onnx(model, 2 * x, tmp_path / "net.onnx", exporter="torchscript", verify=False)
    assert {entry: (tmp_path / entry).read_bytes() for entry in os.listdir(tmp_path)} == before


@pytest.mark.sweep(1)
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize("backend", ["tensorrt10", "onnxruntime"])
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
    string, path = opened  # to compare codes, and the default session, which reads the file
    assert isinstance(path, str | os.PathLike)
    assert all(len(t.raw_data) <= 256 for t in onnx.ModelProto.FromString(string).graph.initializer)
    with torch.no_grad():
        model.get_submodule("conv2").weight[0, 0, 0, 0] *= -1.5
    assert verify_onnx(model, x, result.path).weight_codes.differing == 1
