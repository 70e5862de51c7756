import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import qtoolkit as qt

W4 = qt.QConfig(qt.QuantSpec(bits=4), qt.QuantSpec(bits=4, axis=0))
W8 = qt.QConfig(qt.QuantSpec(), qt.QuantSpec(axis=0))

specs = st.builds(
    qt.QuantSpec,
    bits=st.integers(2, 16),
    signed=st.booleans(),
    symmetric=st.booleans(),
    narrow=st.booleans(),
    axis=st.none() | st.integers(-4, 3),
    quantizer=st.sampled_from(["fixed", "lsq"]),
    observer=st.just("moving_average"),
    observer_args=st.just({}) | st.builds(lambda m: {"momentum": m}, st.floats(0.01, 1)),
)

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
        (lambda: qt.QConfigMapping.from_dict({"object_type": [["no.such:Type", None]]}), "does not import"),
        (lambda: qt.QConfigMapping().set_module_name_regex("(", None), "is not a regular expression"),
    ],
)
def test_bad_values_are_named(make, words: str) -> None:
    with pytest.raises(ValueError, match=None) as error:
        make()
    assert words in str(error.value)


@pytest.mark.parametrize(
    "make",
    [lambda: qt.QConfigMapping().set_global("int8"), lambda: qt.QConfigMapping().set_object_type("Conv2d", None)],
)
def test_wrong_types(make) -> None:
    with pytest.raises(TypeError, match="must be"):
        make()


def test_a_spec_keeps_arguments_of_its_own() -> None:
    arguments = {"momentum": 0.5}
    spec = qt.QuantSpec(observer="moving_average", observer_args=arguments)
    arguments["momentum"] = 0.1
    assert spec.observer_args == {"momentum": 0.5}
