"""convert(arithmetic="integer") computes the codes of onnxruntime at its default optimizations: all of them."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt
from qtoolkit.export import verify
from tests import nets

X = torch.randn(3, 6, 14, 14, generator=torch.Generator().manual_seed(3))


class Net(nn.Module):
    """Convolutions of several geometries, a residual add, products, pools and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(6, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU6())
        self.depthwise = nn.Sequential(nn.Conv2d(24, 24, 3, padding=1, groups=24, bias=False), nn.BatchNorm2d(24))
        self.wide = nn.Conv2d(24, 17, 5, dilation=2, stride=2)
        self.gate = nn.Conv2d(24, 24, 1)
        self.odd = nn.Conv2d(24, 17, (1, 3), stride=2, padding=(0, 1))
        self.pool, self.mean = nn.MaxPool2d(2), nn.AvgPool2d(3, 2, 1)
        self.fc, self.last = nn.Linear(17, 33), nn.Linear(33, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = F.relu(self.depthwise(x) + x)
        x = x * self.gate(x)
        x = self.odd(self.mean(x)) + self.wide(F.pad(x, (2, 2, 2, 2))).narrow(2, 0, 4).narrow(3, 0, 4)
        x = F.adaptive_avg_pool2d(self.pool(x), 1).flatten(1)
        return self.last(F.relu(self.fc(x)))


def converted(
    model: nn.Module, x: Tensor, bits: int = 8, signed: bool = False, weight_axis: int | None = 0
) -> nn.Module:
    torch.manual_seed(1)
    model = nets.trained(model, *x.shape) if any(isinstance(m, nn.BatchNorm2d) for m in model.modules()) else model
    activation = qt.QuantSpec(bits=bits, signed=signed, symmetric=False)
    mapping = qt.QConfigMapping().set_global(qt.QConfig(activation, qt.QuantSpec(bits=bits, axis=weight_axis)))
    prepared = qt.prepare(model.eval(), (x,), backend="onnxruntime", qconfig_mapping=mapping)
    qt.calibrate(prepared, [x], progress=False)
    return qt.convert(prepared, arithmetic="integer")


def assert_equal_codes(model: nn.Module, x: Tensor, path: object, exact: bool = True, **options: object) -> None:
    result = verify(model, (x,), qt.export_onnx(model, (x,), path, **options).path)
    result.check()
    codes = result.runtimes["onnxruntime"]
    if exact:
        assert codes.codes.differing == 0, result
        # A last layer in float rounds in the order of each processor's instructions.
        assert codes.output_difference == 0 or codes.float_layers, result


@pytest.mark.parametrize("exporter", [pytest.param("dynamo", marks=pytest.mark.sweep(1)), "torchscript"])
@pytest.mark.parametrize("bits", [8, 4, 3])
@pytest.mark.parametrize("signed", [False, True], ids=["uint8", "int8"])
def test_no_code_differs_in_a_convolutional_net(tmp_path, signed: bool, bits: int, exporter: str) -> None:
    model = converted(Net(), X, bits, signed)
    kernels = {name: how.kernel for name, how in model.plan.computed.items()}
    layers = [name for name in kernels if name.startswith(("stem", "depth", "wide", "gate", "odd", "fc", "last"))]
    assert all(kernels[name] in ("QLinearConv", "QGemm") for name in layers), model.plan.computed
    assert_equal_codes(model, X, tmp_path / "m.onnx", exporter=exporter)


@pytest.mark.slow
def test_no_code_differs_with_one_scale_for_a_weight(tmp_path) -> None:
    assert_equal_codes(converted(Net(), X, weight_axis=None), X, tmp_path / "m.onnx", exporter="torchscript")


def test_sums_beyond_the_exact_integers_of_float32(tmp_path) -> None:
    model = nn.Sequential(nn.Conv2d(700, 4, 5), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    with torch.no_grad():
        model[0].weight.fill_(0.1).add_(1e-3 * torch.randn(model[0].weight.shape))
    x = torch.rand(2, 700, 6, 6) + 1
    integer = converted(model, x)
    assert integer.get_submodule("0").integer_kernel.bounds.sums > 2**28
    assert_equal_codes(integer, x, tmp_path / "m.onnx", exporter="torchscript")


def test_biases_beyond_the_exact_integers_of_float32(tmp_path) -> None:
    model = nn.Sequential(nn.Conv2d(6, 8, 3), nn.ReLU(), nn.Conv2d(8, 5, 1), nn.Flatten(), nn.Linear(720, 5))
    with torch.no_grad():
        for layer in (model[0], model[4]):
            layer.weight *= 1e-4
            layer.bias.uniform_(-30, 30)
    assert_equal_codes(converted(model, X), X, tmp_path / "m.onnx", exporter="torchscript")


@pytest.mark.parametrize("bias", [True, False])
def test_linear_layers_of_three_dimensions(tmp_path, bias: bool) -> None:
    model = nn.Sequential(
        nn.Linear(16, 24, bias=bias), nn.GELU(), nn.Linear(24, 16, bias=bias), nn.ReLU(), nn.Linear(16, 3)
    )
    x = torch.randn(2, 7, 16)
    integer = converted(model, x)
    assert {how.kernel for how in integer.plan.computed.values()} <= {"QGemm", "QLinearMatMul"}
    assert "integer_kernels" not in dict(integer.named_modules())  # it would be empty
    assert_equal_codes(integer, x, tmp_path / "m.onnx", exact=False, exporter="torchscript")


class Mean(nn.Module):
    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()
        self.args, self.kwargs = args, kwargs

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(*self.args, **self.kwargs)


@pytest.mark.parametrize(
    "mean", [Mean((2, 3)), Mean((2, 3), True), Mean(dim=(-2, -1), keepdim=True), nn.AdaptiveAvgPool2d(1)]
)
def test_means_of_the_whole_map(tmp_path, mean: nn.Module) -> None:
    model = converted(nn.Sequential(nn.Conv2d(6, 5, 3), mean, nn.Flatten(), nn.Linear(5, 3)), X)
    assert "QLinearGlobalAveragePool" in {how.kernel for how in model.plan.computed.values()}
    assert_equal_codes(model, X, tmp_path / "m.onnx")


class Gated(nn.Module):
    """Means over some of the dimensions behind the channels, by which the tensor itself is multiplied."""

    def __init__(self, shape: tuple[int, ...], dims: tuple[int, ...]) -> None:
        super().__init__()
        self.conv, self.mean, self.last, self.shape = (
            nn.Conv2d(6, 8, 3),
            Mean(dims, keepdim=True),
            nn.Conv2d(8, 4, 1),
            shape,
        )

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv(x)).reshape(self.shape)
        return self.last((x * self.mean(x)).reshape(3, 8, 12, 12))


PARTS = [
    ((3, 8, 3, 4, 12), (-2, -1)),
    ((3, 8, 3, 4, 12), (2, 3)),
    ((24, 12, 12), (-2, -1)),
    ((3, 8, 2, 6, 3, 4), (2, 3, 4)),
]


@pytest.mark.parametrize("examples", [(X,), None], ids=["examples", "no examples"])
@pytest.mark.parametrize(("shape", "dims"), PARTS)
def test_means_of_parts_of_the_map(tmp_path, shape: tuple[int, ...], dims: tuple[int, ...], examples) -> None:
    prepared = qt.prepare(Gated(shape, dims).eval(), examples, backend="onnxruntime")
    qt.calibrate(prepared, [X], progress=False)
    integer, y = qt.convert(prepared, arithmetic="integer"), qt.convert(prepared)(X)
    assert (integer(X) - y).abs().max() < 0.02 * y.abs().max()
    if examples is not None:  # which tell how many dimensions there are
        assert integer.plan.computed["mean"].kernel is None
        assert_equal_codes(integer, X, tmp_path / "m.onnx", exact=False)


class Viewed(nn.Module):
    """The head of many a first network: `view` takes rows alone, and int8 convolutions return channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(6, 8, 3), nn.Linear(8 * 36, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        return self.fc(x.view(x.size(0), -1))


class SizesBetween(nn.Module):
    """Python reads sizes between a convolution and its ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(6, 8, 3), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        count, channels, height, width = x.shape
        x = F.relu(x).reshape(count, channels, height, width)
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


def test_sizes_that_are_read_between_a_convolution_and_its_relu(tmp_path) -> None:
    model = converted(SizesBetween(), X)
    assert model.plan.computed["conv"].kernel == "QLinearConv"
    assert_equal_codes(model, X, tmp_path / "m.onnx", exact=False)


def test_a_view_behind_a_convolution(tmp_path) -> None:
    assert_equal_codes(converted(Viewed(), X), X, tmp_path / "m.onnx", exporter="torchscript")


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(x, x.transpose(1, 2))


def test_the_product_of_two_activations(tmp_path) -> None:
    model = nn.Sequential(nn.Linear(16, 24), Attention(), nn.Linear(7, 3))
    x = torch.randn(2, 7, 16)
    assert_equal_codes(converted(model, x), x, tmp_path / "m.onnx")


def test_ops_that_the_runtime_computes_in_float_are_named(tmp_path) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.reflected = nn.Conv2d(6, 6, 3), nn.Conv2d(6, 6, 3, padding=1, padding_mode="reflect")
            self.last = nn.Conv2d(6, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.relu(self.reflected(torch.relu(self.conv(x)))))

    model = converted(Mixed(), X)
    assert model.plan.computed["conv"].kernel == "QLinearConv"
    assert model.plan.computed["reflected"].kernel == "QLinearConv"
    assert str(model.plan.computed["last"]).startswith("float: its output is not quantized")
    report = str(qt.quantization_report(model))
    assert "QLinearConv" in report
    assert "its output is not quantized" in report
    assert_equal_codes(model, X, tmp_path / "m.onnx", exact=False)


def test_a_relu_that_saturation_does_not_compute_stays(tmp_path) -> None:
    model = converted(
        nn.Sequential(nn.Conv2d(6, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1)), X
    )
    grid = model.get_submodule("activation_quantizers._1")
    state = model.state_dict()
    state["activation_quantizers._1.zero_point"] = grid.zero_point + 9
    assert model.plan.computed["_0"].kernel == "QLinearConv"
    prepared = qt.prepare(
        nn.Sequential(nn.Conv2d(6, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1)).eval(),
        (X,),
        backend="onnxruntime",
    )
    restored = qt.convert(prepared, arithmetic="integer", state_dict=state)
    assert restored.plan.computed["_0"].kernel is None
    assert_equal_codes(restored, X, tmp_path / "m.onnx", exact=False, exporter="torchscript")


# ---- as a model among others


class ClampedAt(nn.Module):
    """A clamp whose upper bound is a parameter, or another convolution."""

    def __init__(self, bound: float | None) -> None:
        super().__init__()
        self.first, self.other, self.last = nn.Conv2d(6, 4, 1), nn.Conv2d(6, 4, 1), nn.Conv2d(4, 4, 1)
        self.bound = None if bound is None else nn.Parameter(torch.tensor(bound))

    def forward(self, x: Tensor) -> Tensor:
        bound = self.other(x) if self.bound is None else self.bound
        return self.last(torch.clamp(self.first(x), max=bound))


@pytest.mark.parametrize("bound", [5.0, None])
def test_a_clamp_at_values_of_the_model_is_computed(tmp_path, bound: float | None) -> None:
    torch.manual_seed(0)
    prepared = qt.prepare(ClampedAt(bound).eval(), X, backend="onnxruntime")
    qt.calibrate(prepared, [X], progress=False)
    if bound is not None:  # trained since the range was observed
        prepared.bound.data.fill_(0.2)
    integer = qt.convert(prepared, arithmetic="integer")
    assert_equal_codes(integer, X * 2, tmp_path / "model.onnx", exporter="torchscript")


def test_copies_and_state_dicts_keep_the_arithmetic() -> None:
    model = converted(Net(), X)
    y = model(X)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(X), y)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(X), y)
    assert model.state_dict().keys() == qt.convert(prepared_net()).state_dict().keys()


def prepared_net() -> nn.Module:
    prepared = qt.prepare(Net().eval(), (X,), backend="onnxruntime")
    qt.calibrate(prepared, [X], progress=False)
    return prepared


def test_with_quantizers_off_it_is_the_float_model() -> None:
    model = converted(Net(), X)
    reference = model(X)
    with qt.disable_quantization(model):
        y = model(X)
    assert not torch.equal(y, reference)
    float_form = qt.convert(prepared_net())
    float_form.load_state_dict(model.state_dict())
    with qt.disable_quantization(float_form):
        assert torch.equal(y, float_form(X))


def test_it_is_close_to_the_float_reference() -> None:
    prepared = prepared_net()
    integer, reference = qt.convert(prepared, arithmetic="integer"), qt.convert(prepared)
    assert torch.allclose(integer(X), reference(X), atol=0.02)


def test_compare_and_sensitivity_take_it() -> None:
    net = Net().eval()
    prepared = qt.prepare(net, (X,), backend="onnxruntime")
    qt.calibrate(prepared, [X], progress=False)
    result = qt.debug.compare(net, qt.convert(prepared, arithmetic="integer"), (X,))
    assert min(line.own.sqnr for line in result.layers) > 20, result
    names = {line.name for line in result.layers}
    assert {"stem.0", "add", "mul", "fc"} <= names
    integer, y = qt.convert(prepared, arithmetic="integer"), net(X).detach()

    def error(model: nn.Module) -> float:
        with torch.no_grad():
            return float(F.mse_loss(model(X), y))

    found = qt.debug.sensitivity(integer, error, higher_is_better=False, progress=False)
    assert {"stem.0", "add", "mul", "fc"} <= {row.name for row in found.rows}
    assert 0 < found.quantized_score < 1e-2
    assert found.float_score < 1e-9


@pytest.mark.slow
def test_it_compiles_to_one_graph() -> None:
    model = converted(Net(), X)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
    assert torch.equal(compiled(X), model(X))
    assert torch.equal(compiled(X[:2]), model(X[:2]))


@pytest.mark.slow
def test_compiled_it_computes_the_same() -> None:
    model = converted(
        nn.Sequential(nn.Conv2d(6, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)), X
    )
    assert torch.equal(torch.compile(model, fullgraph=True)(X), model(X))


@pytest.mark.slow
def test_exported_by_torch_it_computes_the_same() -> None:
    model = converted(Net(), X)
    program = torch.export.export(model, (X,))
    assert torch.equal(program.module()(X), model(X))


@pytest.mark.slow
@pytest.mark.sweep  # AOTInductor compiles for a minute
def test_packaged_for_cpp_it_computes_the_same(tmp_path) -> None:
    model = converted(nn.Sequential(nn.Conv2d(6, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 144, 3)), X)
    program = torch.export.export(model, (X,))
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    assert torch.equal(torch._inductor.aoti_load_package(path)(X), model(X))


def test_what_cannot_be_converted_says_why() -> None:
    replaced = qt.quant_modules.replace(Net().eval(), backend="onnxruntime")
    qt.calibrate(replaced, [X], progress=False)
    with pytest.raises(ValueError, match="needs the graph of the model"):
        qt.convert(replaced, arithmetic="integer")
    other = qt.prepare(nn.Sequential(nn.Linear(4, 2)).eval(), backend="snpe")
    qt.calibrate(other, [torch.rand(2, 4)], progress=False)
    with pytest.raises(ValueError, match="'snpe' has no runtime"):
        qt.convert(other, arithmetic="integer")
    with pytest.raises(ValueError, match=r"runtime.*'onnxruntme'"):
        qt.convert(prepared_net(), arithmetic="integer", runtime="onnxruntme")
    with pytest.raises(ValueError, match="needs a model in float32"):
        qt.convert(prepared_net().half(), arithmetic="integer")
