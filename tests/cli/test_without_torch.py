"""Help, the version, completions and wrong arguments need no torch."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import qtoolkit as qt
import qtoolkit_command
from qtoolkit.export.exporters.torch_exporters import EXPORTERS
from qtoolkit.runtimes.table import EXECUTES

HOME = Path(qt.__file__).parents[1]
WAYS = (("-c", "import sys, qtoolkit_command; sys.exit(qtoolkit_command.main())"), ("-m", "qtoolkit"))


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory) -> Path:
    """A folder with a torch that ends the process when it is imported."""
    folder = tmp_path_factory.mktemp("poisoned")
    (folder / "torch.py").write_text("import os, sys\nsys.stderr.write('torch was imported')\nos._exit(70)\n")
    return folder


def run(poisoned: Path, way: tuple[str, str], *argv: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(poisoned), str(HOME), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, *way, *argv]
    env = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, env=env, cwd=poisoned, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("way", WAYS, ids=["script", "module"])
@pytest.mark.parametrize("argv", [["--help"], ["quantize", "--help"], ["lint", "-h"], ["verify", "-h"], ["info", "-h"]])
def test_help(poisoned: Path, way: tuple[str, str], argv: list[str]) -> None:
    done = run(poisoned, way, *argv)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: qtoolkit")


@pytest.mark.parametrize("way", WAYS, ids=["script", "module"])
def test_the_version(poisoned: Path, way: tuple[str, str]) -> None:
    done = run(poisoned, way, "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"qtoolkit {qt.__version__}\n", "")


@pytest.mark.parametrize("way", WAYS, ids=["script", "module"])
@pytest.mark.parametrize("argv", [["lint"], ["lint", "x", "--backend", "tensort"], ["frobnicate"], ["quantize", "m:f"]])
def test_wrong_arguments(poisoned: Path, way: tuple[str, str], argv: list[str]) -> None:
    done = run(poisoned, way, *argv)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: qtoolkit")


def test_a_command_does_import_it(poisoned: Path) -> None:
    assert run(poisoned, WAYS[0], "info").stderr == "torch was imported"


def test_the_names_are_those_of_the_package() -> None:
    assert sorted(qtoolkit_command.BACKENDS) == sorted(qt.backends)
    assert sorted(qtoolkit_command.RUNTIMES) == sorted(EXECUTES)
    assert sorted(qtoolkit_command.EXPORTERS) == sorted(EXPORTERS)


# ---- completions


def completions(poisoned: Path, *words: str) -> list[str]:
    """What bash offers for the last of some words behind `qtoolkit`."""
    script = run(poisoned, WAYS[0], "--print-completion", "bash").stdout
    typed = " ".join(f"'{word}'" for word in ("qtoolkit", *words))
    line = f"COMP_WORDS=({typed}); COMP_CWORD={len(words)}; COMP_LINE='x'; _shtab_qtoolkit 2>/dev/null"
    program = f'{script}\n{line}\nprintf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True, cwd=poisoned)
    return [each.strip() for each in done.stdout.split()]


def test_bash_completes_commands_backends_and_files(poisoned: Path) -> None:
    pytest.importorskip("shtab")
    (poisoned / "a_model.onnx").touch()
    assert completions(poisoned, "li") == ["lint"]
    assert completions(poisoned, "lint", "--backend", "onn") == ["onnxruntime"]
    assert "--allow" in completions(poisoned, "verify", "--a")
    assert completions(poisoned, "lint", "a_m") == ["a_model.onnx"]


@pytest.mark.parametrize("shell", qtoolkit_command.SHELLS)
def test_each_shell_has_completions(poisoned: Path, shell: str) -> None:
    pytest.importorskip("shtab")
    done = run(poisoned, WAYS[0], "--print-completion", shell)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(word in done.stdout for word in ("quantize", "lint", "verify", "info", "tensorrt"))


def test_without_the_library_it_says_what_to_install(capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit) as stop:
        qtoolkit_command.parser().parse_args(["--print-completion", "bash"])
    assert stop.value.code == 2
    assert re.search(r"^qtoolkit: --print-completion needs shtab, .* run: pip install", capsys.readouterr().err)
