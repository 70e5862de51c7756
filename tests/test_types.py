"""Programs of users pass mypy --strict."""

import subprocess
import sys
from pathlib import Path

import pytest

PLAN = """
import torch

import qtoolkit as qt

prepared = qt.prepare(torch.nn.Sequential(torch.nn.Linear(4, 2)), torch.zeros(1, 4), backend="tensorrt")
for edge in prepared.plan.edges:
    print(edge.source, edge.quantizer, edge.spec.bits, edge.why)
"""


@pytest.mark.slow
def test_a_program_that_reads_the_plan_passes_mypy(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="needs mypy, which is not installed")
    (tmp_path / "program.py").write_text(PLAN)
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", str(tmp_path / "program.py")]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
