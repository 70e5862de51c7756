"""Files of LiteRT: what they hold, and all their codes in LiteRT's interpreter."""

import functools
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt
from qtoolkit.export import UnreadableFileError, Verdict, export_litert, verify
from qtoolkit.runtimes import table
from tests import processes
from tests.data import DATA, needs_data
from tests.export.litert_kernels import KERNELS, STORED_TABLES, nodes_of
from tests.export.litert_nets import random_net

litert = pytest.importorskip(
    "ai_edge_litert.interpreter",
    reason="files of LiteRT are not written and run; pip install -r requirements-litert.txt",
)
BOTH = ("litert", "litert-xnnpack")
X = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
MORE = torch.randn(16, 3, 16, 16, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """A convolution, a depthwise one, a residual add, a transposed convolution, pools and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.up, self.head = nn.ConvTranspose2d(8, 8, 4, 2, 1), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu6(self.first(x))
        x = F.max_pool2d(torch.relu(self.up(torch.relu(self.second(x) + x))), 3, 2, 1)
        return self.head(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


def prepared(model: nn.Module, x: Tensor = MORE, backend: str = "litert") -> nn.Module:
    torch.manual_seed(0)
    found = qt.prepare(model.eval(), x[:1], backend)
    qt.calibrate(found, [x], progress=False)
    return found


def runs(content: bytes, *inputs: np.ndarray) -> "litert.Interpreter":
    """Return the interpreter with the reference kernels, which keeps all tensors, after a run."""
    interpreter = litert.Interpreter(
        model_content=content,
        experimental_op_resolver_type=litert.OpResolverType.BUILTIN_REF,
        experimental_preserve_all_tensors=True,
    )
    interpreter.allocate_tensors()
    for detail, x in zip(interpreter.get_input_details(), inputs, strict=True):
        interpreter.set_tensor(detail["index"], x)
    interpreter.invoke()
    return interpreter


def nhwc(x: Tensor) -> np.ndarray:
    return np.ascontiguousarray(x.numpy().transpose(0, 2, 3, 1))


# ---- what a file holds


def test_a_file_computes_all_in_integers(tmp_path) -> None:
    model = prepared(Net())
    result = qt.export_litert(model, X[:1], tmp_path / "model.tflite")
    assert (result.float_layers, result.conversions) == ((), 2)
    assert (result.inputs, result.outputs) == ({"x": "NHWC"}, {"output": "as in the model"})
    kernels = [layer.kernel for layer in result.layers]
    assert kernels == [
        "CONV_2D", "CONV_2D", "ADD", "TRANSPOSE_CONV", "MAX_POOL_2D", "AVERAGE_POOL_2D", "FULLY_CONNECTED",
    ]  # fmt: skip
    assert result.bytes == result.path.stat().st_size
    assert result.verification.verdict is not Verdict.DIFFERENT
    assert "7 ops in integers" in str(result)
    found = verify(qt.convert(model), MORE, result.path, BOTH, progress=False)
    for codes in found.runtimes.values():
        assert codes.not_compared == ()
        assert {name: count.differing for name, count in codes.weights.items()} == {
            f"{name}.weight_quantizer": 0 for name in ("first", "second", "up", "head")
        }
        assert codes.codes.compared >= 16 * (3 * 256 + 4 * 8 * 64)
    assert [*found.check()] == [*BOTH]


def test_the_model_is_captured_once(tmp_path, monkeypatch) -> None:
    captured, export = [], torch.export.export
    monkeypatch.setattr(
        torch.export, "export", lambda *args, **kwargs: captured.append(args) or export(*args, **kwargs)
    )
    export_litert(
        prepared(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), MORE), MORE, tmp_path / "m.tflite", verify=False
    )
    assert len(captured) == 1


def test_the_delegate_computes_the_codes_of_xnnpacks_arithmetic(tmp_path) -> None:
    """The pool alone differs: it rounds halves away from code zero."""
    model = prepared(
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU6(), nn.ConvTranspose2d(8, 4, 9, 3, 4, 2), nn.Conv2d(4, 3, 5))
    )
    export_litert(model, X[:1], tmp_path / "model.tflite")
    integer = qt.convert(model, arithmetic="integer")
    found = verify(integer, MORE, tmp_path / "model.tflite", ("litert-xnnpack",), progress=False)
    assert found.runtimes["litert-xnnpack"].verdict is Verdict.EQUAL
    assert found.runtimes["litert-xnnpack"].output_difference == 0


TIES = torch.rand(4, 3, 64, 64, generator=torch.Generator().manual_seed(8)) + 1e-3


def with_ties(scale: float) -> Tensor:
    """Return inputs in [0, 1), each a float32 next to the middle between two codes, where roundings are told apart."""
    codes = (TIES / scale).floor() + 0.5
    middle = (codes.double() * scale).float()
    return torch.stack([middle, middle.nextafter(torch.tensor(2.0)), middle.nextafter(torch.tensor(-2.0))], 1).flatten(
        0, 1
    )


@pytest.mark.parametrize("io_type", ["float32", "int8"])
@pytest.mark.parametrize(("runtime", "kernels"), [("litert", "litert"), ("xnnpack", "litert-xnnpack")])
def test_floats_are_quantized_as_the_kernels_do(tmp_path, runtime: str, kernels: str, io_type: str) -> None:
    """The reference kernels round x / scale away from zero, the delegate x * (1 / scale) to even."""
    model = qt.prepare(nn.Sequential(nn.Conv2d(3, 4, 3)).eval(), TIES[:1], backend="litert")
    qt.calibrate(model, [TIES], progress=False)
    x = with_ties(float(next(q.scale for name, q in qt.quantizers_of(model).items() if name.startswith("activation"))))
    export_litert(model, TIES[:1], tmp_path / "model.tflite", io_type=io_type)
    integer = qt.convert(model, arithmetic="integer", runtime=runtime)
    codes = verify(integer, x, tmp_path / "model.tflite", (kernels,), progress=False).runtimes[kernels]
    assert codes.codes.differing == 0
    assert codes.check() is Verdict.EQUAL
    assert (codes.share == 0) == (kernels == "litert")


def test_a_code_that_differs_from_the_reference_kernels_is_no_rounding(tmp_path) -> None:
    """Their arithmetic promises none; a model in another one is told so."""
    model = qt.prepare(nn.Sequential(nn.Conv2d(3, 4, 3)).eval(), TIES[:1], backend="litert")
    qt.calibrate(model, [TIES], progress=False)
    path, x = export_litert(model, TIES[:1], tmp_path / "model.tflite").path, with_ties(1 / 255)
    other = qt.convert(model, arithmetic="integer", runtime="xnnpack")
    codes = verify(other, x, path, ("litert",), progress=False).runtimes["litert"]
    assert codes.codes.differing > 0
    assert "runtime='litert')" in codes.remark
    result = export_litert(other, x[:1], tmp_path / "again.tflite")
    assert "XNNPACK" in result.verification.runtime
    assert result.verification.verdict is Verdict.EQUAL
    exact = qt.convert(model, arithmetic="integer", runtime="litert")
    with torch.no_grad():
        exact.get_submodule("0").integer_kernel.bias[0] += 40  # a difference of at most a step
    with pytest.raises(RuntimeError, match="verify: .* differ .* in ai-edge-litert"):
        verify(exact, x, path, ("litert",), progress=False).check()


def test_codes_outside(tmp_path) -> None:
    model = prepared(Net())
    result = export_litert(model, X[:1], tmp_path / "model.tflite", io_type="int8")
    assert result.conversions == 0
    interpreter = litert.Interpreter(str(result.path))
    (given,), (returned,) = interpreter.get_input_details(), interpreter.get_output_details()
    assert (given["dtype"], returned["dtype"]) == (np.int8, np.int8)
    assert tuple(given["shape"]) == (1, 16, 16, 3)
    quantizer = qt.quantizers_of(model)["activation_quantizers.x"]
    scales, zero_points = (given["quantization_parameters"][name] for name in ("scales", "zero_points"))
    assert (scales[0], zero_points[0]) == (float(quantizer.scale), int(quantizer.zero_point))
    assert [*verify(qt.convert(model), MORE, result.path, BOTH, progress=False).check()] == [*BOTH]


def test_biases_are_int32_at_input_scale_times_weight_scale(tmp_path) -> None:
    model = prepared(Net())
    export_litert(model, X[:1], tmp_path / "model.tflite")
    content = (tmp_path / "model.tflite").read_bytes()
    (node,) = (n for n in nodes_of(content, runs(content, nhwc(X[:1]))) if n.name == "CONV_2D")
    x, weight, bias = node.inputs
    first = qt.convert(model).get_submodule("first")
    steps = np.float32(x.scale) * weight.scales
    assert np.array_equal(bias.scales, steps)
    assert np.array_equal(bias.data, np.rint(first.bias.detach().double().numpy() / steps))
    assert weight.data.min() >= -127
    assert (bias.data.dtype, weight.data.dtype, weight.data.shape) == (np.int32, np.int8, (8, 3, 3, 3))


class Floats(nn.Module):
    """Ops without an integer kernel, around a layer that has one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1)
        self.slopes = nn.PReLU(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.hardsigmoid(self.slopes(self.first(x))) * 2.5 + 1)


def test_what_stays_float_is_listed_with_the_reason(tmp_path) -> None:
    model = prepared(Floats())
    result = export_litert(model, X[:1], tmp_path / "model.tflite")
    reasons = {layer.name: result.reasons[layer.name] for layer in result.float_layers}
    assert reasons == {
        "slopes": "LiteRT has no integer kernel for prelu",
        "hardsigmoid": "LiteRT has no integer kernel for hardsigmoid",
        "mul_1": "its output is not quantized, or not for all users",
        "add": "its input mul_1 is not quantized",
    }
    assert [layer.name for layer in result.layers if layer.integer] == ["first", "last"]
    assert verify(qt.convert(model), MORE, result.path, BOTH, progress=False).check()


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-0.5, 0.25), (-1.0, 1.0)])
def test_a_clip_is_the_saturation_of_the_output(low: float, high: float, tmp_path) -> None:
    model = prepared(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Hardtanh(low, high), nn.ConvTranspose2d(8, 2, 3)))
    result = export_litert(model, X[:1], tmp_path / "model.tflite")
    assert [layer.kernel for layer in result.layers if layer.integer] == ["CONV_2D", "TRANSPOSE_CONV"]
    assert result.float_layers == ()


def test_a_replaced_model_is_exported(tmp_path) -> None:
    """Each layer quantizes its input, so that the last one has an output in float, and computes in float."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.ReLU6(), nn.Conv2d(4, 3, 3)).eval()
    replaced = qt.quant_modules.replace(model, backend="litert")
    qt.calibrate(replaced, [MORE], progress=False)
    result = export_litert(replaced, X[:1], tmp_path / "model.tflite")
    assert {layer.name: layer.integer for layer in result.layers} == {"0": True, "2": True, "4": False}
    assert result.reasons == {"4": "its output is not quantized, or not for all users"}


# ---- codes


# The first eight have all blocks that the others have.
SEEDS = [*range(8), *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(8, 15))]
RANDOM_NETS = [partial(random_net, seed) for seed in range(len(SEEDS))]
Exported = Callable[[Callable[[], nn.Module]], tuple[nn.Module, qt.export.LitertResult]]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Prepares and exports what a function makes, once for all tests that read the model and the file."""

    @functools.cache
    def once(make: Callable[[], nn.Module]) -> tuple[nn.Module, qt.export.LitertResult]:
        model = prepared(make())
        return model, export_litert(model, X[:1], tmp_path_factory.mktemp("exported") / "model.tflite")

    return once


@pytest.mark.parametrize("seed", SEEDS)
def test_each_kernel_of_a_random_net_computes_its_formula(seed: int, exported: Exported) -> None:
    """No code of any op differs from the formulas, and none by more than one step from float arithmetic."""
    _, result = exported(RANDOM_NETS[seed])
    content = result.path.read_bytes()
    for x in MORE[:2]:
        for node in nodes_of(content, runs(content, nhwc(x[None]))):
            if node.output.data.dtype == np.int8 and node.name in KERNELS:
                assert np.array_equal(KERNELS[node.name](node), node.output.data), node.name
    assert result.verification.layer_codes.steps <= 1
    assert {layer.kernel for layer in result.float_layers} <= {"TANH", "LOGISTIC"}


def integer_codes(model: nn.Module, x: Tensor, path: Path) -> qt.export.RuntimeCodes:
    """Compare a file with the model in the arithmetic of the reference kernels."""
    integer = qt.convert(model, arithmetic="integer", runtime="litert")
    return verify(integer, x, path, ("litert",), progress=False).runtimes["litert"]


@pytest.mark.parametrize("seed", SEEDS)
def test_integer_arithmetic_has_the_codes_of_the_reference_kernels(seed: int, exported: Exported) -> None:
    model, result = exported(RANDOM_NETS[seed])
    codes = integer_codes(model, MORE[:4], result.path)
    assert (codes.layer_codes.differing, codes.codes.differing) == (0, 0)
    assert codes.verdict is Verdict.EQUAL


@pytest.mark.sweep
@pytest.mark.parametrize("seed", SEEDS)
def test_the_delegate_computes_random_nets(seed: int, exported: Exported) -> None:
    model, result = exported(RANDOM_NETS[seed])
    found = verify(qt.convert(model), MORE, result.path, ("litert-xnnpack",), progress=False)
    assert found.runtimes["litert-xnnpack"].layer_codes.steps <= 1
    assert found.check()


class Probe(nn.Module):
    """An op between convolutions."""

    def __init__(self, op: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.LazyConv2d(2, 1)
        self.line, self.up, self.fc = nn.Conv1d(4, 6, 3, 2, 1), nn.ConvTranspose2d(4, 4, 3, 2, 1, 1), nn.Linear(16, 8)
        self.deep, self.norm = nn.Conv1d(4, 8, 5, padding="same", groups=4), nn.BatchNorm2d(4)
        self.even = nn.Conv2d(4, 4, (2, 4), padding="same")
        self.scales = nn.Parameter(torch.rand(4, 1, 1))
        self.op = op
        self.eval()(torch.zeros(1, 3, 16, 16))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.last(self.op(self, y, x))


OPS = {
    "softmax over channels": (lambda m, y, x: torch.softmax(y, 1), 0),
    "softmax over columns": (lambda m, y, x: torch.softmax(y, 3), 0),
    "matmul": (lambda m, y, x: y @ y.transpose(2, 3), 0),
    "linear over columns": (lambda m, y, x: m.fc(y), 0),
    "conv1d": (lambda m, y, x: m.line(y.flatten(2))[:, :4, :, None], 0),
    "depthwise conv1d": (lambda m, y, x: m.deep(y.flatten(2))[:, :4, :, None], 0),
    "even kernel": (lambda m, y, x: m.even(y), 0),
    "gelu": (lambda m, y, x: F.gelu(y), 0),
    "gelu by tanh": (lambda m, y, x: F.gelu(y, approximate="tanh"), 0),
    "hard swish": (lambda m, y, x: F.hardswish(y), 0),
    "silu": (lambda m, y, x: F.silu(y), 0),
    "relu on its own": (lambda m, y, x: torch.relu(x)[:, :1] + y, 0),
    "select": (lambda m, y, x: y[:, 1].unsqueeze(1), 0),
    "slice from the end": (lambda m, y, x: y[:, -2:, 1:-1], 0),
    "every second": (lambda m, y, x: y[:, ::2, ::3], 0),
    "permute": (lambda m, y, x: y.permute(0, 2, 3, 1), 0),
    "reshape": (lambda m, y, x: y.reshape(-1, 8, 8, 16), 0),
    "mean over channels": (lambda m, y, x: y.mean(1, keepdim=True) + y, 0),
    "mean over an image": (lambda m, y, x: y.mean((2, 3))[:, :, None, None] + y, 0),
    "max over channels": (lambda m, y, x: y.max(1, keepdim=True)[0] + y.amin(1, keepdim=True), 0),
    "max over an image": (lambda m, y, x: (y.amax((2, 3)) - y.flatten(2).min(2).values)[:, :, None, None] + y, 0),
    "concat of rows": (lambda m, y, x: torch.cat([y, y[:, :, :3]], 2), 0),
    "pool with ceil mode": (lambda m, y, x: F.max_pool2d(y, 3, 2, ceil_mode=True), 0),
    "pool with padding": (lambda m, y, x: F.max_pool2d(y, 2, 2, 1), 0),
    "aligned corners": (lambda m, y, x: F.interpolate(y, (31, 24), mode="bilinear", align_corners=True), 0),
    "nearest": (lambda m, y, x: F.interpolate(y, (24, 40)), 0),
    "chunk": (lambda m, y, x: y.chunk(2, 1)[1] + y.split([1, 2, 1], 1)[1], 0),
    "unbind": (lambda m, y, x: y.unbind(1)[2][:, None], 0),
    "layer norm": (lambda m, y, x: F.layer_norm(y, (16,), m.fc.weight[0], m.fc.weight[1]), 1),
    "attention": (lambda m, y, x: F.scaled_dot_product_attention(y, y, y), 1),
    "broadcast": (lambda m, y, x: y * torch.sigmoid(y.mean((2, 3), keepdim=True)), 0),
    "elu": (lambda m, y, x: F.elu(y), 1),
    "times parameters": (lambda m, y, x: y * m.scales, 1),
    "divided": (lambda m, y, x: y / 3, 1),
    "times a number": (lambda m, y, x: 2 * y, 1),
    "plus a number": (lambda m, y, x: y + 0.5, 1),
    "minus a number": (lambda m, y, x: y - 1, 1),
    "narrow": (lambda m, y, x: torch.narrow(y, 1, 1, 3).narrow(2, -5, 5), 0),
    "batch norm on its own": (lambda m, y, x: m.norm(torch.relu(y)), 0),
    "clip on its own": (lambda m, y, x: F.hardtanh(F.max_pool2d(y, 2), -0.1, 0.2), 1),
    "hard sigmoid": (lambda m, y, x: F.hardsigmoid(y), 1),
    "one minus": (lambda m, y, x: 1 - y, 1),
    "negative": (lambda m, y, x: -y, 1),
    "absolute": (lambda m, y, x: y.abs(), 0),
    "square": (lambda m, y, x: y**2, 1),
    "square root": (lambda m, y, x: torch.relu(y) ** 0.5, 1),
    "power of two": (lambda m, y, x: 2**y, 1),
    "power": (lambda m, y, x: torch.relu(y) ** m.scales, 1),
    "one divided by": (lambda m, y, x: 1 / (y * y + 1), 3),
    "reversed difference": (lambda m, y, x: torch.rsub(y, m.even(y)), 0),
}


PROBES = {name: partial(Probe, op) for name, (op, _) in OPS.items()}


@pytest.mark.parametrize("name", OPS)
def test_each_op(name: str, exported: Exported) -> None:
    """The file has its codes, in all runtimes; and as many ops in float as it must."""
    _, floats = OPS[name]
    model, result = exported(PROBES[name])
    found = verify(qt.convert(model), MORE[:4], result.path, BOTH, progress=False)
    for codes in found.runtimes.values():
        assert codes.not_compared == ()
        assert codes.layer_codes.steps <= 1
    assert found.check()
    assert len(result.float_layers) == floats, result


@pytest.mark.parametrize("name", [name for name, (_, floats) in OPS.items() if not floats])
def test_each_op_in_integer_arithmetic(name: str, exported: Exported) -> None:
    model, result = exported(PROBES[name])
    codes = integer_codes(model, MORE[:4], result.path)
    assert (codes.layer_codes.differing, codes.codes.differing) == (0, 0)


@pytest.mark.parametrize(
    ("op", "why"),
    [
        (lambda m, y, x: F.avg_pool2d(y, 2, divisor_override=3), "or its divisor is not the window size"),
        (lambda m, y, x: F.avg_pool2d(y, 3, 2, ceil_mode=True), "its windows differ in size"),
        (lambda m, y, x: F.leaky_relu(y, -0.5), "its slope is not positive"),
        (lambda m, y, x: F.hardswish(-1e3 * torch.relu(y)), "does not support its scales"),
        (lambda m, y, x: F.prelu(y, m.norm.weight), "the reference arithmetic of a prelu is not implemented here"),
    ],
)
def test_what_stays_float_in_integer_arithmetic_has_a_reason(op, why: str) -> None:
    integer = qt.convert(prepared(Probe(op)), arithmetic="integer", runtime="litert")
    reasons = [computed.why for computed in integer.plan.computed.values() if computed.kernel is None]
    assert any(why in reason for reason in reasons), reasons
    assert bool(integer(X).isfinite().all())


@pytest.mark.parametrize("name", [name for name, (_, floats) in OPS.items() if not floats])
def test_each_op_computes_its_formula(name: str, exported: Exported) -> None:
    model, result = exported(PROBES[name])
    content = result.path.read_bytes()
    codes = np.random.default_rng(0).integers(-128, 128, (1, 16, 16, 3)).astype(np.int8)
    of_input = qt.quantizers_of(model)["activation_quantizers.x"]
    x = (codes - float(of_input.zero_point)) * float(of_input.scale)
    first, *nodes, last = nodes_of(content, runs(content, x.astype(np.float32)))
    assert (first.name, last.name) == ("QUANTIZE", "DEQUANTIZE")
    assert np.array_equal(first.output.data, codes)
    assert [node.name for node in nodes if node.name not in KERNELS] == []
    for node in nodes:
        assert np.array_equal(KERNELS[node.name](node), node.output.data), node.name


# ---- int16


NETS_OF_16_BITS = {
    "net": Net,
    **{f"random {seed}": net for seed, net in enumerate(RANDOM_NETS)},
    "softmax": PROBES["softmax over columns"],
    "matmul": PROBES["matmul"],
    "mean": PROBES["mean over an image"],
    "absolute": PROBES["absolute"],
}


@pytest.mark.parametrize(
    "name", [name for name in NETS_OF_16_BITS if name in ("net", "softmax", "absolute", "random 2")]
)
def test_codes_of_16_bits(name: str, tmp_path) -> None:
    codes_of_16_bits(NETS_OF_16_BITS[name](), tmp_path / "model.tflite")


@pytest.mark.sweep
@pytest.mark.parametrize("name", NETS_OF_16_BITS)
def test_codes_of_16_bits_of_more_nets(name: str, tmp_path) -> None:
    codes_of_16_bits(NETS_OF_16_BITS[name](), tmp_path / "model.tflite")


def codes_of_16_bits(model: nn.Module, path: Path) -> None:
    """Export a model with int16 activations; its codes are those of the formulas, and within two of 65,536 steps of its own."""
    quantized = prepared(model, backend="litert-16x8")
    result = export_litert(quantized, X[:1], path, io_type="int16")
    assert {layer.kernel for layer in result.float_layers} <= {"HARD_SWISH", "TANH", "LOGISTIC"}
    content = path.read_bytes()
    (interpreter,) = [litert.Interpreter(model_content=content)]
    assert interpreter.get_input_details()[0]["dtype"] is np.int16
    codes = np.random.default_rng(0).integers(-(2**15), 2**15, (1, 16, 16, 3)).astype(np.int16)
    for node in nodes_of(content, runs(content, codes)):
        if node.is_wide and node.name not in STORED_TABLES:
            assert np.array_equal(KERNELS[node.name](node), node.output.data), node.name
    found = verify(qt.convert(quantized), MORE[:2], path, BOTH, progress=False)
    for codes in found.runtimes.values():
        assert codes.not_compared == ()
        assert codes.layer_codes.steps <= 2
        assert not codes.other_weights
    assert found.check()


# ---- errors


@pytest.mark.parametrize(
    ("op", "sentence"),
    [
        (lambda x: torch.cumsum(x, 1), "LiteRT has no op for aten.cumsum.default at 'cumsum'"),
        (nn.ConvTranspose2d(4, 4, 3, dilation=2), "transposed convolution supports no groups and no dilation"),
        (lambda x: F.adaptive_avg_pool2d(x, 5), "windows of different sizes from (16, 16) to (5, 5)"),
        (lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), "set count_include_pad=True"),
        (lambda x: F.pad(x, (1, 1, 1, 1), value=1.0), "pads with other values than zero"),
        (lambda x: F.avg_pool2d(x, 2, divisor_override=3), "average pool has no ceil_mode and no divisor"),
        (lambda x: F.max_pool2d(x, 2, 1, dilation=2), "max pool supports no dilation, got (2, 2)"),
        (lambda x: F.max_pool2d(x, 3, 3, dilation=(1, 2)), "max pool supports no dilation, got (1, 2)"),
    ],
)
def test_what_litert_does_not_have_is_a_sentence(op, sentence: str, tmp_path) -> None:
    class Probe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)
            self.op = op if isinstance(op, nn.Module) else None

        def forward(self, x: Tensor) -> Tensor:
            return self.last((self.op or op)(self.first(x)))

    (tmp_path / "model.tflite").write_bytes(b"old")
    with pytest.raises(ValueError, match=re.escape(sentence)):
        export_litert(prepared(Probe()), X[:1], tmp_path / "model.tflite")
    assert (tmp_path / "model.tflite").read_bytes() == b"old"


def test_arguments_of_other_types_are_sentences(tmp_path) -> None:
    model = prepared(nn.Sequential(nn.Conv2d(3, 2, 1)))
    with pytest.raises(TypeError, match="export_litert: path must be the file to write, got a Sequential; write path="):
        export_litert(model, X, model)
    with pytest.raises(IsADirectoryError, match="export_litert: path must be the file to write, got the folder"):
        export_litert(model, X, tmp_path)
    with pytest.raises(TypeError, match="export_litert: example_inputs do not fit the model: a list is one argument"):
        export_litert(model, [X], tmp_path / "model.tflite")
    unsigned = prepared(nn.Sequential(nn.Conv2d(3, 2, 1)), backend="onnxruntime")
    with pytest.raises(
        ValueError, match="'activation_quantizers.input_1' is torch.uint8, but LiteRT's kernels support"
    ):
        export_litert(unsigned, X, tmp_path / "model.tflite")


def test_files_and_inputs_that_do_not_fit(tmp_path) -> None:
    model = prepared(Net())
    converted = qt.convert(model)
    path = export_litert(model, X, tmp_path / "model.tflite", verify=False).path
    with pytest.raises(ValueError, match=r"the file takes inputs of \(2, 3, 16, 16\), got \(3, 3, 16, 16\)"):
        verify(converted, MORE[:3], path, BOTH)
    with pytest.raises(ValueError, match=r"do not read the same file; call verify for each file"):
        verify(converted, X, path, ("litert", "onnxruntime"))
    with pytest.raises(ValueError, match="the file has a quantizer 'activation_quantizers.x', and the model does not"):
        verify(qt.convert(prepared(nn.Sequential(nn.Conv2d(3, 2, 1)))), X, path, BOTH)
    with pytest.raises(ValueError, match="unknown io_type of export_litert: 'uint8'"):
        export_litert(model, X, path, io_type="uint8")
    other = tmp_path / "other.tflite"
    other.write_bytes(b"no flatbuffer")
    with pytest.raises(UnreadableFileError, match="is not a LiteRT file"):
        verify(converted, X, other, BOTH)
    other.write_bytes(path.read_bytes()[:200])
    with pytest.raises(UnreadableFileError, match="LiteRT cannot open"):
        verify(converted, X, other, BOTH)


def test_a_file_before_the_weights_changed_is_found(tmp_path) -> None:
    model = prepared(Net())
    path = export_litert(model, X[:1], tmp_path / "model.tflite").path
    with torch.no_grad():
        model.get_submodule("first").weight.mul_(-1)
    found = verify(qt.convert(model), X, path, ("litert",), progress=False)
    with pytest.raises(RuntimeError, match="the weights of the file differ from the model's at first.weight_quantizer"):
        found.check()


def test_the_package_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(table, "find_spec", lambda name: None)
    with pytest.raises(
        ImportError, match="export_litert needs ai_edge_litert, which is not installed; run: pip install"
    ):
        export_litert(prepared(Net()), X, tmp_path / "model.tflite")


KILLED = """
import os, signal, sys
import torch, qtoolkit as qt
from pathlib import Path
from torch import nn
model = qt.prepare(nn.Sequential(nn.Conv2d(3, 4, 3)).eval(), torch.randn(1, 3, 8, 8), "litert")
qt.calibrate(model, [torch.randn(1, 3, 8, 8)], progress=False)
Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
qt.export_litert(model, torch.randn(1, 3, 8, 8), sys.argv[1])
"""


def test_a_killed_process_leaves_the_old_file(tmp_path) -> None:
    path = tmp_path / "model.tflite"
    path.write_bytes(b"old")
    done = processes.python("-c", KILLED, path)
    assert done.returncode == -signal.SIGKILL
    assert path.read_bytes() == b"old"


# ---- real networks


@pytest.mark.slow
@needs_data
def test_real_nets_compute_their_formulas(tmp_path) -> None:
    """ResNet-20, FSRCNN's integer layers and MLPerf Tiny's networks: no code of a kernel differs, and so none end to end."""
    pytest.importorskip("timm", reason="the benchmark's networks are not there; pip install -r requirements-zoo.txt")
    for name, model, calibration, images in import_module("benchmarks.pages.litert").networks(DATA, quick=True):
        x = images[:1, :, :48, :48] if name.startswith("FSRCNN") else images[:1]
        quantized = qt.prepare(model, x, "litert")
        qt.calibrate(quantized, [calibration[:16]], progress=False)
        content = export_litert(quantized, x, tmp_path / "model.tflite", verify=False).path.read_bytes()
        for node in nodes_of(content, runs(content, nhwc(x))):
            if node.output.data.dtype == np.int8:
                assert np.array_equal(KERNELS[node.name](node), node.output.data), f"{name}: {node.name}"


# ---- Arm's compiler for Ethos-U


def flash_of(path: Path) -> float:
    """Return the KiB of flash that Vela's file needs, all of whose ops run on the Ethos-U55."""
    options = ("--accelerator-config", "ethos-u55-128", "--output-dir", str(path.parent))
    done = processes.python("-c", "from ethosu.vela.vela import main; main()", path, *options)
    assert done.returncode == 0, done.stderr
    assert "CPU operators = 0 (0.0%)" in done.stdout
    return float(re.search(r"Total Off-chip Flash used +([\d.]+) KiB", done.stdout)[1])


@pytest.mark.slow
def test_vela_takes_all_ops_and_stores_four_bit_weights_in_less(tmp_path) -> None:
    pytest.importorskip("ethosu.vela", reason="files are not compiled for Ethos-U; pip install ethos-u-vela")
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU6(), nn.MaxPool2d(2))
    default, flash = qt.backends["litert"].qconfig, {}
    for bits in (8, 4):
        mapping = qt.QConfigMapping().set_global(replace(default, weight=replace(default.weight, bits=bits)))
        found = qt.prepare(model.eval(), MORE[:1], "litert", qconfig_mapping=mapping)
        qt.calibrate(found, [MORE], progress=False)
        result = export_litert(found, X[:1], tmp_path / f"w{bits}.tflite", io_type="int8", verify=False)
        assert result.float_layers == ()
        flash[bits] = flash_of(result.path)
    assert flash[4] < 0.7 * flash[8]
