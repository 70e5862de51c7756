"""A spec says only what it changes: in a rule, the fields that are left out are those of the backend's spec."""

import json
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import qtoolkit as qt
from qtoolkit.compat.mqbench.platforms import PLATFORMS, qconfig_of
from qtoolkit.config.spec import ALL

X = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
LSQ = qt.QConfig(qt.QuantSpec(quantizer="lsq"), qt.QuantSpec(bits=4, quantizer="lsq"))


def net() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4))


def everywhere(activation: qt.QuantSpec | None, weight: qt.QuantSpec | None = None) -> qt.QConfigMapping:
    return qt.QConfigMapping().set_global(qt.QConfig(activation, weight))


def completed(backend: str, of: str, **fields: Any) -> qt.QuantSpec:
    base = getattr(qt.backends[backend].qconfig, of)
    return qt.QuantSpec(**fields).completed(base)


ROUTES = {
    "traced": lambda mapping, backend: qt.prepare(net(), X, backend=backend, qconfig_mapping=mapping),
    "replaced": lambda mapping, backend: qt.quant_modules.replace(net(), mapping, backend=backend),
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("backend", "activation", "weight"),
    [
        ("onnxruntime", "uint8 affine lsq", "int4 per-channel(0) lsq"),
        ("tensorrt", "int8 float16 scale lsq", "int4 per-channel(0) float16 scale lsq"),
        ("tensorrt10", "int8 lsq", "int4 per-channel(0) lsq"),
        ("qnn", "uint8 affine lsq", "uint4 affine lsq"),
        ("xnnpack", "int8 affine lsq", "int4 narrow per-channel(0) lsq"),
        ("ppl-w8a16", "uint16 affine lsq", "uint4 affine lsq"),
        ("stpu", "int8 narrow lsq", "int4 narrow lsq"),
    ],
)
def test_a_rule_says_only_what_it_changes(route: str, backend: str, activation: str, weight: str) -> None:
    model = ROUTES[route](qt.QConfigMapping().set_global(LSQ), backend)
    specs = {name: quantizer.spec.describe() for name, quantizer in qt.quantizers_of(model).items()}
    assert {spec for name, spec in specs.items() if "weight" in name} == {weight}
    assert {spec for name, spec in specs.items() if "weight" not in name} == {activation}
    report = str(qt.quantization_report(model))
    assert activation in report
    assert weight in report


def test_the_activations_of_a_learned_scale_have_the_codes_that_the_runtime_computes_with() -> None:
    model = qt.prepare(net().train(), X, backend="onnxruntime", qconfig_mapping=everywhere(*(LSQ.activation,) * 2))
    qt.calibrate(model, [X], progress=False)
    kernels = qt.convert(model.eval(), arithmetic="integer").plan.computed
    assert [each.kernel for each in kernels.values()] == ["QLinearConv", "QLinearConv", "QGemm"]
    behind_a_relu = next(q for name, q in qt.quantizers_of(model).items() if name.endswith("_1"))
    assert (behind_a_relu.spec.qmin, behind_a_relu.spec.qmax) == (0, 255)


@pytest.mark.parametrize(
    ("backend", "of", "fields", "described"),
    [
        ("onnxruntime", "activation", {}, "uint8 affine"),
        ("onnxruntime", "activation", {"symmetric": True}, "int8"),  # no unsigned codes that clip negative values
        ("onnxruntime", "activation", {"symmetric": True, "signed": False}, "uint8"),
        ("onnxruntime", "activation", {"signed": True}, "int8 affine"),
        ("onnxruntime", "activation", {"format": "e4m3"}, "e4m3"),
        ("onnxruntime", "activation", {"bits": 4, "quantizer": "pact"}, "int4 pact"),
        ("onnxruntime", "activation", {"quantizer": "tqt"}, "int8 tqt"),
        ("onnxruntime", "activation", {"dynamic": True}, "uint8 affine dynamic"),
        ("onnxruntime", "activation", {"pow2_scale": True, "observer": "pow2"}, "int8 pow2"),
        ("onnxruntime", "weight", {"axis": None}, "int8"),
        ("onnxruntime", "weight", {"bits": 4, "axis": 1, "group_size": 32}, "int4 groups of 32(1)"),
        ("onnxruntime", "weight", {"format": "mxfp4"}, "mxfp4"),
        ("openvino", "weight", {"quantizer": "lsq"}, "int7 per-channel(0) lsq"),
        ("openvino", "weight", {"bits": 8}, "int8 per-channel(0)"),
        ("stpu", "activation", {"signed": False}, "uint8"),
        ("stpu", "activation", {"narrow": False}, "int8"),
        ("vitis", "weight", {"quantizer": "lsq"}, "int8 lsq"),
        ("vitis", "weight", {"quantizer": "tqt"}, "int8 pow2 tqt"),
        ("nnie", "weight", {"quantizer": "lsq"}, "int8 lsq"),
        ("nnie", "weight", {"format": "int", "bits": 4}, "int4"),
        ("nnie", "activation", {"dynamic": True}, "int8 dynamic"),
    ],
)
def test_what_is_written_holds_against_the_backend(
    backend: str, of: str, fields: dict[str, Any], described: str
) -> None:
    found = completed(backend, of, **fields)
    assert found.describe() == described
    assert found.given == ALL
    assert found.completed(qt.QuantSpec(bits=3, signed=False, axis=1)) == found


def test_options_belong_to_what_is_named() -> None:
    base = qt.QuantSpec(observer="clip_std", observer_args={"deviations": 3.0})
    assert qt.QuantSpec(bits=4).completed(base).observer_args == {"deviations": 3.0}
    assert qt.QuantSpec(observer="histogram").completed(base).observer_args == {}


def test_what_does_not_fit_the_backend_is_an_error() -> None:
    rule = "qconfig_mapping, with what it leaves to nnie.weight: QuantSpec: format='nnie' needs bits=8, got 4"
    with pytest.raises(ValueError, match=rule):
        qt.prepare(net(), X, backend="nnie", qconfig_mapping=everywhere(None, qt.QuantSpec(bits=4)))


@pytest.mark.parametrize("route", ["prepare", "replace"])
def test_an_axis_that_is_left_out_is_the_output_channel_of_every_layer(route: str) -> None:
    def scales(spec: qt.QuantSpec) -> int:
        rules: Any = qt.QConfigMapping().set_module_name("0", qt.QConfig(qt.QuantSpec(), spec))
        model: nn.Module = nn.Sequential(nn.ConvTranspose2d(4, 6, 3))
        if route == "replace":
            model = qt.quant_modules.replace(model, rules, backend="onnxruntime")
        else:
            model = qt.prepare(model, torch.rand(1, 4, 5, 5), backend="onnxruntime", qconfig_mapping=rules)
        return int(model.get_submodule("0.weight_quantizer").scale.numel())

    assert [scales(qt.QuantSpec(**axis)) for axis in ({}, {"axis": None}, {"axis": 1})] == [6, 1, 6]


def test_alone_a_spec_has_the_defaults() -> None:
    assert qt.TensorQuantizer(qt.QuantSpec()).spec.describe() == "int8"
    layer = qt.nn.QuantLinear(4, 2, weight_spec=qt.QuantSpec(bits=4))
    assert layer.weight_quantizer.spec.describe() == "int4"


def test_the_fields_that_are_written_go_on() -> None:
    spec = qt.QuantSpec(4, quantizer="lsq")
    assert spec.given == {"bits", "quantizer"}
    assert "given" not in repr(spec)
    assert spec == replace(spec, given=None)
    assert replace(spec, signed=False).given == {"bits", "quantizer", "signed"}
    assert replace(spec, axis=0).completed(qt.QuantSpec(signed=False, symmetric=False)).describe() == (
        "uint4 affine per-channel(0) lsq"
    )
    assert spec.with_(signed=True, bits=8).given == {"bits", "quantizer", "signed"}
    with pytest.raises(TypeError, match="no argument 'num_bits'"):
        spec.with_(num_bits=4)
    with pytest.raises(ValueError, match="given must hold names of its fields"):
        qt.QuantSpec(given=frozenset({"bit"}))
    for copy in (pickle.loads(pickle.dumps(spec)), qt.QuantSpec.from_dict(json.loads(json.dumps(spec.to_dict())))):
        assert (copy, copy.given, vars(copy).keys()) == (spec, spec.given, vars(spec).keys())
    assert spec.to_dict() == {"bits": 4, "quantizer": "lsq"}
    assert spec.values().keys() == ALL


def test_json_of_an_earlier_version_has_all_fields_written() -> None:
    old = {"global": [["", {"activation": qt.QuantSpec(bits=8).values(), "weight": None}]]}
    mapping = qt.QConfigMapping.from_json(json.dumps(old))
    config = mapping.match("0", nn.Conv2d).qconfig
    assert config.activation.given == ALL
    assert json.loads(everywhere(qt.QuantSpec(bits=4)).to_json())["global"] == [
        ["", {"activation": {"bits": 4}, "weight": None}]
    ]


def test_rules_are_compared_by_what_they_write() -> None:
    one, other = everywhere(qt.QuantSpec()), everywhere(qt.QuantSpec(signed=True))
    assert qt.QuantSpec() == qt.QuantSpec(signed=True)
    assert one != other
    assert one == everywhere(qt.QuantSpec())
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model.again = model[0]
    mapping = qt.QConfigMapping()
    for name, spec in {"0": qt.QuantSpec(), "again": qt.QuantSpec(signed=True)}.items():
        mapping.set_module_name(name, qt.QConfig(spec, qt.QuantSpec()))
    with pytest.raises(ValueError, match="'0', 'again' are names of one module"):
        qt.quant_modules.replace(model, mapping, backend="onnxruntime")


def test_a_state_dict_of_other_signs_names_the_fields_to_write() -> None:
    new = qt.QuantSpec(quantizer="lsq")
    saved, model = (
        qt.prepare(net(), X, backend="onnxruntime", qconfig_mapping=everywhere(spec, new))
        for spec in (new.completed(qt.QuantSpec()), new)
    )
    named = "has signed=True, symmetric=True, in the model signed=False, symmetric=False; prepare the model"
    with pytest.raises(ValueError, match=named) as error:
        model.load_state_dict(saved.state_dict())
    assert "with the fields from the state dict in the QuantSpec of its rule" in str(error.value)


def test_the_search_for_mixed_precision_completes_its_choices() -> None:
    choices = {"w4": LSQ, "float": None}
    search = qt.tuning.mixed_precision.MixedPrecision(net(), X, choices, backend="onnxruntime")
    assert {configs["w4"].describe() for configs in search.configs.values()} == {
        "activation uint8 affine lsq, weight int4 per-channel(0) lsq"
    }


def test_a_backend_of_ones_own_has_complete_specs() -> None:
    own = replace(qt.backends["onnxruntime"], qconfig=qt.QConfig(qt.QuantSpec(bits=4), qt.QuantSpec()))
    model = qt.prepare(net(), X, backend=own)
    assert {q.spec.describe() for q in qt.quantizers_of(model).values()} == {"int4", "int8"}


@pytest.mark.parametrize("name", sorted(PLATFORMS))
def test_configs_of_mqbench_keep_their_own_meaning(name: str) -> None:
    platform = PLATFORMS[name]
    target = qt.backends[platform.backend]
    scheme = {"bit": 4, "symmetry": True, "per_channel": False, "pot_scale": False, "symmetric_range": False}
    kinds = {"observer": "MinMaxObserver", "fakequantize": "FixedFakeQuantize", "qscheme": scheme}
    extra = {} if name == "NNIE" else {f"{side}_{kind}": value for side in "wa" for kind, value in kinds.items()}
    config = qconfig_of(platform, target, extra)
    assert {spec.given for spec in (config.activation, config.weight)} == {ALL}
    for other in qt.backends.values():
        assert config.completed(other.qconfig) == config
