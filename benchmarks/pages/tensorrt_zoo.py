"""Files in float16 for TensorRT 11 of models of the zoo: what is int8 in them, and what onnxruntime computes otherwise.

python -m benchmarks.pages.tensorrt_zoo    writes the table of docs/tensorrt.md

The results, benchmarks/results/zoo_tensorrt.json, are made by

python -m benchmarks.pages.zoo --backend tensorrt --only ultralytics/ torchvision/ \\
    --json benchmarks/results/zoo_tensorrt.json --markdown build/zoo_tensorrt.md
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.pages.stored import write_part
from benchmarks.pages.zoo_models import sums
from benchmarks.report import markdown_lines

RESULTS = Path(__file__).parents[1] / "results" / "zoo_tensorrt.json"
PAGE = Path(__file__).parents[2] / "docs" / "tensorrt.md"
BEGIN, END = "<!-- begin: benchmarks/pages/tensorrt_zoo.py -->", "<!-- end -->"
COLUMNS = (
    "model",
    "multiply-adds in int8",
    "weights and quantizers that differ",
    "outputs of layers, one step apart",
    "findings",
)


def cells(outcome: Mapping[str, Any]) -> list[str]:
    """Return the line of a model."""
    macs = outcome["macs"]
    apart, outputs = outcome["layer_codes"]
    found = ", ".join(f"{name} {count}" for name, count in outcome["slower"].items())
    share = macs["int8"] / max(sum(macs.values()), 1)
    return [
        outcome["name"],
        f"{share:.1%}",
        f"{sums.differing(outcome):,} of {sums.compared(outcome):,}",
        f"{apart / max(outputs, 1):.2%}",
        found,
    ]


def lines(results: Mapping[str, Any]) -> list[str]:
    """Return the text of the page's part."""
    passed = [outcome for outcome in results["models"] if not outcome["failed"]]
    failed = [f"{outcome['name']} ({outcome['failed']})" for outcome in results["models"] if outcome["failed"]]
    versions = f"onnxruntime {results['onnxruntime']}, torch {results['torch']}, ultralytics {results['ultralytics']}"
    head = f"{len(passed)} of {len(results['models'])} models pass each step ({versions}); weights are random."
    return [
        head + (f" The others: {', '.join(failed)}." if failed else ""),
        "",
        *markdown_lines(COLUMNS, [cells(outcome) for outcome in passed]),
    ]


if __name__ == "__main__":
    write_part(PAGE, BEGIN, END, lines(json.loads(RESULTS.read_text())))
