"""Scripts as users of pytorch-quantization have them, with the import changed: what they compute and export."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from tests import processes, reference

ROOT = Path(__file__).parents[2]


def run(name: str, folder: Path) -> None:
    script = ROOT / "tests" / "compat" / "legacy_scripts" / f"{name}.py"
    result = processes.python(script, folder)
    assert result.returncode == 0, result.stderr


def legacy(x, amax):
    return reference.tensor_quant(x, amax, 8, False, False)[2]


def onnxs(x, amax):
    """Values on ONNX's grid: steps of amax / 127."""
    axes = [d for d, size in enumerate(amax.shape) if size != 1]
    return reference.fake_quant(x, amax.flatten() / 127 if axes else amax / 127, axis=axes[0] if axes else None)


class Saved:
    """The ranges and parameters that a script saved."""

    def __init__(self, path: Path):
        self.saved = torch.load(path)
        self.state = self.saved["state"]

    def amax(self, name):
        return self.state[f"{name}_quantizer._amax"]

    def operands(self, layer, x, grid):
        weight = grid(self.state[f"{layer}.weight"], self.amax(f"{layer}._weight"))
        return grid(x, self.amax(f"{layer}._input")), weight, self.state[f"{layer}.bias"]


def proto_and_outputs(path: Path, x):
    onnx, ort = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    proto = onnx.load(path)
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return proto, torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


def weight_axes(proto):
    """The axis of each Q with several scales, by order."""
    scales = {i.name: list(i.dims) for i in proto.graph.initializer}
    nodes = [n for n in proto.graph.node if n.op_type == "QuantizeLinear" and scales[n.input[1]]]
    return [next(a.i for a in n.attribute if a.name == "axis") for n in nodes]


def counts(proto):
    ops = Counter(n.op_type for n in proto.graph.node)
    return ops["QuantizeLinear"], ops["DequantizeLinear"]


# ---- the classification flow


def classify(saved, x, grid):
    features = F.relu(F.conv2d(*saved.operands("conv", x, grid), padding=1))
    pooled = F.adaptive_avg_pool2d(grid(features, saved.amax("pool._input")), 2)
    return F.linear(*saved.operands("fc", pooled.flatten(1), grid))


@pytest.mark.slow
def test_the_classification_flow(tmp_path):
    run("classification_flow", tmp_path)
    saved = Saved(tmp_path / "quant.pth")
    results = saved.saved["results"]
    assert results["float"] > 0.95
    assert all(score > 0.9 for score in results.values()), results
    assert saved.amax("conv._weight").shape == (8, 1, 1, 1)
    x = saved.saved["x"]
    torch.testing.assert_close(saved.saved["y"], classify(saved, x, legacy), rtol=0, atol=1e-5)
    proto, outputs = proto_and_outputs(tmp_path / "model.onnx", x)
    torch.testing.assert_close(outputs, classify(saved, x, onnxs), rtol=0, atol=1e-5)
    assert counts(proto) == (5, 5)
    assert weight_axes(proto) == [0, 0]


# ---- a custom module


def test_a_custom_module_with_one_quantizer_for_three_inputs(tmp_path):
    run("custom_module", tmp_path)
    saved = torch.load(tmp_path / "add.pth")
    inputs = saved["x"]
    assert torch.equal(saved["dynamic"], sum(legacy(x, x.abs().max()) for x in inputs))
    assert torch.equal(saved["y"], sum(legacy(x, saved["amax"]) for x in inputs))
    magnitudes = torch.cat([x.abs().flatten() for x in inputs])
    share = float((magnitudes <= saved["amax"]).float().mean())
    assert 0.985 < share <= 0.99 + 1 / len(magnitudes)  # the lower edge of the bin with the percentile


# ---- manual replacement


def test_manual_replacement_with_an_ignore_policy(tmp_path):
    run("manual_replacement", tmp_path)
    saved = Saved(tmp_path / "manual.pth")
    types = saved.saved["types"]
    assert {name: types[name] for name in ("stem", "block.conv1", "block.conv2", "pool", "head")} == {
        "stem": "Conv2d",
        "block.conv1": "QuantConv2d",
        "block.conv2": "Conv2d",
        "pool": "QuantAvgPool2d",
        "head": "QuantLinear",
    }
    assert torch.equal(saved.amax("block.conv1._input"), saved.amax("block.add._input1"))
    state = saved.state
    stem = F.conv2d(saved.saved["x"], state["stem.weight"], state["stem.bias"])
    inner = F.conv2d(*saved.operands("block.conv1", stem, legacy), padding=1).relu()
    branch = F.conv2d(inner, state["block.conv2.weight"], state["block.conv2.bias"])
    total = legacy(branch, saved.amax("block.add._input0")) + legacy(stem, saved.amax("block.add._input1"))
    pooled = F.avg_pool2d(legacy(total, saved.amax("pool._input")), 2).flatten(1)
    wanted = F.linear(*saved.operands("head", pooled, legacy))
    torch.testing.assert_close(saved.saved["y"], wanted, rtol=0, atol=1e-5)


# ---- use_fb_fake_quant


@pytest.mark.slow
def test_export_by_use_fb_fake_quant(tmp_path):
    run("fb_fake_quant_export", tmp_path)
    saved = Saved(tmp_path / "fb.pth")
    x = saved.saved["x"]
    inner = F.conv2d(*saved.operands("0", x, onnxs), stride=2).relu()
    wanted = F.conv_transpose2d(*saved.operands("2", inner, onnxs), stride=2)
    assert saved.amax("2._weight").shape == (1, 5, 1, 1)
    for name in ("dynamo", "script"):
        proto, outputs = proto_and_outputs(tmp_path / f"{name}.onnx", x)
        torch.testing.assert_close(outputs, wanted, rtol=0, atol=1e-5)
        assert counts(proto) == (4, 4)
        assert weight_axes(proto) == [0, 1]
