import json
import operator
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import qtoolkit as qt

W4 = qt.QConfig(qt.QuantSpec(bits=4), qt.QuantSpec(bits=4, axis=0))
W8 = qt.QConfig(qt.QuantSpec(), qt.QuantSpec(axis=0))

specs = st.builds(
    lambda narrow, **given: qt.QuantSpec(narrow=narrow and (given["signed"] or not given["symmetric"]), **given),
    bits=st.integers(2, 16),
    signed=st.booleans(),
    symmetric=st.booleans(),
    narrow=st.booleans(),
    axis=st.none() | st.integers(-4, 3),
    quantizer=st.sampled_from(["fixed", "lsq"]),
    observer=st.just("moving_average"),
    observer_args=st.just({}) | st.builds(lambda m: {"momentum": m}, st.floats(0.01, 1)),
)

NESTED: list[object] = []
for _ in range(100_000):
    NESTED = [NESTED]

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda of: st.lists(of, max_size=3) | st.dictionaries(st.text(max_size=4), of, max_size=3),
)
json_specs = st.fixed_dictionaries(
    {}, optional={f.name: json_values | st.sampled_from([8, True, "histogram", "lsq"]) for f in fields(qt.QuantSpec)}
)
json_configs = st.fixed_dictionaries({}, optional=dict.fromkeys(("activation", "weight"), json_values | json_specs))
json_rules = st.lists(
    json_values | st.tuples(json_values | st.sampled_from(["", "(", "torch:add"]), json_values | json_configs),
    max_size=3,
)
json_mappings = st.fixed_dictionaries({}, optional=dict.fromkeys(qt.QConfigMapping.SOURCES, json_values | json_rules))

grouped_specs = st.builds(
    qt.QuantSpec,
    bits=st.integers(2, 8),
    axis=st.integers(-4, 3),
    group_size=st.integers(1, 256),
    symmetric=st.booleans(),
)


@pytest.mark.parametrize(
    ("spec", "ends"),
    [
        (qt.QuantSpec(), (-128, 127)),
        (qt.QuantSpec(narrow=True), (-127, 127)),
        (qt.QuantSpec(bits=4, signed=False), (0, 15)),
        (qt.QuantSpec(bits=2), (-2, 1)),
        (qt.QuantSpec(bits=16, signed=False), (0, 65535)),
    ],
)
def test_range_of_codes(spec: qt.QuantSpec, ends: tuple[int, int]) -> None:
    assert (spec.qmin, spec.qmax) == ends


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        (qt.QuantSpec(group_size=4, axis=1), (8, 3, 5)),
        (qt.QuantSpec(group_size=4, axis=-2), (8, 3, 5)),
        (qt.QuantSpec(group_size=8, axis=0), (1, 12, 5)),
        (qt.QuantSpec(group_size=1, axis=2), (8, 12, 5)),
        (qt.QuantSpec(axis=1), (12,)),
        (qt.QuantSpec(), ()),
    ],
)
def test_shape_of_the_scale(spec: qt.QuantSpec, shape: tuple[int, ...]) -> None:
    assert spec.scale_shape((8, 12, 5)) == shape


@given(specs | grouped_specs)
def test_spec_survives_a_dict(spec: qt.QuantSpec) -> None:
    assert qt.QuantSpec.from_dict(spec.to_dict()) == spec


@given(st.none() | specs, st.none() | specs | grouped_specs)
def test_mapping_survives_json(activation: qt.QuantSpec | None, weight: qt.QuantSpec | None) -> None:
    qconfig = qt.QConfig(activation, weight)
    mapping = (
        qt.QConfigMapping().set_global(qconfig).set_object_type(nn.Conv2d, None).set_object_type(torch.add, qconfig)
    )
    mapping.set_module_name_regex(r"layer\d", qconfig).set_module_name("fc", None)
    assert qt.QConfigMapping.from_json(mapping.to_json()) == mapping


@given(json_values | json_mappings)
def test_any_json_is_a_mapping_or_a_sentence(values: object) -> None:
    for read in (qt.QConfigMapping.from_dict, lambda v: qt.QConfigMapping.from_json(json.dumps(v))):
        try:
            mapping = read(values)
        except ValueError as error:
            assert str(error)  # noqa: PT017  # most values are refused
        else:
            assert qt.QConfigMapping.from_json(mapping.to_json()) == mapping


class Mine(nn.Linear):
    """A module type of a user."""


def test_types_of_the_user_are_handed_over() -> None:
    mapping = qt.QConfigMapping().set_object_type(Mine, W4).set_object_type(nn.Linear, None)
    with pytest.raises(ValueError, match=r"object_type\[0\]: 'tests.test_config:Mine' .* types=\[MyLayer\]"):
        qt.QConfigMapping.from_json(mapping.to_json())
    assert qt.QConfigMapping.from_json(mapping.to_json(), types=[Mine]) == mapping


def test_types_are_a_sequence() -> None:
    with pytest.raises(TypeError, match="types must be a sequence of module types and functions, got <class"):
        qt.QConfigMapping.from_json("{}", types=Mine)


def test_a_file_cannot_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ran_by_a_config.py").write_text("class Layer: pass")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="'ran_by_a_config:Layer'"):
        qt.QConfigMapping.from_dict({"object_type": [["ran_by_a_config:Layer", None]]})
    assert "ran_by_a_config" not in sys.modules


@pytest.mark.parametrize(
    "kind",
    [
        nn.Conv2d,
        torch.add,
        F.max_pool2d,
        F.linear,
        torch.matmul,
        operator.add,
        torch.Tensor.add,
        torch.Tensor.split,
        qt.nn.Add,
        nn.modules.linear.NonDynamicallyQuantizableLinear,
    ],
)
def test_kinds_of_torch_survive_json(kind: object) -> None:
    mapping = qt.QConfigMapping().set_object_type(kind, W8)
    assert qt.QConfigMapping.from_json(mapping.to_json()) == mapping


def test_precedence_is_name_regex_type_global() -> None:
    mapping = qt.QConfigMapping().set_global(W8)
    for sets, source in (
        (lambda: mapping.set_object_type(nn.Linear, None), "object_type"),
        (lambda: mapping.set_module_name_regex("fc.*", W4), "module_name_regex"),
        (lambda: mapping.set_module_name("fc1", None), "module_name"),
    ):
        sets()
        assert mapping.match("fc1", nn.Linear).source == source
    assert mapping.match("fc2", nn.Linear).source == "module_name_regex"
    assert mapping.match("other", nn.Conv2d).source == "global"
    assert qt.QConfigMapping().match("fc", nn.Linear) is None


def test_a_regex_must_match_the_whole_name() -> None:
    assert qt.QConfigMapping().set_module_name_regex("layer1", W4).match("layer10", nn.Linear) is None


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: qt.QuantSpec(bits=1), "bits must be a whole number from 2 to 16, got 1"),
        (lambda: qt.QuantSpec(bits=8.0), "got 8.0"),
        (lambda: qt.QuantSpec(observer="minmaxx"), "unknown observer 'minmaxx'; did you mean 'minmax'"),
        (lambda: qt.QuantSpec(quantizer="lsqq"), "did you mean 'lsq'"),
        (lambda: qt.QuantSpec(observer="moving_average", observer_args={"momentun": 1}), "did you mean 'momentum'"),
        (lambda: qt.QuantSpec(observer_args={"momentum": 1}), "takes no options"),
        (lambda: qt.QuantSpec(observer="moving_average", observer_args={"momentum": 0}), "must lie in (0, 1], got 0"),
        (lambda: qt.QuantSpec(pow2_scale=True, quantizer="lsq"), "pow2_scale=True needs quantizer='fixed'"),
        (lambda: qt.QuantSpec(format="nni"), "unknown format 'nni'; did you mean 'nnie'"),
        (lambda: qt.QuantSpec(format="nnie", bits=4), "format='nnie' needs bits=8, got 4"),
        (lambda: qt.QuantSpec(format="nnie", signed=False), "format='nnie' needs signed=True, got False"),
        (lambda: qt.QuantSpec(format="nnie", quantizer="lsq"), "format='nnie' needs quantizer='fixed', got 'lsq'"),
        (lambda: qt.QuantSpec(format="nnie", observer="histogram"), "needs another observer than 'histogram'"),
        (lambda: qt.QuantSpec(group_size=32), "group_size=32 needs the axis that groups run along, got axis=None"),
        (lambda: qt.QuantSpec(axis=1, group_size=0), "group_size must be a whole number above 0 or None, got 0"),
        (lambda: qt.QuantSpec(axis=1, group_size=4.0), "group_size must be a whole number above 0 or None, got 4.0"),
        (lambda: qt.QuantSpec(axis=1, group_size=4, observer="histogram"), "needs group_size=None"),
        (
            lambda: qt.QuantSpec(axis=1, group_size=4).scale_shape((8, 6)),
            "must divide dimension 1 of a tensor of shape",
        ),
        (lambda: qt.QConfig(qt.QuantSpec(axis=1, group_size=32), None), "group_size is for weights, got activation"),
        (lambda: qt.QuantSpec.from_dict({"bitz": 4}), "unknown key of QuantSpec 'bitz'; did you mean 'bits'"),
        (lambda: qt.QConfig.from_dict({"weigth": None}), "did you mean 'weight'"),
        (lambda: qt.QConfigMapping.from_dict({"module_nam": []}), "did you mean 'module_name'"),
        (
            lambda: qt.QConfigMapping.from_dict({"object_type": [["no.such:Type", None]]}),
            "object_type[0]: 'no.such:Type' is no module type or function of torch, torch.nn, operator or qtoolkit.nn",
        ),
        (
            lambda: qt.QConfigMapping.from_dict(
                {"object_type": [["torch.nn:Linear", {"activation": {"symmetric": "false"}}]]}
            ),
            "object_type[0].activation: QuantSpec: symmetric must be true or false, got 'false'",
        ),
        (
            lambda: qt.QConfigMapping.from_dict({"module_name_regex": [["fc", None], ["(", None]]}),
            "module_name_regex[1]: ",
        ),
        (lambda: qt.QConfigMapping.from_dict({"module_name_regex": [["a{99999999999}", None]]}), "is not a regular"),
        (
            lambda: qt.QConfigMapping.from_dict({"module_name": [[5, None]]}),
            "a rule must be a list of a text and a config",
        ),
        (
            lambda: qt.QConfigMapping.from_dict({"module_name": ["fc"]}),
            "module_name[0]: QConfigMapping: a rule must be",
        ),
        (lambda: qt.QConfigMapping.from_dict({"module_name": 5}), "module_name must be a list of rules, got int"),
        (lambda: qt.QConfigMapping.from_dict({"global": [["fc", None]]}), "the global rule has the name '', got 'fc'"),
        (lambda: qt.QConfigMapping.from_dict({"global": [["", 8]]}), "global[0]: QConfig must be a mapping"),
        (lambda: qt.QConfigMapping.from_json("[" * 100_000), "the JSON is nested too deeply"),
        (lambda: qt.QConfigMapping.from_json("5"), "QConfigMapping must be a mapping of names to values, got int"),
        (lambda: qt.QConfig.from_dict({"weight": {"bits": NESTED}}), "weight: QuantSpec: a value is nested too deeply"),
        (lambda: qt.QuantSpec(observer_args=5), "the options of observer 'minmax' must be a mapping"),
        (lambda: qt.QuantSpec(observer="moving_average", observer_args={"momentum": "a"}), "lie in (0, 1], got 'a'"),
        (lambda: qt.QuantSpec(observer="histogram", observer_args={"percentile": []}), "lie in (0, 100], got []"),
        (lambda: qt.QConfigMapping().set_module_name_regex("(", None), "is not a regular expression"),
    ],
)
def test_bad_values_are_named(make, words: str) -> None:
    with pytest.raises(ValueError, match=None) as error:
        make()
    assert words in str(error.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: qt.QConfigMapping().set_global("int8"),
        lambda: qt.QConfigMapping().set_object_type("Conv2d", None),
        lambda: qt.QConfigMapping().set_object_type(nn.Conv2d(1, 1, 1), None),
        lambda: qt.QConfigMapping().set_module_name(["0"], None),
        lambda: qt.QConfigMapping().set_module_name(5, None),
        lambda: qt.QConfigMapping().set_module_name_regex(["0"], None),
    ],
)
def test_wrong_types(make) -> None:
    with pytest.raises(TypeError, match="must be"):
        make()


def test_several_names_are_one_call_each() -> None:
    words = r"^set_module_name: name must be one text, such as 'layer1.0.conv', got a list; call it once for each\.$"
    with pytest.raises(TypeError, match=words):
        qt.QConfigMapping().set_module_name(["0", "1"], None)


def test_a_spec_keeps_arguments_of_its_own() -> None:
    arguments = {"momentum": 0.5}
    spec = qt.QuantSpec(observer="moving_average", observer_args=arguments)
    arguments["momentum"] = 0.1
    assert spec.observer_args == {"momentum": 0.5}
