"""Transposed convolutions: 1d/2d/3d x groups x batch norm x ReLU x train/eval x geometry, against an oracle and onnxruntime."""

from collections.abc import Collection
from dataclasses import replace
from itertools import product

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt
from tests import nets, reference, reference_layers
from tests.sessions import default_session
from tests.sweep import covering

DIMS = (1, 2, 3)
GROUPS = (1, 2, 4)
GEOMETRIES = {
    "plain": {},
    "stride": {"stride": 3, "padding": 2},
    "output_padding": {"stride": 2, "padding": 1, "output_padding": 1},
    "dilation": {"stride": 2, "dilation": 2, "output_padding": 1},
}
LAYERS = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
QAT = {1: qt.nn.QuantConvTranspose1d, 2: qt.nn.QuantConvTranspose2d, 3: qt.nn.QuantConvTranspose3d}
FUNCTIONS = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
POINTWISE = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}

IN, OUT = 4, 8


def block(dims: int, groups: int, geometry: str, batch_norm: bool = True, relu: bool = True) -> nn.Sequential:
    layers = [LAYERS[dims](IN, OUT, 3, groups=groups, **GEOMETRIES[geometry])]
    with torch.no_grad():  # channels of very different size, which shared scales would lose
        layers[0].weight.mul_(torch.logspace(-2, 1, OUT // groups * IN).reshape(IN, OUT // groups, *[1] * dims))
    layers += [NORMS[dims](OUT)] if batch_norm else []
    layers += [nn.ReLU()] if relu else []
    return nn.Sequential(*layers)


def data(dims: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(3, IN, *(4, 3, 5)[:dims], dtype=dtype)


def numpy_of(*tensors: Tensor | None) -> list:
    return [None if t is None else t.detach().double().numpy() for t in tensors]


FLOAT_BIAS = replace(qt.backends["onnxruntime"], integer_bias=False, sub_pixel=False)


class Oracle:
    """A block computed by the oracle, with the grids of the prepared model and the parameters of the float model."""

    def __init__(self, model: nn.Sequential, prepared: nn.Module) -> None:
        self.layer, self.norm = (
            model[0],
            next((m for m in model if isinstance(m, nn.modules.batchnorm._BatchNorm)), None),
        )
        self.relu = isinstance(model[-1], nn.ReLU)
        self.activation = next(iter(prepared.activation_quantizers.children()))
        self.scale = prepared.get_submodule("0").weight_quantizer.scale
        self.weight, self.bias = numpy_of(self.layer.weight, self.layer.bias)
        if self.norm is not None:
            bn = self.norm
            self.mean, self.variance, self.gamma, self.beta = numpy_of(
                bn.running_mean, bn.running_var, bn.weight, bn.bias
            )
            self.factor = self.gamma / np.sqrt(self.variance + bn.eps)

    def folded_weight(self) -> np.ndarray:
        if self.norm is None:
            return self.weight
        return reference_layers.scale_output_channels(self.weight, self.factor, self.layer.groups)

    def codes(self) -> Tensor:
        return reference.quantize(torch.from_numpy(self.folded_weight()), self.scale, axis=1, group=self.layer.groups)

    def convolve(self, x: Tensor, bias: np.ndarray | None) -> np.ndarray:
        layer, q = self.layer, self.activation
        x = reference.fake_quant(x, q.scale, q.zero_point, q.spec.qmin, q.spec.qmax)
        weight = reference.dequantize(self.codes(), self.scale, None, torch.float64, axis=1, group=layer.groups).numpy()
        return reference_layers.conv_transpose(
            x.numpy(), weight, bias, layer.stride, layer.padding, layer.output_padding, layer.dilation, layer.groups
        )

    def evaluate(self, x: Tensor) -> np.ndarray:
        if self.norm is None:
            return self.activated(self.convolve(x, self.bias))
        return self.activated(self.convolve(x, (self.bias - self.mean) * self.factor + self.beta))

    def train(self, x: Tensor) -> np.ndarray:
        """Scale the weight, divide the output by the same factor, then normalize with the batch's statistics."""
        if self.norm is None:
            return self.evaluate(x)
        y = self.convolve(x, None)
        y = y / reference_layers.along(self.factor, y) + reference_layers.along(self.bias, y)
        mean, variance = reference_layers.statistics(y)
        return self.activated(reference_layers.batch_norm(y, mean, variance, self.gamma, self.beta, self.norm.eps))

    def activated(self, y: np.ndarray) -> np.ndarray:
        return np.maximum(y, 0) if self.relu else y


@pytest.mark.sweep(2)
@pytest.mark.parametrize("relu", [True, False], ids=["relu", "linear"])
@pytest.mark.parametrize("batch_norm", [True, False], ids=["bn", "no-bn"])
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("dims", DIMS)
def test_the_matrix_equals_the_oracle(dims: int, groups: int, geometry: str, batch_norm: bool, relu: bool) -> None:
    x = data(dims, torch.float64)
    model = nets.trained(block(dims, groups, geometry, batch_norm, relu), *x.shape).double()
    for training in (True, False):
        prepared = qt.prepare(model.train(training), x, backend=FLOAT_BIAS).double()
        qt.calibrate(prepared, [x], progress=False)
        oracle = Oracle(model, prepared)
        amax = np.abs(oracle.folded_weight().reshape(groups, IN // groups, OUT // groups, -1)).max((1, 3)).flatten()
        np.testing.assert_allclose(oracle.scale.numpy(), amax / 127, rtol=1e-6)
        layer = qt.convert(prepared).get_submodule("0")
        assert torch.equal(layer.weight_quantizer.codes(layer.weight), oracle.codes())
        for mode, expected in (
            (False, oracle.evaluate(x)),
            (training, (oracle.train if training else oracle.evaluate)(x)),
        ):
            y = prepared.train(mode)(x).detach().numpy()
            np.testing.assert_allclose(y, expected, rtol=1e-10, atol=1e-10)


MATRIX = {str(case): case for case in product(GROUPS, GEOMETRIES, (True, False), (True, False))}
PAIRS = covering({name: tuple(enumerate(case)) for name, case in MATRIX.items()}, 2)


class Branches(nn.Module):
    """Blocks of one number of dimensions in parallel, each followed by a layer whose input is quantized."""

    def __init__(self, dims: int, cases: Collection[str]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(block(dims, *MATRIX[case]), POINTWISE[dims](OUT, 2, 1)) for case in cases
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        return [branch(x) for branch in self.blocks]


@pytest.mark.slow
@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "cases", [sorted(PAIRS), pytest.param([*MATRIX], marks=pytest.mark.sweep)], ids=["pairs", "all"]
)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(
    ("dims", "exporter"),
    [(dims, "dynamo" if dims == 2 else "torchscript") for dims in DIMS]
    + [pytest.param(dims, "torchscript" if dims == 2 else "dynamo", marks=pytest.mark.sweep) for dims in DIMS],
)
def test_the_matrix_in_onnxruntime(tmp_path, dims: int, exporter: str, training: bool, cases: Collection[str]) -> None:
    x = data(dims)
    model = nets.trained(Branches(dims, cases), *x.shape, steps=2).train(training)
    prepared = qt.prepare(model, x, backend="onnxruntime")
    qt.calibrate(prepared, [x], progress=False)
    path = tmp_path / "m.onnx"
    result = qt.export_onnx(prepared, x, path, exporter=exporter)  # raises where a code differs that no tie explains
    codes, layers = result.verification, [m for m in model.modules() if hasattr(m, "kernel_size")]
    assert codes.weight_codes.compared == sum(layer.weight.numel() for layer in layers)
    assert codes.weight_codes.differing == codes.quantizer_codes.differing == 0
    assert codes.missing == ()
    assert len(codes.by_quantizer) == 1 + len(model.blocks)
    assert codes.layer_codes.share < 1e-4
    outputs = onnxruntime.InferenceSession(str(result.path)).run(None, {"x": x.numpy()})
    assert [y.shape for y in outputs] == [tuple(y.shape) for y in model(x)]
    graph = onnx.load(str(result.path)).graph
    nodes, stored = {node.name: node for node in graph.node}, {tensor.name for tensor in graph.initializer}
    for i, groups in enumerate(layer[0][0].groups for layer in model.blocks):
        node = nodes[f"blocks.{i}.0.0.weight_quantizer.dequantize"]
        # With groups the codes are stored as (groups * out, in * k...), each row an output channel; rearranged codes
        # (`qtoolkit.export.passes.sub_pixel`) have a row for each pixel of an output channel.
        in_rows = groups > 1 or node.input[0] not in stored
        assert [a.i for a in node.attribute if a.name == "axis"] == [0 if in_rows else 1]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("dims", DIMS)
def test_the_axis_of_tensorrt8_is_the_input_channel_with_groups_too(tmp_path, dims: int, groups: int) -> None:
    x, model = data(dims), block(dims, groups, "plain", batch_norm=False).eval()
    mapping = qt.QConfigMapping().set_module_name("0", qt.QConfig(qt.QuantSpec(), qt.QuantSpec()))  # groups too
    prepared = qt.prepare(model, backend="tensorrt8", qconfig_mapping=mapping)
    qt.calibrate(prepared, [x], progress=False)
    layer = qt.convert(prepared).get_submodule("0")
    quantizer = layer.weight_quantizer
    assert (quantizer.spec.axis, quantizer.scale.shape) == (0, (IN,))  # the same number for any groups
    amax = model[0].weight.detach().abs().flatten(1).amax(1)
    torch.testing.assert_close(quantizer.scale, amax / 127, rtol=0, atol=0)
    codes = reference.quantize(model[0].weight.detach(), quantizer.scale, axis=0)
    assert torch.equal(quantizer.codes(layer.weight), codes)
    result = qt.export_onnx(prepared, x, tmp_path / "m.onnx")
    node = next(n for n in onnx.load(str(result.path)).graph.node if n.name == "0.weight_quantizer.dequantize")
    assert [a.i for a in node.attribute if a.name == "axis"] == [0]
    assert result.verification.weight_codes.differing == 0


@pytest.mark.sweep(1)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dims", DIMS)
def test_the_axis_is_that_of_the_backend(tmp_path, dims: int, axis: int) -> None:
    backend = replace(qt.backends["onnxruntime"], conv_transpose_axis=axis, sub_pixel=False)
    x = data(dims)
    prepared = qt.prepare(block(dims, 1, "plain").eval(), backend=backend)
    qt.calibrate(prepared, [x], progress=False)
    quantizer = prepared.get_submodule("0").weight_quantizer
    assert (quantizer.spec.axis, quantizer.scale.numel()) == (axis, (IN, OUT)[axis])
    result = qt.export_onnx(prepared, x, tmp_path / "m.onnx")
    node = next(n for n in onnx.load(str(result.path)).graph.node if n.name == "0.weight_quantizer.dequantize")
    assert [a.i for a in node.attribute if a.name == "axis"] == [axis]


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("dims", DIMS)
def test_the_fold_is_exact_to_1e_6(dims: int, groups: int) -> None:
    x = data(dims)
    model = nets.trained(block(dims, groups, "dilation", relu=False), *x.shape).eval()
    prepared = qt.prepare(model, backend="tensorrt")
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in prepared.modules())
    with qt.disable_quantization(prepared):
        difference = (prepared(x) - model(x)).abs().max()
    assert difference <= 1e-6 * model(x).abs().max()


def straight_through(x: Tensor, scale: Tensor, axis: int | None, groups: int, spec: qt.QuantSpec) -> Tensor:
    """Quantize with the oracle's values, and pass gradients inside the range."""
    grid = (scale, None, spec.qmin, spec.qmax, axis, groups)
    passed = x * reference.inside(x, *grid)
    return passed + (reference.fake_quant(x, *grid) - passed).detach()


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("dims", DIMS)
def test_gradients_equal_those_of_plain_torch(dims: int, groups: int) -> None:
    x = data(dims, torch.float64)
    model = nets.trained(block(dims, groups, "output_padding", relu=False), *x.shape).double()
    prepared = qt.prepare(model, backend="tensorrt").double()
    qt.calibrate(prepared, [x], progress=False)
    layer, bn = model
    with torch.no_grad():  # so that some weights are clamped
        prepared.get_submodule("0").weight_quantizer.amax = prepared.get_submodule("0").weight_quantizer.amax * 0.6
    scale = prepared.get_submodule("0").weight_quantizer.scale
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    g = torch.randn_like(model(x))
    model.load_state_dict({k: v for k, v in prepared.state_dict().items() if k in model.state_dict()})
    prepared.train()(ours).backward(g)

    activation = next(iter(prepared.activation_quantizers.children()))
    quantized = straight_through(theirs, activation.scale, None, 1, activation.spec)
    factor = bn.weight / torch.sqrt(bn.running_var.clone() + bn.eps)
    shape = (groups, 1, OUT // groups, *[1] * dims)
    weight = (layer.weight.view(groups, IN // groups, OUT // groups, *[3] * dims) * factor.view(shape)).flatten(0, 1)
    weight = straight_through(weight, scale, 1, groups, qt.QuantSpec())
    y = FUNCTIONS[dims](quantized, weight, None, layer.stride, layer.padding, layer.output_padding, groups)
    y = y / factor.view(-1, *[1] * dims) + layer.bias.view(-1, *[1] * dims)
    bn.train()(y).backward(g)

    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-10)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(prepared.get_parameter(name).grad, parameter.grad, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("dims", DIMS)
def test_gradcheck_with_quantizers_off(dims: int) -> None:
    layer = QAT[dims](2, 4, 2, stride=2, groups=2, output_padding=1, weight_spec=qt.QuantSpec(axis=1)).double()
    x = torch.randn(2, 2, *[2] * dims, dtype=torch.float64, requires_grad=True)

    def compute(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.func.functional_call(layer, {"weight": weight, "bias": bias}, (x,))

    with qt.disable_quantization(layer):
        assert torch.autograd.gradcheck(compute, (x, layer.weight, layer.bias))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("stride", "dilation", "extra"), [(1, 1, 0), (2, 1, 0), (2, 2, 1), (3, 1, 2)])
@pytest.mark.parametrize("dims", DIMS)
def test_an_output_size_gives_the_float_layers_result(
    dims: int, groups: int, stride: int, dilation: int, extra: int
) -> None:
    float_layer = LAYERS[dims](IN, OUT, 3, stride, padding=1, groups=groups, dilation=dilation)
    layer = QAT[dims].from_float(float_layer, qt.QuantSpec(axis=1))
    x = data(dims)
    size = [(n - 1) * stride - 2 + 2 * dilation + 1 + extra for n in x.shape[2:]]
    with qt.disable_quantization(layer):
        assert torch.equal(layer(x, size), float_layer(x, size))
        assert torch.equal(layer(x, output_size=[3, OUT, *size]), float_layer(x, output_size=[3, OUT, *size]))
    assert layer(x, output_size=size).shape[2:] == torch.Size(size)


def test_bad_output_sizes() -> None:
    layer = qt.nn.QuantConvTranspose2d(IN, OUT, 3, stride=2, weight_spec=qt.QuantSpec(axis=1))
    with pytest.raises(
        ValueError, match=r"QuantConvTranspose2d: output_size must lie in \[9, 10\] in spatial dimension 1, got 12"
    ):
        layer(torch.zeros(1, IN, 4, 4), [9, 12])
    with pytest.raises(ValueError, match="output_size must have 2 or 4 elements, got 3"):
        layer(torch.zeros(1, IN, 4, 4), [1, 9, 9])


@pytest.mark.sweep(1)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dims", DIMS)
def test_an_output_size_with_a_batch_norm_exports(tmp_path, dims: int, training: bool) -> None:
    class Up(nn.Module):
        """Upsample as a U-Net does, to the size before downsampling."""

        def __init__(self) -> None:
            super().__init__()
            self.down = POINTWISE[dims](IN, IN, 3, stride=2, padding=1)
            self.up, self.bn = LAYERS[dims](IN, IN, 3, stride=2, padding=1, groups=2), NORMS[dims](IN)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.bn(self.up(self.down(x), output_size=x.shape[2:])))

    x = torch.randn(2, IN, *(6, 7, 8)[:dims])
    model = nets.trained(Up(), *x.shape).train(training)
    prepared = qt.prepare(model, x, backend="onnxruntime")
    qt.calibrate(prepared, [x], progress=False)
    result = qt.export_onnx(prepared, x, tmp_path / "m.onnx")
    assert result.verification.weight_codes.differing == 0
    (y,) = default_session(result.path).run(None, {"x": x.numpy()})
    np.testing.assert_allclose(y, qt.convert(prepared)(x).detach().numpy(), rtol=1e-4, atol=1e-4)


def test_grouped_scales_are_those_of_each_output_channel() -> None:
    layer = qt.nn.QuantConvTranspose2d(4, 6, 3, groups=2, weight_spec=qt.QuantSpec(axis=1))
    amax = layer.weight.detach().view(2, 2, 3, 9).abs().amax((1, 3)).flatten()
    torch.testing.assert_close(layer.weight_quantizer.amax, amax)
    scales = layer.weight_quantizer.scale.view(2, 3)
    halves = [qt.ops.fake_quant(layer.weight[2 * g : 2 * g + 2], scales[g], axis=1) for g in range(2)]
    x = torch.randn(1, 4, 5, 5)
    assert torch.equal(layer(x), F.conv_transpose2d(x, torch.cat(halves), layer.bias, groups=2))
