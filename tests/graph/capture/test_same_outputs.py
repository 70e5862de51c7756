"""A graph computes what the model's forward does for the example inputs, or `prepare` says that it does not."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt

X = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(0))


class Recurrent(nn.Module):
    """A recurrent layer whose state a function chooses."""

    def __init__(self, kind: type[nn.Module], state: Callable[[object], Tensor]) -> None:
        super().__init__()
        self.layer, self.head, self.state = kind(8, 8), nn.Linear(8, 4), state

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.state(self.layer(x)[1])[0])


def prepared(model: nn.Module, x: Tensor = X) -> nn.Module:
    found = qt.prepare(model.eval(), (x,), backend="tensorrt")
    qt.calibrate(found, [x], progress=False)
    return found


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("of", [tuple, (list, tuple)])
def test_isinstance_tells_what_a_layer_returns(kind: type[nn.Module], of: type | tuple) -> None:
    torch.manual_seed(0)
    model = Recurrent(kind, lambda state: state[1] if isinstance(state, of) else state)
    found = prepared(model)
    with qt.disable_quantization(found):
        assert torch.equal(found(X), model(X))


def test_isinstance_tells_sizes_from_other_values() -> None:
    class Halved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            size = x.shape[0]
            size = (size, 1) if isinstance(size, int) else size
            assert (isinstance(x, int | tuple), isinstance(x, Tensor), isinstance(x.shape, tuple)) == (
                False,
                True,
                True,
            )
            return self.layer(x) / size[0]

    model = Halved()
    found = prepared(model)
    with qt.disable_quantization(found):
        assert torch.equal(found(X), model(X))


class Deciding(nn.Module):
    """A forward with a line of Python that a function is."""

    def __init__(self, decide: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.head, self.decide, self.calls = nn.Linear(8, 8), nn.Linear(8, 4), decide, 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.decide(self, self.layer(x)))


def by_count(model: nn.Module, x: Tensor) -> Tensor:
    model.calls += 1
    return x if model.calls % 2 else -x


@pytest.mark.parametrize(
    ("decide", "difference"),
    [
        (lambda m, x: -x if type(x) is Tensor else x, "computes other values than the model in output 0"),
        (lambda m, x: x[:2] if type(x.size(0)) is int else x, "returns the shape (5, 3, 4) in output 0, and the model (2,"),
        (by_count, "reads and assigns to attribute 'calls', which a graph does not record"),
    ],
    ids=["the type of a tensor", "the type of a size", "a count of calls"],
)  # fmt: skip
def test_what_a_trace_does_not_see_is_an_error(decide, difference: str) -> None:
    torch.manual_seed(0)
    model = Deciding(decide)
    with pytest.raises(qt.UntraceableError, match=re.escape(difference)) as error:
        qt.prepare(model.eval(), (X,), backend="tensorrt")
    assert "untraced" in str(error.value)
    assert "qtoolkit.quant_modules.replace(model, backend=...)" in str(error.value)


def test_the_comparison_leaves_the_model_as_it_was() -> None:
    torch.manual_seed(0)
    model = Deciding(lambda m, x: x + m.seen.add_(1)).train()
    random = torch.get_rng_state()
    found = qt.prepare(model, (X,), backend="tensorrt")
    assert model.seen == 0
    assert torch.equal(torch.get_rng_state(), random)
    assert (model.training, found.training) == (True, True)


def test_a_forward_that_draws_numbers_is_compared_with_the_same_numbers() -> None:
    torch.manual_seed(0)
    model = Deciding(lambda m, x: nn.functional.dropout(x, 0.5, training=True))
    assert qt.prepare(model.eval(), (X,), backend="tensorrt") is not None


def test_concrete_args_and_keyword_inputs_are_compared_too() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x: Tensor, double: bool = False, factor: float = 1.0) -> Tensor:
            return self.layer(x) * (2 if double else 1) * factor

    assert (
        qt.prepare(Scaled().eval(), {"x": X, "factor": 3.0}, concrete_args={"double": True}, backend="tensorrt")
        is not None
    )


def test_a_graph_that_fails_where_the_model_runs_is_an_error() -> None:
    torch.manual_seed(0)
    model = Deciding(lambda m, x: x if type(x) is Tensor else x.reshape(-1, 3))
    with pytest.raises(
        qt.UntraceableError, match=r"its graph fails \(RuntimeError: mat1 and mat2 shapes cannot be multiplied"
    ):
        qt.prepare(model.eval(), (X,), backend="tensorrt")


def test_a_forward_may_change_its_input_in_place() -> None:
    class Scaling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.mul_(2))

    assert qt.prepare(Scaling().eval(), (X.clone(),), backend="tensorrt") is not None


class IsTrue(nn.Module):
    """A forward whose branch a trace does not see: the mode of a traced module is no bool."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (2 if self.training is True else 1)


class KeepsAverage(nn.Module):
    """The same, with a buffer that training writes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        if self.training is True:
            self.average.lerp_(x.mean((0, 1)), 0.1)
        return self.layer(x)


@pytest.mark.parametrize(
    ("net", "what"), [(IsTrue, "computes other values than the model in output 0"),
        (KeepsAverage, "leaves other values than the model in 'average'")],
)  # fmt: skip
def test_a_graph_is_compared_in_training_mode_too(net: type[nn.Module], what: str) -> None:
    model = net()
    with pytest.raises(qt.UntraceableError, match=f"{what}, in training mode"):
        qt.prepare(model.train(), X, backend="onnxruntime")
    assert qt.prepare(model.eval(), X, backend="onnxruntime") is not None
