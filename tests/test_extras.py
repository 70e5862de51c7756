"""What an error says of packages that are missing: a command that installs them, however qtoolkit was installed."""

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from qtoolkit import extras

ROOT = Path(__file__).parents[1]
EXTRAS = ("checkpoint", "cli", "executorch", "onnx", "openvino", "report", "tuning")


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
