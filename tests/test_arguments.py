"""Arguments of wrong types: each error names the public function, the argument and the value."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import qtoolkit as qt
from qtoolkit.compat.checkpoints import load_amax


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


X = torch.ones(2, 4)
OF_MODULES: dict[str, Callable[[object], object]] = {
    "prepare: model": qt.prepare,
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
    "replace: model": qt.quant_modules.replace,
    "fuse_modules: model": lambda m: qt.fuse_modules(m, [["0", "1"]]),
    "compare: quantized": lambda m: qt.debug.compare(net(), m, X),
    "compare: float_model": lambda m: qt.debug.compare(m, qt.prepare(net()), X),
    "sensitivity: model": lambda m: qt.debug.sensitivity(m, len),
    "draw: graph_module": lambda m: qt.debug.draw(m, "unwritten.svg"),
    "report: model": lambda m: qt.debug.report(m, "unwritten.html"),
}


@pytest.mark.parametrize("value", [5, None, [], "model", nn.Linear, object()], ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("start", OF_MODULES)
def test_what_is_no_module_is_named(start: str, value: object) -> None:
    with pytest.raises(TypeError, match=rf"^{start} must be .* got {type(value).__name__}\b"):
        OF_MODULES[start](value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"skip": None}, r"prepare: skip must be a sequence of names, got None; write skip=\[\]"),
        ({"skip": 5}, "prepare: skip must be a sequence of names, got 5"),
        ({"leaf_modules": None}, r"leaf_modules must be a sequence of module types, got None; write leaf_modules=\[\]"),
        ({"leaf_modules": nn.Linear}, "prepare: leaf_modules must be a sequence of module types, got <class"),
        ({"preserve_attributes": "training"}, r"got the string 'training'; write preserve_attributes=\['training'\]"),
        ({"preserve_attributes": 5}, "prepare: preserve_attributes must be a sequence of names, got 5"),
        ({"concrete_args": 5}, "prepare: concrete_args must be a dict of arguments of forward, got 5"),
        ({"backend": {}}, r"backend must be a name or a qtoolkit.Backend, got \{\}"),
        ({"backend": None}, "backend must be a name or a qtoolkit.Backend, got None"),
    ],
)
def test_options_of_prepare(options: dict[str, object], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        qt.prepare(net(), **options)


@pytest.mark.parametrize("evaluate", ["accuracy", None])
def test_what_is_no_function_does_not_evaluate(evaluate: object) -> None:
    prepared = qt.prepare(net().eval())
    qt.calibrate(prepared, [X], progress=False)
    with pytest.raises(TypeError, match=f"sensitivity: evaluate must be a function of a model, got {evaluate!r}"):
        qt.debug.sensitivity(prepared, evaluate, progress=False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("text",), "batches must be an iterable of batches, such as a list, got str"),
        (({"x": X},), "batches must be an iterable of batches, such as a list, got dict"),
        (([X], "3"), "max_batches must be a whole number or None, got '3'"),
        (([X], None, 5), "forward must be a function of a model and a batch, or None, got 5"),
    ],
)
def test_arguments_of_calibrate(arguments: tuple[object, ...], words: str) -> None:
    with pytest.raises(TypeError, match=f"calibrate: {words}"):
        qt.calibrate(qt.prepare(net()), *arguments)


@pytest.mark.parametrize("state_dict", [None, 5, [X]])
def test_a_checkpoint_is_a_mapping(state_dict: object) -> None:
    with pytest.raises(TypeError, match="load_amax: state_dict must be a mapping of names to tensors, got"):
        load_amax(qt.prepare(net()), state_dict)
