"""The examples, run as a user would, and their figures on real weights and images."""

import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt
from qtoolkit.debug import LayerComparison
from tests import processes
from tests.data import DATA, needs_data

EXAMPLES = Path(__file__).parents[1] / "examples"


def run_example(name: str, *args: str) -> str:
    done = processes.python(EXAMPLES / name, *args)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_digits(tmp_path) -> None:
    out = run_example("digits.py", "--epochs", "12", "--qat-epochs", "4", "--out", str(tmp_path / "model.onnx"))
    assert (tmp_path / "model.onnx").exists()
    assert (tmp_path / "model_w4a4.onnx").exists()
    for bits in ("W8A8", "W4A4"):
        row = next(line for line in out.splitlines() if bits in line)
        float_accuracy, _, qat, runtime, *_ = (float(f) for f in re.findall(r"[\d.]+", row.replace(bits, "")))
        assert float_accuracy > 95
        assert qat > float_accuracy - 2
        assert runtime == qat
        assert re.search(r" 0 of [\d,]+ ", row)


def centernet(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for package in ("torchvision", "pycocotools"):
        pytest.importorskip(package, reason=f"needs {package}, which is not installed")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return import_module("centernet")


SMALL = "--backbone resnet18 --width 32 --size 128 --calibration 4 --train-size 64 --steps 20 --batch 2 --images 8 --least-ap 0"
DOCUMENTED = re.search(
    r"python examples/centernet\.py (--.+)", (EXAMPLES.parent / "docs" / "centernet.md").read_text()
)[1]


@pytest.mark.parametrize("options", [SMALL, pytest.param(DOCUMENTED, marks=pytest.mark.sweep)])
@pytest.mark.slow
def test_centernet_small(tmp_path, monkeypatch, options: str) -> None:
    """So short a training finds few shapes: docs/centernet.md has the figures of the full run."""
    centernet(monkeypatch)
    out = run_example("centernet.py", *options.split(), "--out", str(tmp_path))
    assert "38 quantized layers" in out
    layers = re.findall(r"^(\S+)  +(\S+)  +([\d.]+) +-?[\d.]+ dB", out, flags=re.MULTILINE)
    assert len(layers) == 38
    assert sum(kind == "conv_transpose" for _, kind, _ in layers) == 3
    assert all(float(cosine) > 0.99 for _, _, cosine in layers)
    for line in ("weights", "quantizers"):
        assert re.search(rf"^{line}: +0 of \d{{6,}} differ", out, flags=re.MULTILINE)
    assert (tmp_path / "centernet.onnx").exists()
    assert "conv_transpose" in (tmp_path / "centernet.svg").read_text()
    float_ap, int8_ap = (float(re.search(rf"{model} +│ +([\d.]+)", out)[1]) for model in ("float", "int8"))
    assert abs(float_ap - int8_ap) <= 1


class Truth(nn.Module):
    """Heads that say where the shapes are."""

    def __init__(self, example: ModuleType, scenes: list[Any]) -> None:
        super().__init__()
        self.targets = example.targets_of(scenes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.targets.heat.logit(1e-6), self.targets.size, self.targets.offset


def test_centernet_ap_of_the_truth_is_100_and_of_moved_boxes_is_not(monkeypatch) -> None:
    example = centernet(monkeypatch)
    scenes = [example.draw_scene(128, np.random.default_rng(seed)) for seed in range(6)]
    model = Truth(example, scenes)
    assert example.average_precision(model, scenes, 6, "truth") > 99
    model.targets.offset.add_(1)  # 4 pixels
    assert 5 < example.average_precision(model, scenes, 6, "moved") < 60


def test_centernet_says_what_does_not_hold(monkeypatch) -> None:
    example = centernet(monkeypatch)
    good = qt.debug.Similarity(0.9999, 40.0)
    layers = [
        LayerComparison(name, "conv", own, good, None) for name, own in (("a", good), ("b", replace(good, cosine=0.98)))
    ]
    result = SimpleNamespace(comparison=qt.debug.Comparison(tuple(layers), good))
    assert example.faults(result, 30.0, 28.9, 10) == [
        "The layer b alone has a cosine of 0.9800, which must be above 0.99.",
        "The int8 model's AP is 28.90, more than 1.0 from the float model's 30.00.",
    ]
    result.comparison = qt.debug.Comparison((layers[0],), good)
    assert example.faults(result, 30.0, 29.1, 10) == []
    (sentence,) = example.faults(result, float("nan"), 0.0, 10)[1:]
    assert "it has learned too little" in sentence


@needs_data
@pytest.mark.data
@pytest.mark.parametrize(
    ("images", "float_accuracy", "lost"), [(100, 94, 0.001), pytest.param(1000, 91.5, 0.301, marks=pytest.mark.sweep)]
)
@pytest.mark.slow
def test_cifar10_resnet20_codes_and_accuracy(
    tmp_path, monkeypatch, images: int, float_accuracy: float, lost: float
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import cifar10_resnet20

    result = cifar10_resnet20.run(DATA, "onnxruntime", tmp_path / "resnet20.onnx", images)
    codes = result.verification
    assert result.float_accuracy == pytest.approx(float_accuracy, abs=0.051)
    assert result.accuracy >= result.float_accuracy - lost
    assert abs(result.runtime_accuracy - result.accuracy) <= 100.1 / images
    assert result.same_class >= 99.5
    assert codes.weight_codes.compared == 268_336
    assert codes.weight_codes.differing == 0
    assert codes.quantizer_codes.compared > 270_000 * images
    assert codes.quantizer_codes.differing == 0
    assert codes.layer_codes.share < 1e-5
    assert codes.layer_codes.steps <= 1


@pytest.mark.sweep
@needs_data
@pytest.mark.data
def test_cifar10_resnet20_trains(tmp_path, monkeypatch) -> None:
    """Four bits without training have 77.5 %."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import cifar10_resnet20

    torch.manual_seed(0)
    result = cifar10_resnet20.run(DATA, "onnxruntime", tmp_path / "resnet20.onnx", 200, bits=4, steps=30)
    assert result.accuracy > 82
    assert abs(result.runtime_accuracy - result.accuracy) <= 1
    assert result.verification.quantizer_codes.differing == 0


@pytest.mark.sweep
@needs_data
@pytest.mark.data
def test_auto_replace_on_a_model_with_and_one_without_a_graph(tmp_path, monkeypatch) -> None:
    """Two ways of choosing ranges of the four, and fewer images than the example itself takes."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = import_module("auto_replace")
    monkeypatch.setattr(example, "METHODS", ("max", "entropy"))
    images = example.load(DATA, 256, 200)
    torch.manual_seed(0)
    models = {"ResNet20": example.load_model(DATA), "EarlyExit": example.load_early_exit(DATA, count=1000)}
    with pytest.raises(qt.UntraceableError, match="sure.all"):
        qt.prepare(models["EarlyExit"], backend="tensorrt")
    for name, model in models.items():
        result = example.run(model, images, tmp_path, for_sensitivity=32)
        assert set(result.methods) == {"max", "entropy"}
        assert min(result.methods.values()) >= result.float_accuracy - 1.001
        assert len(result.sensitivity.rows) == (20 if name == "ResNet20" else 21)
        assert result.sensitivity.float_score < 1e-9  # batch norms are folded, which rounds
        worst = result.sensitivity.rows[0].name
        ways = [""] if name == "ResNet20" else ["_late", "_early"]
        assert list(result.exports) == [f"{step}{way}" for step in ("ptq", "qat") for way in ways]
        for step, export in result.exports.items():
            codes = export.verification
            assert (codes.weight_codes.differing, codes.quantizer_codes.differing, codes.missing) == (0, 0, ())
            assert codes.quantizer_codes.compared > 1_000_000
            assert not any(worst in name for name in codes.by_quantizer)
            unreached = {name.partition(".")[0] for name in codes.unreached}
            assert unreached == ({"layer3", "linear"} - {worst} if "early" in step else set())
            assert abs(result.accuracies[step] - result.runtime[step]) <= 0.501  # one image: a tie may flip, and spread
            assert export.path == tmp_path / f"{name}_{step}.onnx"
        for step in ("ptq", "qat"):
            assert result.accuracies[f"{step}{ways[0]}"] >= result.float_accuracy - 1.001


@pytest.mark.sweep
@needs_data
@pytest.mark.data
def test_mixed_precision_is_better_than_the_same_bits_everywhere(tmp_path, monkeypatch) -> None:
    """One estimate of the three, and fewer images than the example itself takes."""
    pytest.importorskip("scipy", reason="needs scipy, which is not installed")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = import_module("mixed_precision")
    monkeypatch.setattr(example, "ESTIMATES", ("gradient",))
    monkeypatch.setattr(example, "CHOICES", {name: example.CHOICES[name] for name in ("w2", "w3", "w4", "w8")})
    result = example.run(DATA, 64, 200, 3)
    at = result.accuracies["w3"]
    assert at["gradient"] > at["uniform"] + 5
    front = result.fronts["gradient"]
    assert front.points[0].costs["size"] == result.sizes["w2"]
    assert front.points[-1].costs["size"] == result.sizes["w8"]
    assert front.scores[-1] >= result.float_accuracy - 1.001


@needs_data
@pytest.mark.data
@pytest.mark.slow
def test_mlperf_tiny_has_the_codes_and_the_accuracy_of_its_files(tmp_path, monkeypatch) -> None:
    """Few images and one epoch each: docs/litert.md has the figures of the whole training."""
    pytest.importorskip("ai_edge_litert", reason="files of LiteRT are not run; pip install -r requirements-litert.txt")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = import_module("mlperf_tiny")
    data, exact = example.load_all(DATA, (512, 100, 20), tmp_path)
    assert data.train[1].sum(1).allclose(torch.ones(512))  # probabilities
    assert (data.train[1].max(1).values >= 0.5).all()
    rows = [*example.run(data, exact, (1, 1), tmp_path, tmp_path)]
    assert [row.name for row in rows] == ["float", "post-training W8A8", "QAT W8A8", "QAT W4A8"]
    for row in rows[1:]:
        assert row.bytes < rows[0].bytes / 3
        assert row.compared == 20 * 117_834
        assert row.differing <= 1e-4 * row.compared  # ties of the average pool, and what layers behind spread
        assert abs(row.simulated - row.accuracy) <= 1.001  # one image


def test_mlperf_tiny_has_four_bits_between_the_first_and_the_last_layer(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = import_module("mlperf_tiny")
    images = torch.randint(256, (8, 3, 32, 32)).float()
    data = example.Data((images, torch.zeros(8, 10)), (images, torch.zeros(8)), torch.zeros(3))
    prepared = example.calibrated(example.ResNet8().train(), data, example.mapping_of(4))
    specs = {name: q.spec for name, q in qt.quantizers_of(prepared).items()}
    weights = {name: spec.bits for name, spec in specs.items() if name.endswith("weight_quantizer")}
    assert len(weights) == 10
    assert {name for name, bits in weights.items() if bits == 8} == {"conv.weight_quantizer", "linear.weight_quantizer"}
    assert {spec.bits for name, spec in specs.items() if name not in weights} == {8}
    pixels = qt.quantizers_of(prepared)["activation_quantizers.x"]
    assert (pixels.scale.item(), pixels.zero_point.item()) == (1.0, -128.0)  # each pixel is a code
