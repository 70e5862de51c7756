"""What somebody types first, who knows another tool or has read one page: it works, or the error says what to type."""

import importlib
import inspect
import json
import pickle
import re
import warnings
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import qtoolkit as qt
from qtoolkit.compat import mqbench
from qtoolkit.instead import RENAMED, WAYS
from qtoolkit.ops.observe import RangeMethod
from qtoolkit.quantizers.observers.histogram import METHODS
from qtoolkit.runtimes.table import EXECUTES, RUNTIMES, ExecutingRuntime, RuntimeName
from qtoolkit.tuning.reconstruct import METHODS as RECONSTRUCTIONS

IMAGES, LABELS = torch.randn(8, 3, 8, 8), torch.randint(10, (8,))
KINDS = ("prepare", "replace")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.head = nn.Sequential(nn.Linear(144, 16), nn.ReLU(), nn.Linear(16, 10))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn(self.conv(x)))
        return self.head(x.flatten(1))


class Text(nn.Module):
    """Takes what a tokenizer returns, and computes a loss of labels, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(20, 8), nn.Linear(8, 4)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        x = self.words(input_ids)
        if attention_mask is not None:
            x = x * attention_mask.unsqueeze(-1)
        logits = self.head(x.mean(1))
        if labels is None:
            return {"logits": logits}
        return {"logits": logits, "loss": nn.functional.cross_entropy(logits, labels)}


class Encoder(Text):
    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.head((self.words(input_ids) * attention_mask.unsqueeze(-1)).mean(1))


IDS, MASK = torch.randint(20, (4, 6)), torch.ones(4, 6)
TOKENS = {"input_ids": IDS, "attention_mask": MASK}


def quantized(kind: str, model: nn.Module, **options: object) -> nn.Module:
    quantize = qt.prepare if kind == "prepare" else qt.quant_modules.replace
    return quantize(model, backend="tensorrt", **options)


def calibrated(model: nn.Module | None = None) -> nn.Module:
    prepared = qt.prepare((model or Net()).eval(), IMAGES[:1], backend="onnxruntime")
    qt.calibrate(prepared, [IMAGES], progress=False)
    return prepared


def float_layers(model: nn.Module) -> set[str]:
    types = (nn.Conv2d, nn.Linear)
    return {name for name, module in model.named_modules() if type(module) in types}


# ---- calibrate, with the batches that a data loader has


@pytest.mark.parametrize("kind", KINDS)
def test_a_data_loader_of_images_and_labels_calibrates(kind: str) -> None:
    loader = DataLoader(TensorDataset(IMAGES, LABELS), batch_size=4)
    torch.manual_seed(0)
    model = Net()
    ours, wanted = quantized(kind, model), quantized(kind, model)
    with pytest.warns(UserWarning, match=r"^calibrate: .*forward\(.*\) does not take item 1 of a batch") as said:
        report = qt.calibrate(ours, loader, progress=False)
    assert len(said) == 1, "once, and not for each batch"
    assert said[0].filename == __file__
    assert "pass forward=lambda model, batch:" in str(said[0].message)
    assert report.ranges == qt.calibrate(wanted, list(IMAGES.split(4)), progress=False).ranges
    assert report.batches == 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["labels", "label", "label_ids", "target", "start_positions"])
def test_a_dict_with_labels_calibrates(kind: str, name: str) -> None:
    model = quantized(kind, Encoder())
    with pytest.warns(UserWarning, match=rf"^calibrate: .* does not take '{name}' of a batch") as said:
        report = qt.calibrate(model, [UserDict({**TOKENS, name: LABELS[:4]})] * 2, progress=False)
    assert len(said) == 1
    assert report.unreached == ()


@pytest.mark.parametrize("example", [TOKENS, (IDS, MASK)], ids=["mapping", "tuple"])
def test_a_graph_takes_no_labels_that_were_not_in_its_example_inputs(example: object) -> None:
    """The signature of the graph still has the argument, which tracing has fixed at None."""
    prepared = qt.prepare(Text(), example, backend="tensorrt")
    assert "labels" in inspect.signature(prepared.forward).parameters
    labels = LABELS[:4] % 4
    batch = {**TOKENS, "labels": labels} if isinstance(example, dict) else [IDS, MASK, labels]
    with pytest.warns(UserWarning, match="does not take ('labels'|item 2) of a batch"):
        assert qt.calibrate(prepared, [batch], progress=False).unreached == ()


@pytest.mark.parametrize(
    ("make", "batch"),
    [
        (lambda: qt.quant_modules.replace(Text(), backend="tensorrt"), {**TOKENS, "labels": LABELS[:4] % 4}),
        (
            lambda: qt.prepare(Text(), {**TOKENS, "labels": LABELS[:4] % 4}, backend="tensorrt"),
            {**TOKENS, "labels": LABELS[:4] % 4},
        ),
        (lambda: qt.quant_modules.replace(Text(), backend="tensorrt"), [IDS, MASK, LABELS[:4] % 4]),
        (lambda: qt.prepare(Net(), backend="tensorrt"), IMAGES),
        (lambda: qt.prepare(Net(), backend="tensorrt"), (IMAGES,)),
    ],
    ids=["replaced", "in the graph", "list", "tensor", "tuple of one"],
)
def test_labels_that_forward_takes_are_passed(make: Callable[[], nn.Module], batch: object) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qt.calibrate(make(), [batch], progress=False)


def test_a_hook_may_take_the_labels() -> None:
    seen, model = [], qt.quant_modules.replace(Net(), backend="tensorrt")
    model.register_forward_pre_hook(lambda module, args: (seen.append(args[1]), args[:1])[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qt.calibrate(model, [(IMAGES, LABELS)], progress=False)
    assert seen[0] is LABELS


@pytest.mark.parametrize(
    ("make", "batch"),
    [
        (Net, (IMAGES, LABELS, LABELS)),
        (Encoder, {**TOKENS, "token_type_ids": IDS}),
        (Encoder, {**TOKENS, "labels": IDS, "idx": IDS}),
        (Encoder, {"input_ids": IDS, "labels": IDS}),
    ],
    ids=["two more", "no label", "labels and more", "too few"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_that_is_ambiguous_says_to_pass_forward(kind: str, make: type[nn.Module], batch: object) -> None:
    model = quantized(kind, make())
    with pytest.raises(TypeError, match=r"^calibrate: a batch does not match .*; pass forward=lambda model, batch:"):
        qt.calibrate(model, [batch], progress=False)


def test_post_training_methods_take_the_same_batches() -> None:
    prepared = calibrated()
    with pytest.warns(UserWarning, match="^bias_correction: .* does not take item 1 of a batch"):
        qt.tuning.bias_correction(prepared, [(IMAGES, LABELS)], progress=False)
    text = qt.prepare(Text().eval(), TOKENS, backend="onnxruntime")
    qt.calibrate(text, [TOKENS], progress=False)
    with pytest.warns(UserWarning, match="^gptq: .* does not take 'labels' of a batch"):
        qt.tuning.gptq(text, [{**TOKENS, "labels": LABELS[:4] % 4}], progress=False)


@pytest.mark.parametrize("batches", [IMAGES, {"input_ids": IDS}], ids=["tensor", "dict"])
def test_one_batch_without_a_list(batches: object) -> None:
    with pytest.raises(TypeError, match=r"^calibrate: batches must be an iterable of batches.*; write \[batch\]"):
        qt.calibrate(qt.prepare(Net(), backend="tensorrt"), batches)


# ---- prepare


def test_prepare_takes_the_model_alone() -> None:
    prepared = qt.prepare(Net(), backend="tensorrt")
    qt.calibrate(prepared, [IMAGES], progress=False)
    assert prepared(IMAGES).shape == (8, 10)


class BranchesOnSizes(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.shape[2] == 8 else x[:, :, :8])


def test_a_model_that_needs_example_inputs_says_so() -> None:
    with pytest.raises(qt.UntraceableError, match="pass example_inputs, which determine the sizes"):
        qt.prepare(BranchesOnSizes(), backend="tensorrt")
    qt.prepare(BranchesOnSizes(), IMAGES, backend="tensorrt")


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ("tensorrt", r"got a str; write prepare\(model, example_inputs, backend=\.\.\.\)"),
        (qt.backends["tensorrt"], r"got a Backend; write prepare\(model, example_inputs, backend=\.\.\.\)"),
        (
            qt.QConfigMapping(),
            r"got a QConfigMapping; write prepare\(model, example_inputs, backend=\.\.\., qconfig_mapping=\.\.\.\)",
        ),
    ],
    ids=["name", "backend", "mapping"],
)
def test_an_argument_in_the_place_of_the_example_inputs(second: object, words: str) -> None:
    with pytest.raises(TypeError, match=rf"^prepare: example_inputs must be the model's inputs, {words}"):
        qt.prepare(Net(), second, IMAGES)


SHAPES = {
    "channels": (torch.randn(2, 5, 8, 8), "conv", r"\(2, 5, 8, 8\)"),
    "channels last": (torch.randn(2, 8, 8, 3), "conv", r"\(2, 8, 8, 3\)"),
    "size": (torch.randn(2, 3, 9, 9), r"head\.0", r"\(2, 196\)"),
    "no batch": (torch.randn(3, 8, 8), r"head\.0|bn", r"\(4, (36|6, 6)\)"),
}


@pytest.mark.parametrize("case", SHAPES)
def test_an_example_of_another_shape_names_it_and_the_layer(case: str, tmp_path: Path) -> None:
    x, layer, shape = SHAPES[case]
    given = str(tuple(x.shape)).replace("(", r"\(").replace(")", r"\)")
    words = (
        rf"not fit the model: 'x' has the shape {given}, from which layer '({layer})', an? \w+, gets {shape}, which it "
    )
    with pytest.raises(
        RuntimeError, match=f"^prepare: example_inputs do {words}cannot take; pass inputs of the shapes"
    ):
        qt.prepare(Net(), x, backend="tensorrt")
    with pytest.raises(RuntimeError, match=f"^export_onnx: example_inputs do {words}"):
        qt.export_onnx(calibrated(), x, tmp_path / "model.onnx", progress=False)
    with pytest.raises(RuntimeError, match=f"^calibrate: a batch does {words}"):
        qt.calibrate(qt.quant_modules.replace(Net(), backend="tensorrt"), [x], progress=False)
    with pytest.raises(ValueError, match=f"^calibrate: a batch does not fit the model: 'x' has the shape {given}, "):
        qt.calibrate(qt.prepare(Net(), backend="tensorrt"), [x], progress=False)
    with pytest.raises(ValueError, match=f"^report: inputs do {words}"):
        qt.debug.report(calibrated(), x, tmp_path / "report.html", progress=False)
    for quantize in (qt.prepare, qt.quant_modules.replace):
        model = quantize(Net().eval(), backend="tensorrt")
        qt.calibrate(model, [IMAGES], progress=False)
        with pytest.raises(ValueError, match=f"^compare: inputs do not fit the model: 'x' has the shape {given}, "):
            qt.debug.compare(Net().eval(), model, x, progress=False)
    assert list(tmp_path.iterdir()) == []


def test_errors_of_other_causes_are_not_about_shapes() -> None:
    class Fails(Net):
        def forward(self, x: Tensor) -> Tensor:
            if x.sum() > 0:
                raise RuntimeError("no device has this size of memory.")
            return x

    model = qt.quant_modules.replace(Net(), backend="tensorrt")
    with pytest.raises(RuntimeError, match="^quantizer 'conv.input_quantizer' has no range yet"):
        model(IMAGES)
    with pytest.raises(ValueError, match="the model was prepared for inputs of other sizes"):
        qt.calibrate(
            qt.prepare(BranchesOnSizes(), IMAGES, backend="tensorrt"), [torch.randn(2, 3, 9, 8)], progress=False
        )


# ---- what is excluded: one rule for prepare and replace


EXCLUDED = [
    ("conv", ["conv"]),
    (["conv", "head.2"], ["conv", "head.2"]),
    ("head", ["head.0", "head.2"]),
    (r"head\.\d", ["head.0", "head.2"]),
    (".*0", ["head.0"]),
    (nn.Linear, ["head.0", "head.2"]),
    ([nn.Conv2d, "head.0"], ["conv", "head.0"]),
    (("conv", nn.Sequential), ["conv", "head.0", "head.2"]),
    ([], []),
    (None, []),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("exclude", "left"), EXCLUDED, ids=str)
def test_exclude_takes_names_regular_expressions_and_types(kind: str, exclude: object, left: list[str]) -> None:
    model = quantized(kind, Net(), exclude=exclude)
    assert float_layers(model) == set(left)
    reasons = {line.name: line.reason for line in qt.quantization_report(model).layers if line.name in left}
    assert all("excluded by" in reason for reason in reasons.values())
    assert len(reasons) == len(left)


@pytest.mark.parametrize("kind", KINDS)
def test_no_other_rule_quantizes_what_is_excluded(kind: str) -> None:
    config = qt.QConfig(qt.QuantSpec(), qt.QuantSpec(axis=0))
    mapping = qt.QConfigMapping().set_module_name("head.2", config).set_object_type(nn.Linear, config)
    mapping.set_module_name_regex("head.*", config).set_global(config)
    before = mapping.to_json()
    for exclude in ("head", nn.Linear, r"head\..*", nn.Sequential):
        assert float_layers(quantized(kind, Net(), qconfig_mapping=mapping, exclude=exclude)) == {"head.0", "head.2"}
    assert mapping.to_json() == before, "the user's mapping is not changed"
    assert float_layers(quantized(kind, Net(), qconfig_mapping=mapping)) == set()


def test_exclude_takes_functions_and_ops_of_a_graph() -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.add(self.a(x), self.b(x))

    def status(**options: object) -> str:
        report = qt.quantization_report(qt.prepare(Adds(), backend="onnxruntime", **options))
        return next(line.reason for line in report.layers if line.name == "add")

    assert "excluded" not in status()
    assert "excluded by add" in status(exclude=torch.add)
    assert "excluded by 'add'" in status(exclude="add")
    with pytest.warns(UserWarning, match="^replace: exclude names add, which is a function"):
        qt.quant_modules.replace(Adds(), exclude=torch.add, backend="tensorrt")


def test_a_layer_with_two_names_is_excluded_by_either() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.b = self.a

        def forward(self, x: Tensor) -> Tensor:
            return self.a(self.b(x))

    for kind in KINDS:
        for name in "ab":
            assert float_layers(quantized(kind, Shared(), exclude=name)) == {"a"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("exclude", "error", "words"),
    [
        ("con", ValueError, "exclude: unknown layer 'con'; did you mean 'conv'"),
        (r"cnov\d", ValueError, r"exclude: the regular expression 'cnov\\d' matches no layer's full name"),
        ("*.conv", ValueError, r"'\*\.conv' is not a regular expression: .* \('\.\*' stands for any characters\)"),
        (5, TypeError, "exclude must contain names, regular expressions, module types and functions, got 5"),
        ([None], TypeError, "exclude must contain names, regular expressions, module types and functions, got None"),
        (nn.ReLU(), TypeError, "got a ReLU; name the module by its dotted name in the model, or by its type"),
        (dict, TypeError, "a type must be a module type, such as torch.nn.Conv2d, got dict"),
    ],
)
def test_what_cannot_be_excluded(kind: str, exclude: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        quantized(kind, Net(), exclude=exclude)


@pytest.mark.parametrize("kind", KINDS)
def test_a_type_that_is_not_in_the_model_is_said(kind: str) -> None:
    with pytest.warns(UserWarning, match=f"^{kind}: exclude names Conv1d, which is not in the model") as said:
        quantized(kind, Net(), exclude=nn.Conv1d)
    assert said[0].filename == __file__


def test_initialize_excludes_types() -> None:
    with qt.quant_modules.initialize(exclude=[nn.Conv2d], backend="tensorrt"):
        assert (type(nn.Conv2d(3, 4, 3)), type(nn.Linear(4, 4))) == (nn.Conv2d, qt.nn.QuantLinear)
    with pytest.raises(ValueError, match="^initialize: exclude has the name 'conv', but layers have no names"):
        qt.quant_modules.initialize(exclude="conv", backend="tensorrt")


def test_the_earlier_ignore_keeps_its_patterns_and_is_the_same_rule() -> None:
    for ignore in ("head.*", ["head"], lambda name, module: name == "head"):
        assert float_layers(qt.quant_modules.replace(Net(), ignore=ignore, backend="tensorrt")) == {"head.0", "head.2"}
    odd = nn.ModuleDict({"a+b": nn.Linear(2, 2), "a": nn.Linear(2, 2)})
    assert float_layers(qt.quant_modules.replace(odd, ignore="a+b", backend="tensorrt")) == {"a+b"}
    both = qt.quant_modules.replace(Net(), None, "conv", exclude="head.0", backend="tensorrt")
    assert float_layers(both) == {"conv", "head.0"}


def test_exclusions_are_kept_in_text_copies_pickles_and_checkpoints(tmp_path: Path) -> None:
    mapping = qt.QConfigMapping().exclude("conv", r"head\..*", nn.Linear, torch.add).set_global(None)
    for again in (qt.QConfigMapping.from_json(mapping.to_json()), mapping.copy(), pickle.loads(pickle.dumps(mapping))):
        assert again == mapping
        assert again.match("head.0", None).qconfig is None
    assert mapping != qt.QConfigMapping().set_global(None)
    assert "exclude" not in json.loads(qt.QConfigMapping().to_json()), "texts without exclusions are as they were"
    prepared = qt.prepare(Net(), exclude="conv", backend="tensorrt")
    qt.calibrate(prepared, [IMAGES], progress=False)
    qt.save_checkpoint(prepared, tmp_path / "model.safetensors")
    found = qt.load_checkpoint(prepared, tmp_path / "model.safetensors")
    restored = qt.prepare(Net(), qconfig_mapping=qt.QConfigMapping.from_json(found.mapping), backend="tensorrt")
    assert float_layers(restored) == {"conv"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"exclude": {}}', "exclude must be a list of layers, got dict"),
        ('{"exclude": ["conv"]}', r"exclude\[0\]: .* must be a list of the kind of its rule and a text"),
        ('{"exclude": [["name", "conv"]]}', r"exclude\[0\]: unknown kind of rule 'name'; did you mean 'module_name'"),
        ('{"exclude": [["global", ""]]}', r"exclude\[0\]: unknown kind of rule 'global'"),
        ('{"exclude": [["module_name", 5]]}', r"exclude\[0\]: .* a list of a text and a config"),
    ],
)
def test_texts_with_wrong_exclusions(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        qt.QConfigMapping.from_json(text)


# ---- one order: model, inputs, path


ORDERS = [(0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("function", "names"),
    [
        (qt.export_onnx, "model, example_inputs, path"),
        (qt.export.export_executorch, "model, example_inputs, path"),
        (qt.export.verify, "model, inputs, path"),
        (qt.export.verify_onnx, "converted, inputs, path"),
        (qt.debug.report, "model, inputs, path"),
    ],
)
def test_another_order_is_an_error_that_shows_the_order(
    function: Callable[..., object], names: str, order: tuple[int, ...], tmp_path: Path
) -> None:
    given = (calibrated(), IMAGES, str(tmp_path / "file"))
    name, words = function.__name__, " and ".join(names.rsplit(", ", 1))
    with pytest.raises(TypeError, match=re.escape(f"{name} takes {words} in this order: {name}({names}).")):
        function(*(given[i] for i in order))
    assert not list(tmp_path.iterdir())


def test_a_path_in_the_place_of_the_inputs_is_an_error(tmp_path: Path) -> None:
    prepared, place = calibrated(), tmp_path / "model.safetensors"
    qt.save_checkpoint(prepared, place)
    qt.debug.report(path=tmp_path / "report.html", model=prepared)
    for call, words in (
        (lambda: qt.debug.report(prepared, place), "report takes model, inputs and path in this order"),
        (lambda: qt.load_checkpoint(place, prepared), "load_checkpoint takes model and path in this order"),
        (lambda: qt.export.compare_runtimes({}, place), "compare_runtimes takes path and inputs in this order"),
        (
            lambda: qt.export_onnx(prepared, "model.onnx", example_inputs=IMAGES),
            "export_onnx takes model, example_inputs and p",
        ),
    ):
        with pytest.raises(TypeError, match=words):
            call()
    with pytest.raises(TypeError, match=r"^report: path must be the file to write, got None; write path="):
        qt.debug.report(prepared, IMAGES)


def test_the_order_is_the_same_in_all_functions() -> None:
    functions = [
        qt.export_onnx, qt.export.export_executorch, qt.export.verify, qt.export.verify_onnx, qt.export.encodings,
        qt.export.export_program, qt.debug.report, qt.save_checkpoint, qt.load_checkpoint,
    ]  # fmt: skip
    order = {**dict.fromkeys(("model", "converted"), 0), **dict.fromkeys(("inputs", "example_inputs"), 1), "path": 2}
    for function in functions:
        places = [order[name] for name in inspect.signature(function).parameters if name in order]
        assert places in ([0, 1, 2], [0, 2], [0, 1]), function


def test_arguments_that_are_missing_are_named() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'example_inputs'"):
        qt.export_onnx(calibrated(), path="model.onnx")
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'path'"):
        qt.export_onnx(calibrated(), IMAGES)


# ---- names of other tools


@pytest.mark.parametrize(
    ("name", "way"),
    [
        (
            "prepare_qat",
            r"qtoolkit\.prepare\(model, example_inputs, backend=\.\.\.\), which prepares for QAT in training mode",
        ),
        ("prepare_fx", r"qtoolkit\.prepare\(model, example_inputs, backend=\.\.\.\)"),
        ("prepare_qat_fx", r"qtoolkit\.prepare\(model, example_inputs, backend=\.\.\.\)"),
        ("convert_fx", r"qtoolkit\.convert\(prepared\)"),
        ("get_default_qat_qconfig", r"qtoolkit\.prepare\(model, example_inputs, backend=\.\.\.\)"),
        ("QuantDescriptor", r"qtoolkit\.QuantSpec"),
        ("verify", r"qtoolkit\.export\.verify"),
        ("sensitivity", r"qtoolkit\.debug\.sensitivity"),
        ("reconstruct", r"qtoolkit\.tuning\.reconstruct"),
        ("QuantConv2d", r"qtoolkit\.nn\.QuantConv2d"),
        ("replace", r"qtoolkit\.quant_modules\.replace"),
    ],
)
def test_names_that_the_package_does_not_have_say_what_to_write(name: str, way: str) -> None:
    with pytest.raises(AttributeError, match=rf"^module 'qtoolkit' has no attribute '{name}'; write {way}"):
        getattr(qt, name)
    assert not hasattr(qt, name)


def test_a_typing_error_in_a_name_gets_the_nearest_one() -> None:
    with pytest.raises(
        AttributeError, match="^module 'qtoolkit' has no attribute 'calibrat': .*did you mean 'calibrate'"
    ):
        qt.calibrat  # noqa: B018
    assert not hasattr(qt, "__wrapped__")


def test_every_way_names_something_that_is_there() -> None:
    for way in WAYS.values():
        for path in re.findall(r"qtoolkit\.([\w.]*\w)", way):
            found: object = qt
            for part in path.split("."):
                found = getattr(found, part)
    assert set(RENAMED.values()) <= set(inspect.signature(qt.QuantSpec.__init__).parameters)
    assert not set(WAYS) & set(qt.__all__)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: qt.export(None, IMAGES, "x.onnx"),
            r"qtoolkit\.export is a package .*; write qtoolkit\.export_onnx\(model, exa",
        ),
        (
            lambda: qt.report(None, "x.html"),
            r"qtoolkit\.report is a package .*; write qtoolkit\.debug\.report\(model, inputs",
        ),
        (lambda: qt.lint("x.onnx"), r"qtoolkit\.lint is a package .*; write qtoolkit\.export\.lint\(path, backend\)"),
    ],
    ids=["export", "report", "lint"],
)
def test_packages_are_no_functions(call: Callable[[], object], words: str) -> None:
    with pytest.raises(TypeError, match=f"^{words}"):
        call()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_bits": 4}, "has no argument 'num_bits'; write bits=4."),
        ({"dtype": torch.qint8}, "has no argument 'dtype'; write bits=8, signed=True."),
        ({"dtype": torch.quint8}, "write bits=8, signed=False."),
        ({"dtype": torch.int16}, "write bits=16, signed=True."),
        ({"dtype": torch.float8_e4m3fn}, "write format='e4m3'."),
        ({"dtype": torch.float32}, "write bits=8 for integers, format='e4m3' for small floats."),
        ({"per_channel": True}, "write axis=0."),
        ({"per_channel": False}, "write axis=None."),
        ({"unsigned": True}, "write signed=False."),
        ({"qscheme": torch.per_channel_symmetric}, "write axis=0, symmetric=True."),
        ({"qscheme": torch.per_tensor_affine}, "write axis=None, symmetric=False."),
        ({"num_bits": 8, "per_channel": True}, "no argument 'num_bits' and no 'per_channel'; write bits=8, axis=0."),
        ({"bit": 4}, "write bits=4."),
        ({"bts": 4}, "unknown argument of QuantSpec 'bts'; did you mean 'bits'"),
    ],
    ids=str,
)
def test_arguments_of_other_tools_say_those_of_quant_spec(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(TypeError) as error:
        qt.QuantSpec(**arguments)
    assert words in str(error.value)


def test_what_an_error_says_to_write_is_a_spec() -> None:
    for arguments in ({"num_bits": 4, "per_channel": True}, {"dtype": torch.quint8}, {"dtype": torch.float8_e5m2}):
        with pytest.raises(TypeError) as error:
            qt.QuantSpec(**arguments)
        written = str(error.value).partition("write ")[2].removesuffix(".")
        assert isinstance(eval(f"qt.QuantSpec({written})"), qt.QuantSpec)


def test_texts_and_pickles_of_specs_are_as_before() -> None:
    spec = qt.QuantSpec(bits=4, axis=0)
    assert pickle.loads(pickle.dumps(spec)) == qt.QuantSpec.from_dict(spec.to_dict()) == spec
    with pytest.raises(ValueError, match="unknown key of QuantSpec 'num_bits'; did you mean 'bits'"):
        qt.QuantSpec.from_dict({"num_bits": 4})


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_of_weights_alone(kind: str) -> None:
    weights = qt.QConfig(weight=qt.QuantSpec(bits=4, axis=0))
    assert weights == qt.QConfig(None, qt.QuantSpec(bits=4, axis=0)) == qt.QConfig.from_dict(weights.to_dict())
    model = quantized(kind, Net().eval(), qconfig_mapping=qt.QConfigMapping().set_global(weights))
    names = list(qt.quantizers_of(model))
    assert len(names) == 3
    assert all(name.endswith("weight_quantizer") for name in names)
    assert qt.QConfig(activation=qt.QuantSpec()).weight is None


@pytest.mark.parametrize("value", [8, "int8", nn.Identity])
def test_a_config_takes_specs(value: object) -> None:
    with pytest.raises(
        TypeError, match=r"^QConfig: weight must be a QuantSpec or None.*; write weight=qtoolkit\.QuantSpec"
    ):
        qt.QConfig(weight=value)


# ---- scripts of other tools


@pytest.mark.parametrize("kind", KINDS)
def test_training_without_ranges_names_the_step_that_is_missing(kind: str) -> None:
    """Scripts of torch.ao train at once after prepare_qat_fx: its quantizers find their ranges while they train."""
    model = quantized(kind, Net().train())
    words = r"has no range yet: call qtoolkit\.calibrate\(model, batches\) first, or find it in the first steps of the training"
    with pytest.raises(
        RuntimeError, match=rf"{words} with qtoolkit\.tuning\.QuantizationSchedule\(model, observe=100\)"
    ):
        model(IMAGES).sum().backward()
    with pytest.raises(
        RuntimeError, match=r"has no range yet: call qtoolkit\.calibrate\(model, batches\) first, or switch"
    ):
        model.eval()(IMAGES)


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_steps_of_a_training_find_the_ranges_if_asked(kind: str) -> None:
    model = quantized(kind, Net().train())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    schedule = qt.tuning.QuantizationSchedule(model, observe=2)
    for _ in range(4):
        nn.functional.cross_entropy(model(IMAGES), LABELS).backward()
        optimizer.step()
        schedule.step()
    assert all(quantizer.ready and quantizer.quantizing for quantizer in qt.quantizers_of(model).values())


def test_mqbench_s_advanced_ptq_leads_to_reconstruct() -> None:
    with pytest.raises(
        ImportError, match=r"'ptq_reconstruction' is missing: use qtoolkit\.tuning\.reconstruct\(prepared, batches\)"
    ):
        from qtoolkit.compat.mqbench.advanced_ptq import ptq_reconstruction  # noqa: F401
    with pytest.raises(
        ImportError, match=r"'ptq_reconstruction' is missing: use qtoolkit\.tuning\.reconstruct\(prepared, batches\)"
    ):
        mqbench.advanced_ptq.ptq_reconstruction  # noqa: B018


# ---- options that are names have types


NAMED = {
    RuntimeName: RUNTIMES,
    ExecutingRuntime: EXECUTES,
    RangeMethod: METHODS,
    inspect.signature(qt.tuning.reconstruct).parameters["method"].annotation: RECONSTRUCTIONS,
    get_type_hints(qt.Backend)["batch_norm"]: qt.nn.batch_norm.STRATEGIES,
}


@pytest.mark.parametrize(("options", "table"), NAMED.items(), ids=lambda value: str(value)[:20])
def test_the_types_of_options_name_what_the_tables_have(options: object, table: object) -> None:
    assert set(get_args(options)) == set(table)


def test_options_that_are_plain_text_are_names_that_users_may_add() -> None:
    functions = {
        name: function
        for module in (qt, qt.export, qt.debug, qt.tuning, qt.quant_modules, qt.ops)
        for name in getattr(module, "__all__", ("replace", "initialize"))
        if inspect.isfunction(function := getattr(module, name))
    }
    plain = {
        (name, parameter.name)
        for name, function in functions.items()
        for parameter in inspect.signature(function).parameters.values()
        if parameter.annotation in (str, str | None) and parameter.default is not inspect.Parameter.empty
    }
    of_torch = {(op, "process_group") for op in ("batch_norm_fake_quant", "batch_norm_totals")}  # torch names these
    of_users = {("calibrate", "method"), ("report", "title")}  # an observer, which users register; any text
    assert plain == of_torch | of_users


def test_a_model_of_ultralytics_is_told_which_trainer_trains_it() -> None:
    """Its own builds a float model anew, and would train that without a word."""
    kind = type("DetectionModel", (Net,), {"__module__": "ultralytics.nn.tasks"})
    for quantize in (qt.prepare, qt.quant_modules.replace):
        with pytest.warns(UserWarning, match=r"trainer=qtoolkit\.integrations\.ultralytics\.trainer\(yolo\)") as found:
            quantize(kind(), backend="tensorrt")
        assert [Path(warning.filename) for warning in found] == [Path(__file__)]


def test_what_lint_names_for_models_is_there() -> None:
    with pytest.raises(TypeError, match="for a model, from qtoolkit.graph.lint import lint and lint.prepared."):
        qt.lint(Net())
    assert callable(importlib.import_module("qtoolkit.graph.lint").lint)


# ---- what other tools call an argument, a method or a target


def some_calls(path: Path) -> dict[str, Callable[..., object]]:
    """Public functions, each with what it needs: keyword arguments are added."""
    prepared = calibrated()
    return {
        "prepare": lambda **other: qt.prepare(Net(), IMAGES, backend="onnxruntime", **other),
        "replace": lambda **other: qt.quant_modules.replace(Net(), backend="onnxruntime", **other),
        "prepare_parts": lambda **other: qt.prepare_parts(Net(), IMAGES, backend="onnxruntime", **other),
        "initialize": lambda **other: qt.quant_modules.initialize(backend="onnxruntime", **other),
        "quantize": lambda **other: qt.quantize(Net(), [IMAGES], backend="onnxruntime", path=path, **other),
        "calibrate": lambda **other: qt.calibrate(prepared, [IMAGES], progress=False, **other),
        "export_onnx": lambda **other: qt.export_onnx(prepared, IMAGES, path, **other),
    }


@pytest.mark.parametrize(
    ("name", "other", "words"),
    [
        ("prepare", {"bits": 4}, r"no argument 'bits'; write qconfig_mapping=QConfigMapping\(\)\.set_global\(QConfig"),
        (
            "prepare",
            {"weights": "int4", "activations": "int8"},
            r"'weights' and no 'activations'; write qconfig_mapping=",
        ),
        ("prepare", {"num_bits": 4}, r"no argument 'num_bits'; write qconfig_mapping=.*QuantSpec\(bits=4\)\.$"),
        ("prepare", {"ignored_scope": "head"}, "no argument 'ignored_scope'; write exclude='head'.$"),
        ("replace", {"dtype": torch.qint8}, "no argument 'dtype'; write qconfig_mapping="),
        ("prepare_parts", {"w_bits": 4}, "^prepare_parts has no argument 'w_bits'; write qconfig_mapping="),
        ("initialize", {"bits": 4}, "^initialize has no argument 'bits'; write qconfig_mapping="),
        ("quantize", {"num_batches": 8}, "no argument 'num_batches'; write max_batches=8.$"),
        ("calibrate", {"num_batches": 8}, "no argument 'num_batches'; write max_batches=8.$"),
        ("calibrate", {"data_loader": [IMAGES]}, "no argument 'data_loader'; write batches.$"),
        (
            "calibrate",
            {"metod": "mse"},
            r"^unknown argument of calibrate 'metod'; did you mean 'method'\? Known: batches",
        ),
        ("export_onnx", {"dynamic_axes": {"x": {0: "n"}}}, "no argument 'dynamic_axes'; write dynamic_batch=True for"),
        ("export_onnx", {"opset_version": 17}, "^export_onnx has no argument 'opset_version'; write opset=17.$"),
        (
            "export_onnx",
            {"do_constant_folding": True},
            "^unknown argument of export_onnx 'do_constant_folding'. Known: b",
        ),
    ],
)
def test_arguments_of_other_tools(name: str, other: dict[str, object], words: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=words):
        some_calls(tmp_path / "model.onnx")[name](**other)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "meant"),
    [("x86", "onnxruntime"), ("fbgemm", "onnxruntime"), ("ort", "onnxruntime"), ("qnnpack", "xnnpack"), ("trt", "tensorrt"),
     ("tflite", "litert"), ("ov", "openvino")],
)  # fmt: skip
def test_other_names_of_targets(name: str, meant: str) -> None:
    assert meant in qt.backends
    with pytest.raises(ValueError, match=f"^unknown backend '{name}'; did you mean '{meant}'?"):
        qt.prepare(Net(), backend=name)


@pytest.mark.parametrize(("name", "meant"), [("kl", "entropy"), ("KL_divergence", "entropy"), ("absmax", "minmax")])
def test_other_names_of_methods(name: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"^unknown method of calibrate '{name}'; did you mean '{meant}'?"):
        qt.calibrate(qt.prepare(Net(), backend="tensorrt"), [IMAGES], method=name, progress=False)
    if meant in METHODS:
        with pytest.raises(
            ValueError, match=f"^unknown method of observer 'histogram' '{name}'; did you mean '{meant}'?"
        ):
            qt.QuantSpec(observer="histogram", observer_args={"method": name})
    with pytest.raises(ValueError, match=f"^unknown observer '{name}'; did you mean '(histogram|minmax)'?"):
        qt.QuantSpec(observer=name)


@pytest.mark.parametrize("name", sorted(set(RUNTIMES) - set(EXECUTES) - {"litert"}))
def test_runtimes_that_are_not_executed(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^verify: qtoolkit cannot execute the runtime '{name}', only 'onnx"):
        qt.export.verify(qt.convert(calibrated()), IMAGES, tmp_path / "model.onnx", runtimes=(name,))


# ---- wrong values for an input, a function or a path


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            DataLoader(TensorDataset(IMAGES, LABELS)),
            r"got a DataLoader; pass the model's inputs from one batch, as from next\(",
        ),
        (TensorDataset(IMAGES), r"got a TensorDataset; pass the model's inputs from one batch, as from dataset\[0\]"),
        ((1, 3, 8, 8), r"got the shape \(1, 3, 8, 8\); pass a tensor of it, such as torch.randn\(1, 3, 8, 8\)"),
        ([1, 3, 8, 8], r"got the shape \(1, 3, 8, 8\); pass a tensor of it"),
        (IMAGES.shape, r"got the shape \(8, 3, 8, 8\); pass a tensor of it"),
    ],
    ids=["loader", "dataset", "tuple", "list", "size"],
)
def test_a_data_loader_or_a_shape_in_the_place_of_inputs(given: object, words: str, tmp_path: Path) -> None:
    prepared, path = calibrated(), tmp_path / "model.onnx"
    for call in (
        lambda: qt.prepare(Net(), given, backend="onnxruntime"),
        lambda: qt.prepare_parts(Net(), given, backend="onnxruntime"),
        lambda: qt.export_onnx(prepared, given, path, progress=False),
        lambda: qt.debug.compare(Net(), prepared, given, progress=False),
        lambda: qt.tuning.equalize(Net(), given),
    ):
        with pytest.raises(TypeError, match=rf"^\w+: (example_)?inputs do not match \w+\.forward\(.*\).*: {words}"):
            call()


def test_errors_show_no_tensor() -> None:
    prepared = calibrated()
    for call in (
        lambda: qt.debug.sensitivity(prepared, IMAGES),
        lambda: qt.calibrate(prepared, [IMAGES], forward=IMAGES),
        lambda: qt.tuning.reconstruct(prepared, [IMAGES], loss=IMAGES),
        lambda: qt.prepare(Net(), backend="tensorrt", exclude=[IMAGES]),
        lambda: qt.debug.watch(prepared, writer=IMAGES),
    ):
        with pytest.raises(TypeError, match="got a Tensor"):
            call()


@pytest.mark.parametrize("ending", [".pt", ".pth", ".safetensors", ".pt2"])
def test_a_path_of_weights_is_no_path_of_a_file(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"w{ending}"
    with pytest.raises(
        ValueError, match=rf"^export_onnx: path must not end in '{ending}', .* write path='model.onnx', or"
    ):
        qt.export_onnx(calibrated(), IMAGES, path, progress=False)
    if ending != ".safetensors":
        with pytest.raises(
            ValueError, match=f"^save_checkpoint: path must not end in '{ending}', .*'last.safetensors', or"
        ):
            qt.save_checkpoint(calibrated(), path)
    assert list(tmp_path.iterdir()) == []


# ---- a frozen layer


@pytest.mark.parametrize("kind", KINDS)
def test_the_scale_of_a_weight_that_was_frozen_is_not_trained(kind: str) -> None:
    model, spec = Net(), qt.QuantSpec(quantizer="lsq")
    model.head[0].requires_grad_(False)
    mapping = qt.QConfigMapping().set_global(qt.QConfig(spec, qt.QuantSpec(quantizer="lsq", axis=0)))
    ours = quantized(kind, model, qconfig_mapping=mapping)
    qt.calibrate(ours, [IMAGES], progress=False)
    scales = {n: q for n, q in qt.quantizers_of(ours).items() if q.of_weight}
    before = {name: quantizer.scale.clone() for name, quantizer in scales.items()}
    optimizer = torch.optim.SGD(qt.parameter_groups(ours, lr=10.0))
    ours(IMAGES).square().mean().backward()
    optimizer.step()
    kept = {name for name, quantizer in scales.items() if torch.equal(quantizer.scale, before[name])}
    assert kept == {"head.0.weight_quantizer"}
