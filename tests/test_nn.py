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


# ---- groups along the input


def grouped(axis: int, size: int, **options: object) -> qt.QuantSpec:
    return qt.QuantSpec(bits=4, axis=axis, group_size=size, **options)


@pytest.mark.parametrize(
    ("float_layer", "spec", "scales"),
    [
        (nn.Linear(64, 6), grouped(1, 32), (6, 2)),
        (nn.Conv2d(16, 6, 3), grouped(1, 8), (6, 2, 3, 3)),
        (nn.Conv2d(16, 6, 3, groups=2), grouped(-3, 4), (6, 2, 3, 3)),
        (nn.ConvTranspose2d(16, 6, 3), grouped(0, 8), (2, 6, 3, 3)),
        (nn.ConvTranspose2d(16, 6, 3, groups=2), grouped(1, 3), (16, 1, 3, 3)),
    ],
    ids=["linear", "conv", "grouped_conv", "conv_transpose", "grouped_conv_transpose"],
)
def test_weights_in_groups(float_layer: nn.Module, spec: qt.QuantSpec, scales: tuple[int, ...]) -> None:
    layer = qt.nn.QAT_MODULES[type(float_layer)].from_float(float_layer, spec)
    assert layer.weight_quantizer.scale.shape == scales
    axis = spec.axis % layer.weight.dim()
    wide = layer.weight_quantizer.scale.repeat_interleave(spec.group_size, axis)
    x = torch.randn(2, 64) if isinstance(float_layer, nn.Linear) else torch.randn(2, 16, 5, 5)
    with torch.no_grad():
        float_layer.weight.data = (layer.weight / wide).round().clamp(-8, 7) * wide
        assert torch.equal(layer.compute(x, layer.weight_quantizer(layer.weight), layer.bias), float_layer(x))


def test_groups_along_the_input_and_a_batch_norm_along_the_output() -> None:
    """The batch norm scales each output channel before the groups of its inputs are quantized."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(16, 6, 3, bias=False), nn.BatchNorm2d(6)).double()
    model[1].running_var.copy_(torch.logspace(-2, 2, 6))
    model[1].running_mean.copy_(torch.randn(6))
    weight = qt.QConfig(None, grouped(1, 8))
    prepared = qt.prepare(
        model.train(), qconfig_mapping=qt.QConfigMapping().set_global(qt.QConfig(qt.QuantSpec(), weight.weight))
    )
    x = torch.randn(2, 16, 7, 7, dtype=torch.float64)
    qt.calibrate(prepared, [x], progress=False)
    layer = prepared.get_submodule("0")
    factor = (model[1].weight / torch.sqrt(model[1].running_var + model[1].eps)).view(-1, 1, 1, 1)
    folded = (model[0].weight * factor).detach()
    amax = folded.unflatten(1, (2, 8)).abs().amax(2)
    torch.testing.assert_close(layer.weight_quantizer.scale, amax.float() / 7, rtol=1e-6, atol=0)
    converted = qt.convert(prepared)
    torch.testing.assert_close(converted(x), prepared.eval()(x), rtol=1e-9, atol=1e-9)
    scale = layer.weight_quantizer.scale.repeat_interleave(8, 1)
    torch.testing.assert_close(
        converted.get_submodule("0").weight_quantizer(converted.get_submodule("0").weight),
        (folded / scale).round().clamp(-8, 7) * scale,
    )


def test_groups_that_do_not_fit_name_the_layer() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    mapping = qt.QConfigMapping().set_global(qt.QConfig(qt.QuantSpec(), grouped(1, 32)))
    with pytest.raises(
        ValueError, match=r"layer '0': group_size must divide dimension 1 .* \(8, 3, 3, 3\), got 32; take"
    ):
        qt.prepare(model, qconfig_mapping=mapping)


@pytest.mark.parametrize(("axis", "taken"), [(1, 0), (0, 1), (-1, -1)])
def test_a_global_rule_means_the_input_channel_of_every_kind(axis: int, taken: int) -> None:
    model = nn.Sequential(nn.ConvTranspose2d(8, 8, 4))
    qconfig = qt.QConfig(qt.QuantSpec(), grouped(axis, 4))
    for mapping, wanted in (
        (qt.QConfigMapping().set_global(qconfig), taken),
        (qt.QConfigMapping().set_module_name("0", qconfig), axis),
    ):
        prepared = qt.prepare(model, qconfig_mapping=mapping)
        assert prepared.get_submodule("0").weight_quantizer.spec.axis == wanted


def test_the_report_tells_the_groups() -> None:
    mapping = qt.QConfigMapping().set_global(qt.QConfig(qt.QuantSpec(), grouped(1, 32)))
    prepared = qt.prepare(nn.Sequential(nn.Linear(64, 6)), qconfig_mapping=mapping)
    assert qt.quantization_report(prepared).layers[0].weight == "int4 groups of 32(1)"


def test_training_in_groups_learns() -> None:
    torch.manual_seed(0)
    mapping = qt.QConfigMapping().set_global(qt.QConfig(qt.QuantSpec(), grouped(1, 8, quantizer="lsq")))
    prepared = qt.prepare(nn.Sequential(nn.Linear(32, 4)).train(), qconfig_mapping=mapping)
    x, y = torch.randn(128, 32), torch.randn(128, 4)
    qt.calibrate(prepared, [x], progress=False)
    before = prepared.get_submodule("0").weight_quantizer.scale.clone()
    optimizer, losses = torch.optim.SGD(prepared.parameters(), lr=0.1), []
    for _ in range(50):
        optimizer.zero_grad()
        losses.append((prepared(x) - y).square().mean())
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.9 * losses[0]
    assert (prepared.get_submodule("0").weight_quantizer.scale != before).all()
