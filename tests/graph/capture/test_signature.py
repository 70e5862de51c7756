"""Decorated forwards, and forwards with variadic arguments for which the example inputs give nothing: they are traced."""

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt
from tests import nets
from tests.nets import linear_of


class Detector(nn.Module):
    """Passes on what it does not know, as the models of ultralytics do."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = linear_of(), linear_of()

    def forward(self, x: Tensor | dict[str, Tensor], *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(x, dict):
            return self.loss(x, *args, **kwargs)
        return self.predict(x, *args, **kwargs)

    def predict(self, x: Tensor, profile: bool = False, augment: bool = False) -> Tensor:
        return self.out(torch.relu(self.fc(x))) if not (profile or augment) else x

    def loss(self, batch: dict[str, Tensor], scale: float = 1.0) -> Tensor:
        return scale * self.predict(batch["image"]).mean()


def with_flags(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a forward as transformers does: flags are taken from the keywords and set in them."""

    @functools.wraps(forward)
    def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        as_dict = kwargs.pop("return_dict", None)
        if kwargs.get("use_cache") is None:
            kwargs["use_cache"] = False
        result = forward(self, *args, **kwargs)
        return result if as_dict is not False else (result,)

    return wrapper


class Decorated(Detector):
    @with_flags
    def forward(
        self,
        ids: Tensor,
        mask: Tensor | None = None,
        use_cache: bool | None = None,
        *,
        shift: float = 0.0,
        **kwargs: Any,
    ) -> Tensor:
        y = self.fc(ids) + shift
        return self.out(y if mask is None else y * mask)


class TwiceDecorated(Detector):
    @with_flags
    @with_flags
    def forward(self, ids: Tensor, use_cache: bool | None = None, *, shift: float = 0.0) -> Tensor:
        return self.out(self.fc(ids) + shift)


X, MASK = torch.randn(2, 4), torch.ones(2, 4)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(
    ("kind", "inputs"),
    [
        (Detector, (X,)),
        (Detector, {"x": X}),
        (Decorated, (X,)),
        (Decorated, (X, MASK)),
        (Decorated, {"ids": X, "mask": MASK}),
        (Decorated, {"mask": MASK, "ids": X, "shift": 2.0}),
        (TwiceDecorated, (X,)),
        (TwiceDecorated, {"ids": X}),
    ],
)
def test_variadic_arguments_without_values_are_empty(kind: type[nn.Module], inputs: Any, training: bool) -> None:
    model = kind().train(training)
    prepared = qt.prepare(model, inputs, backend="tensorrt")
    args, kwargs = (inputs, {}) if isinstance(inputs, tuple) else ((), inputs)
    with qt.disable_quantization(prepared):
        assert torch.equal(prepared(*args, **kwargs), model(*args, **kwargs))
        assert torch.equal(copy.deepcopy(prepared)(*args, **kwargs), model(*args, **kwargs))
    assert {line.name for line in qt.quantization_report(prepared).quantized} >= {"fc", "out"}
    with pytest.raises(TypeError, match="unexpected keyword argument 'augment'"):
        prepared(*args, **kwargs, augment=False)


def test_values_for_variadic_arguments_stay_inputs() -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = linear_of()

        def forward(self, x: Tensor, *more: Tensor) -> Tensor:
            return self.fc(x + more[0] * more[1])

    model, inputs = Sums(), (X, torch.randn(4), torch.randn(4))
    prepared = qt.prepare(model, inputs, backend="tensorrt")
    with qt.disable_quantization(prepared):
        assert torch.equal(prepared(X, MASK, 2 * MASK), model(X, MASK, 2 * MASK))


@pytest.mark.parametrize("kind", [Detector, Decorated])
def test_without_example_inputs_the_error_names_remedies_that_work(kind: type[nn.Module]) -> None:
    model = kind().eval()
    with pytest.raises(
        qt.UntraceableError,
        match=r"pass example_inputs.* by qtoolkit\.quant_modules\.replace\(model, backend=\.\.\.\)\.",
    ) as e:
        qt.prepare(model, backend="tensorrt")
    assert "args" not in str(e.value).partition("fix an argument")[2].partition("with concrete_args")[0]
    replaced = qt.quant_modules.replace(model, backend="tensorrt")
    nets.assert_float_when_off(replaced, model, X)


def test_each_error_of_a_model_that_cannot_be_traced_names_replace() -> None:
    model = nets.ControlFlow()
    with pytest.raises(
        qt.UntraceableError,
        match=r"untraced=\['block'\].* by qtoolkit\.quant_modules\.replace\(model, backend=\.\.\.\)\.",
    ):
        qt.prepare(model, backend="tensorrt")
    patched = linear_of()
    patched.forward = lambda x: x
    with pytest.raises(
        qt.UntraceableError,
        match=r"define forward in the class, or .*quant_modules\.replace\(model, backend=\.\.\.\)\.",
    ):
        qt.prepare(patched, backend="tensorrt")


@pytest.mark.parametrize("example", [None, {"ids": X, "more": X}], ids=["plain", "sized"])
def test_values_for_variadic_arguments_of_a_decorated_forward_are_refused(example: Any) -> None:
    with pytest.raises(
        qt.UntraceableError, match=r"decorated and takes \*args or \*\*kwargs, .* example_inputs give nothing for"
    ):
        qt.prepare(Decorated(), example, backend="tensorrt")


class WithKeywordOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: float = 2.0, *, y: Tensor, mask: Tensor | None = None) -> Tensor:
        z = self.fc(x) * scale + y
        return z if mask is None else z * mask


@pytest.mark.parametrize("example", [True, False])
def test_defaults_before_an_argument_without_one_are_kept(example: bool) -> None:
    model, x, y = WithKeywordOnly().eval(), torch.randn(2, 4), torch.randn(2, 4)
    prepared = qt.prepare(model, {"x": x, "y": y} if example else None, backend="tensorrt")
    qt.calibrate(prepared, [{"x": x, "y": y}], progress=False)
    for ours in (prepared, pickle.loads(pickle.dumps(prepared)), copy.deepcopy(prepared)):
        with qt.disable_quantization(ours):
            assert torch.equal(ours(x, y=y), model(x, y=y))
            assert torch.equal(ours(x=x, y=y), model(x, y=y))


ONES = torch.ones(4)


class Defaults(nn.Module):
    """Branches on a default that is a container."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = linear_of()


class ListDefault(Defaults):
    def forward(self, x: Tensor, scale: list[int] = [4, 2]) -> Tensor:  # noqa: B006
        return self.fc(x) * scale[1] if scale[0] != 1 else x


class TupleDefault(Defaults):
    def forward(self, x: Tensor, scale: tuple[float, ...] = (4, 2), shift: Tensor = ONES) -> Tensor:
        return self.fc(x) * scale[1] + shift if scale[0] != 1 else x


class DictDefault(Defaults):
    def forward(self, x: Tensor, *, scale: dict[str, Any] = {"a": [4, {"b": 2}]}) -> Tensor:  # noqa: B006
        return self.fc(x) * scale["a"][1]["b"] if scale["a"][0] != 1 else x


class DtypeDefault(Defaults):
    def forward(self, x: Tensor, scale: torch.dtype = torch.float32) -> Tensor:
        return self.fc(x.to(scale)) if scale.is_floating_point else x


@pytest.mark.parametrize("example", [None, (X,)], ids=["plain", "sized"])
@pytest.mark.parametrize(
    ("kind", "default", "other"),
    [
        (ListDefault, [4, 2], [1, 2]),
        (TupleDefault, (4, 2), (1, 2)),
        (DictDefault, {"a": [4, {"b": 2}]}, {}),
        (DtypeDefault, torch.float32, torch.int64),
    ],
)
def test_containers_that_are_left_out_are_fixed_at_their_defaults(
    kind: type[nn.Module], default: Any, other: Any, example: Any
) -> None:
    model = kind().eval()
    prepared = qt.prepare(model, example, backend="onnxruntime")
    qt.calibrate(prepared, [X], progress=False)
    for ours in (prepared, copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared))):
        nets.assert_float_when_off(ours, model, X)
        with qt.disable_quantization(ours):
            assert torch.equal(ours(X, scale=default), model(X))
        with pytest.raises(
            ValueError, match="argument 'scale' is .*prepare has fixed it at its default, .*example_inputs"
        ):
            ours(X, scale=other)
    assert qt.convert(prepared)(X).shape == X.shape


@pytest.mark.parametrize("example", [None, (X,)], ids=["plain", "sized"])
def test_a_tensor_that_is_a_default_is_fixed(example: Any) -> None:
    model = TupleDefault().eval()
    prepared = qt.prepare(model, example, backend="onnxruntime")
    sentence = "argument 'shift' has been fixed at its default: to pass a value, .*example_inputs"
    with qt.disable_quantization(prepared), pytest.raises(ValueError, match=sentence):
        prepared(X, shift=ONES)
    given = qt.prepare(model, {"x": X, "shift": ONES}, backend="onnxruntime")
    with qt.disable_quantization(given):
        assert torch.equal(given(X, shift=2 * ONES), model(X, shift=2 * ONES))


def test_a_container_that_the_example_inputs_give_stays_an_input() -> None:
    prepared = qt.prepare(ListDefault().eval(), (X, [4, 2]), backend="onnxruntime")
    with qt.disable_quantization(prepared):
        assert torch.equal(prepared(X, [4, 6]), 3 * prepared(X, [4, 2]))
