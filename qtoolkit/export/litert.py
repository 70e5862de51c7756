"""export_litert(): write a model as a LiteRT file (.tflite) for integer kernels, after verification."""

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import nn

from qtoolkit.errors import check_flags, check_known
from qtoolkit.export.program import Decomposed, decomposed
from qtoolkit.export.tflite.lowering import Lowering, layouts
from qtoolkit.export.verification.deployed import RuntimeCodes
from qtoolkit.export.verification.verify import verify as verify_file
from qtoolkit.files import checked_path, write_atomically
from qtoolkit.graph.graph_module import QuantizedGraphModule
from qtoolkit.graph.passes import integers
from qtoolkit.instead import in_order
from qtoolkit.integer.kernels import Kernel
from qtoolkit.model_state import deepcopy_model
from qtoolkit.quantizers.frozen import rounding_of
from qtoolkit.runtimes.execution import ExecutedLayer
from qtoolkit.runtimes.table import LITERT, LITERT_RUNTIMES, XNNPACK, LitertRuntime
from qtoolkit.version import __version__


@dataclass(frozen=True)
class LitertResult:
    """The result of `export_litert`.

    Attributes:
        path: The file.
        bytes: Its size.
        layers: The ops that compute; `integer` marks the ops with integer kernels.
        conversions: The number of ops that quantize, dequantize or requantize.
        inputs: The layout of each input of the file, by name: "NHWC" if the model has NCHW; "as in the model" otherwise.
        outputs: The layout of each output, by name.
        reasons: The reason for each layer that computes in float, by its name.
        verification: The comparison with LiteRT's reference kernels, or with the XNNPACK delegate for a model in its
            arithmetic; None with `verify=False`.
    """

    path: Path
    bytes: int
    layers: tuple[ExecutedLayer, ...]
    conversions: int
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    reasons: Mapping[str, str]
    verification: RuntimeCodes | None

    @property
    def float_layers(self) -> tuple[ExecutedLayer, ...]:
        """The ops that compute in float."""
        return tuple(layer for layer in self.layers if not layer.integer)

    def __str__(self) -> str:
        layouts = [f"{name} ({layout})" for ends in (self.inputs, self.outputs) for name, layout in ends.items()]
        left = [f"{layer.name} ({layer.kernel}: {self.reasons[layer.name]})" for layer in self.float_layers]
        lines = [
            f"{self.path}: {self.bytes / 1024:.1f} KiB, {len(self.layers) - len(left)} ops in integers, "
            f"{self.conversions} conversions",
            f"inputs and outputs: {', '.join(layouts)}",
            f"in float: {', '.join(dict.fromkeys(left)) or 'none'}",
        ]
        return "\n".join([*lines, *([] if self.verification is None else [str(self.verification)])])


@in_order(model="model", inputs="example_inputs", path="path")
def export_litert(
    model: nn.Module,
    example_inputs: object,
    path: str | os.PathLike[str],
    io_type: Literal["float32", "int8", "int16"] = "float32",
    verify: bool = True,
) -> LitertResult:
    """Write a calibrated or converted model as a LiteRT file (.tflite) for phones and microcontrollers.

    Prepare the model with `backend="litert"`. Ops between quantizers compute in integers: activations are int8 with a zero
    point, weights int8 with per-output-channel scales, biases int32 at input scale times weight scale. Ops without an integer
    kernel compute in float; the result lists them, with the reason.

    Inputs of four dimensions, and outputs that are images, are NHWC in the file; the result gives the layout of each. Sizes are
    fixed to the sizes of the example inputs.

    Args:
        model: The result of `qtoolkit.prepare`, `qtoolkit.quant_modules.replace` or `qtoolkit.convert`. It is not changed.
        example_inputs: A tuple of inputs (tensors, alone or in lists and dicts), a mapping of keyword inputs, or one tensor.
            They give the shapes and are the inputs of the verification.
        path: The file to write. If any step fails, an existing file is kept.
        io_type: "float32", or "int8" ("int16" with the backend "litert-16x8") for integer inputs and outputs. It applies to
            inputs and outputs with a quantizer of this type.
        verify: Run the file with LiteRT's reference kernels, and compare all quantized values with a model in the same
            arithmetic, `convert(arithmetic="integer", runtime="litert")` (graph mode only). A model in the arithmetic of
            XNNPACK, `convert(arithmetic="integer")`, is compared with that delegate.

    Returns:
        The path, the size, the layouts, the ops in integers and in float, and the comparison.

    Raises:
        ValueError: LiteRT lacks an op of the model, or cannot express a quantizer; the message names it.
        RuntimeError: A quantizer is not calibrated, torch.export cannot export the model, or the quantized values in LiteRT
            differ from the model by more than rounding.
        TypeError: The model has no quantizers, or the example inputs do not match its forward.
        ImportError: The extra [litert] is not installed.

    Example:
        >>> import tempfile
        >>> model, x = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()), torch.randn(2, 3, 8, 8)
        >>> prepared = qt.prepare(model, x, backend="litert")
        >>> _ = qt.calibrate(prepared, [x], progress=False)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     result = qt.export_litert(qt.convert(prepared), x, f"{folder}/model.tflite")
        >>> list(result.inputs.values()), result.float_layers
        (['NHWC'], ())
    """
    check_flags("export_litert", verify=verify)
    LITERT_RUNTIMES["litert"].check_installed("export_litert")
    check_known("io_type of export_litert:", io_type, ("float32", "int8", "int16"))
    path = checked_path(path, "export_litert", "model.tflite")
    found = decomposed(model, example_inputs, None, "export_litert")
    lowering = Lowering(found, io_type)
    file = lowering.run(f"torch-qtoolkit {__version__}")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "model.tflite"
        place.write_bytes(file)
        codes = _verified(found, place) if verify else None
    write_atomically(file, path)
    inputs, outputs = layouts(lowering.inputs), layouts(lowering.outputs)
    facts = (tuple(lowering.layers), lowering.conversions, inputs, outputs, lowering.reasons)
    return LitertResult(Path(path), len(file), *facts, verification=codes)


def _verified(found: Decomposed, file: Path) -> RuntimeCodes:
    """Compare a file with the XNNPACK delegate if the model has its arithmetic, otherwise with the reference kernels."""
    computing = _as_the_reference_kernels(found.converted)
    runtime: LitertRuntime = "litert-xnnpack" if rounding_of(computing) is XNNPACK.quantizes_as else "litert"
    compared = verify_file(computing, found.kwargs or found.args, file, (runtime,), progress=False).runtimes[runtime]
    compared.check()
    return compared


def _as_the_reference_kernels(model: nn.Module) -> nn.Module:
    """Return a converted model in the arithmetic of the kernels, if it has a graph and no integer arithmetic yet."""
    integer = any(isinstance(module, Kernel) for module in model.modules())
    if integer or not isinstance(model, QuantizedGraphModule):
        return model
    return integers.run(deepcopy_model(model, what="export_litert"), LITERT)
