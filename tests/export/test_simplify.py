"""Files compute what the model does, where rules of onnxscript or an exporter's form of an op would change values."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt

Tail = Callable[[Tensor], Tensor]


class Behind(nn.Module):
    """A quantized layer, and a function of its output."""

    def __init__(self, tail: Tail) -> None:
        super().__init__()
        self.fc, self.tail = nn.Linear(8, 8, bias=False), tail
        self.register_buffer("eps", torch.tensor(2e-9))

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.fc(x))


class WithBuffer(Behind):
    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        return y / (self.eps + y.norm(dim=1, keepdim=True))


def inputs() -> Tensor:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    x[1] = 0
    return x


def outputs(model: nn.Module, x: Tensor, path: Path, **options: Any) -> tuple[Tensor, Tensor]:
    """Return the outputs of a quantized model and of its file."""
    graph = options.pop("graph", True)
    backend = options.pop("backend", "onnxruntime")
    if graph:
        prepared = qt.prepare(model.eval(), x, backend=backend)
    else:
        prepared = qt.quant_modules.replace(model.eval(), backend=backend)
    qt.calibrate(prepared, [x], progress=False)
    converted = qt.convert(prepared)
    result = qt.export_onnx(converted, x, path, **options)
    session = onnxruntime.InferenceSession(str(result.path))
    assert len(session.get_inputs()) == 1
    (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    return converted(x).detach(), torch.from_numpy(y)


TAILS: dict[str, Tail] = {
    "a small eps": lambda y: y / (y.norm(dim=1, keepdim=True) + 1e-9),
    "an eps before": lambda y: y / (1e-10 + y.norm(dim=1, keepdim=True)),
    "a factor near 1": lambda y: (y * 1.000003 - 3e-9) / 1.000002,
    "a double": lambda y: y.double() + 1e-11,
    "zero": lambda y: (y + 0.0) * 1.0,
    "index_add": lambda y: y.index_add(0, torch.arange(4), y * 2),
    "index_put": lambda y: y.index_put((torch.arange(4),), y * 2, accumulate=True),
    "a ReLU of a clip": lambda y: F.relu(y.clamp(max=-0.2)).add(1).int(),
    "clips that do not meet": lambda y: (y.clamp(max=-0.2).clamp(min=0.3) * 10).int(),
    "two clips": lambda y: F.relu(y.clamp(max=0.3)) + F.relu(y.clamp(max=0.6)) * 2,
    "log_sigmoid": lambda y: F.logsigmoid(100 * y),
    "logaddexp": lambda y: torch.logaddexp(300 * y, y),
    "integers": lambda y: (y * 3).long().to(y.dtype) + 0.25,
}


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize("tail", TAILS)
def test_a_file_has_the_values_of_the_model(tail: str, exporter: str, tmp_path: Path) -> None:
    wanted, y = outputs(Behind(TAILS[tail]), inputs(), tmp_path / "m.onnx", exporter=exporter)
    torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)


def test_an_eps_in_a_buffer(tmp_path: Path) -> None:
    wanted, y = outputs(WithBuffer(nn.Identity()), inputs(), tmp_path / "m.onnx")
    torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)


def test_an_eps_in_a_branch(tmp_path: Path) -> None:
    def tail(y: Tensor) -> Tensor:
        return torch.cond(y.sum() > -1e9, lambda y: y / (y.norm(dim=1, keepdim=True) + 1e-9), lambda y: 2 * y, (y,))

    wanted, y = outputs(Behind(tail), inputs(), tmp_path / "m.onnx", graph=False)
    torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.int8])
def test_a_cast_to_integers_in_a_float16_file(kind: torch.dtype, tmp_path: Path) -> None:
    model = Behind(lambda y: (y * 3).to(kind).to(y.dtype) + 0.25)
    wanted, y = outputs(model, inputs(), tmp_path / "m.onnx", backend="tensorrt")
    assert torch.equal(y, wanted)


class OfInput(nn.Module):
    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.fc, self.function = nn.Linear(8, 8), forward

    def forward(self, x: Tensor) -> Any:
        return self.function(self.fc, x)


@pytest.mark.parametrize("backend", ["tensorrt", "onnxruntime"])
@pytest.mark.parametrize(
    "function", [lambda fc, x: fc(F.silu(x)), lambda fc, x: (fc(x), x), lambda fc, x: fc(x) + F.silu(x)]
)
def test_what_an_input_shares_its_type_with(function: Callable[..., Any], backend: str, tmp_path: Path) -> None:
    model, x = OfInput(function).eval(), inputs()
    prepared = qt.prepare(model, x, backend=backend)
    qt.calibrate(prepared, [x], progress=False)
    result = qt.export_onnx(qt.convert(prepared), x, tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(str(result.path))
    assert {each.type for each in (*session.get_inputs(), *session.get_outputs())} == {"tensor(float)"}


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_a_tensor_that_is_returned_twice_has_both_names(exporter: str, tmp_path: Path) -> None:
    def twice(fc: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        y = fc(x)
        return y, y, y.relu()

    names = ["logits", "boxes", "scores"]
    prepared = qt.prepare(OfInput(twice).eval(), inputs(), backend="onnxruntime")
    qt.calibrate(prepared, [inputs()], progress=False)
    result = qt.export_onnx(qt.convert(prepared), inputs(), tmp_path / "m.onnx", output_names=names, exporter=exporter)
    session = onnxruntime.InferenceSession(str(result.path))
    assert [each.name for each in session.get_outputs()] == names


class Queries(nn.Module):
    """A layer on learned queries, and an addend that is no bias."""

    def __init__(self, addend: Callable[[Tensor], Tensor], batch: int = 1) -> None:
        super().__init__()
        self.fc, self.addend = nn.Linear(8, 8, bias=False), addend
        self.queries = nn.Parameter(torch.randn(batch, 5, 8))
        self.other = nn.Parameter(torch.randn(5, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.queries) + self.addend(x) + self.other


@pytest.mark.parametrize("dynamic_batch", [False, True])
def test_what_is_added_to_queries_is_no_bias(dynamic_batch: bool, tmp_path: Path) -> None:
    model = Queries(lambda x: x[:, None, :])
    wanted, y = outputs(model, inputs(), tmp_path / "m.onnx", dynamic_batch=dynamic_batch)
    torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("backend", "name"), [("tensorrt", "half"), ("onnxruntime", "sizes"), ("onnxruntime", "0.weight.codes")]
)
def test_inputs_may_have_the_names_of_our_constants(backend: str, name: str, tmp_path: Path) -> None:
    x = torch.randn(2, 4, 8, 8)
    model = nn.Sequential(nn.ConvTranspose2d(4, 4, 3, 2, groups=2), nn.SiLU(), nn.Conv2d(4, 4, 3))
    _, y = outputs(model, x, tmp_path / "m.onnx", backend=backend, input_names=[name])
    assert bool(y.isfinite().all())


def test_a_logarithm_that_overflows_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        RuntimeError, match="an output is infinite in the runtime or in the model, and finite in the other"
    ):
        outputs(Behind(lambda y: (100 * y).sigmoid().log()), 0.2 * inputs(), tmp_path / "m.onnx")
