"""Functions with a weight, F.conv2d(x, w): the same kernels, and the same codes in onnxruntime, as layers have."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt
from qtoolkit.export import verify
from qtoolkit.verdicts import Cause
from tests.integer.test_onnxruntime import X, assert_equal_codes, converted


class Functions(nn.Module):
    """Convolutions of several geometries and linear layers whose parameters are the module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.b1 = nn.Parameter(torch.randn(8, 6, 3, 3) * 0.2), nn.Parameter(torch.randn(8))
        self.w2, self.b2 = nn.Parameter(torch.randn(8, 1, 3, 3)), nn.Parameter(torch.randn(8))
        self.w3 = nn.Parameter(torch.randn(5, 8, 1, 1))
        self.w4, self.b4 = nn.Parameter(torch.randn(7, 5) * 0.3), nn.Parameter(torch.randn(7))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(F.conv2d(x, self.w1, self.b1, stride=2, padding=1))
        x = F.relu(torch.conv2d(input=x, weight=self.w2 * 2, bias=self.b2, padding="same", groups=8) + x)
        x = F.adaptive_avg_pool2d(F.conv2d(x, self.w3), 1).flatten(1)
        return F.linear(x, self.w4, bias=self.b4)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("weight_axis", [0, None])
def test_no_code_of_functions_differs(tmp_path, weight_axis: int | None, bits: int, exporter: str) -> None:
    model = converted(Functions(), X, bits, weight_axis=weight_axis)
    kernels = [how.kernel for name, how in model.plan.computed.items() if name.startswith(("conv", "linear"))]
    assert kernels == ["QLinearConv"] * 3 + ["QGemm"], model.plan.computed
    assert_equal_codes(model, X, tmp_path / "m.onnx", exporter=exporter)


def layer_and_function() -> tuple[nn.Module, nn.Module]:
    """Return the same network of layers and of functions."""
    torch.manual_seed(5)
    net = Functions()

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Conv2d(6, 8, 3, stride=2, padding=1)
            self.two = nn.Conv2d(8, 8, 3, padding="same", groups=8)
            self.three, self.four = nn.Conv2d(8, 5, 1, bias=False), nn.Linear(5, 7)

        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(self.one(x))
            x = F.relu(self.two(x) + x)
            return self.four(F.adaptive_avg_pool2d(self.three(x), 1).flatten(1))

    layers = Layers()
    with torch.no_grad():
        for layer, weight, bias in (
            (layers.one, net.w1, net.b1),
            (layers.two, net.w2 * 2, net.b2),
            (layers.three, net.w3, None),
            (layers.four, net.w4, net.b4),
        ):
            layer.weight.copy_(weight)
            if bias is not None:
                layer.bias.copy_(bias)
    return layers, net


@pytest.mark.sweep(1)
@pytest.mark.parametrize("runtime", [None, "onnxruntime", "openvino"])
@pytest.mark.parametrize("backend", ["onnxruntime", "openvino", "tensorrt10"])
def test_functions_compute_the_bits_of_layers(backend: str, runtime: str | None) -> None:
    outputs = []
    for model in layer_and_function():
        prepared = qt.prepare(model.eval(), (X,), backend=backend)
        qt.calibrate(prepared, [X], progress=False)
        outputs += [prepared(X), qt.convert(prepared)(X), qt.convert(prepared, "integer", runtime=runtime)(X)]
    assert all(torch.equal(*pair) for pair in zip(outputs[:3], outputs[3:], strict=True))


def test_training_rounds_the_biases_of_functions() -> None:
    gradients = []
    for model in layer_and_function():
        prepared = qt.prepare(model.train(), (X,), backend="onnxruntime", training_arithmetic="float")
        qt.calibrate(prepared, [X], progress=False)
        prepared.train()(X).square().sum().backward()
        parameters = dict(model.named_parameters())
        gradients.append([p.grad for n, p in prepared.named_parameters() if n in parameters and p.dim() == 1])
    for of_layer, of_function in zip(*gradients, strict=True):
        assert torch.equal(of_layer, of_function)


def test_biases_of_functions_that_do_not_fit_enlarge_the_weights_scales(tmp_path) -> None:
    net = Functions()
    with torch.no_grad():
        net.w1[2] = 1e-9
        net.b1[2] = 30
    prepared = qt.prepare(net.eval(), (X,), backend="onnxruntime")
    qt.calibrate(prepared, [X], progress=False)
    with pytest.warns(UserWarning, match=r"the biases of 'conv2d' \(1 scales\) do not fit in int32"):
        model = qt.convert(prepared, arithmetic="integer")
    with pytest.warns(UserWarning, match="do not fit"):
        assert torch.allclose(model(X), qt.convert(prepared)(X), atol=0.5)
    assert_equal_codes(model, X, tmp_path / "m.onnx", exporter="torchscript")


def test_a_state_dict_brings_new_weights() -> None:
    model, other = converted(Functions(), X), converted(Functions(), X)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    other(X)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(X), model(X))
    assert torch.equal(copy.deepcopy(other)(X), model(X))
    assert model.state_dict().keys() == other.state_dict().keys()


class Hyper(nn.Module):
    """A bias that is computed from the input, and a product with a weight, for which there is no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.bias = nn.Parameter(torch.randn(8, 6, 3, 3) * 0.2), nn.Linear(6, 8)
        self.product = nn.Parameter(torch.randn(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(F.conv2d(x, self.w, self.bias(x.mean((0, 2, 3)))))
        return torch.matmul(x.mean((2, 3)), self.product)


def test_what_no_layer_computes_stays_float(tmp_path) -> None:
    model = converted(Hyper(), X)
    assert str(model.plan.computed["conv2d"]) == "float: a conv whose bias or geometry is computed"
    assert str(model.plan.computed["matmul"]) == "float: a matmul with a weight"
    assert_equal_codes(model, X, tmp_path / "m.onnx", exact=False)


@pytest.mark.slow
def test_functions_compile_and_are_reported() -> None:
    model = converted(Functions(), X)
    assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(X), model(X))
    lines = {line.name: line for line in qt.quantization_report(model).layers}
    for name in ("conv2d", "conv2d_1", "conv2d_2", "linear"):
        assert lines[name].verdict.status == "quantized", lines[name]
        assert lines[name].weight == "int8 per-channel(0)", lines[name]
        assert lines[name].verdict.text in ("QLinearConv", "QGemm"), lines[name]
    with qt.disable_quantization(model):
        assert torch.isfinite(model(X)).all()


class Deconvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(6, 4, 2, 2)), nn.Parameter(torch.randn(8))
        self.last = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(F.conv_transpose2d(F.relu(x), self.w, self.b, 2, 0, 1, 2)))


def test_a_transposed_convolution_as_a_function(tmp_path) -> None:
    layer = nn.ConvTranspose2d(6, 8, 2, 2, 0, 1, 2)
    net = Deconvolution()
    with torch.no_grad():
        layer.weight.copy_(net.w)
        layer.bias.copy_(net.b)
    outputs = []
    for model in (net, nn.Sequential(nn.ReLU(), layer, nn.ReLU(), net.last)):
        prepared = qt.prepare(model.eval(), (X,), backend="tensorrt10")
        qt.calibrate(prepared, [X], progress=False)
        integer = qt.convert(prepared, arithmetic="integer")
        outputs.append(integer(X))
        assert "int8 product" in {how.kernel for name, how in integer.plan.computed.items() if "last" not in name}
    assert torch.equal(*outputs)


class Between(nn.Module):
    """Two linear layers, and a product of what they give, or of weights of its own."""

    def __init__(self, product, *sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.one, self.two, self.product = nn.Linear(8, 8), nn.Linear(8, 8), product
        self.weights = nn.ParameterList(torch.randn(size) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(self.one(x), self.two(x), *self.weights)


@pytest.mark.parametrize(
    ("product", "sizes"),
    [
        (lambda x, _, v, w: torch.bmm(torch.relu(torch.bmm(x, v)), w), [(3, 8, 16), (3, 16, 4)]),
        (lambda x, _, v: x.unsqueeze(1) @ v, [(2, 8, 4)]),
        (lambda x, y, v: x @ v + y.sum(-1), [(8,)]),
        (lambda x, _, v: v @ x, [(5,)]),
    ],
    ids=["experts", "broadcast", "a vector", "a vector first"],
)
def test_weights_that_are_no_matrix_have_one_scale(tmp_path, product, sizes: list[tuple[int, ...]]) -> None:
    """onnxruntime's integer product refuses several scales of them when it runs."""
    x = torch.randn(3, 5, 8)
    model = converted(Between(product, *sizes), x)
    assert all(q.scale.numel() == 1 for name, q in model.named_modules() if name.startswith("weight_quantizers."))
    assert_equal_codes(model, x, tmp_path / "m.onnx", exact=False)


def test_experts_have_a_scale_for_each_column_where_the_target_takes_them() -> None:
    x = torch.randn(3, 5, 8)
    experts = Between(lambda x, _, v: torch.bmm(x, v), (3, 8, 16))
    for backend, scales in (("onnxruntime", 1), ("openvino", 1), ("tensorrt10", 16)):
        prepared = qt.prepare(experts, x, backend=backend)
        (quantizer,) = prepared.weight_quantizers.children()
        assert quantizer.scale.numel() == scales


@pytest.mark.parametrize(
    "product",
    [
        lambda x, y: torch.einsum("bij,bkj->bik", x, y),
        lambda x, y: torch.baddbmm(x[:, :, :5], x, y.transpose(1, 2), alpha=2),
        lambda x, y: torch.matmul(input=x, other=y.transpose(1, 2)),
    ],
    ids=["einsum", "a sum", "by name"],
)
def test_a_product_of_other_arguments_stays_float(tmp_path, product) -> None:
    """The kernel of a product takes two tensors; it was called with the others too, where nothing quantizes its output."""
    x = torch.randn(3, 5, 8)
    model = converted(Between(product), x)
    (refused,) = [how for how in model.plan.computed.values() if how.kernel is None]
    assert refused.cause is Cause.CALL
    assert_equal_codes(model, x, tmp_path / "m.onnx", exact=False)


class Skips(nn.Module):
    """Outputs of several layers, added up by Python's `sum`, which begins with 0, and by a residual of scale 1."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(6, 8, 3)
        self.layers, self.skips = nn.ModuleList(), nn.ModuleList()
        for _ in range(3):
            self.layers.append(nn.Conv2d(8, 8, 3, padding=1))
            self.skips.append(nn.Conv2d(8, 8, 1))
        self.last = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.first(x), []
        for layer, skip in zip(self.layers, self.skips, strict=True):
            h = torch.tanh(layer(x)) * 1.0
            skips.append(skip(h))
            x = x + h
        return self.last(F.relu(sum(skips)))


@pytest.mark.slow
def test_no_code_of_a_sum_that_begins_with_zero_differs(tmp_path) -> None:
    model = converted(Skips(), X)
    assert [how.kernel for name, how in model.plan.computed.items() if name.startswith("skips")] == ["QLinearConv"] * 3
    path = qt.export_onnx(model, (X,), tmp_path / "m.onnx", verify=False).path
    found = verify(model, (X,), path).runtimes["onnxruntime"]
    assert (found.codes.differing, found.not_compared) == (0, ())
