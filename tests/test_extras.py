"""Missing packages, and a package of the same name: each is said with the command that helps."""

import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from qtoolkit import extras

ROOT = Path(__file__).parents[1]
EXTRAS = ("checkpoint", "cli", "executorch", "litert", "onnx", "openvino", "report", "tuning")


def lines_of(extra: str) -> list[str]:
    lines = (ROOT / f"requirements-{extra}.txt").read_text().splitlines()
    return [line.split("#")[0].strip() for line in lines if line.split("#")[0].strip()]


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_command_names_the_packages_of_the_extra(extra: str, monkeypatch) -> None:
    """And never qtoolkit by its import's name, which is another project on the package index."""
    asked = [f'{line}; extra == "{name}"' for name in EXTRAS for line in lines_of(name)]
    monkeypatch.setattr(extras, "requires", lambda name: ["torch>=2.11", *asked])
    assert extras.install_command(extra) == " ".join(["pip install", *(f'"{line}"' for line in lines_of(extra))])


def test_in_a_source_folder_it_names_the_file_of_requirements(monkeypatch) -> None:
    def requires(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(extras, "requires", requires)
    error = extras.missing("verify", "onnxruntime", "onnx")
    assert str(error) == "verify needs onnxruntime, which is not installed; run: pip install -r requirements-onnx.txt."
    assert (ROOT / "requirements-onnx.txt").exists()


def test_the_distribution_has_the_name_that_the_project_declares() -> None:
    assert f'name = "{extras.DISTRIBUTION}"' in (ROOT / "pyproject.toml").read_text()


def test_no_text_installs_the_other_project() -> None:
    places = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("docs/**/*.ipynb")]
    places += [*ROOT.glob("qtoolkit/**/*.py"), *ROOT.glob("csrc/**/*.*"), *ROOT.glob("examples/**/*.*")]
    assert len(places) > 400
    found = [(path, line) for path in places if path.is_file() for line in path.read_text().splitlines()]
    command = re.compile(r"pip install[^`|]*[ \"']qtoolkit\b(?![/.\w-])")
    assert [(path, line) for path, line in found if command.search(line)] == []


# ---- the other project of this name


def site(folder: Path, record: str | None, package: Path) -> Path:
    """A folder of installed packages: a `qtoolkit`, the command, and, with a record, the other project's distribution."""
    (folder / "qtoolkit").symlink_to(package)
    (folder / "qtoolkit_command.py").symlink_to(ROOT / "qtoolkit_command.py")
    if record is not None:
        info = folder / "qtoolkit-0.1.7.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: qtoolkit\nVersion: 0.1.7\n")
        (info / "RECORD").write_text(record)
    return folder


def run(folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-c", program, "info"]
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, check=False)


COLLIDES = "qtoolkit/__init__.py,sha256=abc,127\nqtoolkit/manager.py,sha256=abc,9\n"


@pytest.mark.parametrize(
    ("record", "warns"), [(COLLIDES, True), ("qtoolkit_other/__init__.py,sha256=abc,127\n", False), (None, False)]
)
@pytest.mark.slow
def test_the_other_project_in_the_same_folder_is_a_warning_with_the_remedy(tmp_path, record, warns: bool) -> None:
    done = run(site(tmp_path, record, ROOT / "qtoolkit"), "import qtoolkit; print(qtoolkit.__file__)")
    assert done.stdout == f"{tmp_path / 'qtoolkit' / '__init__.py'}\n", done.stderr
    assert ("UserWarning: qtoolkit 0.1.7 is installed in" in done.stderr) is warns
    assert ("Run: pip uninstall qtoolkit torch-qtoolkit, and install torch-qtoolkit again." in done.stderr) is warns


@pytest.mark.parametrize("uninstalled", [False, True])
def test_the_command_says_that_python_imports_the_other_project(tmp_path, uninstalled: bool) -> None:
    """Where the other project was installed last, its package replaces ours; uninstalled, it takes our __init__.py along."""
    other = tmp_path / "other"
    other.mkdir()
    (other / ("manager.py" if uninstalled else "__init__.py")).write_text("__version__ = '0.1.7'\n")
    folder = tmp_path / "site"
    folder.mkdir()
    done = run(site(folder, COLLIDES, other), "import sys, qtoolkit_command; sys.exit(qtoolkit_command.main())")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"the package in {folder / 'qtoolkit'}" in done.stderr
    assert "is not torch-qtoolkit's. The distribution 'qtoolkit' on the package index is another" in done.stderr
    assert done.stderr.count("\n") == 1
