"""LiteRT's files of a model: in float, quantized after training by qtoolkit, and by litert-quantizer from the float file."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

import qtoolkit as qt
from benchmarks.export_models import ROOT
from qtoolkit.runtimes.execution import ExecutedLayer

sys.path.insert(0, str(ROOT / "examples"))

from mlperf_tiny import as_given, channels_last, interpreter_of, write_float

FLOAT, OURS, THEIRS = "float", "qtoolkit", "litert-quantizer"


def quantized_by_theirs(path: Path, calibration: Sequence[Tensor], out: Path) -> None:
    """Quantize a float file after training by litert-quantizer: int8 weights, activations, inputs and outputs."""
    from ai_edge_litert.interpreter import Interpreter
    from litert_quantizer import quantizer, recipe

    (name,) = Interpreter(str(path)).get_signature_list()["serving_default"]["inputs"]
    theirs = quantizer.Quantizer(str(path))
    theirs.load_quantization_recipe(recipe.static_wi8_ai8())
    images = (image for batch in calibration for image in batch)
    ranges = theirs.calibrate({"serving_default": [{name: channels_last(image)} for image in images]})
    out.write_bytes(theirs.quantize(ranges).quantized_model)


def write_files(
    model: nn.Module, image: Tensor, calibration: Sequence[Tensor], folder: Path
) -> tuple[dict[str, Path], Sequence[ExecutedLayer]]:
    """Write a model for one image in float, by qtoolkit and by litert-quantizer, where it is installed and takes it.

    Returns:
        The files, by the tool that wrote them, and the ops of qtoolkit's file, which has int8 inputs and outputs.
    """
    paths = {name: folder / f"{name}.tflite" for name in (FLOAT, OURS, THEIRS)}
    prepared = qt.prepare(model, image, backend="litert")
    qt.calibrate(prepared, calibration, progress=False)
    result = qt.export_litert(prepared, image, paths[OURS], io_type="int8", verify=False)
    write_float(prepared, image, paths[FLOAT])
    try:
        quantized_by_theirs(paths[FLOAT], calibration, paths[THEIRS])
    except Exception as error:  # another tool may raise anything; its file is then missing in the table
        print(f"without a file of litert-quantizer ({type(error).__name__}: {error})")
    return {name: path for name, path in paths.items() if path.exists()}, result.layers


def in_litert(path: Path, threads: int) -> Callable[[Any], Any]:
    """Return what runs a file on an array of images, one by one, with the delegate XNNPACK."""
    interpreter = interpreter_of(path, threads)
    (given,), (returned,) = interpreter.get_input_details(), interpreter.get_output_details()
    scale, zero_point = returned["quantization"]

    def run(x: Any) -> Any:
        outputs = []
        for image in x:
            interpreter.set_tensor(
                given["index"], as_given(np.ascontiguousarray(image.transpose(1, 2, 0)[None]), given)
            )
            interpreter.invoke()
            y = interpreter.get_tensor(returned["index"])
            y = y if y.dtype == np.float32 else (y.astype(np.float32) - zero_point) * np.float32(scale)
            outputs.append(y.transpose(0, 3, 1, 2) if y.ndim == 4 else y)
        return np.concatenate(outputs)

    return run
