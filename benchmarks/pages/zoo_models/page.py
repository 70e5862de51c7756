"""docs/zoo.md: the sums, the comparison with other tools, the meaning of the columns, and the tables."""

import json
import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.pages.zoo_models import peers_table
from benchmarks.pages.zoo_models.table import failures, markdown, summary
from benchmarks.pages.zoo_models.timm_families import DRAWN, SEED

HERE = Path(__file__).parents[2]
PAGE = HERE.parent / "docs" / "zoo.md"
ZOO = HERE / "results" / "zoo.json"
PEERS = HERE / "results" / "zoo_peers.json"
# The distributions that the page names, by the word in it.
PACKAGES = {
    **{
        name: name for name in ("torchvision", "timm", "onnxruntime", "onnx", "transformers", "ultralytics", "spandrel")
    },
    **{name: name for name in ("monai", "torchaudio", "pytorchcv")},
    "segmentation_models": "segmentation_models_pytorch",
    "vit_pytorch": "vit-pytorch",
}

TEXT = """# The model zoo

{summary}

`python -m benchmarks.pages.zoo` prints these figures and writes this page; `--only resnet18` or `--family timm` runs some
of the models and keeps the other results. Models of packages that are not installed are left out, and keep theirs;
`benchmarks/pages/zoo_models/requirements.txt` has the packages. The data is in `benchmarks/results/zoo.json`.

## The same models through other tools

{peers}

## What does not come through, and why

{failures}

Causes that are known:

- *A value that Python uses is ... now*: the forward asks for the device (`x.is_cpu`, `x.type()`), and tracing answers for
  the meta device, on which it computes sizes. The message names sizes. Such a submodule is a leaf module in `untraced`.
- *Branches on self.training*: the branch of eval mode cannot be traced. Prepare in eval mode, as a note says where
  the recipe does, or make the submodule a leaf module.
- *A value of type int has no length*, *unpackString*, *new() received*: `torch.tensor(x.size(0))`, a test of autocast for
  `x.device.type`, and `x.new(sizes)` get a traced value in C++. The error names the leaf module, or replacement.
- `unsafe_chunk` (tacotron2), `sort` (atd), `uniform` (ats_vit), complex numbers (hdemucs): neither exporter of torch writes
  the op. Files of the float models fail with the same error. The parts around it are quantized and exported, as the error
  advises.
- *FlexAttention*: torch has no backward of it on the CPU, not even for the float models. The recipes of vit-pytorch's
  vit_nd let the models compute attention as on a device without it.
- *By more than rounding ties*: a range that holds rounding errors alone.
    - levit of vit-pytorch as it is initialized; its recipe sets gammas of 0 to 1. An attention without a residual ends with
      a batch norm of gamma 0, so that all stages behind it get a constant. Their batch norms see a variance of 0 and
      multiply by 1/sqrt(eps) = 316. After three steps of training one channel of 128 differed, by 100 steps of 9.6e-9:
      torch sums to 0 and onnxruntime to 9.5e-7, which is one unit in the last place of the bias, -13.2 (in float64 the sum
      is 6.7e-7). With gammas of 1 at most two codes differ, by one step.
    - hdemucs, whose recipe turns two quantizers off: a sigmoid of -20 is 1.8e-9, in steps of 4.2e-12. onnxruntime's
      sigmoid has an error of 1e-7 there: below -18 it is 0.

## What runs

Every model of torchvision {torchvision}; of timm {timm} a small model of each family and {drawn} drawn by seed {seed}
from those whose names say that they are small; small models from configs of transformers {transformers}; decoders and
encoders of segmentation_models_pytorch {segmentation_models}; small networks of spandrel {spandrel}, MONAI {monai},
torchaudio {torchaudio}, vit-pytorch {vit_pytorch} and pytorchcv {pytorchcv}; the smallest networks of ultralytics
{ultralytics} for each task. They go through `prepare` (in training mode, unless a note says otherwise), `calibrate`,
three steps of SGD, `convert`, `export_onnx` and verification in onnxruntime {onnxruntime}. What cannot be traced goes on
as the error advises: with the leaf module that it names, or by `qt.quant_modules.replace`; an export, by the exporter
that its error names. Weights are random, inputs are small, the backend is {backend}; torch {torch}, one thread of
{cores} shared cores.

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
        **{name: _version(name, before) for name in PACKAGES},
    }


def _version(name: str, before: Mapping[str, Any]) -> str:
    try:
        return version(PACKAGES[name])
    except PackageNotFoundError:
        return str(before.get(name, "(not installed)"))


def json_text(results: Mapping[str, Any]) -> str:
    """Return results as JSON with one line for each model."""
    head = json.dumps({name: value for name, value in results.items() if name != "models"}, indent=1)
    models = ",\n".join(json.dumps(outcome) for outcome in results["models"])
    return f'{head.removesuffix("}").rstrip()},\n "models": [\n{models}\n]\n}}\n'


def text(results: Mapping[str, Any]) -> str:
    """Return the page for the results, with the comparison as it is stored."""
    models = results["models"]
    compared = peers_text(json.loads(PEERS.read_text())) if PEERS.exists() else ""
    texts = {"summary": summary(models), "failures": failures(models), "peers": compared}
    return TEXT.format(**results, **texts, seed=SEED, drawn=DRAWN) + markdown(models)


COMPARED = """{count} of the models, drawn by seed {seed} from those that went through all steps, take one tensor and
take at most {seconds:.0f} seconds here. Each other tool has its default int8 configuration for training, one step of SGD,
and its own way to an ONNX file.
*Within* and *equal*: the outputs of onnxruntime beside the exported model's in PyTorch, relative to the largest:
at most {near:g} and {equal:g}. A rounding tie in one layer changes outputs of random weights by more than that, in every
tool; no other one compares codes. *Out of time*: stopped after 60 s of processor time. torchao takes a
model by torch.export, and Brevitas by its graph. `python -m benchmarks.pages.zoo_peers` prints the table; the data is in
`benchmarks/results/zoo_peers.json`.
"""


def peers_text(results: Mapping[str, Any]) -> str:
    """Return the comparison with other tools."""
    count, bounds = len(peers_table.models_in(results)), {"near": peers_table.NEAR, "equal": peers_table.EQUAL}
    text = COMPARED.format(count=count, seed=results["seed"], seconds=results["seconds"], **bounds)
    return "\n".join([text, *peers_table.sums(results), *peers_table.failures(results)])
