"""The table of op kinds is the only place that names them: passes ask its flags, and other vocabularies are read from it."""

import ast
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

import qtoolkit as qt
from qtoolkit.export.files.kinds import BINARY, DECIDED
from qtoolkit.op_kinds import rules
from qtoolkit.op_kinds.facts import set_facts
from qtoolkit.op_kinds.kind import OpKind
from qtoolkit.op_kinds.table import (
    KINDS,
    OF_ATEN,
    OF_METHOD,
    OF_ONNX,
    OTHER,
    calls_where,
    kind_of_type,
)

PACKAGE = Path(qt.__file__).parent
NAMES = KINDS.keys() | OF_METHOD.keys() | OF_ATEN.keys()


# Literals that are in the table too, but belong to another vocabulary.
OTHER_WORDS = {
    "export/onnx.py: backend.silu_form == 'tanh'",
    "compat/pytorch_quantization/calib/histogram.py: method == 'max'",  # a method of calibration, as are the next
    "compat/pytorch_quantization/calib/histogram.py: method not in ('percentile', 'mse', 'max')",
    "graph/capture/functions.py: SIZED",  # functions that take sizes
    "graph/capture/rewrites/in_place.py: VIEWS",  # a kind has views and copies among its ops
    "graph/capture/rewrites/in_place.py: RESHAPES",  # which copy where they must
    "graph/program/memory_format.py: OF_STRIDES",  # a kind has ops that take any strides too
    "graph/program/units/function.py: COMPILED",  # functions of an op, which has two of GELU's forms
}


def strings_of(literal: ast.expr) -> set[str]:
    """Return the strings that a literal is, or has as its items."""
    items = literal.elts if isinstance(literal, ast.Tuple | ast.List | ast.Set) else [literal]
    return {item.value for item in items if isinstance(item, ast.Constant) and isinstance(item.value, str)}


def names_of_ops(path: Path) -> Iterator[str]:
    """Yield the comparisons with names of kinds, and the assigned literals most of whose strings are ops of the table."""
    is_data = path.relative_to(PACKAGE).parts[0] in ("op_kinds", "integer")  # the table, and what runtimes compute
    for node in ast.walk(ast.parse(path.read_text())):
        found = ""
        if isinstance(node, ast.Compare):
            words = {word for side in (node.left, *node.comparators) for word in strings_of(side)}
            found = ast.unparse(node) if words & KINDS.keys() else ""
        elif isinstance(node, ast.Assign) and not is_data and isinstance(node.value, ast.Tuple | ast.List | ast.Set):
            words = strings_of(node.value)
            found = ast.unparse(node.targets[0]) if len(words & NAMES) > max(1, len(words) / 2) else ""
        if found:
            yield f"{path.relative_to(PACKAGE).as_posix()}: {found}"


@pytest.mark.slow
def test_no_pass_names_an_op() -> None:
    passes = [path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "backends.py"]  # targets are data
    found = {text for path in passes for text in names_of_ops(path)}
    assert found == OTHER_WORDS, "ask a flag of OpKind, or `calls_where` of the table, instead of names"


def test_the_search_finds_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.op_kinds.test_table.PACKAGE", tmp_path)
    (tmp_path / "a.py").write_text(
        'x = kind_of(node).name in ("relu", "clamp")\ny = op == "tensor"\nz = "pad" == name\n'
        'A = (torch.add, "add", "add_", "__iadd__")\nB = ("scale", "zero_point", "axis", "group")\n'
    )
    assert sorted(names_of_ops(tmp_path / "a.py")) == [
        "a.py: 'pad' == name",
        "a.py: A",
        "a.py: kind_of(node).name in ('relu', 'clamp')",
    ]


@pytest.mark.parametrize(
    ("flag", "calls"),
    [
        ("adds", {operator.add, operator.iadd, torch.add, "add", "add_", "__add__", "__iadd__", "__radd__"}),
        ("means_over_dims", {torch.mean, "mean"}),
    ],
)
def test_calls_of_kinds(flag: str, calls: set[Any]) -> None:
    assert calls_where(operator.attrgetter(flag)) == calls


@pytest.mark.parametrize("op", sorted(op for op, kinds in OF_ONNX.items() if len(kinds) > 1))
def test_something_decides_between_the_kinds_of_an_onnx_op(op: str) -> None:
    assert op in DECIDED or op in BINARY or op == "MatMul"  # by whether an input is constant


@pytest.mark.parametrize("kind", KINDS.values(), ids=str)
def test_flags_of_a_kind_agree(kind: OpKind) -> None:
    assert not (kind.rearranges or kind.returns_input) or kind.moves
    assert not kind.transposed or kind.convolves
    assert not kind.convolves or kind.layer
    assert not kind.adds or kind.sums
    assert not kind.clips or kind.activation


def test_any_class_may_declare_its_kind() -> None:
    class Own:
        KIND = "linear"

    assert kind_of_type(Own) is KINDS["linear"]
    assert kind_of_type(object) is OTHER


@pytest.mark.parametrize(
    ("dims", "rank", "kind"),
    [
        ((2, 3), 4, "avg_pool"),
        ((-1, 2), 4, "avg_pool"),
        ((2, 3, 4), 5, "avg_pool"),
        ((-2, -1), None, "avg_pool"),
        ((-3, -2, -1), None, "avg_pool"),
        ((2, 3), 5, "mean"),
        ((-2, -1), 5, "mean"),
        ((-2, -1), 3, "mean"),
        ((2,), 3, "mean"),
        ((2, 3, 4), 6, "mean"),
        (-1, 4, "mean"),
        (None, 4, "mean"),
    ],
)
def test_a_mean_over_an_image_has_all_dimensions_behind_the_channels(dims: object, rank: int | None, kind: str) -> None:
    graph = fx.Graph()
    node = graph.call_method("mean", (graph.placeholder("x"), dims))
    set_facts(node, input_dims=rank)
    assert rules.mean(node) == kind
