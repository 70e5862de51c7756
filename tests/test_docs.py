"""The Python programs of the pages in docs/ run as they stand."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import pages

DOCS = Path(__file__).parents[1] / "docs"
PROGRAMS = {
    f"{page.name}-{number}": program
    for page in sorted(DOCS.rglob("*.md"))
    for number, program in enumerate(pages.blocks("python", page.read_text()))
    if ".install()" not in program  # which registers modules under another package's name
}
IN_PROCESSES = [name for name, program in PROGRAMS.items() if "init_process_group" in program]
SLOW = ("detection.md-0", "timm.md-0", "hugging_face.md-1", "export.md-3")


@pytest.mark.parametrize(
    "program",
    [pytest.param(p, marks=[pytest.mark.slow] if p in SLOW else []) for p in PROGRAMS if p not in IN_PROCESSES],
)
def test_the_programs_run(program: str, tmp_path, monkeypatch) -> None:
    text = PROGRAMS[program]
    for package in pages.needed(text):
        pytest.importorskip(package, reason=f"needs {package}, which is not installed")
    monkeypatch.chdir(tmp_path)
    exec(compile(text, program, "exec"), {"__name__": program})


@pytest.mark.slow
@pytest.mark.parametrize("program", IN_PROCESSES)
def test_the_programs_run_in_two_processes(program: str, tmp_path: Path) -> None:
    """As the page says: torchrun --nproc-per-node 2 train.py."""
    (tmp_path / "train.py").write_text(PROGRAMS[program])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(torchrun, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert all(f"rank {rank}, epoch 1: loss" in done.stdout for rank in range(2))
