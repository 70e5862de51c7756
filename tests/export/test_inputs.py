"""What a file takes and returns: keyword inputs, containers, unused inputs, names, dtypes, and outputs that are no tensors."""

from collections.abc import Callable
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt
from qtoolkit.export import verify_onnx
from tests.nets import linear_of

EXPORTERS = ["dynamo", "torchscript"]
ROUTES = ["prepare", "replace"]
X, Y = torch.rand(3, 4), torch.rand(3, 4)


class Net(nn.Module):
    """A linear layer, called as a function of the module and the inputs says."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.fc, self.function = linear_of(4), function


class OfOne(Net):
    def forward(self, x: Any) -> Any:
        return self.function(self, x)


class OfTwo(Net):
    def forward(self, x: Any, y: Any) -> Any:
        return self.function(self, x, y)


class ByKeyword(Net):
    def forward(self, x: Any, *, y: Any) -> Any:
        return self.function(self, x, y)


def calibrated(model: nn.Module, inputs: Any, route: str = "prepare") -> nn.Module:
    model = model.eval()
    model = (
        qt.quant_modules.replace(model, backend="tensorrt10")
        if route == "replace"
        else qt.prepare(model, inputs, backend="onnxruntime")
    )
    qt.calibrate(model, [inputs], progress=False)
    return model


def names_of(path: Any) -> tuple[list[str], list[str]]:
    graph = onnx.load(str(path)).graph
    return [i.name for i in graph.input], [o.name for o in graph.output]


@pytest.fixture(params=EXPORTERS)
def exporter(request) -> str:
    return request.param


@pytest.fixture(params=ROUTES)
def route(request) -> str:
    return request.param


def minus(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return m.fc(x) - y


# ---- inputs


@pytest.mark.sweep(1)
@pytest.mark.parametrize("inputs", [{"x": X, "y": Y}, {"y": Y, "x": X}], ids=["in order", "reversed"])
def test_keyword_inputs(tmp_path, inputs: dict[str, Tensor], exporter: str, route: str) -> None:
    model = calibrated(OfTwo(minus), inputs, route)
    result = qt.export_onnx(model, inputs, tmp_path / "m.onnx", exporter=exporter)
    assert names_of(result.path)[0] == ["x", "y"]
    assert result.verification.output_difference < 1e-6
    assert verify_onnx(qt.convert(model), inputs, result.path).quantizer_codes.differing == 0


def test_arguments_that_are_keywords_only(tmp_path, exporter: str, route: str) -> None:
    inputs = {"x": X, "y": Y}
    model = calibrated(ByKeyword(minus), inputs, route)
    result = qt.export_onnx(
        model, inputs, tmp_path / "m.onnx", exporter=exporter, dynamic_shapes={"x": {0: "n"}, "y": {0: "n"}}
    )
    assert names_of(result.path)[0] == ["x", "y"]
    more = {"x": torch.rand(7, 4), "y": torch.rand(7, 4)}
    assert verify_onnx(qt.convert(model), more, result.path).output_difference < 1e-5


class Positions(nn.Module):
    """Language models compare the sizes of two inputs, and make the arguments between them where nobody gives any."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.fc, self.out = nn.Embedding(9, 4), linear_of(4), linear_of(4)

    def forward(self, ids: Tensor, mask: Tensor | None = None, scale: float = 2.0, positions: Any = None) -> Tensor:
        if positions.shape[0] != ids.shape[0]:
            positions = positions.expand(ids.shape[0], -1)
        x = self.embedding(ids) if mask is None else self.embedding(ids) * mask
        return self.out(torch.relu(self.fc(x) + scale * positions[:, :, None].float()))


def sentences(samples: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(samples)
    return {
        "ids": torch.randint(0, 9, (samples, 5), generator=generator),
        "positions": torch.arange(5).repeat(samples, 1),
    }


SENTENCES: dict[str, Any] = {
    "fixed": {},
    "named": {"dynamic_shapes": {"ids": {0: "batch"}, "positions": {0: "batch"}}},
    "in order": {"dynamic_shapes": ({0: "batch"}, {0: "batch"})},
    "dynamic_batch": {"dynamic_batch": True},
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("sizes", SENTENCES)
def test_keyword_inputs_that_skip_arguments(tmp_path, sizes: str, exporter: str, route: str) -> None:
    inputs = sentences(2)
    model = calibrated(Positions(), inputs, route)
    result = qt.export_onnx(model, inputs, tmp_path / "m.onnx", exporter=exporter, **SENTENCES[sizes])
    graph = onnx.load(str(result.path)).graph
    shapes = {i.name: [d.dim_param or d.dim_value for d in i.type.tensor_type.shape.dim] for i in graph.input}
    batch = 2 if sizes == "fixed" else "batch"
    assert shapes == {"ids": [batch, 5], "positions": [batch, 5]}
    for samples in (2,) if sizes == "fixed" else (1, 2, 3):
        found = verify_onnx(qt.convert(model), sentences(samples), result.path)
        assert found.quantizer_codes.compared > 0
        assert found.quantizer_codes.differing == found.weight_codes.differing == 0
        assert found.output_difference < 1e-5


def test_too_few_dynamic_shapes_of_keyword_inputs(tmp_path, exporter: str) -> None:
    model = calibrated(Positions(), sentences(2))
    with pytest.raises(ValueError, match=r"an entry for each input of forward \(ids, positions\), got 1"):
        qt.export_onnx(model, sentences(2), tmp_path / "m.onnx", exporter=exporter, dynamic_shapes={"ids": {0: "n"}})


def test_inputs_that_forward_does_not_take(tmp_path) -> None:
    model = calibrated(OfTwo(minus), (X, Y))
    words = r"^export_onnx: example_inputs do not match .+forward\(.*x.*, .*y.*\).*: missing a required argument: 'y'"
    with pytest.raises(TypeError, match=words):
        qt.export_onnx(model, X, tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []


DICTS = {
    "last": (
        lambda m, x, y: m.fc(x) - y["b"] * y["c"],
        (X, {"b": Y, "unused": Y, "c": X}),
        ["x", "y_b", "y_unused", "y_c"],
    ),
    "first": (lambda m, x, y: m.fc(x["b"]) - x["c"] - y, ({"b": X, "c": Y}, Y), ["x_b", "x_c", "y"]),
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("function", "inputs", "names"), DICTS.values(), ids=DICTS)
def test_a_dict_is_an_input(
    tmp_path, function: Callable[..., Tensor], inputs: Any, names: list[str], exporter: str, route: str
) -> None:
    model = calibrated(OfTwo(function), inputs, route)
    result = qt.export_onnx(model, inputs, tmp_path / "m.onnx", exporter=exporter)
    assert names_of(result.path)[0] == names
    assert result.verification.output_difference < 1e-6


@pytest.mark.sweep(1)
@pytest.mark.parametrize("unused", ["x", "y"])
def test_an_unused_input_stays_an_input(tmp_path, unused: str, exporter: str, route: str) -> None:
    model = calibrated(OfTwo(lambda m, x, y: m.fc(y if unused == "x" else x)), (X, Y), route)
    result = qt.export_onnx(model, (X, Y), tmp_path / "m.onnx", exporter=exporter, dynamic_shapes=({0: "n"}, {0: "n"}))
    assert names_of(result.path)[0] == ["x", "y"]
    shapes = [
        [d.dim_param or d.dim_value for d in i.type.tensor_type.shape.dim]
        for i in onnx.load(str(result.path)).graph.input
    ]
    assert shapes == [["n", 4], ["n", 4]]
    assert result.verification.output_difference < 1e-6


def test_dynamic_shapes_of_containers(tmp_path, exporter: str) -> None:
    inputs = ({"b": X, "c": Y}, [Y, X])
    model = calibrated(OfTwo(lambda m, x, y: m.fc(x["b"]) - x["c"] * y[0] + y[1]), inputs, "replace")
    sizes = {0: "n"}
    result = qt.export_onnx(
        model, inputs, tmp_path / "m.onnx", exporter=exporter, dynamic_shapes=({"b": sizes, "c": sizes}, [sizes, sizes])
    )
    x = torch.rand(5, 4)
    assert verify_onnx(qt.convert(model), ({"b": x, "c": x}, [x, x]), result.path).output_difference < 1e-5


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_dynamic_shapes_of_other_names(tmp_path, exporter: str) -> None:
    model = calibrated(OfTwo(minus), (X, Y))
    shapes = {"x": {0: "n"}, "z": {0: "n"}}
    with pytest.raises(ValueError, match=r"entry for each input of forward \(x, y\), got \['x', 'z'\]"):
        qt.export_onnx(model, (X, Y), tmp_path / "m.onnx", exporter=exporter, dynamic_shapes=shapes)


def test_too_few_dynamic_shapes(tmp_path) -> None:
    model = calibrated(OfTwo(minus), (X, Y))
    with pytest.raises(
        ValueError, match=r"dynamic_shapes must have an entry for each input of forward \(x, y\), got 1"
    ):
        qt.export_onnx(model, (X, Y), tmp_path / "m.onnx", exporter="torchscript", dynamic_shapes=({0: "n"},))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize(
    ("shapes", "error", "words"),
    [
        (({-2: "n"}, {-2: "n"}), ValueError, "dimensions of 'x' must be numbers from 0 to 1, got -2"),
        (({0: "n"}, {2: "n"}), ValueError, "dimensions of 'y' must be numbers from 0 to 1, got 2"),
        (({"0": "n"}, None), ValueError, "dimensions of 'x' must be numbers from 0 to 1, got '0'"),
        ((["n", None, None], None), ValueError, "dimensions of 'x' must be numbers from 0 to 1, got 2"),
        (
            ("n", "n"),
            TypeError,
            r"the entry of 'x' must be a dict of dimensions, such as \{0: 'batch'\}, or None, got 'n'",
        ),
        (5, TypeError, "must be a sequence or a dict of entries for the inputs of forward, .* got 5"),
        ("n", TypeError, "must be a sequence or a dict of entries for the inputs of forward, .* got 'n'"),
    ],
)
def test_dynamic_shapes_of_dimensions_that_are_none(tmp_path, exporter: str, shapes, error, words: str) -> None:
    """torch.export ignores negative ones, and the older exporter ends the process."""
    model = calibrated(OfTwo(minus), (X, Y))
    with pytest.raises(error, match=f"^export_onnx: dynamic_shapes:? {words}"):
        qt.export_onnx(model, (X, Y), tmp_path / "m.onnx", exporter=exporter, dynamic_shapes=shapes)


def test_verification_with_another_number_of_inputs(tmp_path) -> None:
    model = calibrated(OfOne(lambda m, x: m.fc(x)), (X,))
    result = qt.export_onnx(model, (X,), tmp_path / "m.onnx")
    other = calibrated(OfTwo(minus), (X, Y))
    with pytest.raises(ValueError, match=r"verify_onnx: the file takes 1 tensors \(x\), got 2"):
        verify_onnx(qt.convert(other), (X, Y), result.path)


# ---- names


def test_names_for_the_first_inputs(tmp_path, exporter: str) -> None:
    result = qt.export_onnx(
        calibrated(OfTwo(minus), (X, Y)), (X, Y), tmp_path / "m.onnx", exporter=exporter, input_names=["image"]
    )
    assert names_of(result.path)[0] == ["image", "y"]


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({"input_names": ["a", "b", "c"]}, r"input_names must have at most .+, got 3 for 2 \(x, y\)"),
        ({"input_names": ["a", "a"]}, r"input_names must be different names, got \['a', 'a'\]"),
        ({"input_names": ["y"]}, r"input_names must be different names, got \['y', 'y'\]"),
        ({"output_names": ["a", "b"]}, r"output_names must have at most .+, got 2 for 1 \(output\)"),
        ({"input_names": [""]}, r"input_names must be names of at least one letter, got \[''"),
        ({"output_names": [""]}, r"output_names must be names of at least one letter, got \[''\]"),
        ({"input_names": ["a"], "output_names": ["a"]}, r"output_names must differ .+ \(a, y\), got 'a'"),
        ({"output_names": ["y"]}, r"output_names must differ from the names of the inputs \(x, y\), got 'y'"),
    ],
    ids=["more", "equal", "default", "outputs", "empty", "empty output", "both", "both by default"],
)
def test_names_that_do_not_fit(tmp_path, names: dict[str, list[str]], words: str, exporter: str) -> None:
    model = calibrated(OfTwo(minus), (X, Y))
    with pytest.raises(ValueError, match=f"^export_onnx: {words}"):
        qt.export_onnx(model, (X, Y), tmp_path / "m.onnx", exporter=exporter, **names)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("argument", ["input_names", "output_names"])
def test_one_string_is_no_sequence_of_names(tmp_path, argument: str) -> None:
    model = calibrated(OfTwo(minus), (X, Y))
    with pytest.raises(
        TypeError, match=rf"^export_onnx: {argument} must be a sequence .* 'a'; write {argument}=\['a'\]"
    ):
        qt.export_onnx(model, (X, Y), tmp_path / "m.onnx", **{argument: "a"})


# ---- outputs


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("rest", "words"),
    [
        (lambda x: x.shape[0], r"returns 3 in output\[1\]"),
        (lambda x: True, r"returns True in output\[1\]"),
        (lambda x: {"kind": "logits"}, r"returns 'logits' in output\[1\]\['kind'\]"),
        (lambda x: [x, 0.5], r"returns 0.5 in output\[1\]\[1\]"),
    ],
    ids=["int", "bool", "str", "float"],
)
def test_outputs_that_are_no_tensors(tmp_path, rest: Callable[..., Any], words: str, exporter: str, route: str) -> None:
    model = calibrated(OfOne(lambda m, x: (m.fc(x), rest(x))), (X,), route)
    with pytest.raises(TypeError, match=f"^export_onnx: the outputs of an ONNX file are tensors, but forward {words}"):
        qt.export_onnx(model, X, tmp_path / "m.onnx", exporter=exporter)
    assert list(tmp_path.iterdir()) == []


def test_outputs_of_other_dtypes(tmp_path, exporter: str, route: str) -> None:
    model = calibrated(OfOne(lambda m, x: (m.fc(x), x > 0.5, x.argmax(1), None)), (X,), route)
    result = qt.export_onnx(model, X, tmp_path / "m.onnx", exporter=exporter, output_names=["y", "mask", "index"])
    assert names_of(result.path)[1] == ["y", "mask", "index"]
    assert result.verification.output_difference < 1e-6


def test_an_output_that_does_not_depend_on_the_inputs(tmp_path) -> None:
    model = calibrated(OfOne(lambda m, x: (m.fc(x), m.fc.bias * 1)), (X,))
    model.get_submodule("fc").bias.requires_grad_(False)
    assert names_of(qt.export_onnx(model, X, tmp_path / "m.onnx").path)[1] != []
    constant = calibrated(OfOne(lambda m, x: (m.fc(x), torch.arange(3))), (X,))
    assert qt.export_onnx(constant, X, tmp_path / "m.onnx").verification.output_difference < 1e-6
    with pytest.raises(RuntimeError, match=r"cannot write an output that does not depend on the inputs .+'dynamo'"):
        qt.export_onnx(constant, X, tmp_path / "m.onnx", exporter="torchscript")


# ---- dtypes


def convolutions(dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Conv2d(16, 8, 3))
    x = torch.randn(4, 3, 24, 24, dtype=dtype)
    return calibrated(model.to(dtype), (x,)), x


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_models_in_float64_are_refused_with_the_remedy(tmp_path, exporter: str) -> None:
    model, x = convolutions(torch.float64)
    with pytest.raises(
        TypeError, match=r"^export_onnx: '.+' is float64, .+; export model.float\(\) with float32 inputs"
    ):
        qt.export_onnx(model, x, tmp_path / "m.onnx", exporter=exporter)
    assert list(tmp_path.iterdir()) == []
    assert qt.export_onnx(model.float(), x.float(), tmp_path / "m.onnx", exporter=exporter).verification is not None


def test_an_input_or_scales_of_float64_are_refused(tmp_path) -> None:
    model, x = convolutions(torch.float32)
    with pytest.raises(TypeError, match="^export_onnx: 'image' is float64"):
        qt.export_onnx(model, x.double(), tmp_path / "m.onnx", input_names=["image"])
    scales = nn.Sequential(
        qt.convert(calibrated(nn.Sequential(nn.ReLU(), qt.TensorQuantizer(qt.QuantSpec())), (X,), "replace"))
    )
    with pytest.raises(TypeError, match="^export_onnx: '0.1.scale' is float64"):
        qt.export_onnx(scales.double(), X, tmp_path / "m.onnx")


def test_models_in_float16_are_verified(tmp_path, exporter: str) -> None:
    """Many more codes than one in ten thousand lie so near to a rounding boundary that half precision decides."""
    model, x = convolutions(torch.float16)
    codes = qt.export_onnx(model, x, tmp_path / "m.onnx", exporter=exporter).verification
    assert codes.weight_codes.differing == codes.quantizer_codes.differing == 0
    assert codes.layer_codes.differing > 1e-3 * codes.layer_codes.compared
    assert codes.layer_codes.steps == 1


@pytest.mark.slow
def test_models_in_bfloat16_are_written_in_opset_22_without_verification(tmp_path) -> None:
    model, x = convolutions(torch.bfloat16)
    with pytest.raises(
        RuntimeError, match=r"^verify_onnx: onnxruntime cannot run the file on the CPU: .+; pass verify=False|float32"
    ):
        qt.export_onnx(model, x, tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []
    assert qt.export_onnx(model, x, tmp_path / "m.onnx", verify=False).opset == 22
    assert qt.export_onnx(model, x, tmp_path / "m.onnx", verify=False, exporter="torchscript").opset == 22
    with pytest.raises(RuntimeError, match=r"not valid ONNX in opset 18: .+bfloat16.+; pass opset=22\."):
        qt.export_onnx(model, x, tmp_path / "m.onnx", verify=False, opset=18)
