"""Targets with integer kernels that return codes: onnxruntime. Which outputs are quantized, and which ops are left in float."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt
from qtoolkit.graph.lint import lint
from qtoolkit.verdicts import Cause

X = torch.randn(2, 4, 6, 6)


class Probe(nn.Module):
    """A function between convolutions."""

    def __init__(self, function) -> None:
        super().__init__()
        self.first, self.side, self.last = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.slopes, self.up = nn.Parameter(torch.full((4,), 0.1)), nn.ConvTranspose2d(4, 4, 2, 2)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self, self.first(x), x))


class Returned(Probe):
    """A function of a convolution, whose value is returned."""

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.first(x), x)


def prepared_probe(function, kind: type[nn.Module] = Probe, **changes: object) -> nn.Module:
    prepared = qt.prepare(kind(function).eval(), X, replace(qt.backends["onnxruntime"], **changes))
    assert lint(prepared) == ()
    return prepared


def quantized(prepared: nn.Module) -> set[str]:
    return {name.removeprefix("activation_quantizers.") for name in qt.quantizers_of(prepared) if "weight" not in name}


@pytest.mark.parametrize(
    ("activation", "names"),
    [
        (lambda m, y, x: F.relu(y), {"x", "relu"}),  # the saturation of the QuantizeLinear replaces it
        (lambda m, y, x: F.relu6(y), {"x", "relu6"}),
        (lambda m, y, x: F.prelu(y, m.slopes), {"x", "first", "prelu"}),
        (lambda m, y, x: F.silu(y), {"x", "first", "silu_sigmoid", "silu"}),
        (lambda m, y, x: F.hardswish(y), {"x", "first", "hardswish"}),
        (lambda m, y, x: F.leaky_relu(y), {"x", "first", "leaky_relu"}),  # an integer kernel of its own
        (lambda m, y, x: torch.sigmoid(y), {"x", "first", "sigmoid"}),
        (lambda m, y, x: F.prelu(y + x, m.slopes), {"x", "first", "add", "prelu"}),
        (lambda m, y, x: F.relu(y + x), {"x", "first", "relu"}),
        (lambda m, y, x: torch.exp(y), {"x", "first", "exp"}),
        (lambda m, y, x: F.relu(m.up(y)), {"x", "first", "relu"}),
        (lambda m, y, x: torch.exp(m.up(y)), {"x", "first", "up", "exp"}),
        (lambda m, y, x: F.interpolate(y, scale_factor=2, mode="bilinear"), {"x", "first", "interpolate"}),
    ],
)
def test_the_output_of_a_convolution_is_quantized_before_what_does_not_join_it(activation, names: set[str]) -> None:
    assert quantized(prepared_probe(activation)) == names


def test_an_activation_that_does_not_join_is_reported_in_float() -> None:
    prepared = prepared_probe(lambda m, y, x: F.mish(y))
    verdict = prepared.plan.status["mish"]
    assert (verdict.status, verdict.text) == ("float", "float: a mish, which onnxruntime computes in float")
    assert "before mish" not in str(qt.quantization_report(prepared))


def test_a_linear_layer_returns_floats_and_joins_its_activation() -> None:
    body = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6))
    assert quantized(qt.prepare(body.eval(), X, "onnxruntime")) == {"input_1", "_1"}


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (lambda m, y, x: y, {"x"}),
        (lambda m, y, x: y.flatten(1), {"x"}),
        (lambda m, y, x: F.relu(y), {"x"}),
        (lambda m, y, x: torch.tanh(y), {"x", "first"}),
    ],
)
def test_what_only_the_outputs_of_the_graph_take_keeps_its_precision(function, names: set[str]) -> None:
    assert quantized(prepared_probe(function, Returned)) == names
    assert quantized(prepared_probe(function, Returned, quantize_graph_outputs=True)) > {"x"}


def test_all_that_take_an_output_take_it_quantized() -> None:
    """A second user in float would keep the convolution from its integer kernel."""

    def function(m: Probe, y: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return m.last(y), torch.exp(y), y

    prepared = prepared_probe(function, Returned)
    (line,) = (line for line in qt.quantization_report(prepared).tensors if line.source == "first")
    assert set(line.consumers) == {"last", "exp", "output"}


class Transformer(nn.Module):
    """A residual stream: adds that layer norms and further adds take."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm, self.last = nn.LayerNorm(6), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(self.norm(x))
        return self.last(x + self.second(self.norm(x)))


def test_adds_of_a_residual_stream_stay_float() -> None:
    prepared = qt.prepare(Transformer().eval(), X, "onnxruntime")
    assert {prepared.plan.status[name].status for name in ("add", "add_1")} == {"float"}
    assert quantized(prepared) == {"norm", "norm_1"}


def test_an_op_without_an_integer_kernel_stays_float_unless_a_rule_names_it() -> None:
    resize = nn.Upsample(scale_factor=2, mode="bilinear")
    model = nn.Sequential(nn.Conv2d(4, 4, 1), resize, nn.Conv2d(4, 4, 1)).eval()
    assert qt.prepare(model, X, "onnxruntime").plan.status["_1"].status == "float"
    rule = qt.QConfigMapping().set_global(qt.backends["onnxruntime"].qconfig)
    named = qt.prepare(model, X, "onnxruntime", rule.set_module_name("1", qt.backends["onnxruntime"].qconfig))
    assert named.plan.status["_1"].status == "quantized"


def test_unknown_kinds_are_errors() -> None:
    with pytest.raises(
        ValueError, match=r"unknown kind of op in Backend 'onnxruntime': 'convs'; did you mean 'conv'\?"
    ):
        replace(qt.backends["onnxruntime"], needs_quantized_output=("convs",))


@pytest.mark.parametrize("backend", ["onnxruntime", "tensorrt", "tensorrt8", "tensorrt-nlp"])
def test_dot_product_attention_stays_float_unless_a_rule_names_it(backend: str) -> None:
    """onnxruntime and TensorRT compute it in float from quantized inputs too: Q/DQ nodes only cost."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(6, 18), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(F.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1)))

    name, x = "scaled_dot_product_attention", torch.randn(2, 5, 6)
    assert quantized(qt.prepare(Attention().eval(), x, backend)) == {"x", name}
    mapping = qt.QConfigMapping().set_module_name(name, qt.backends[backend].qconfig)
    assert quantized(qt.prepare(Attention().eval(), x, backend, mapping)) == {"x", "qkv", name}


def up(function=lambda m, y, x: m.up(y), **changes: object) -> tuple[bool, set[str]]:
    """Return whether the transposed convolution is quantized, and the quantized tensors."""
    prepared = prepared_probe(function, Returned, **changes)
    return isinstance(prepared.get_submodule("up"), qt.nn.QuantConvTranspose2d), quantized(prepared)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, y, x: m.up(y),
        lambda m, y, x: F.relu(m.up(y)),
        lambda m, y, x: m.up(y).clamp(0, 1).flatten(1),
        lambda m, y, x: (m.up(y), m.up(x)),  # each of its calls
        lambda m, y, x: F.conv_transpose2d(y, m.up.weight, stride=2),
    ],
)
def test_a_transposed_convolution_that_is_returned_stays_float(function) -> None:
    """It has no integer kernel without a quantized output, and Q/DQ around it would only cost."""
    assert up(function) == (False, {"x", "first"})


def test_a_returned_transposed_convolution_is_reported() -> None:
    left = qt.quantization_report(prepared_probe(lambda m, y, x: m.up(y), Returned)).left_float
    (line,) = (line for line in left if line.verdict.cause is not Cause.NOT_CALLED)
    assert (line.name, line.reason) == (
        "up",
        "float: its output is not quantized, and onnxruntime computes it in integers only between two quantized tensors",
    )


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (lambda m, y, x: m.last(m.up(y)), {"x", "first", "up"}),
        (lambda m, y, x: (m.up(y), m.last(m.up(x))), {"x", "first", "up_1"}),  # one of its calls goes on
        (lambda m, y, x: torch.exp(m.up(y)), {"x", "first", "up"}),
    ],
)
def test_one_that_is_taken_again_is_quantized(function, names: set[str]) -> None:
    assert up(function) == (True, names)


def test_a_returned_transposed_convolution_is_quantized_by_a_rule_that_names_it_or_a_target_with_other_kernels() -> (
    None
):
    config = qt.backends["onnxruntime"].qconfig
    named = qt.QConfig(config.activation, qt.QuantSpec(axis=1))
    for mapping, expected in (
        (qt.QConfigMapping().set_module_name("up", named), True),
        (qt.QConfigMapping().set_object_type(nn.ConvTranspose2d, named), True),
        (qt.QConfigMapping().set_global(config), False),
    ):
        prepared = qt.prepare(Returned(lambda m, y, x: m.up(y)).eval(), X, "onnxruntime", mapping)
        assert isinstance(prepared.get_submodule("up"), qt.nn.QuantConvTranspose2d) is expected
    assert up(quantize_graph_outputs=True) == (True, {"x", "first", "up"})
    assert up(sub_pixel=False) == (True, {"x", "first"})
