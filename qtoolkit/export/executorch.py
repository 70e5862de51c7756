"""export_executorch(): write a model as an ExecuTorch file for the XNNPACK delegate, after verification."""

import os
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from qtoolkit.errors import check_flags
from qtoolkit.export.inputs import ONE_AT_A_TIME, DynamicShapes
from qtoolkit.export.program import Decomposed, decomposed
from qtoolkit.export.verification.codes import CodeCount, largest_difference
from qtoolkit.export.verification.deployed import RuntimeCodes, compare_execution
from qtoolkit.export.verification.follower import Follower, NodeCodes, in_shapes_of_calls
from qtoolkit.export.verification.runtimes import executorch_xnnpack
from qtoolkit.export.verification.runtimes.executorch_xnnpack import Lowered, lower
from qtoolkit.export.verification.verify import Verification
from qtoolkit.files import checked_path, write_atomically
from qtoolkit.instead import in_order
from qtoolkit.integer.kernels import in_float
from qtoolkit.model_inputs import tensors_of
from qtoolkit.model_state import evaluating
from qtoolkit.runtimes.execution import Executed, ExecutedLayer
from qtoolkit.runtimes.table import XNNPACK


@dataclass(frozen=True)
class ExecutorchResult:
    """The result of `export_executorch`.

    Attributes:
        path: The file.
        bytes: Its size.
        layers: The ops that compute, with their kernels: "XNNPACK convolution", or "portable mean" for ExecuTorch's own kernel.
        delegates: Number of program parts that XNNPACK computes; one if it computes the whole program.
        verification: Comparison of the quantized values layer by layer, or None with `verify=False`.
        end_to_end: End-to-end comparison of the quantized values and outputs, or None with `verify=False`.
    """

    path: Path
    bytes: int
    layers: tuple[ExecutedLayer, ...]
    delegates: int
    verification: Verification | None
    end_to_end: RuntimeCodes | None

    @property
    def left(self) -> tuple[ExecutedLayer, ...]:
        """The ops that are not delegated."""
        return tuple(layer for layer in self.layers if layer.left)

    def __str__(self) -> str:
        head = f"{self.path}: {self.bytes / 1024:.1f} KiB, {self.delegates} parts in XNNPACK"
        left = ", ".join(f"{layer.name} ({layer.kernel})" for layer in self.left) or "none"
        parts = [head, f"left to ExecuTorch's own kernels: {left}", self.verification, self.end_to_end]
        return "\n".join(str(part) for part in parts if part is not None)


@in_order(model="model", inputs="example_inputs", path="path")
def export_executorch(
    model: nn.Module,
    example_inputs: object,
    path: str | os.PathLike[str],
    dynamic_shapes: DynamicShapes | None = None,
    verify: bool = True,
) -> ExecutorchResult:
    """Write a calibrated or converted model as an ExecuTorch file (.pte) for the XNNPACK delegate.

    Prepare the model with `backend="xnnpack"`: XNNPACK requires signed activations, and computes a layer only if its output is
    quantized. All other ops run in ExecuTorch's own float kernels, which are slow; `left` names them. Export takes half a
    minute for a ResNet-20, and verification lowers the model once more.

    Args:
        model: The result of `qtoolkit.prepare`, `qtoolkit.quant_modules.replace` or `qtoolkit.convert`. It is not changed.
        example_inputs: A tuple of inputs (tensors, alone or in lists and dicts), a mapping of keyword inputs, or one tensor.
            They give the shapes and are the inputs of the verification.
        path: The file to write. If any step fails, an existing file is kept.
        dynamic_shapes: Dynamic dimensions in the format of torch.export: ({0: torch.export.Dim("batch", max=8)},). Each needs a
            maximum size, for which ExecuTorch plans its memory.
        verify: Run the file, and compare all quantized values with the model layer by layer: each layer of the model gets the
            runtime's quantized values as inputs.

    Returns:
        The path, the size, the ops with their kernels, and the comparisons.

    Raises:
        ValueError: The format cannot express a quantizer; see `export_program`.
        RuntimeError: A quantizer is not calibrated, ExecuTorch cannot lower the model, or its quantized values differ by more
            than rounding ties.
        TypeError: The model has no quantizers, or the example inputs do not match its forward.
        ImportError: The extra [executorch] is not installed.

    Example:
        >>> import tempfile
        >>> prepared, x = qt.prepare(torch.nn.Sequential(torch.nn.Linear(4, 2)), backend="xnnpack"), torch.randn(8, 4)
        >>> _ = qt.calibrate(prepared, [x], progress=False)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     result = qt.export.export_executorch(qt.convert(prepared), x, f"{folder}/model.pte")
        >>> result.delegates, result.verification.quantizer_codes.differing
        (1, 0)
    """
    check_flags("export_executorch", verify=verify)
    XNNPACK.check_installed("export_executorch")
    path = checked_path(path, "export_executorch", "model.pte")
    found = decomposed(model, example_inputs, dynamic_shapes, "export_executorch")
    lowered = lower(found.program)
    verification, end_to_end = _compared(found, lowered) if verify else (None, None)
    if verification is not None:
        verification.check()
    write_atomically(lowered.file, path)
    return ExecutorchResult(Path(path), len(lowered.file), lowered.layers, lowered.delegates, verification, end_to_end)


def _compared(found: Decomposed, lowered: Lowered) -> tuple[Verification, RuntimeCodes]:
    """Run the file, and a second one that also returns the quantized values; compare both with the model."""
    model, inputs = found.converted, (found.args, found.kwargs)
    tensors = tensors_of(inputs)
    outputs = executorch_xnnpack.load(lowered.file)(tensors)
    reading = lower(executorch_xnnpack.with_codes(found.program, inputs))
    values = executorch_xnnpack.load(reading.file)(tensors)
    executed = Executed(
        executorch_xnnpack.description(),
        outputs,
        {},
        lowered.layers,
        lowered.conversions,
        largest_difference(outputs, values[: len(outputs)]),
        XNNPACK.tie_share,
    )
    with ONE_AT_A_TIME, evaluating(model):
        ours = Follower(model, found.args, found.kwargs)
        codes = zip(found.quantizers.activations, values[len(outputs) :], strict=True)
        nodes = in_shapes_of_calls(((name, array) for name, array in codes if name), ours)  # without repeated pairs
        end_to_end = compare_execution(ours, executed, nodes, ours.codes, frozenset(), weights={})
        stored = {name: [NodeCodes(codes.numpy(), True)] for name, codes in found.quantizers.stored.items()}
        with in_float(model):
            in_floats = Follower(model, found.args, found.kwargs)
            followed = in_floats.layer_by_layer({**stored, **nodes}, complete=True)
    return Verification.of(in_floats, followed, outputs, CodeCount(), frozenset()), end_to_end
