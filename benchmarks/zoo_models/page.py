"""docs/zoo.md: the table with what its columns mean."""

import json
import os
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch

from zoo_models.table import markdown

PACKAGES = ("torchvision", "timm", "onnxruntime", "onnx")

TEXT = """# The model zoo

Every model of torchvision {torchvision} and families of timm {timm}, through `prepare` (in training mode), `calibrate`,
one step of SGD, `convert`, `export_onnx` and its verification in onnxruntime {onnxruntime}. Random weights, small
inputs, the {backend} backend, torch {torch}, one thread of {cores} shared cores. Made by `python benchmarks/zoo.py`;
`--only resnet18` or `--family timm` runs a part of it, and keeps the rest as it was found. The data is
`benchmarks/results/zoo.json`.

- **layers**: those with weights; **ops**: all others. Ops in float are counted by kind, or, of functions that no kind
  has, by name: *relu after a float op* has no quantized op right before it; *layer_norm* and the like are float on this
  target.
- **off**: largest difference to the float model in eval mode with quantizers off, as a share of the largest output.
  *Norms apart*: batch norms are left where they are by the qconfig_mapping: 0 is the demand. *Norms folded*: as the
  prepared model computes in eval mode, and the exported one: other sums in float32, over the depth of the model
  (in float64 the deepest, deeplabv3_resnet101, differs by 2e-12).
- **layer codes differing**: each layer computed by torch on the codes that onnxruntime had before it; what differs is a
  rounding tie. Codes of weights, and of quantizers fed what onnxruntime's were fed, must be equal, else they are named.
  **Output difference** is that of onnxruntime end to end, as a share of the largest output, where ties have spread
  through random weights.
- **trace**: the processor's seconds for the graph alone; **prepare beyond**: those of `prepare` besides it. Both after a
  first `prepare` in the same process.
- **how**: parts that were prepared on their own, where the model's own forward cannot be traced; submodules kept whole
  by `skip`; another exporter than torch.export's, or clipped gradients, and why.

"""


def facts(backend: str) -> dict[str, Any]:
    """Return what the models ran on."""
    return {
        "backend": backend,
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        **{p: version(p) for p in PACKAGES},
    }


def json_text(results: Mapping[str, Any]) -> str:
    """Return results as JSON, one model a line."""
    head = json.dumps({name: value for name, value in results.items() if name != "models"}, indent=1)
    models = ",\n".join(json.dumps(outcome) for outcome in results["models"])
    return f'{head.removesuffix("}").rstrip()},\n "models": [\n{models}\n]\n}}\n'


def text(results: Mapping[str, Any]) -> str:
    """Return the page of some results."""
    return TEXT.format(**results) + markdown(results["models"])
