"""The table of op kinds is the only place that names them: passes ask its flags, and other vocabularies are read from it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import qtoolkit as qt
from qtoolkit.export.files.kinds import BINARY, DECIDED
from qtoolkit.op_kinds.kind import OpKind
from qtoolkit.op_kinds.table import KINDS, OF_ONNX, OTHER, kind_of_type

PACKAGE = Path(qt.__file__).parent


def comparisons_with_kinds(path: Path) -> Iterator[str]:
    """Yield the comparisons of something called a kind with the name of a kind."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Compare) and "kind" in ast.unparse(node.left).lower():
            words = {
                part.value for side in node.comparators for part in ast.walk(side) if isinstance(part, ast.Constant)
            }
            if words & KINDS.keys():
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}"


def test_no_pass_names_an_op() -> None:
    passes = [path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "backends.py"]  # targets are data
    found = [text for path in passes for text in comparisons_with_kinds(path)]
    assert not found, "\n".join(["Ask a flag of OpKind instead of its name:", *found])


def test_the_search_finds_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.op_kinds.test_table.PACKAGE", tmp_path)
    (tmp_path / "a.py").write_text('x = kind_of(node).name in ("relu", "clamp")\ny = kind == "tensor"\n')
    assert list(comparisons_with_kinds(tmp_path / "a.py")) == ["a.py:1: kind_of(node).name in ('relu', 'clamp')"]


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
