"""docs/zoo.md: the table and the meaning of its columns."""

import json
import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from zoo_models.table import markdown

PACKAGES = ("torchvision", "timm", "onnxruntime", "onnx", "transformers", "ultralytics", "spandrel")

TEXT = """# The model zoo

Every model of torchvision {torchvision}, small models of each family of timm {timm}, small models of transformers
{transformers} and spandrel {spandrel}, and the smallest YOLOs of ultralytics {ultralytics} go through `prepare` (in
training mode, unless a note says otherwise), `calibrate`, one step of SGD, `convert`, `export_onnx` and verification in
onnxruntime {onnxruntime}. Weights are random, inputs are small, the backend is {backend}; torch {torch}, one thread of
{cores} shared cores. `python benchmarks/zoo.py` writes this page; `--only resnet18` or `--family timm` runs some of the
models and keeps the other results; models of packages that are not installed are left out, and keep theirs. The data is in
`benchmarks/results/zoo.json`.

- **layers** have weights; **ops** are all others. Layers that *forward does not call* are there for another mode, for other
  inputs or for tied weights: heads for training in detectors, the shared embedding of T5. Ops in float are counted by kind,
  or by name if no kind contains the function. *relu after a float op* does not directly follow a quantized op. The backend
  computes *layer_norm* and the like in float.
- **off**: largest difference from the float model in eval mode with quantizers disabled, relative to the largest
  output. *Norms kept*: the qconfig_mapping leaves batch norms unfolded; the difference must be 0, except in models with
  SiLUs, which onnxruntime computes as x * sigmoid(x), with one more rounding than torch's. *Norms folded*: as the
  prepared model computes in eval mode and as it is exported. The differences are float32 rounding errors, which grow
  with the depth of the model (in float64 the deepest, deeplabv3_resnet101, differs by 2e-12, and yolov9t, whose SiLUs
  differ most, by 9e-13).
- **layer codes differing**: torch computes each layer from the codes that onnxruntime has at its inputs; the
  differences are rounding ties. Codes of weights, and codes of quantizers for the inputs that they have in onnxruntime,
  must be equal; otherwise the cell reports them. **Output difference**: largest difference of onnxruntime's outputs end
  to end, relative to the largest output; ties accumulate through layers with random weights.
- **trace**: processor seconds to trace the graph; **rest of prepare**: processor seconds of `prepare` minus those of
  tracing. A first trace in the same process is not counted.
- **notes**: submodules that are prepared separately because the model's forward cannot be traced; leaf modules, named
  by `untraced`; use of torch's older exporter, or of gradient clipping, with the reason.

"""


def facts(backend: str, before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the backend, the versions of the packages and the number of cores.

    Args:
        backend: The backend's name.
        before: The facts of the results so far; the version of a package that is not installed here is taken from them.
    """
    return {
        "backend": backend,
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        **{p: _version(p, before) for p in PACKAGES},
    }


def _version(package: str, before: Mapping[str, Any]) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return str(before.get(package, "(not installed)"))


def json_text(results: Mapping[str, Any]) -> str:
    """Return results as JSON with one line for each model."""
    head = json.dumps({name: value for name, value in results.items() if name != "models"}, indent=1)
    models = ",\n".join(json.dumps(outcome) for outcome in results["models"])
    return f'{head.removesuffix("}").rstrip()},\n "models": [\n{models}\n]\n}}\n'


def text(results: Mapping[str, Any]) -> str:
    """Return the page for the results."""
    return TEXT.format(**results) + markdown(results["models"])
