"""The record of fuse_modules and replace: it is one attribute, and survives copies, pickles and a larger model."""

import copy
import pickle
from collections.abc import Callable

import pytest
from torch import nn

import qtoolkit as qt
from qtoolkit.eager.record import EagerRecord, chains_of, plan_of, record_of, records_in, verdicts_in
from qtoolkit.quant_modules import replace

each_copy = pytest.mark.parametrize(
    "copied",
    [lambda model: model, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["itself", "deepcopy", "pickle"],
)


def block() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU())


def replaced() -> nn.Module:
    return replace(qt.fuse_modules(block(), ["0", "1", "2"]), backend="tensorrt10")


def test_a_float_model_has_an_empty_record() -> None:
    model = block()
    assert record_of(model) == EagerRecord(None, ())
    assert list(records_in(model)) == []
    assert (plan_of(model), chains_of(model), verdicts_in(model)) == (None, [], {})
    assert vars(model).keys() == vars(block()).keys()


@each_copy
def test_copies_and_pickles_have_the_record(copied: Callable[[nn.Module], nn.Module]) -> None:
    model = replaced()
    other = copied(model)
    assert record_of(other) == record_of(model)
    assert record_of(other).chains == (("0", "1", "2"),)
    assert record_of(other).plan.inside["1"].status == "fused"
    assert record_of(other).plan.backend == qt.backends["tensorrt10"]
    assert other[0].batch_norm is other[1]


@each_copy
def test_a_larger_model_has_the_records_of_its_parts(copied: Callable[[nn.Module], nn.Module]) -> None:
    first, second = replaced(), qt.fuse_modules(block(), ["0", "1"])
    model = copied(nn.ModuleDict({"a": nn.Sequential(first), "b": second, "c": first}))
    assert dict(records_in(model)) == {
        "a.0": record_of(first),
        "b": record_of(second),
    }  # a shared part by its first name
    assert chains_of(model) == [("a.0.0", "a.0.1", "a.0.2"), ("b.0", "b.1")]
    assert plan_of(model) == record_of(first).plan
    assert {name: verdict.status for name, verdict in verdicts_in(model).items()} == {
        "a.0.0": "quantized",
        "a.0.1": "fused",
        "a.0.2": "float",
    }
    assert record_of(model) == EagerRecord()


def test_chains_are_added_and_stay_when_the_model_is_replaced() -> None:
    model = nn.Sequential(*block(), *block())
    model[3] = nn.Conv2d(4, 4, 1)
    qt.fuse_modules(model, ["0", "1"], inplace=True)
    qt.fuse_modules(model, ["3", "4", "5"], inplace=True)
    replace(model, inplace=True, backend="tensorrt10")
    assert record_of(model).chains == (("0", "1"), ("3", "4", "5"))
    assert {name for name, verdict in record_of(model).plan.inside.items() if verdict.status == "fused"} == {"1", "4"}


def test_a_failed_change_in_place_leaves_no_record() -> None:
    model = block()
    with pytest.raises(ValueError, match="the axis of a tensor"):
        replace(
            model,
            qt.QConfigMapping().set_global(qt.QConfig(None, qt.QuantSpec(axis=7))),
            inplace=True,
            backend="tensorrt10",
        )
    assert record_of(model) == EagerRecord()
    assert type(model[0]) is nn.Conv2d
