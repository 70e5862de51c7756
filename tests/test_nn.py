"""QAT layers against torch's own functions on separately fake-quantized weights, in every option of the layer."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import qtoolkit as qt

SPEC = qt.QuantSpec(bits=5, axis=0)


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("padding", [0, 1, (2, 1), "same", "valid"])
@pytest.mark.parametrize("options", [{}, {"groups": 2}, {"dilation": 2, "bias": False}], ids=str)
def test_convolutions_pad_as_torch_does(mode: str, padding: object, options: dict[str, object]) -> None:
    float_layer = nn.Conv2d(4, 6, (3, 2), padding=padding, padding_mode=mode, **options)
    layer = qt.nn.QuantConv2d.from_float(float_layer, SPEC)
    x = torch.randn(2, 4, 9, 8)
    assert torch.equal(layer.forward_fp32(x), float_layer(x))
    quantized = nn.Conv2d(4, 6, (3, 2), padding=padding, padding_mode=mode, **options)
    quantized.load_state_dict(float_layer.state_dict())
    with torch.no_grad():
        quantized.weight.copy_(qt.ops.fake_quant(layer.weight, layer.weight_quantizer.scale, qmin=-16, qmax=15, axis=0))
    assert torch.equal(layer(x), quantized(x))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("stride", "extra"), [(1, 0), (2, 0), (2, 1), (3, 0), (3, 2)])
def test_transposed_convolutions_take_an_output_size(groups: int, stride: int, extra: int) -> None:
    float_layer = nn.ConvTranspose2d(4, 6, 3, stride, padding=1, groups=groups, dilation=1)
    layer = qt.nn.QuantConvTranspose2d.from_float(float_layer, qt.QuantSpec(axis=1))
    x = torch.randn(2, 4, 5, 6)
    size = [(5 - 1) * stride + 1 + extra, (6 - 1) * stride + 1]
    with qt.disable_quantization(layer):
        assert torch.equal(layer(x, size), float_layer(x, size))
    assert layer(x, size).shape[2:] == torch.Size(size)
    with pytest.raises(ValueError, match="output_size must lie in"):
        layer(x, [100, 100])


def test_grouped_scales_are_those_of_each_output_channel() -> None:
    layer = qt.nn.QuantConvTranspose2d(4, 6, 3, groups=2, weight_spec=qt.QuantSpec(axis=1))
    amax = layer.weight.detach().view(2, 2, 3, 9).abs().amax((1, 3)).flatten()
    torch.testing.assert_close(layer.weight_quantizer.amax, amax)
    scales = layer.weight_quantizer.scale.view(2, 3)
    halves = [qt.ops.fake_quant(layer.weight[2 * g : 2 * g + 2], scales[g], axis=1) for g in range(2)]
    x = torch.randn(1, 4, 5, 5)
    assert torch.equal(layer(x), F.conv_transpose2d(x, torch.cat(halves), layer.bias, groups=2))


def test_the_wrong_type_and_axis_are_refused() -> None:
    with pytest.raises(TypeError, match="takes a Conv2d, got Linear"):
        qt.nn.QuantConv2d.from_float(nn.Linear(2, 2), SPEC)
    with pytest.raises(ValueError, match=r"axis of a weight of 2 dimensions must lie in \[-2, 1\], got 2"):
        qt.nn.QuantLinear(2, 2, weight_spec=qt.QuantSpec(axis=2))
