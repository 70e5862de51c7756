"""Which tests a change can reach: those whose files, or what these import in turn, have changed.

    python -m tests.reach COMMIT     prints the paths for pytest, or nothing where no test is reached

Without a commit, or with one that the history lacks, it prints all. .ci/run gives the commit in .ci/verified, at which
every test has passed (make test-all). A change of a package reaches the tests in the folder of its name, and all whose
text needs what has changed: imports, dotted names of the package in programs that a test starts, and the attributes of
`qt`, which stand for the modules that define them.
"""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import qtoolkit
from tests.test_house import UPWARD

ROOT = Path(__file__).parents[1]
ALL = ["tests"]  # examples in docstrings are among what make test runs
# A change of these can reach every test.
EVERYTHING = re.compile(
    r"csrc/|setup\.py|pyproject\.toml|constraints\.txt|requirements|Makefile|\.ci/run|conftest\.py|qtoolkit/__init__\.py"
    r"|tests/(conftest|sweep|reach)\.py"
)
# Folders and files that tests read, run or name.
READ = ("benchmarks", "docs", "examples", "mkdocs.yml", "CHANGELOG.md", "README.md", "MANIFEST.in", "qtoolkit_command")


@functools.cache
def files() -> dict[str, Path]:
    """The modules of the package and of the tests, by name."""
    paths = [path for folder in ("tests", "qtoolkit") for path in sorted((ROOT / folder).rglob("*.py"))]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


@functools.cache
def text_of(module: str) -> str:
    return files()[module].read_text()


def module_of(name: str) -> str | None:
    """The module that a dotted name lies in."""
    while name not in files() and "." in name:
        name = name.rpartition(".")[0]
    return name if name in files() else None


def homes(value: object, name: str) -> Iterator[str]:
    """The modules in which a public name of the package is defined."""
    yield f"qtoolkit.{name}"
    code = getattr(value, "__code__", None) or getattr(getattr(value, "__init__", None), "__code__", None)
    path = Path(code.co_filename) if code is not None else None
    if path is not None and path.is_relative_to(ROOT / "qtoolkit"):
        yield ".".join(path.relative_to(ROOT).with_suffix("").parts)


@functools.cache
def public() -> dict[str, list[str]]:
    return {name: list(homes(getattr(qtoolkit, name, None), name)) for name in qtoolkit.__all__}


def named_in(module: str) -> Iterator[str]:
    """Dotted names that a module imports or mentions."""
    text = text_of(module)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
    if module.startswith("tests"):  # also in programs, which are strings
        yield from re.findall(r"\b(?:qtoolkit|tests)(?:\.\w+)+", text)
        for name in re.findall(r"\bqt\.(\w+)", text):
            yield from public().get(name, [f"qtoolkit.{name}"])


@functools.cache
def needed_by(module: str) -> frozenset[str]:
    """The modules that a module names, and the packages that they lie in."""
    found = {home for name in named_in(module) if (home := module_of(name)) is not None}
    found |= {f"{parent}.conftest" for parent in parents(module) if f"{parent}.conftest" in files()}
    found -= {name for importer, name in UPWARD if importer == module}
    return frozenset(found - {module, "qtoolkit", "tests"})  # all of the package imports qtoolkit


def parents(module: str) -> Iterator[str]:
    while "." in module:
        module = module.rpartition(".")[0]
        yield module


def reached_by(modules: Iterable[str]) -> set[str]:
    """The modules that need some of these, or that need what needs them."""
    reached, new = set(), set(modules)
    while new:
        reached |= new
        new = {name for name in files() if name not in reached and not needed_by(name).isdisjoint(new)}
    return reached


def tests_of(changed: Iterable[str]) -> list[str]:
    """The test files that changed files reach; ALL where that is everything."""
    changed = list(changed)
    if any(EVERYTHING.match(path) for path in changed):
        return ALL
    modules = {name for name, path in files().items() if str(path.relative_to(ROOT)) in changed}
    tests = {name for name in files() if name.rpartition(".")[2].startswith("test_")}
    for path in changed:
        folder = Path(path).parts[1] if path.count("/") > 1 else None
        if path.startswith("qtoolkit/") or (
            path.startswith("tests/") and not path.endswith(".py")
        ):  # data, or programs
            modules |= {name for name in tests if name.startswith(f"tests.{folder}.")}
        for place in READ:
            if path.startswith(place):
                modules |= {name for name in tests if re.search(rf"\b{place}\b", text_of(name))}
    return sorted(str(files()[name].relative_to(ROOT)) for name in reached_by(modules) & tests)


def changed_since(commit: str) -> list[str] | None:
    """The files that differ from a commit, those that git does not know yet among them; None if the history lacks it."""
    known = subprocess.run(
        ["git", "cat-file", "-e", f"{commit}^{{commit}}"], cwd=ROOT, capture_output=True, check=False
    )
    if not commit or known.returncode != 0:
        return None
    commands = (["git", "diff", "--name-only", commit], ["git", "ls-files", "--others", "--exclude-standard"])
    return [
        line
        for command in commands
        for line in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    ]


if __name__ == "__main__":
    differing = changed_since(sys.argv[1] if len(sys.argv) > 1 else "")
    print(*(ALL if differing is None else tests_of(differing)))
