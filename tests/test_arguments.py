"""Arguments of wrong types: each error names the public function, the argument and the value."""

import inspect
import io
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import qtoolkit as qt
from qtoolkit.compat.checkpoints import load_amax
from qtoolkit.graph.lint import lint as graph_lint
from qtoolkit.tuning import mixed_precision


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


X = torch.ones(2, 4)
OF_MODULES: dict[str, Callable[[object], object]] = {
    "prepare: model": lambda m: qt.prepare(m, backend="tensorrt"),
    "calibrate: prepared": lambda m: qt.calibrate(m, [X]),
    "convert: the model": qt.convert,
    "export_onnx: the model": lambda m: qt.export_onnx(m, X, "unwritten.onnx"),
    "quantization_report: model": qt.quantization_report,
    "quantizers_of: model": qt.quantizers_of,
    "disable_quantization: model": qt.disable_quantization,
    "enable_quantization: model": qt.enable_quantization,
    "calibrating: model": qt.calibrating,
    "load_amax: model": lambda m: load_amax(m, {}),
    "freeze_batch_norm: model": qt.freeze_batch_norm,
    "unfreeze_batch_norm: model": qt.unfreeze_batch_norm,
    "replace: model": lambda m: qt.quant_modules.replace(m, backend="tensorrt"),
    "fuse_modules: model": lambda m: qt.fuse_modules(m, [["0", "1"]]),
    "compare: quantized": lambda m: qt.debug.compare(net(), m, X),
    "compare: float_model": lambda m: qt.debug.compare(m, qt.prepare(net(), backend="tensorrt"), X),
    "sensitivity: model": lambda m: qt.debug.sensitivity(m, len),
    "draw: graph_module": lambda m: qt.debug.draw(m, "unwritten.svg"),
    "report: model": lambda m: qt.debug.report(m, path="unwritten.html"),
}


@pytest.mark.parametrize("value", [5, None, [], "model", nn.Linear, object()], ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("start", OF_MODULES)
def test_what_is_no_module_is_named(start: str, value: object) -> None:
    with pytest.raises(TypeError, match=rf"^{start} must be .* got {type(value).__name__}\b"):
        OF_MODULES[start](value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"untraced": None}, r"prepare: untraced must be a sequence of names, got None; write untraced=\[\]"),
        ({"untraced": 5}, "prepare: untraced must be a sequence of names, got 5"),
        ({"leaf_modules": None}, r"leaf_modules must be a sequence of module types, got None; write leaf_modules=\[\]"),
        ({"leaf_modules": nn.Linear}, "prepare: leaf_modules must be a sequence of module types, got <class"),
        ({"preserve_attributes": "training"}, r"got the string 'training'; write preserve_attributes=\['training'\]"),
        ({"preserve_attributes": 5}, "prepare: preserve_attributes must be a sequence of names, got 5"),
        ({"concrete_args": 5}, "prepare: concrete_args must be a dict of arguments of forward, got 5"),
        ({"backend": {}}, r"backend must be a name or a qtoolkit.Backend, got a dict"),
        ({"backend": None}, "backend must be a name or a qtoolkit.Backend, got None"),
    ],
)
def test_options_of_prepare(options: dict[str, object], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        qt.prepare(net(), **{"backend": "tensorrt", **options})


def flags() -> Iterator[tuple[str, Callable[..., object], str]]:
    """Yield each option of public functions that is True or False: the function's name, the function and the option."""
    homes = (qt, qt.tuning, qt.debug, qt.export)
    public = [getattr(home, name) for home in homes for name in home.__all__]
    others = [qt.quant_modules.replace, graph_lint, mixed_precision.hessian_traces]
    methods = [*vars(mixed_precision.MixedPrecision).values(), *vars(mixed_precision.Front).values()]
    for function in filter(inspect.isfunction, [*public, *others, *methods]):
        for option, parameter in inspect.signature(function).parameters.items():
            if parameter.annotation in (bool, bool | None):
                yield function.__name__, function, option


FLAGS = {f"{function.__module__}-{name}-{option}": (name, function, option) for name, function, option in flags()}


@pytest.mark.parametrize("value", ["no", 0], ids=repr)
@pytest.mark.parametrize("case", FLAGS)
def test_options_that_are_true_or_false_are_nothing_else(case: str, value: object) -> None:
    name, function, option = FLAGS[case]
    parameters = inspect.signature(function).parameters.values()
    required = ["model.onnx" if p.name == "path" else object() for p in parameters if p.default is p.empty]
    with pytest.raises(
        TypeError, match=rf"^{name}: {option} must be True or False, got {value!r}; write {option}=True"
    ):
        function(*required, **{option: value})


def test_the_best_known_options_are_among_them() -> None:
    found = {(name, option) for name, _, option in FLAGS.values()}
    assert {("prepare", "inplace"), ("export_onnx", "integer_weights"), ("measured", "progress")} <= found


@pytest.mark.parametrize("evaluate", ["accuracy", None])
def test_what_is_no_function_does_not_evaluate(evaluate: object) -> None:
    prepared = qt.prepare(net().eval(), backend="tensorrt")
    qt.calibrate(prepared, [X], progress=False)
    with pytest.raises(TypeError, match=f"sensitivity: evaluate must be a function of a model, got {evaluate!r}"):
        qt.debug.sensitivity(prepared, evaluate, progress=False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("text",), "batches must be an iterable of batches, such as a list, got str"),
        (({"x": X},), "batches must be an iterable of batches, such as a list, got dict"),
        (([X], "3"), "max_batches must be a whole number or None, got '3'"),
        (([X], True), "max_batches must be a whole number or None, got True"),
        (([X], None, 5), "forward must be a function of a model and a batch, or None, got 5"),
    ],
)
def test_arguments_of_calibrate(arguments: tuple[object, ...], words: str) -> None:
    with pytest.raises(TypeError, match=f"calibrate: {words}"):
        qt.calibrate(qt.prepare(net(), backend="tensorrt"), *arguments)


@pytest.mark.parametrize("state_dict", [None, 5, [X]])
def test_a_checkpoint_is_a_mapping(state_dict: object) -> None:
    with pytest.raises(TypeError, match="load_amax: state_dict must be a mapping of names to tensors, got"):
        load_amax(qt.prepare(net(), backend="tensorrt"), state_dict)


def conv_net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()


def embedding_net() -> nn.Module:
    return nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4)).eval()


IMAGES = torch.ones(2, 3, 8, 8)
MISFITS = {
    "float64": (
        conv_net,
        IMAGES.double(),
        r"'input' is float64, and the model is float32; pass it with .to\(torch.float32\)",
    ),
    "int32": (conv_net, IMAGES.int(), r"'input' is int32, and the model is float32; pass it with"),
    "float16": (conv_net, {"input": IMAGES.half()}, r"'input' is float16, and the model is float32; pass it with"),
    "device": (net, X.to("meta"), r"'input' is on meta, and the model on cpu; pass it with .to\('cpu'\)"),
    "numpy": (
        conv_net,
        (IMAGES.numpy(),),
        r"'input' is an array of type ndarray, and layers take tensors; pass torch.as",
    ),
    "indices": (
        embedding_net,
        torch.ones(2, 3),
        r"'input' is float32, and an embedding looks up whole numbers; pass those",
    ),
}


@pytest.mark.parametrize("case", MISFITS)
def test_inputs_that_a_model_does_not_take_are_named(case: str) -> None:
    make, inputs, words = MISFITS[case]
    with pytest.raises(TypeError, match=f"^prepare: example_inputs do not fit the model: {words}"):
        qt.prepare(make(), inputs, backend="tensorrt")
    with pytest.raises(RuntimeError, match=f"^calibrate: a batch does not fit the model: {words}"):
        qt.calibrate(qt.prepare(make(), backend="tensorrt"), [inputs], progress=False)


def test_inputs_in_a_list_are_named_by_the_export(tmp_path: Path) -> None:
    prepared = qt.prepare(conv_net(), IMAGES, backend="tensorrt")
    qt.calibrate(prepared, [IMAGES], progress=False)
    words = "example_inputs do not fit the model: a list is one argument, 'input'; write a tuple"
    with pytest.raises(TypeError, match=f"^export_onnx: {words}"):
        qt.export_onnx(prepared, [IMAGES], tmp_path / "model.onnx", progress=False)
    with pytest.raises(TypeError, match=f"^export_program: {words}"):
        qt.export.export_program(prepared, [IMAGES])


@pytest.mark.parametrize("value", [5, 2.5, True])
def test_inputs_without_a_tensor_are_named(value: object, tmp_path: Path) -> None:
    words = f"do(es)? not fit the model: 'input' is {value!r}, and no input is a tensor"
    with pytest.raises(TypeError, match=f"^prepare: example_inputs {words}"):
        qt.prepare(conv_net(), value, backend="tensorrt")
    prepared = qt.prepare(conv_net(), IMAGES, backend="tensorrt")
    with pytest.raises(RuntimeError, match=f"^calibrate: a batch {words}"):
        qt.calibrate(prepared, [value], progress=False)
    qt.calibrate(prepared, [IMAGES], progress=False)
    with pytest.raises(TypeError, match=f"^export_onnx: example_inputs {words}"):
        qt.export_onnx(prepared, (value,), tmp_path / "model.onnx", progress=False)


@pytest.mark.parametrize("path", [None, io.BytesIO(), 5, ""])
def test_a_value_that_is_no_path_is_named(path: object) -> None:
    prepared = qt.prepare(conv_net(), IMAGES, backend="tensorrt")
    qt.calibrate(prepared, [IMAGES], progress=False)
    with pytest.raises(
        TypeError, match=r'^export_onnx: path must be the file to write, got .*; write path="model\.onnx"'
    ):
        qt.export_onnx(prepared, IMAGES, path=path)
    with pytest.raises(TypeError, match=r'^report: path must be the file to write, got .*; write path="report\.html"'):
        qt.debug.report(prepared, IMAGES, path)
    with pytest.raises(TypeError, match=r'^draw: path must be the file to write, got .*; write path="model\.svg"'):
        qt.debug.draw(prepared, path)
    with pytest.raises(
        TypeError, match=r"^save_checkpoint: path must be a file that ends in '\.safetensors' or a folder, got"
    ):
        qt.save_checkpoint(prepared, path=path)


def test_a_file_is_no_folder_of_a_checkpoint(tmp_path: Path) -> None:
    place = tmp_path / "last"
    place.write_text("notes")
    words = r"^save_checkpoint: a path that does not end in '\.safetensors' is a folder, but '.*last' is a file; remove it, or"
    with pytest.raises(NotADirectoryError, match=words):
        qt.save_checkpoint(net(), place)
    assert place.read_text() == "notes"


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    prepared = qt.prepare(conv_net(), IMAGES, backend="tensorrt")
    qt.calibrate(prepared, [IMAGES], progress=False)
    with pytest.raises(
        IsADirectoryError, match=r"^export_onnx: path must be the file to write, got the folder .*model.onnx'"
    ):
        qt.export_onnx(prepared, IMAGES, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_path_with_the_ending_of_another_format_is_refused(tmp_path: Path) -> None:
    """quantize(backend="litert", path="model.tflite") wrote an ONNX file."""
    words = r"^{0}: path must not end in '\.tflite', a format that {0} does not write, got .*; write path='model.onnx'"
    prepared = qt.prepare(conv_net(), IMAGES, backend="tensorrt")
    qt.calibrate(prepared, [IMAGES], progress=False)
    with pytest.raises(ValueError, match=words.format("quantize")):
        qt.quantize(conv_net(), [IMAGES], backend="litert", path=tmp_path / "model.tflite", progress=False)
    with pytest.raises(ValueError, match=words.format("export_onnx")):
        qt.export_onnx(prepared, IMAGES, tmp_path / "model.TFLITE")
    with pytest.raises(ValueError, match="^export_litert: .* or call qtoolkit.export_onnx, which writes such files"):
        qt.export_litert(prepared, IMAGES, tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("forward", [lambda model, batch: None, lambda model, batch: conv_net()(batch)])
def test_a_forward_that_calls_another_model_calibrates_nothing(forward: object) -> None:
    prepared = qt.prepare(conv_net(), IMAGES, backend="tensorrt")
    qt.calibrate(prepared, [IMAGES], progress=False)
    state = {name: value.clone() for name, value in prepared.state_dict().items() if isinstance(value, torch.Tensor)}
    words = r"^calibrate: no data reached the quantizers .* in 1 batches; forward\(model, batch\) must call the model"
    with pytest.raises(RuntimeError, match=words):
        qt.calibrate(prepared, [2 * IMAGES], forward=forward, progress=False)
    assert all(torch.equal(prepared.state_dict()[name], value) for name, value in state.items())


def test_a_runtime_is_of_integer_arithmetic() -> None:
    prepared = qt.prepare(conv_net(), IMAGES, backend="tensorrt")
    qt.calibrate(prepared, [IMAGES], progress=False)
    with pytest.raises(
        ValueError, match=r"^convert: runtime='litert' needs arithmetic=\"integer\", got .* or leave runtime out"
    ):
        qt.convert(prepared, runtime="litert")


def test_a_list_of_inputs_is_one_argument() -> None:
    with pytest.raises(TypeError, match="a list is one argument, 'input'; write a tuple for the arguments of forward"):
        qt.prepare(conv_net(), [IMAGES], backend="tensorrt")


def test_inputs_of_another_shape_are_named_with_the_error_of_torch() -> None:
    with pytest.raises(
        RuntimeError, match=r"^prepare: .*'input' has the shape \(2, 5, 8, 8\), .*Error: Given groups=1"
    ):
        qt.prepare(conv_net(), torch.ones(2, 5, 8, 8), backend="tensorrt")


def test_an_array_that_is_exported_is_named(tmp_path: Path) -> None:
    prepared = qt.prepare(conv_net(), IMAGES, backend="tensorrt")
    qt.calibrate(prepared, [IMAGES], progress=False)
    with pytest.raises(
        TypeError, match="^export_onnx: example_inputs do not fit the model: 'input' is an array of type"
    ):
        qt.export_onnx(prepared, IMAGES.numpy(), tmp_path / "model.onnx", progress=False)


def test_a_converted_model_is_not_calibrated() -> None:
    prepared = qt.prepare(net(), backend="tensorrt")
    qt.calibrate(prepared, [X], progress=False)
    with pytest.raises(ValueError, match="^calibrate: a converted model has fixed scales; calibrate the prepared one"):
        qt.calibrate(qt.convert(prepared), [X], progress=False)


def test_a_class_of_the_same_name_is_told_apart() -> None:
    other = type("QConfigMapping", (), {"__module__": "torch.ao.quantization"})()
    words = (
        "must be a QConfigMapping of qtoolkit or None, got torch.ao.quantization.QConfigMapping; write qtoolkit.QCon"
    )
    for quantize in (qt.prepare, qt.quant_modules.replace):
        with pytest.raises(TypeError, match=words):
            quantize(net(), qconfig_mapping=other, backend="tensorrt")
    config = type("QConfig", (), {"__module__": "torch.ao.quantization"})()
    with pytest.raises(TypeError, match="a config must be a QConfig or None, got torch.ao.quantization.QConfig"):
        qt.QConfigMapping().set_global(config)


@pytest.mark.parametrize(
    ("make", "nearest"),
    [
        (lambda: qt.prepare(net(), backend="onnx"), "onnxruntime"),
        (lambda: qt.prepare(net(), backend="ort"), "onnxruntime"),
        (lambda: qt.prepare(net(), backend="trt"), "tensorrt"),
        (lambda: qt.QuantSpec(format="fp8"), "e4m3"),
        (lambda: qt.QuantSpec(format="float8_e5m2"), "e5m2"),
        (lambda: qt.QuantSpec(format="fp4"), "e2m1"),
        (lambda: qt.QuantSpec(format="mxfp16"), "mxfp8"),
    ],
)
def test_names_of_other_tools_lead_to_those_here(make: Callable[[], object], nearest: str) -> None:
    with pytest.raises(ValueError, match=f"; did you mean '{nearest}'"):
        make()


def test_a_rule_of_torch_alone_names_the_way_here() -> None:
    mapping = qt.QConfigMapping()
    with pytest.raises(
        AttributeError, match="'set_module_name_object_type_order'; a layer, .* is named by set_module_name"
    ):
        mapping.set_module_name_object_type_order("layer1", nn.Conv2d, 0, None)
    assert not hasattr(mapping, "set_anything")
