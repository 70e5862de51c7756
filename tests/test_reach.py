"""Which tests a change can reach: every test has its place, and what a test runs is among what it needs."""

import json
from pathlib import Path

import pytest

from tests import processes, reach

PACKAGES = sorted(path.parent.name for path in (reach.ROOT / "qtoolkit").glob("*/__init__.py"))

# Prints the files of the package whose code runs while the tests of a module run, without what runs in imports.
RECORDED = """
import json, sys, pytest
seen = set()
def note(frame, event, argument):
    if event == "call":
        seen.add(frame.f_code.co_filename)
class Recorder:
    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self):
        sys.setprofile(note)
        try:
            return (yield)
        finally:
            sys.setprofile(None)
code = pytest.main(["-q", "-p", "no:cacheprovider", "--few", *sys.argv[1:]], plugins=[Recorder()])
print(json.dumps([int(code), *sorted(seen)]))
"""


def needed_for(module: str) -> set[str]:
    """All modules that a module needs, directly or not."""
    found, new = set(), {module}
    while new:
        found |= new
        new = {name for each in new for name in reach.needed_by(each)} - found
    return found


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_a_change_of_a_package_reaches_the_tests_in_the_folder_of_its_name(package):
    folder = reach.ROOT / "tests" / package
    changed = [str(path.relative_to(reach.ROOT)) for path in (reach.ROOT / "qtoolkit" / package).rglob("*.py")]
    reached = reach.tests_of(changed)
    own = {str(path.relative_to(reach.ROOT)) for path in folder.rglob("test_*.py")}
    assert reached == reach.ALL or own <= {*reached}


@pytest.mark.parametrize("path", ["csrc/grid.h", "setup.py", "constraints.txt", "tests/conftest.py", "pyproject.toml"])
def test_some_changes_reach_all(path):
    assert reach.tests_of([path]) == reach.ALL


@pytest.mark.parametrize(
    ("path", "reaches", "leaves"),
    [
        ("qtoolkit/cli/commands.py", "tests/cli/test_command_line.py", "tests/ops/test_values.py"),
        ("qtoolkit/tuning/gptq.py", "tests/tuning/test_gptq.py", "tests/graph/passes/test_insert.py"),
        ("qtoolkit/export/onnx.py", "tests/export/test_onnx.py", "tests/ops/test_values.py"),
        ("tests/nets.py", "tests/test_promises.py", "tests/ops/test_values.py"),
        ("tests/test_promises.py", "tests/test_promises.py", "tests/test_prepare.py"),
        ("docs/training.md", "tests/test_docs.py", "tests/ops/test_values.py"),
        ("benchmarks/pages/ops.py", "tests/test_benchmarks.py", "tests/ops/test_values.py"),
        ("README.md", "tests/test_readme.py", "tests/ops/test_values.py"),
    ],
)
def test_a_change_reaches_what_needs_it_alone(path, reaches, leaves):
    assert (reach.ROOT / path).exists()
    found = reach.tests_of([path])
    assert reaches in found
    assert leaves not in found


@pytest.mark.parametrize("commit", ["", "0" * 40])
def test_without_a_known_commit_nothing_is_left_out(commit):
    assert reach.changed_since(commit) is None


def test_a_change_that_reaches_no_test_names_none():
    assert reach.tests_of(["LICENSE"]) == []


@pytest.mark.parametrize(
    "module",
    ["tests.test_layer_rules", "tests.quantizers.test_bad_specs", "tests.debug.test_sensitivity"],
)
@pytest.mark.slow
def test_what_a_test_runs_is_among_what_it_needs(module):
    path = reach.files()[module]
    run = processes.python("-c", RECORDED, str(path))
    code, *ran = json.loads(run.stdout.splitlines()[-1])
    assert code == 0, run.stdout[-2000:]
    names = {path: name for name, path in reach.files().items()}
    package = {names[Path(file)] for file in ran if Path(file).is_relative_to(reach.ROOT / "qtoolkit")} - {"qtoolkit"}
    assert len(package) > 3
    assert package - needed_for(module) == set()
