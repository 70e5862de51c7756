"""Biases on the grid of the integer sums, in training, after conversion and in the file, on targets that compute so."""

import copy
import pickle

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn

import qtoolkit as qt
from qtoolkit.quantizers.bias import LARGEST_CODE


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5)).eval()


X = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def quantized(route: str, model: nn.Module, backend: str = "onnxruntime") -> nn.Module:
    if route == "graph":
        result: nn.Module = qt.prepare(model, (X,), backend=backend)
    else:
        result = qt.quant_modules.replace(model, backend=backend)
    qt.calibrate(result, [X], progress=False)
    return result


def steps_of(layer: nn.Module, source: nn.Module) -> Tensor:
    return source.scale * layer.weight_quantizer.scale


def input_of(model: nn.Module, route: str, layer: nn.Module) -> nn.Module:
    return layer.input_quantizer if route == "modules" else model.get_submodule("activation_quantizers.input_1")


@pytest.mark.parametrize("route", ["graph", "modules"])
def test_the_bias_of_a_layer_is_on_the_grid_of_its_sums(route: str) -> None:
    prepared = quantized(route, net())
    layer = prepared.get_submodule("0")
    source = input_of(prepared, route, layer)
    steps = steps_of(layer, source).detach()
    bias = torch.round(layer.bias / steps) * steps
    assert not torch.equal(bias, layer.bias)
    x = X if route == "modules" else source(X)
    expected = nn.functional.conv2d(source(x), layer.weight_quantizer(layer.weight), bias)
    assert torch.equal(layer(x), expected)
    converted = qt.convert(prepared)
    assert torch.equal(converted(X), prepared(X))
    assert torch.equal(converted.get_submodule("0").bias, layer.bias)  # the parameter itself stays as trained


@pytest.mark.parametrize("route", ["graph", "modules"])
def test_the_grid_is_that_of_the_weight_in_this_forward(route: str) -> None:
    """A range that follows the weight moves with the first forward after a step; a second one finds nothing new."""
    layer = quantized(route, net()).train().get_submodule("0")
    with torch.no_grad():
        layer.weight.mul_(3)
    y = layer(X)
    assert torch.equal(layer(X), y)


@pytest.mark.parametrize("route", ["graph", "modules"])
def test_gradients_pass_straight_through_to_the_bias(route: str) -> None:
    prepared = quantized(route, net())
    prepared(X).sum().backward()
    assert torch.allclose(prepared.get_submodule("3").bias.grad, torch.full((5,), 4.0))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("route", ["graph", "modules"])
def test_copies_take_the_scale_of_their_own_quantizer(route: str, copied) -> None:
    prepared = quantized(route, net())
    copied = copied(prepared)
    assert torch.equal(copied(X), prepared(X))
    layer = copied.get_submodule("0")
    before = layer.sum_steps()
    input_of(copied, route, layer).amax = 100.0
    assert (layer.sum_steps() > 2 * before).all()
    assert not (prepared.get_submodule("0").sum_steps() > 2 * before).any()


@pytest.mark.parametrize("replace_by", ["set_submodule", "an attribute", "none"])
@pytest.mark.parametrize("route", ["graph", "modules"])
def test_the_grid_is_that_of_the_quantizer_that_is_there_now(route: str, replace_by: str) -> None:
    """A quantizer that replaces another one gives the grid of the bias, without a call that announces it."""
    prepared = quantized(route, net()).train()
    layer = prepared.get_submodule("0")
    place = "0.input_quantizer" if route == "modules" else "activation_quantizers.input_1"
    prepared(X)  # in units, if it has any
    new = qt.TensorQuantizer(qt.QuantSpec(), name=place).train()
    new.amax = 50.0
    parent, _, name = place.rpartition(".")
    if replace_by == "set_submodule":
        prepared.set_submodule(place, new)
    else:
        setattr(prepared.get_submodule(parent), name, nn.Identity() if replace_by == "none" else new)
    if route == "modules" and replace_by == "none":
        layer.input_quantizer = None
    bias = layer.bias if replace_by == "none" else round_to(layer.bias, steps_of(layer, new))
    x = X if replace_by == "none" else new(X)
    trained = prepared(X)
    prepared.eval()
    expected = nn.functional.conv2d(x, layer.weight_quantizer(layer.weight), bias)
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(prepared(X), trained)
    assert torch.equal(qt.convert(prepared)(X), prepared(X))


def round_to(bias: Tensor, steps: Tensor) -> Tensor:
    return torch.round(bias / steps).detach() * steps.detach()


@pytest.mark.parametrize("route", ["graph", "modules"])
def test_the_bias_of_a_pruned_channel_has_the_precision_of_the_others(route: str) -> None:
    """The folded shift of a batch norm behind a channel of zeros: any scale covers its weights, and 1 would be too large."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    with torch.no_grad():
        model[0].weight[2] = 0
        model[0].bias[2] = model[1].bias[2] = 0.0123
    x = X / 4
    if route == "graph":
        prepared = qt.prepare(model, (x,), backend="onnxruntime")
    else:
        fused = qt.fuse_modules(model, [["0", "1", "2"]])
        prepared = qt.quant_modules.replace(fused, backend="onnxruntime")
    qt.calibrate(prepared, [x], progress=False)
    scale = prepared.get_submodule("0").weight_quantizer.scale
    assert scale[2] == scale.max() < 0.01
    wanted = model[:2](x)[:, 2]
    for training in (True, False):  # a step in units, then by the nodes
        prepared.train(training)
        for module in prepared.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        prepared(x)
        assert prepared.get_submodule("0").weight_quantizer.scale[2] == scale[2]
    converted = qt.convert(prepared).get_submodule("0")
    bias = converted.bias_in_sums(converted.bias)[2]
    assert abs(bias - wanted.flatten()[0]) < 1e-5


def test_a_target_that_adds_float_biases_keeps_them() -> None:
    layer = quantized("graph", net(), "tensorrt").get_submodule("0")
    assert layer.sum_steps() is None


def test_with_quantizers_off_the_bias_is_float() -> None:
    prepared = quantized("graph", net())
    with qt.disable_quantization(prepared):
        assert torch.equal(prepared(X), net()(X))


def test_a_layer_called_on_two_grids_has_steps_for_each_call() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(self.conv(x))

    prepared = quantized("graph", Twice().eval())
    conv = prepared.get_submodule("conv")
    sources = [prepared.get_submodule(f"activation_quantizers.{name}") for name in ("x", "conv")]
    for call, source in zip(conv.layer_calls, sources, strict=True):
        assert torch.equal(call.sum_steps(conv), source.scale * conv.weight_quantizer.scale)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize("route", ["graph", "modules"])
def test_the_file_has_the_codes(tmp_path, route: str, exporter: str) -> None:
    converted = qt.convert(quantized(route, net()))
    path = tmp_path / "m.onnx"
    qt.export_onnx(converted, (X,), path, exporter=exporter)
    graph = onnx.load(str(path)).graph
    stored = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
    made_by = {name: node for node in graph.node for name in node.output}
    layers = [node for node in graph.node if node.op_type in ("Conv", "Gemm")]
    assert len(layers) == 2
    for node, name in zip(layers, ("0", "3"), strict=True):
        layer, dequantize = converted.get_submodule(name), made_by[node.input[2]]
        codes, scale = (stored[tensor] for tensor in dequantize.input[:2])
        assert codes.dtype == np.int32
        np.testing.assert_array_equal(scale, layer.sum_steps().numpy())
        np.testing.assert_array_equal(codes, np.rint(layer.bias.detach().numpy() / scale))


def test_codes_beyond_int32_enlarge_the_weights_scale_and_are_named() -> None:
    model = net()
    with torch.no_grad():
        model[0].weight[2] *= 1e-12
        model[0].bias[2] = 3.0
    prepared = quantized("graph", model)
    expected = prepared(X)
    assert torch.isclose(prepared.get_submodule("0")(X)[:, 2], torch.tensor(3.0)).all()  # it is not cut off in training
    with pytest.warns(UserWarning, match=r"biases of '0' \(1 scales\) do not fit in int32"):
        converted = qt.convert(prepared)
    layer = converted.get_submodule("0")
    codes = layer.bias / layer.sum_steps()
    assert codes.abs().max() <= LARGEST_CODE
    assert torch.allclose(converted(X), expected, atol=1e-5)
