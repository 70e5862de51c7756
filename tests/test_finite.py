"""NaN, infinities and negative variances in a model are named before they become codes, a file or a checkpoint."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt
from qtoolkit.export.verification.verify import verify_onnx

SHAPE = (4, 3, 8, 8)
LEARNED = qt.QuantSpec(quantizer="lsq")
BAD = {
    ("3.bias", torch.nan): r"'3\.bias' has NaN \(1 of 4 values\)",
    ("3.bias", torch.inf): r"'3\.bias' has infinities",
    ("3.weight", -torch.inf): r"'3\.weight' has infinities",
    ("1.bias", torch.nan): r"'1\.bias' has NaN",
    ("1.running_mean", torch.inf): r"'1\.running_mean' has infinities",
    ("1.running_var", torch.nan): r"'1\.running_var' has NaN",
    ("1.running_var", -1.0): r"'1\.running_var' has negative values",
    ("mask", torch.nan): "'mask' has NaN",
}


class Net(nn.Sequential):
    """A network with a buffer that is infinite by intention."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3))
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.mask[0]


def prepared_net(spec: qt.QuantSpec = LEARNED) -> nn.Module:
    torch.manual_seed(0)
    mapping = qt.QConfigMapping().set_global(qt.QConfig(spec, spec))
    prepared = qt.prepare(Net().train(), backend="onnxruntime", qconfig_mapping=mapping)
    qt.calibrate(prepared, [torch.randn(SHAPE)], progress=False)
    return prepared


def broken_by(name: str, value: float, model: nn.Module) -> nn.Module:
    with torch.no_grad():
        model.state_dict()[name].view(-1)[1] = value
    return model


@pytest.mark.parametrize(("name", "value"), BAD)
@pytest.mark.parametrize("spec", [LEARNED, qt.QuantSpec()], ids=["lsq", "fixed"])
def test_what_is_no_number_is_named(name: str, value: float, spec: qt.QuantSpec, tmp_path: Path) -> None:
    words = BAD[name, value]
    good = prepared_net(spec)
    qt.save_checkpoint(good, tmp_path / "last.safetensors")
    saved = (tmp_path / "last.safetensors").read_bytes()
    model = broken_by(name, value, prepared_net(spec))
    with pytest.raises(ValueError, match=f"convert: .*{words}"):
        qt.convert(model)
    with pytest.raises(ValueError, match=words):
        qt.export_onnx(model, torch.randn(SHAPE), tmp_path / "model.onnx", progress=False)
    with pytest.raises(ValueError, match=f"save_checkpoint: .*{words}"):
        qt.save_checkpoint(model, tmp_path / "last.safetensors")
    assert (tmp_path / "last.safetensors").read_bytes() == saved
    assert not (tmp_path / "model.onnx").exists()
    torch.save(model.state_dict(), tmp_path / "bad.pt")
    before = {name: tensor.clone() for name, tensor in good.state_dict().items()}
    with pytest.raises(ValueError, match=f"load_checkpoint: .*{words}"):
        qt.load_checkpoint(good, tmp_path / "bad.pt")
    assert all(torch.equal(tensor, before[name]) for name, tensor in good.state_dict().items())


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_converted_model_is_checked_again(value: float, tmp_path: Path) -> None:
    converted = broken_by("3.bias", value, qt.convert(prepared_net()))
    with pytest.raises(ValueError, match=r"export_onnx: '3\.bias' has"):
        qt.export_onnx(converted, torch.randn(SHAPE), tmp_path / "model.onnx", progress=False)
    with pytest.raises(ValueError, match=r"convert: state_dict: '3\.bias' has"):
        qt.convert(prepared_net(), state_dict=converted.state_dict())


def test_statistics_that_a_bad_image_poisons_are_named_and_estimated_anew() -> None:
    """In a loop that skips the steps of batches whose loss is NaN."""
    model = prepared_net().train()
    x = torch.randn(SHAPE)
    bad = x.clone()
    bad[0, 0, 0, 0] = torch.nan
    assert model(bad).sum().isnan()
    with pytest.raises(
        ValueError, match=r"convert: '1\.running_mean' has NaN .*reset_running_stats\(\) on these batch"
    ):
        qt.convert(model)
    model.get_submodule("1").reset_running_stats()
    qt.tuning.reestimate_batch_norm(model, [x], progress=False)
    assert qt.convert(model)(x).isfinite().all()


def test_verification_fails_on_nan(tmp_path: Path) -> None:
    x = torch.randn(SHAPE)
    converted = qt.convert(prepared_net())
    file = qt.export_onnx(converted, x, tmp_path / "model.onnx", progress=False).path
    bad = x.clone()
    bad[:, 0, 0, 0] = torch.nan
    with pytest.raises(RuntimeError, match="export: outputs have NaN, so nothing can be compared"):
        verify_onnx(converted, bad, file, progress=False).check()
    with pytest.raises(RuntimeError, match="verify: outputs have NaN"):
        qt.export.verify(converted, bad, file, progress=False).check()
    with pytest.raises(ValueError, match=r"compare_runtimes: input 'x' contains NaN, so nothing can be compared"):
        qt.export.compare_runtimes(file, {"x": bad.numpy()}, ("onnxruntime",), progress=False)


class Classes(nn.Module):
    """Returns the class of each image, which is a number for NaN too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).argmax(1)


@pytest.mark.parametrize("arithmetic", ["float", "integer"])
@pytest.mark.parametrize("kind", [Classes, lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))])
def test_codes_of_nan_are_not_equal(kind: Callable[[], nn.Module], arithmetic: str, tmp_path: Path) -> None:
    """NaN has some code in each runtime; outputs are then numbers, and the same on both sides."""
    x = torch.randn(8, 4)
    prepared = qt.prepare(kind().eval(), x, "onnxruntime")
    qt.calibrate(prepared, [x], progress=False)
    path = qt.export_onnx(prepared, x, tmp_path / "model.onnx", progress=False).path
    converted, bad = qt.convert(prepared, arithmetic=arithmetic), torch.full_like(x, torch.nan)
    found = qt.export.verify(converted, bad, path, progress=False)
    with pytest.raises(RuntimeError, match=r"verify: (outputs have|the quantizers 'activation.*' get) NaN, so no"):
        found.check()
    codes = found.runtimes["onnxruntime"]
    assert codes.verdict is qt.export.Verdict.DIFFERENT
    assert "not compared (NaN): activation_quantizers." in str(codes)
    by_layer = verify_onnx(qt.convert(prepared), bad, path, progress=False)
    with pytest.raises(RuntimeError, match=r"export: (outputs have|the quantizers 'activation.*' get) NaN, so no"):
        by_layer.check()
    assert by_layer.nan[0] == codes.nan[0]


def test_equal_infinities_are_no_difference() -> None:
    from qtoolkit.export.verification.codes import largest_difference, relative_difference

    ours, theirs = torch.tensor([1.0, -torch.inf]), torch.tensor([1.5, -torch.inf]).numpy()
    assert largest_difference([ours], [theirs]) == 0.5
    assert relative_difference(ours, theirs) == pytest.approx(0.5 / 1.5)
    assert largest_difference([ours], [torch.tensor([1.0, 2.0]).numpy()]) == torch.inf
