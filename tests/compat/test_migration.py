"""docs/migration.md: the new names exist, and each row has one or says that there is none."""

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

import qtoolkit as qt
from tests import processes

PAGE = (Path(__file__).parents[2] / "docs" / "migration.md").read_text()
NAMES = sorted(set(re.findall(r"`(qtoolkit(?:\.\w+)+)`", PAGE)))


def named(path: str) -> Any:
    """The object of a dotted name; its parents may be modules that nothing has imported yet."""
    found: Any = importlib.import_module("qtoolkit")
    done = "qtoolkit"
    for part in path.split(".")[1:]:
        done += f".{part}"
        found = getattr(found, part) if hasattr(found, part) else importlib.import_module(done)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_new_names_exist(name):
    assert named(name) is not None


def test_each_old_name_has_a_new_one_or_none():
    chapters = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
    assert [chapter.split("\n")[0] for chapter in chapters] == [
        "pytorch-quantization",
        "MQBench",
        "Calibrators of TensorRT",
        "torch.ao.quantization",
        "Learned scales: LSQ configs of torchao, Brevitas and Model Optimizer",
    ]
    for chapter in chapters:
        table = chapter.split("###")[0]
        rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| ")]
        assert len(rows) > 10
        for old, new, _ in rows[1:]:
            assert "`qtoolkit." in new or new.strip() == "none", old


@pytest.mark.parametrize("spec", sorted(set(re.findall(r"`(QuantSpec\([^`]*\))`", PAGE))))
def test_the_specs_of_the_tables_can_be_built(spec: str) -> None:
    assert isinstance(eval(spec, {"QuantSpec": qt.QuantSpec}), qt.QuantSpec)


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(program, id=name, marks=pytest.mark.slow if name == "mqbench" else ())
        for name, program in zip(
            ("first", "mqbench", "calibrators", "torch.ao", "freeze", "dynamic"),
            re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL),
            strict=True,
        )
    ],
)
def test_the_programs_run(program: str, tmp_path) -> None:
    # In a process of their own, because they register modules under other names.
    processes.python("-c", program, cwd=tmp_path).check_returncode()


def test_the_adapters_are_imported_when_they_are_asked_for() -> None:
    program = (
        "import sys, qtoolkit as qt; assert 'qtoolkit.compat' not in sys.modules; "
        "print(qt.compat.pytorch_quantization.__version__, callable(qt.compat.load_amax))"
    )
    assert processes.python("-c", program).stdout.split() == ["2.2.1", "True"]
    with pytest.raises(AttributeError, match="module 'qtoolkit' has no attribute 'compt'"):
        importlib.import_module("qtoolkit").compt  # noqa: B018
