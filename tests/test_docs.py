"""The Python programs of the pages in docs/ run as they stand."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
PROGRAMS = {
    f"{page.name}-{number}": program
    for page in sorted(DOCS.rglob("*.md"))
    if page.name != "migration.md"  # its program registers modules under another package's name
    for number, program in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL))
}
EXTRAS = re.compile(
    r"^(?:import|from) (?:torch\.utils\.)?(accelerate|lightning|tensorboard|transformers|ultralytics)\b", re.MULTILINE
)

# Names that need an extra.
NEEDED_BY = {
    "MixedPrecision": "scipy",
    "save_checkpoint": "safetensors",
    "TrainingArguments": "accelerate",
    "export_litert": "ai_edge_litert",
    "CortexMPassManager": "executorch",
    "EthosUPartitioner": "tosa_serializer",  # of tosa-tools
    "EthosUCompileSpec": "ethosu",  # of ethos-u-vela
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_programs_run(program: str, tmp_path, monkeypatch) -> None:
    text = PROGRAMS[program]
    for package in [*EXTRAS.findall(text), *(needed for name, needed in NEEDED_BY.items() if name in text)]:
        pytest.importorskip(package, reason=f"needs {package}, which is not installed")
    monkeypatch.chdir(tmp_path)
    exec(compile(text, program, "exec"), {"__name__": program})
