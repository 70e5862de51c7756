"""docs/zoo.md: the sums over all models, the remedies, and the comparison with other tools."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.pages.zoo_models import peers_table, sums
from benchmarks.pages.zoo_models.timm_families import DRAWN, SEED
from benchmarks.report import markdown_lines

HERE = Path(__file__).parents[2]
PAGE = HERE.parent / "docs" / "zoo.md"
ZOO = HERE / "results" / "zoo.json"
PEERS = HERE / "results" / "zoo_peers.json"
# What runs of each library, by the name of its distribution, which is the first part of the models' names.
LIBRARIES = {
    "torchvision": "all",
    "timm": f"a small model of each family, and {DRAWN} drawn by seed {SEED} from models with names of small ones",
    "transformers": "small models from configs",
    "ultralytics": "the smallest network of each generation, task and head",
    "spandrel": "small networks",
    "segmentation_models_pytorch": "all decoders, on small encoders",
    "monai": "small networks",
    "torchaudio": "small networks",
    "vit_pytorch": "small models, one of each paper",
    "pytorchcv": "a small network of each family that no other library here has",
}

TEXT = """# The model zoo

{count} models of {libraries} libraries go through `prepare`, `calibrate`, {steps} steps of SGD, `convert`, `export_onnx` and a
comparison with onnxruntime.

{summary}

`benchmarks/results/zoo.json` has the results of each model: its quantized layers and ops, the reason for each op in float, the
errors that name a remedy, all differences, and the times of the steps.

## Results by family

{families}

- **unchanged**: `prepare` traces the model as it is.
- **with a remedy**: the model is prepared in one of the other ways of the next table.
- **values that differ**: weights, and the outputs of quantizers that get the same inputs in both runtimes.
- **rounding ties**: outputs that differ by one step, of layers that get the same inputs in both runtimes.

## How models are prepared

{ways}

## Models that need a remedy

`*` stands for a number in a name; `untraced` takes the full names. Reasons are from the error of `prepare`, or from the recipe.

{remedies}

## Layers in float

Layers with weights that remain in float, by the reason in `qt.quantization_report`:

{in_float}

## Failures

{failures}

## The same models in other tools

{peers}

## What runs

{versions}

Weights are random, inputs are small, the target is {backend} {onnxruntime}, PyTorch is {torch}, and each model runs on one
thread. Models are prepared in training mode, except those that the table of remedies names.

| command | result |
|---|---|
| `python -m benchmarks.pages.zoo` | runs all models, and writes the JSON file and this page |
| `python -m benchmarks.pages.zoo --only resnet18` | runs models with this text in their names, and keeps the other results |
| `python -m benchmarks.pages.zoo --family timm` | runs one family, and keeps the other results |
| `python -m benchmarks.pages.zoo --write` | runs nothing, and writes this page from the JSON file |
| `python -m benchmarks.pages.zoo_peers` | runs other tools on models of the zoo |

Models of libraries that are not installed do not run. `benchmarks/pages/zoo_models/requirements.txt` names the packages.
"""


def versions(outcome: Mapping[str, Any]) -> dict[str, str]:
    """Return the versions of the packages that have run a model."""
    library = {sums.library_of(outcome)} & {*LIBRARIES}
    return {name: version(name) for name in ("torch", "onnxruntime", "onnx", *library)}


def used(package: str, models: Sequence[Mapping[str, Any]]) -> str:
    """Return the version of a package that ran the models; where there are several, with the number of models of each."""
    counts = Counter(outcome["versions"][package] for outcome in models)
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{each} ({count} models)" for each, count in sorted(counts.items(), reverse=True))


def json_text(results: Mapping[str, Any]) -> str:
    """Return results as JSON with one line for each model."""
    head = json.dumps({name: value for name, value in results.items() if name != "models"}, indent=1)
    models = ",\n".join(json.dumps(outcome) for outcome in results["models"])
    return f'{head.removesuffix("}").rstrip()},\n "models": [\n{models}\n]\n}}\n'


def text(results: Mapping[str, Any]) -> str:
    """Return the page for the results, with the comparison as it is stored."""
    models = results["models"]
    sections = ("summary", "families", "ways", "remedies", "in_float", "failures")
    return TEXT.format(
        backend=results["backend"],
        onnxruntime=used("onnxruntime", models),
        torch=used("torch", models),
        **{name: getattr(sums, name)(models) for name in sections},
        count=len(models),
        libraries=len({*map(sums.library_of, models)}),
        steps=_steps(models),
        versions=_versions(models),
        peers=peers_text(json.loads(PEERS.read_text())) if PEERS.exists() else "Not measured.",
    )


def _steps(models: Sequence[Mapping[str, Any]]) -> str:
    """Return how many steps the models trained: "3", or "1 to 3"."""
    counts = sorted({o["steps"] for o in models if not o["failed"]})
    return " to ".join(map(str, dict.fromkeys(counts[:1] + counts[-1:]))) or "no"


def _versions(models: Sequence[Mapping[str, Any]]) -> str:
    of = {name: [outcome for outcome in models if sums.library_of(outcome) == name] for name in LIBRARIES}
    rows = [[name, used(name, outcomes), LIBRARIES[name]] for name, outcomes in of.items() if outcomes]
    return "\n".join(markdown_lines(["library", "version", "models"], rows))


OF_ALL = """{count} models, drawn by seed {seed} from all {of} recipes of the zoo that take one floating-point tensor.
Models that fail in qtoolkit, or need a remedy, are among them."""
OF_PASSING = """**This draw favours qtoolkit.** It has {count} models, drawn by seed {seed} from the models that pass every
step in qtoolkit, take one floating-point tensor, and run in at most 6 s. The table shows how models that work in qtoolkit do
in other tools, and not the reverse. `python -m benchmarks.pages.zoo_peers --draw 40` draws from all recipes, failures
included."""
DRAWS = {peers_table.OF_ALL: OF_ALL, peers_table.OF_PASSING: OF_PASSING}
COMPARED = """{draw}

Each other tool has its default int8 configuration for training, one step of SGD, and its own ONNX export. It gets models
without a remedy, so the row to compare with is *qtoolkit, without remedies*. Both rows of qtoolkit are from the results above.
torchao gets a second attempt, on a graph of `torch.fx`, if its own capture fails. The limit is {limit} s of processor time.

{sums}

- **within 1 %**, **equal**: the outputs of onnxruntime and PyTorch differ by at most {near:g} and {equal:g} of the largest
  output. One rounding tie in a layer with random weights can change outputs by more than 1 %, in every tool.

Errors, with the tool's own message. Messages that differ only in numbers are one row:

{failures}

`benchmarks/results/zoo_peers.json` has the results of each model.
"""


def peers_text(results: Mapping[str, Any]) -> str:
    """Return the comparison with other tools."""
    count = len(peers_table.models_in(results))
    draw = DRAWS[results["draw"]].format(count=count, seed=results["seed"], of=results.get("of"))
    return COMPARED.format(
        draw=draw,
        limit=results["limit"],
        near=peers_table.NEAR,
        equal=peers_table.EQUAL,
        sums="\n".join(peers_table.sums(results)),
        failures="\n".join(peers_table.failures(results)),
    ).strip()
