"""What a user sees when the package is not built, or built for another torch, or torch is not there."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qtoolkit import _native
from tests import processes

ROOT = Path(__file__).parents[1]


def test_the_library_tells_what_it_was_built_for() -> None:
    assert _native.built_for(_native.FILE) == torch.__version__.split("+")[0]


def test_another_torch_gives_one_clear_sentence(monkeypatch) -> None:
    monkeypatch.setattr(_native, "built_for", lambda library: "2.11.0")
    with pytest.raises(ImportError, match=r"was built for torch 2\.11\.0, but this is torch .*pip install"):
        _native.load(_native.FILE)


@pytest.fixture
def folders(tmp_path: Path, monkeypatch) -> tuple[Path, Path]:
    """The package in a repository's folder, where nothing was compiled, and an installed copy, as Python searches."""
    packages = tmp_path / "repository" / "qtoolkit", tmp_path / "site-packages" / "qtoolkit"
    for package in packages:
        package.mkdir(parents=True)
        (package / "version.py").write_text('__version__ = "0.1.0"\n')
    (packages[0].parent / "csrc").mkdir()
    (packages[0].parent / "csrc" / "library.cpp").touch()
    (packages[1] / _native.NAME).touch()
    monkeypatch.setattr(sys, "path", [str(package.parent) for package in packages])
    return packages


def test_in_the_repositorys_folder_the_installed_library_is_found(folders: tuple[Path, Path], monkeypatch) -> None:
    source, installed = folders
    assert _native.find(source) == installed / _native.NAME
    monkeypatch.chdir(installed.parent)
    monkeypatch.setattr(sys, "path", [str(source.parent), ""])
    assert _native.find(source) == installed / _native.NAME
    (source / _native.NAME).touch()
    assert _native.find(source) == source / _native.NAME


def test_a_missing_library_says_what_to_type(folders: tuple[Path, Path], monkeypatch) -> None:
    source, _ = folders
    monkeypatch.setattr(sys, "path", [str(source.parent)])
    words = rf"native library is missing.*Type in {source.parent}: pip install --no-build-isolation \."
    with pytest.raises(ImportError, match=words):
        _native.find(source)


@pytest.mark.parametrize("differs", ["the version", "a source that changed after the installation"])
def test_an_installed_library_of_other_sources_is_named(folders: tuple[Path, Path], differs: str) -> None:
    source, installed = folders
    if differs == "the version":
        (installed / "version.py").write_text('__version__ = "0.0.9"\n')
    else:
        later = (installed / _native.NAME).stat().st_mtime + 1
        os.utime(source.parent / "csrc" / "library.cpp", (later, later))
    words = (
        rf"native library is missing.*{installed} is of other sources.*run Python in another folder.*"
        rf"type in {source.parent}: pip install --no-build-isolation \."
    )
    with pytest.raises(ImportError, match=words):
        _native.find(source)


def test_a_library_that_does_not_load_says_why(tmp_path) -> None:
    (tmp_path / "_C.abi3.so").write_bytes(b"no library")
    words = r"does not load under torch .*\(.*_C\.abi3\.so: .*\)\. Install the wheel for the torch you run"
    with pytest.raises(ImportError, match=words):
        _native.load(tmp_path / "_C.abi3.so")


def test_the_library_needs_no_version_of_python() -> None:
    undefined = subprocess.run(
        ["nm", "-D", "--undefined-only", _native.FILE], capture_output=True, text=True, check=True
    )
    assert not [line for line in undefined.stdout.splitlines() if " Py" in line or " _Py" in line]


def test_the_library_shows_little_to_the_linker() -> None:
    """Names would be found by other libraries of the process, and are a tenth of the file."""
    listed = subprocess.run(["readelf", "-SW", _native.FILE], capture_output=True, text=True, check=True).stdout
    assert ".symtab" not in listed
    defined = subprocess.run(["nm", "-DC", "--defined-only", _native.FILE], capture_output=True, text=True, check=True)
    names = re.findall(r"^\w+ \w (.+)$", defined.stdout, re.M)
    assert sorted(names) == sorted(re.findall(r'"(qtoolkit.+)"', (ROOT / "csrc" / "exports.map").read_text()))


def test_the_library_is_small() -> None:
    """docs/packaging.md lists what takes the space. The margin is a new compiler's."""
    has_cuda = b".nv_fatbin" in _native.FILE.read_bytes()
    assert _native.FILE.stat().st_size <= (15e6 if has_cuda else 6e6)


def test_building_without_torch_says_what_to_type(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(
        SystemExit, match=r"Install torch 2\.11 or newer first, then type: pip install --no-build-isolation \."
    ):
        runpy.run_path(str(ROOT / "setup.py"), run_name="__main__")


@pytest.mark.parametrize(
    ("switch", "words"),
    [("QTOOLKIT_CUDA", "must be 0 or 1, got 'yes'"), ("QTOOLKIT_SANITIZE", "must be address or thread, got 'yes'")],
)
def test_a_bad_switch_is_named(switch: str, words: str) -> None:
    code = f"import os, runpy; os.environ[{switch!r}] = 'yes'; runpy.run_path('setup.py')"
    done = processes.python("-c", code)
    assert done.returncode != 0
    assert f"{switch} {words}" in done.stderr


@pytest.mark.parametrize("given", [None, "7.5"])
@pytest.mark.parametrize("visible", [False, True])
def test_architectures_are_those_of_the_visible_gpu(monkeypatch, visible: bool, given: str | None) -> None:
    """Where TORCH_CUDA_ARCH_LIST is unset, torch builds for the visible GPUs and adds PTX."""
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: visible)
    monkeypatch.setenv("QTOOLKIT_CUDA", "0")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", given or "")
    if given is None:
        monkeypatch.delenv("TORCH_CUDA_ARCH_LIST")
    runpy.run_path(str(ROOT / "setup.py"))["choose_architectures"]()
    assert os.environ.get("TORCH_CUDA_ARCH_LIST") == (given or (None if visible else "8.0;9.0+PTX"))


def test_each_source_is_in_one_unit_and_a_change_of_it_builds_again(monkeypatch) -> None:
    given: dict = {}
    monkeypatch.setattr("setuptools.setup", lambda **arguments: given.update(arguments))
    monkeypatch.setenv("QTOOLKIT_CUDA", "0")
    runpy.run_path(str(ROOT / "setup.py"))
    library = given["ext_modules"][0]
    included = [name for unit in library.sources for name in re.findall(r"csrc/\S+\.cpp", (ROOT / unit).read_text())]
    sources = [p for p in (ROOT / "csrc").rglob("*.cpp") if p.parent.name not in ("cuda", "python")]
    assert sorted(included) == sorted(str(p.relative_to(ROOT)) for p in sources)
    assert {str(p.relative_to(ROOT)) for p in (*sources, *(ROOT / "csrc").rglob("*.h"))} <= {*library.depends}


@pytest.mark.slow
def test_importing_torch_first_is_not_needed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import qtoolkit"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


FORKED = """
import os
import signal
import torch
def threads():
    return len(os.listdir("/proc/self/task"))
before = threads()
import qtoolkit
print(threads() - before)
child = os.fork()
if child == 0:
    signal.alarm(60)
    torch.ones(64, 64, 64).exp().sum()
    os._exit(0)
print(os.waitpid(child, 0)[1])
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="only Linux lists a process's threads there")
def test_importing_starts_no_threads() -> None:
    """A forked process would wait for threads that it does not have."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "0"]
