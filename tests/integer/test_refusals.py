"""Whether a layer computes on codes is decided once: training, each runtime and the report name the same cause."""

import itertools
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt
from qtoolkit.export import verify
from qtoolkit.graph.plan import Computed
from qtoolkit.nn.refusals import NO_GRID, refusal_of
from qtoolkit.report.lines import LayerLine
from qtoolkit.runtimes.table import RUNTIMES
from qtoolkit.verdicts import Cause, Refusal, Verdict

IMAGES = torch.randn(2, 8, 6, 6, generator=torch.Generator().manual_seed(0))
ROWS = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
INT8 = qt.QuantSpec()


@dataclass(frozen=True)
class Layer:
    """A layer, the dimension of its weight along which output channels run, and who has no kernel of it: of affine inputs."""

    make: Callable[[], nn.Module]
    axis: int = 0
    own: Mapping[str, Cause] = field(default_factory=dict)
    own_of_affine: Mapping[str, Cause] = field(default_factory=dict)

    @property
    def inputs(self) -> Tensor:
        return ROWS if isinstance(self.make(), nn.Linear) else IMAGES


LAYERS = {
    "conv": Layer(lambda: nn.Conv2d(8, 8, 3)),
    "depthwise": Layer(lambda: nn.Conv2d(8, 8, 3, groups=8)),
    "dilated": Layer(
        lambda: nn.ConvTranspose2d(8, 8, 3, dilation=2),
        1,
        {"onnxruntime": Cause.NO_KERNEL},
        {"openvino": Cause.INPUT_CODES},
    ),
    "linear": Layer(lambda: nn.Linear(8, 8)),
}


@dataclass(frozen=True)
class Case:
    """Specs of weight and input, the cause by a rule that all share, and the causes of those with a rule of their own."""

    weight: Mapping[str, object] = field(default_factory=dict)
    input: qt.QuantSpec | None = INT8
    shared: Cause | None = None
    own: Mapping[str, Cause] = field(default_factory=dict)


def learned(quantizer: str) -> Case:
    """A weight whose grid is that of integers, and whose gradients are not those of the training op."""
    return Case({"bits": 4, "quantizer": quantizer, "axis": None}, own={"training": Cause.WEIGHT_CODES})


UNSIGNED = dict.fromkeys(("training", "onnxruntime", "xnnpack", "litert"), Cause.WEIGHT_CODES)
CASES = {
    "8 bits": Case(),
    "4 bits": Case({"bits": 4}),
    "one scale": Case({"axis": None}),
    "16 bits": Case({"bits": 16}, shared=Cause.WEIGHT_CODES),
    "zero point": Case({"symmetric": False}, shared=Cause.WEIGHT_CODES),
    "unsigned": Case({"signed": False}, own=UNSIGNED),
    "e4m3": Case({"format": "e4m3"}, shared=Cause.WEIGHT_CODES),
    "groups": Case({"bits": 4, "group_size": 4}, shared=Cause.WEIGHT_CODES),
    "other axis": Case({"axis": "other"}, shared=Cause.WEIGHT_CODES),
    **{name: learned(name) for name in ("pact", "qil", "apot", "dorefa")},
    "affine input": Case(input=qt.QuantSpec(symmetric=False), own={"tensorrt": Cause.INPUT_CODES}),
    "learned input": Case(input=qt.QuantSpec(quantizer="lsq")),
    "16-bit input": Case(input=qt.QuantSpec(bits=16), shared=Cause.INPUT_CODES),
    "e4m3 input": Case(input=qt.QuantSpec(format="e4m3"), shared=Cause.INPUT_CODES),
    "per-channel input": Case(input=qt.QuantSpec(axis=1), shared=Cause.INPUT_CODES),
    "shaped input": Case(input=qt.QuantSpec(bits=4, quantizer="apot"), shared=Cause.INPUT_CODES),
    "dynamic input": Case(input=qt.QuantSpec(dynamic=True), shared=Cause.INPUT_CODES),
    "float input": Case(input=None, shared=Cause.INPUT_CODES),
    "both": Case({"bits": 16}, qt.QuantSpec(bits=16), Cause.INPUT_CODES),
}


def prepared(layer: Layer, config: qt.QConfig, output: qt.QuantSpec = INT8) -> nn.Module:
    """Return a calibrated model of the layer and one more, whose input is the output."""
    torch.manual_seed(0)
    last = nn.Linear(8, 4) if layer.inputs is ROWS else nn.Conv2d(8, 4, 1)
    mapping = qt.QConfigMapping().set_module_name("0", config)
    mapping.set_module_name("1", qt.QConfig(output, qt.QuantSpec(axis=0)))
    model = qt.prepare(
        nn.Sequential(layer.make(), last), layer.inputs, "academic", mapping, training_arithmetic="integer"
    )
    qt.calibrate(model, [layer.inputs], progress=False)
    return model.train()


def config_of(layer: Layer, case: Case) -> qt.QConfig:
    fields = {"axis": layer.axis} | case.weight
    if fields["axis"] == "other" or "group_size" in fields:
        fields["axis"] = 1 - layer.axis
    return qt.QConfig(case.input, qt.QuantSpec(**fields))


def line_of(model: nn.Module) -> LayerLine:
    return next(line for line in qt.quantization_report(model).layers if line.name == "0")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        # The only pair for which a runtime has a rule of its own.
        pytest.param(kind, name, marks=() if (kind, name) == ("dilated", "affine input") else pytest.mark.sweep(1))
        for kind, name in itertools.product(LAYERS, CASES)
    ],
)
def test_training_runtimes_and_report_agree(kind: str, name: str) -> None:
    layer, case = LAYERS[kind], CASES[name]
    if kind == "depthwise" and name in ("groups", "other axis"):
        pytest.skip("its weight has one input channel")
    model = prepared(layer, config_of(layer, case))
    line = line_of(model)
    decided, sentences = {"training": line.in_float}, {"training": line.training}
    for runtime in RUNTIMES:
        converted = qt.convert(model, "integer", runtime=runtime)
        computed, row = converted.plan.computed["_0"], line_of(converted)
        assert row.in_float is computed.cause
        assert (computed.cause is None) == (computed.kernel is not None)
        assert str(computed) in str(row.reason)
        decided[runtime], sentences[runtime] = computed.cause, computed.why
    own = {} if case.shared is not None else {**case.own, **layer.own}
    own |= layer.own_of_affine if name == "affine input" else {}
    assert decided == {who: own.get(who, case.shared) for who in ("training", *RUNTIMES)}
    if case.shared is not None:
        trained = model.get_submodule("0")
        source = None if trained.source is None else trained.source.capability
        refusal = refusal_of(trained, trained.weight_quantizer.capability, source)
        assert refusal.cause is case.shared
        assert refusal.text in sentences.pop("training")
        seen = refusal if source is None or source.direct else NO_GRID  # a runtime knows one grid, or none
        assert set(sentences.values()) == {seen.text}
    assert line.training.startswith("int8 kernel") == (decided["training"] is None)


def test_runtimes_that_want_other_signs_say_of_which_codes() -> None:
    conv, unsigned = LAYERS["conv"], qt.QuantSpec(signed=False)
    causes = {}
    for name, (source, output) in {"input": (unsigned, INT8), "output": (INT8, unsigned)}.items():
        model = prepared(conv, qt.QConfig(source, qt.QuantSpec(axis=0)), output)
        for runtime in ("onnxruntime", "xnnpack"):
            causes[name, runtime] = qt.convert(model, "integer", runtime=runtime).plan.computed["_0"].cause
    of_output = dict.fromkeys([("input", "onnxruntime"), ("output", "onnxruntime"), ("output", "xnnpack")])
    assert causes == {**dict.fromkeys(of_output, Cause.OUTPUT_CODES), ("input", "xnnpack"): Cause.INPUT_CODES}


@pytest.mark.parametrize("spec", [qt.QuantSpec(bits=16), qt.QuantSpec(axis=1)], ids=["16 bits", "per channel"])
@pytest.mark.parametrize("kind", LAYERS)
def test_an_output_without_codes_of_a_byte_has_no_kernel_that_gives_them(kind: str, spec: qt.QuantSpec) -> None:
    layer = LAYERS[kind]
    model = prepared(layer, config_of(layer, Case()), spec)
    for runtime in RUNTIMES:
        computed = qt.convert(model, "integer", runtime=runtime).plan.computed["_0"]
        gives_floats = runtime in ("openvino", "tensorrt") or (runtime, kind) == ("onnxruntime", "linear")
        expected = None if gives_floats else layer.own.get(runtime, Cause.OUTPUT_CODES)
        assert computed.cause is expected, (runtime, computed)


def test_onnxruntime_computes_a_layer_with_a_wide_output_in_float(tmp_path: Path) -> None:
    layer = LAYERS["conv"]
    model = qt.convert(
        prepared(layer, config_of(layer, Case()), qt.QuantSpec(bits=16)), "integer", runtime="onnxruntime"
    )
    path = qt.export_onnx(model, (IMAGES,), tmp_path / "m.onnx", opset=21, verify=False).path
    found = verify(model, (IMAGES,), path).runtimes["onnxruntime"]
    assert (len(found.layers), found.integer_layers) == (2, ())
    assert [how.kernel for how in model.plan.computed.values()] == [None, None]


def test_the_zero_points_of_grids_are_those_that_capabilities_tell() -> None:
    """So that a rule reads no tensor."""
    for symmetric, quantizer in itertools.product((True, False), ("fixed", "lsq")):
        trained = qt.TensorQuantizer(qt.QuantSpec(symmetric=symmetric, quantizer=quantizer), of_weight=True)
        trained.set_range(-1.0, 2.0)
        grid = trained.to_grid()
        assert grid.capability.zero_point == (grid.zero_point is not None) == trained.capability.zero_point


@pytest.mark.parametrize(
    ("record", "name"),
    [
        (Computed.in_float(Refusal(Cause.NO_KERNEL, "it has none")), "cause"),
        (LayerLine("conv", "conv", "", (), Verdict.quantized(), in_float=Cause.NO_KERNEL), "in_float"),
    ],
    ids=["plan", "report"],
)
def test_pickles_from_before_load(record: object, name: str) -> None:
    """They have no cause."""
    text = str(record)
    state = {key: value for key, value in vars(record).items() if key != name}
    vars(record).clear()
    vars(record).update(state)
    loaded = pickle.loads(pickle.dumps(record))
    assert name not in vars(loaded)
    assert getattr(loaded, name) is None
    assert str(loaded) == text or name == "in_float"
