"""Installations: the packages of extras with the command that installs them, and another project of the same name."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, distributions, requires
from pathlib import Path
from types import ModuleType

from qtoolkit.errors import warn

DISTRIBUTION = "torch-qtoolkit"  # the name to pip; "qtoolkit" on the package index is another project


def missing(what: str, package: str | None, extra: str) -> ImportError:
    """Return the error of `what`, a part of qtoolkit as the subject of a sentence, without the package of an extra."""
    return ImportError(f"{what} needs {package}, which is not installed; run: {install_command(extra)}.")


def needed(module: str, what: str, extra: str) -> ModuleType:
    """Import a module of an extra; raise the error of `missing` where it is not installed.

    Example:
        >>> needed("json", "plot", "tuning").loads("[1]")
        [1]
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise missing(what, error.name, extra) from None


def install_command(extra: str) -> str:
    """Return the command that installs the packages of an extra, whichever way qtoolkit was installed."""
    try:
        requirements = requires(DISTRIBUTION) or []
    except PackageNotFoundError:  # Python imports qtoolkit from its source folder
        return f"pip install -r requirements-{extra}.txt"
    split = [requirement.replace("'", '"').partition(";")[::2] for requirement in requirements]
    packages = [package.strip() for package, marker in split if marker.strip() == f'extra == "{extra}"']
    return " ".join(["pip install", *(f'"{package}"' for package in packages)])


def warn_of_other_project(package: Path = Path(__file__).parent) -> None:
    """Warn if the distribution `qtoolkit`, another project, is installed over this package's folder, or under it.

    If both have a file of the same name, the file that was installed last is there.
    """
    for other in distributions(name="qtoolkit", path=[str(package.parent)]):  # no other folder is looked at: 0.1 ms
        if "qtoolkit/__init__.py," in (other.read_text("RECORD") or ""):
            from qtoolkit_command import OTHER_PROJECT

            warn(f"qtoolkit {other.version} is installed in {str(package)!r} too. {OTHER_PROJECT}")
