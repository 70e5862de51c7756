"""qtoolkit.integrations.ultralytics with a stand-in for the package, which no environment of the ordinary tests has."""

import copy
import importlib
import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import qtoolkit as qt
from tests.frameworks import ultralytics_stand_in as stand_in

INTEGRATION = "qtoolkit.integrations.ultralytics"


@pytest.fixture
def integration(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The integration, imported with the stand-in; the package, where it is installed, comes back afterwards."""
    for name, module in stand_in.modules():
        monkeypatch.setitem(sys.modules, name, module)
    package = importlib.import_module("qtoolkit.integrations")
    monkeypatch.delitem(sys.modules, INTEGRATION, raising=False)
    monkeypatch.setattr(package, "ultralytics", None, raising=False)
    imported = importlib.import_module(INTEGRATION)
    monkeypatch.setitem(sys.modules, INTEGRATION, imported)
    return imported


def images(count: int = 4) -> Tensor:
    return torch.rand(count, 3, 32, 32)


def float_model() -> nn.Module:
    model = stand_in.DetectionModel().train()
    with torch.no_grad():
        for _ in range(20):
            model(images())
    return model


def tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def test_in_both_modes_it_computes_what_the_float_model_does(integration: Any) -> None:
    model = float_model().double()
    result = integration.quantize(model, backend="onnxruntime")
    x = images().double()
    qt.calibrate(result, [x], progress=False)
    assert type(result) is stand_in.DetectionModel
    layers = {name: m for name, m in result.named_modules() if isinstance(m, nn.Conv2d)}
    left = {name for name, m in layers.items() if not isinstance(m, qt.nn.QuantConv2d)}
    assert left == {"model.graph.model.3.decode.head.dfl"}
    with qt.disable_quantization(result), torch.no_grad():
        for training in (False, True, False):
            found, expected = result.train(training)(x), model.train(training)(x)
            assert type(found) is type(expected)
            for one, other in zip(tensors(found), tensors(expected), strict=True):
                torch.testing.assert_close(one, other)


def test_copies_and_pickles_compute_the_same(integration: Any) -> None:
    model, x = integration.quantize(float_model(), backend="onnxruntime"), images()
    qt.calibrate(model, [x], progress=False)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    others = copy.deepcopy(model), torch.load(file, weights_only=False)
    for training in (False, True):
        expected = tensors(model.train(training)(x))
        for other in others:
            assert all(map(torch.equal, expected, tensors(other.train(training)(x))))


@pytest.mark.slow
@pytest.mark.parametrize("quantizer", ["fixed", "lsq"])
def test_a_trainer_that_builds_its_model_anew_trains_with_quantizers(quantizer: str, integration: Any) -> None:
    spec = qt.QConfig(qt.QuantSpec(quantizer=quantizer), qt.QuantSpec(axis=0, quantizer=quantizer))
    mapping = qt.QConfigMapping().set_global(spec)
    kind = integration.trainer(stand_in.Detector(), backend="onnxruntime", qconfig_mapping=mapping)
    assert kind.__name__ == "QuantizedDetectionTrainer"
    trainer = kind(float_model())
    trainer.train()
    assert trainer.train_loader.resets == 1, "calibrated on batches of the training, which then starts anew"
    assert trainer.losses[-1] < trainer.losses[0]
    for model in (trainer.model, trainer.ema):
        assert sum(isinstance(m, qt.nn.QuantConv2d) for m in model.modules()) == 11
        assert all(each.ready for each in qt.quantizers_of(model).values())
    decay = {id(p): group["weight_decay"] for group in trainer.optimizer.param_groups for p in group["params"]}
    assert {decay[id(p)] for each in qt.quantizers_of(trainer.model).values() for p in each.parameters()} <= {0.0}
    resumed = kind(trainer.ema)
    resumed.train()
    assert resumed.train_loader.resets == 0, "the ranges of a quantized checkpoint stay"
    assert resumed.losses[0] < trainer.losses[0]
    resumed.data["nc"] = 3
    with pytest.raises(ValueError, match="quantized weights have 2 classes, but the data set has 3"):
        resumed.get_model(None, trainer.ema)


@pytest.mark.slow
def test_its_file_has_its_codes(integration: Any, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="runs exported files; install the extra [onnx]")
    model, x = integration.quantize(float_model(), backend="onnxruntime"), images()
    qt.calibrate(model, [x], progress=False)
    boxes = integration.deployed(model)(x)
    torch.testing.assert_close(boxes, model.eval()(x)[0])
    result = integration.export_onnx(model, tmp_path / "model.onnx", 32, progress=False)
    assert result.verification.quantizer_codes.differing == 0 < result.verification.quantizer_codes.compared
    assert result.verification.weight_codes.differing == 0


def test_what_is_no_model_of_it_is_refused(integration: Any) -> None:
    with pytest.raises(TypeError, match=r"heads Classify, Detect, .*RTDETRDecoder; got Linear\."):
        integration.quantize(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="are already quantized"):
        integration.quantize(integration.quantize(float_model(), backend="onnxruntime"))
    with pytest.raises(TypeError, match="^backend is required: "):
        integration.quantize(float_model())
