"""Tensors of integers and booleans, such as masks, and tuples of tensors are not quantized."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt
from qtoolkit.verdicts import Status


class Masked(nn.Module):
    """An op of a layer's output and a mask, before another layer."""

    def __init__(self, op: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.op, self.first, self.last = op, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.last(self.op(self.first(x), mask))  # type: ignore[no-any-return]


OF_A_MASK: dict[str, Callable[[Any, Any], Any]] = {
    "mul": lambda x, mask: x * mask.unsqueeze(-1),
    "rmul": lambda x, mask: mask[:, :, None] * x,
    "add": lambda x, mask: x + mask[..., None],
    "cat": lambda x, mask: torch.cat((x[..., :3], mask.unsqueeze(-1)), -1),
}
COMPUTED: dict[str, Callable[[Any, Any], Any]] = {  # by the names of the ops, without example inputs
    "greater": lambda x, mask: x * (x > 0),
    "moved": lambda x, mask: x * (x.sum(-1) != 0).unsqueeze(-1),
    "of both": lambda x, mask: x * ((x > 0) & ~(x > 1)),
    "places": lambda x, mask: x + x.argmax(-1, keepdim=True),
}
BACKENDS = ("onnxruntime", "tensorrt", "snpe", "litert")


@pytest.mark.sweep(2)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
@pytest.mark.parametrize("op", OF_A_MASK.values(), ids=OF_A_MASK)
def test_a_mask_has_no_quantizer(op: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype, backend: str) -> None:
    torch.manual_seed(0)
    model, inputs = Masked(op).eval(), (torch.randn(5, 3, 4), torch.randint(0, 2, (5, 3)).to(dtype))
    assert is_close(qt.prepare(model, inputs, backend=backend), model, inputs)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("with_examples", [True, False])
@pytest.mark.parametrize("op", COMPUTED.values(), ids=COMPUTED)
def test_a_mask_that_the_model_computes_has_no_quantizer(
    op: Callable[[Tensor, Tensor], Tensor], with_examples: bool, backend: str
) -> None:
    torch.manual_seed(0)
    model, inputs = Masked(op).eval(), (torch.randn(5, 3, 4), torch.ones(5, 3))
    assert is_close(qt.prepare(model, inputs if with_examples else None, backend=backend), model, inputs)


def test_the_op_of_a_mask_is_reported_as_float() -> None:
    inputs = (torch.randn(5, 3, 4), torch.ones(5, 3, dtype=torch.bool))
    plan = qt.prepare(Masked(OF_A_MASK["mul"]), inputs, backend="onnxruntime").plan
    assert plan is not None
    assert plan.status["mul"].status is Status.FLOAT
    assert "takes integers, booleans (such as a mask)" in plan.status["mul"].text


def test_a_rule_for_the_op_quantizes_its_other_input_alone() -> None:
    mapping = qt.QConfigMapping().set_module_name("mul", qt.QConfig(qt.QuantSpec(), qt.QuantSpec()))
    inputs = (torch.randn(5, 3, 4), torch.ones(5, 3, dtype=torch.bool))
    prepared = qt.prepare(Masked(OF_A_MASK["mul"]), inputs, backend="tensorrt", qconfig_mapping=mapping)
    assert prepared.plan is not None
    assert {edge.source for edge in prepared.plan.edges if edge.consumer == "mul"} == {"first"}


SPLIT: dict[str, Callable[[Any], Any]] = {
    "swapped": lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
    "last": lambda x: torch.cat(x.split(1, 1)[1:], 1),
    "of a slice": lambda x: torch.cat(x.unbind(1)[1:][::-1], 1).unflatten(1, (3, -1)),
    "one of a slice": lambda x: torch.split(x, 2, dim=1)[:1][0],
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("with_examples", [True, False])
@pytest.mark.parametrize("op", SPLIT.values(), ids=SPLIT)
def test_some_of_the_tensors_of_a_split_lie_on_the_grid_of_its_input(
    op: Callable[[Tensor], Tensor], with_examples: bool, backend: str
) -> None:
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 4, 3), nn.LazyConv2d(5, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(op(self.first(x)))  # type: ignore[no-any-return]

    x = torch.randn(2, 3, 8, 8)
    model = Net().eval()
    model(x)
    prepared = qt.prepare(model, x if with_examples else None, backend=backend)
    assert is_close(prepared, model, (x,))
    assert prepared.plan is not None
    assert len({edge.quantizer for edge in prepared.plan.edges if edge.source == "first"}) == 1
    assert {edge.quantizer for edge in prepared.plan.edges if edge.consumer == "last"} - {"last.weight_quantizer"}


def is_close(prepared: nn.Module, model: nn.Module, inputs: tuple[Tensor, ...]) -> bool:
    qt.calibrate(prepared, [inputs], progress=False)
    expected = model(*inputs)
    error = (qt.convert(prepared)(*inputs) - expected).abs().max() / expected.abs().max()
    return bool(error < 0.03)


class Spectra(nn.Module):
    """Complex layers and ops, and a float layer behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv1d(2, 4, 3, dtype=torch.complex64), nn.Linear(4, 3)

    def forward(self, z: Tensor) -> Tensor:
        y = self.conv(z)
        return self.fc(torch.matmul(y + y.conj(), y.transpose(1, 2)).abs().mean(-1))


@pytest.mark.parametrize("route", ["graph", "modules"])
def test_complex_numbers_stay_as_they_are(route: str) -> None:
    torch.manual_seed(0)
    model, z = Spectra().eval(), torch.randn(3, 2, 8, dtype=torch.complex64)
    quantize = qt.prepare if route == "graph" else qt.quant_modules.replace
    result = quantize(model, z, backend="tensorrt") if route == "graph" else quantize(model, backend="tensorrt")
    qt.calibrate(result, [z], progress=False)
    with qt.disable_quantization(result):
        assert torch.equal(result(z), model(z))
    assert torch.equal(qt.convert(result)(z), result(z))
    layers = {line.name: line.reason for line in qt.quantization_report(result).layers}
    assert layers["conv"] == "float: its weight is complex"
    assert [name for name, quantizer in qt.quantizers_of(result).items() if not quantizer.of_weight] == (
        ["activation_quantizers.mean"] if route == "graph" else ["fc.input_quantizer"]
    )


class Spectral(nn.Module):
    """A layer of a Fourier neural operator: a product of modes with complex weights, which are stored as such or as pairs."""

    def __init__(self, pairs: bool) -> None:
        super().__init__()
        weight = torch.randn(4, 5, 3, dtype=torch.complex64)
        self.pairs, self.weight = pairs, nn.Parameter(torch.view_as_real(weight).clone() if pairs else weight)
        self.first, self.last = nn.Conv1d(2, 4, 1), nn.Conv1d(5, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        modes = torch.fft.rfft(self.first(x))[..., :3]
        weight = torch.view_as_complex(self.weight) if self.pairs else self.weight
        return self.last(torch.fft.irfft(torch.einsum("bim,iom->bom", modes, weight), n=x.shape[-1]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pairs", [True, False])
def test_a_complex_weight_of_a_function_stays_as_it_is(pairs: bool, backend: str) -> None:
    torch.manual_seed(0)
    model, inputs = Spectral(pairs).eval(), (torch.randn(3, 2, 8),)
    prepared = qt.prepare(model, inputs, backend=backend)
    assert is_close(prepared, model, inputs)
    assert prepared.plan is not None
    assert "complex numbers" in prepared.plan.status["einsum"].text
    assert [name for name in qt.quantizers_of(prepared) if name.startswith("weight_quantizers")] == []


def test_complex_inputs_without_examples_are_refused_with_a_remedy() -> None:
    prepared = qt.prepare(Spectra().eval(), backend="tensorrt")
    with pytest.raises(
        TypeError, match="a tensor of torch.complex64, .* or give complex inputs in the example_inputs of"
    ):
        qt.calibrate(prepared, [torch.randn(3, 2, 8, dtype=torch.complex64)], progress=False)
