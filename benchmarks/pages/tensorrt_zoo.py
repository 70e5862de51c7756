"""Files in float16 for TensorRT 11 of models of the zoo: what is int8 in them, and what onnxruntime computes otherwise.

python -m benchmarks.pages.tensorrt_zoo    writes the table of docs/tensorrt.md

The results, benchmarks/results/zoo_tensorrt.json, are made by

python -m benchmarks.pages.zoo --backend tensorrt --only ultralytics/ torchvision/ \\
    --json benchmarks/results/zoo_tensorrt.json --markdown build/zoo_tensorrt.md
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pages.stored import write_part
from benchmarks.pages.zoo_models import sums
from benchmarks.pages.zoo_models.page import used
from benchmarks.report import markdown_lines

RESULTS = Path(__file__).parents[1] / "results" / "zoo_tensorrt.json"
PAGE = Path(__file__).parents[2] / "docs" / "tensorrt.md"
BEGIN, END = "<!-- begin: benchmarks/pages/tensorrt_zoo.py -->", "<!-- end -->"
COLUMNS = (
    "library, family",
    "models",
    "multiply-adds in int8",
    "weights and quantizers that differ",
    "outputs of layers, one step apart",
)
NEARLY_ALL = 0.99  # of the multiply-adds: models with a smaller share in int8 are named
Outcome = Mapping[str, Any]


def share_in(kind: str, outcome: Outcome) -> float:
    """Return the share of a model's multiply-adds that its file computes in a type."""
    return float(outcome["macs"][kind] / max(sum(outcome["macs"].values()), 1))


def _apart(outcome: Outcome) -> float:
    count, compared = outcome["layer_codes"]
    return float(count / max(compared, 1))


def _range_of(shares: Sequence[float], digits: int) -> str:
    ends = dict.fromkeys(f"{share:.{digits}%}" for share in (min(shares), max(shares)))
    return " to ".join(ends)


def _families(passed: Sequence[Outcome]) -> list[str]:
    rows = []
    for names, group in sums.by_family(passed).items():
        differing, compared = sum(map(sums.differing, group)), sum(map(sums.compared, group))
        in_int8 = _range_of([share_in("int8", outcome) for outcome in group], 1)
        apart = _range_of([_apart(outcome) for outcome in group], 2)
        rows.append([", ".join(filter(None, names)), str(len(group)), in_int8, f"{differing:,} of {compared:,}", apart])
    return markdown_lines(COLUMNS, rows)


def _named(passed: Sequence[Outcome]) -> list[str]:
    """Return a table of the models with the smallest shares in int8, or a sentence."""
    kinds = ("int8", "float16", "float32")
    few = sorted((o for o in passed if share_in("int8", o) < NEARLY_ALL), key=lambda o: share_in("int8", o))
    if not few:
        return [f"All models have at least {NEARLY_ALL:.0%} of their multiply-adds in int8."]
    rows = [[o["name"], *(f"{share_in(kind, o):.1%}" for kind in kinds)] for o in few]
    head = f"Models with less than {NEARLY_ALL:.0%} of their multiply-adds in int8:"
    return [head, "", *markdown_lines(("model", *kinds), rows)]


def _findings(passed: Sequence[Outcome]) -> list[str]:
    models, ops = Counter[str](), Counter[str]()
    for outcome in passed:
        models.update(dict.fromkeys(outcome["slower"], 1))
        ops.update(outcome["slower"])
    return markdown_lines(
        ("finding", "models", "ops"), [[name, str(count), str(ops[name])] for name, count in models.most_common()]
    )


def lines(results: Mapping[str, Any]) -> list[str]:
    """Return the text of the page's part."""
    passed = [outcome for outcome in results["models"] if not outcome["failed"]]
    failed = [f"{outcome['name']} ({outcome['failed']})" for outcome in results["models"] if outcome["failed"]]
    of = {
        name: [o for o in results["models"] if name in o["versions"]]
        for name in ("onnxruntime", "torch", "ultralytics")
    }
    versions = ", ".join(f"{name} {used(name, outcomes)}" for name, outcomes in of.items())
    head = f"{len(passed)} of {len(results['models'])} models pass each step ({versions}); weights are random."
    return [
        head + (f" The others: {', '.join(failed)}." if failed else ""),
        "",
        *_families(passed),
        "",
        *_named(passed),
        "",
        "Findings, the number of models with each, and their ops:",
        "",
        *_findings(passed),
    ]


if __name__ == "__main__":
    write_part(PAGE, BEGIN, END, lines(json.loads(RESULTS.read_text())))
