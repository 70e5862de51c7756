"""Processor time of the export of a quantized ResNet-50, against that of the float model by the same exporter of torch.

    OMP_NUM_THREADS=1 python -m benchmarks.pages.export_time [--backend tensorrt10] [--exporter dynamo] [--rounds 5]

Exports are interleaved, verification is off, and the first export of each, which imports, does not count.
"""

import argparse
import math
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path

import torch
import torchvision

import qtoolkit as qt
from benchmarks.measure import Pace, sample, take_turns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", default="tensorrt10", choices=sorted(qt.backends))
    parser.add_argument("--exporter", default="dynamo", choices=["dynamo", "torchscript"])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model, x = torchvision.models.resnet50().eval(), torch.randn(1, 3, 224, 224)
    prepared = qt.prepare(model, (x,), backend=options.backend)
    qt.calibrate(prepared, [x], progress=False)
    converted, dynamo = qt.convert(prepared), options.exporter == "dynamo"
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model.onnx")

        def export_float() -> None:
            torch.onnx.export(model, (x,), path, dynamo=dynamo, opset_version=18, verbose=False)

        def export_quantized() -> None:
            qt.export_onnx(converted, x, path, opset=18, verify=False, exporter=options.exporter)

        exports = {"float": export_float, "quantized": export_quantized}
        samples = {name: partial(sample, each, clock=time.process_time) for name, each in exports.items()}
        times = take_turns(samples, Pace(options.rounds + 1, math.inf))
    float_time, quantized_time = (min(taken[1:]) for taken in times.values())
    print(f"float {float_time:.2f} s, quantized {quantized_time:.2f} s: {quantized_time / float_time:.2f} times")


if __name__ == "__main__":
    main()
