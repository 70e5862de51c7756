"""Layers whose weights stay in float between quantizers stay in float in onnxruntime too."""

from collections.abc import Callable

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import qtoolkit as qt
from qtoolkit.export.exporters.torch_exporters import EXPORTERS
from qtoolkit.export.passes.onnxruntime import exact_codes

IMAGES, ROWS = torch.randn(16, 4, 18, 18), torch.randn(2048, 8)
LAYERS: dict[str, tuple[Callable[[bool], nn.Module], Tensor]] = {
    "conv": (lambda bias: nn.Conv2d(4, 6, 3, bias=bias), IMAGES),
    "conv_transpose": (lambda bias: nn.ConvTranspose2d(4, 6, 3, groups=2, bias=bias), IMAGES),
    "linear": (lambda bias: nn.Linear(8, 6, bias=bias), ROWS),
}


def converted(layer: nn.Module, x: Tensor, relu: bool, backend: str = "onnxruntime") -> nn.Module:
    """A layer whose weight's quantizer is off, in front of a quantized one."""
    last: nn.Module = nn.Conv2d(6, 4, 1) if x.dim() == 4 else nn.Linear(6, 4)
    prepared = qt.prepare(nn.Sequential(layer, nn.ReLU() if relu else nn.Identity(), last).eval(), x, backend)
    qt.calibrate(prepared, [x], progress=False)
    qt.disable_quantization(prepared.get_submodule("0"), "weights").apply()
    with pytest.warns(UserWarning, match="off and stay off"):
        return qt.convert(prepared, arithmetic="integer")


@pytest.mark.sweep(2)
@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_float_weight_is_not_quantized(tmp_path, kind: str, bias: bool, relu: bool, exporter: str) -> None:
    """Without the bias's DequantizeLinear, onnxruntime rounds the weight: 3 % to 7 % of the codes differ."""
    make, x = LAYERS[kind]
    torch.manual_seed(0)
    model = converted(make(bias), x, relu)
    exported = qt.export_onnx(model, x, tmp_path / "m.onnx", exporter=exporter)
    assert exported.verification.quantizer_codes.differing == 0
    deployed = qt.export.verify(model, x, exported.path).runtimes["onnxruntime"]
    assert deployed.codes.differing <= deployed.codes.compared / 1000  # ties of float sums
    assert {finding.name for finding in qt.export.lint(exported.path, "onnxruntime")} == {"all-inputs"}


def test_other_targets_get_the_float_bias(tmp_path) -> None:
    model = converted(nn.Conv2d(4, 6, 3), IMAGES, False, "tensorrt10")
    exported = qt.export_onnx(model, IMAGES, tmp_path / "m.onnx")
    assert not [t.name for t in onnx.load(exported.path).graph.initializer if t.data_type == onnx.TensorProto.INT32]


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=5))
def test_values_of_exact_codes_are_equal(values: list[float]) -> None:
    bias = np.array(values, np.float32)
    codes, steps = exact_codes(bias)
    assert codes.dtype == np.int32
    assert steps.dtype == np.float32
    assert (steps >= np.finfo(np.float32).tiny).all()
    assert np.isfinite(steps).all()
    np.testing.assert_allclose(codes.astype(np.float32) * steps, bias, rtol=0, atol=2.0**-127)
