"""export_program(): a model as a program of torch.export, in the form that PT2E gives to the delegates of ExecuTorch."""

from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from qtoolkit.export.inputs import ONE_AT_A_TIME, DynamicShapes, ExportSource, by_name
from qtoolkit.export.pairs.shaped_weights import shaped_weights
from qtoolkit.export.pt2e import Decomposition, Quantizers
from qtoolkit.integer.kernels import in_float
from qtoolkit.model_inputs import call_arguments, naming_misfits
from qtoolkit.model_state import evaluating
from qtoolkit.nn.module import names_of_weights
from qtoolkit.quantizers.frozen import DynamicActivation, Grid


@dataclass(frozen=True)
class Decomposed:
    """A captured graph in the decomposed form, with what it was made from."""

    captured: fx.GraphModule  # the graph, in which constants are attributes
    converted: nn.Module  # the converted model
    args: tuple[object, ...]  # the positional arguments of forward
    kwargs: dict[str, object]  # the keyword arguments
    dynamic_shapes: DynamicShapes | None
    quantizers: Quantizers  # the quantizers of its graph

    @cached_property
    def program(self) -> ExportedProgram:
        """The graph as a program, which takes a second capture."""
        with ONE_AT_A_TIME, torch.no_grad():
            return capture(self.captured, self.args, self.kwargs, self.dynamic_shapes)


def export_program(
    model: nn.Module, example_inputs: object, dynamic_shapes: DynamicShapes | None = None
) -> ExportedProgram:
    """Return a calibrated or converted model as a program of torch.export with the ops of `quantized_decomposed`.

    This is the form of torchao's `convert_pt2e`, which XNNPACK and other delegates of ExecuTorch match. Weights are integer
    codes with a dequantize op. An activation has one quantize op, and a dequantize op for each taker. Biases stay float.

    Weights are bit-equal to the converted model's. `quantize_per_tensor` multiplies by 1 / scale, where qtoolkit, like ONNX,
    divides: a value within a rounding error of the middle between two codes may get the other one.

    Args:
        model: What `qtoolkit.prepare`, `qtoolkit.quant_modules.replace` or `qtoolkit.convert` returned. It is not changed.
        example_inputs: A tuple of inputs (tensors, alone or in lists and dicts), a mapping of keyword inputs, or one tensor.
        dynamic_shapes: Dynamic dimensions in the format of torch.export: ({0: torch.export.Dim("batch")},) for one input.

    Returns:
        The program. `.module()` runs it. `torch.export.save` writes it; a process that loads it registers torch's ops first,
        as `import executorch.exir` and `import torchao.quantization.pt2e` do.

    Raises:
        ValueError: The form cannot hold a quantizer: a float format, blocks of channels, scales of the output channels of a
            transposed convolution with groups, scales computed from the input; or the model is not float32.
        RuntimeError: A quantizer saw no data, torch.export cannot export the model, or this torch does not have the ops.
        TypeError: The model has no quantizers, or the example inputs do not match its forward.

    Example:
        >>> prepared = qt.prepare(torch.nn.Sequential(torch.nn.Linear(4, 2)).eval(), backend="xnnpack")
        >>> report = qt.calibrate(prepared, [torch.rand(8, 4)], progress=False)
        >>> program = qt.export.export_program(prepared, (torch.rand(8, 4),))
        >>> [node.name for node in program.graph.nodes if node.op == "call_function"][:4]
        ['quantize_per_tensor', 'dequantize_per_tensor', 'dequantize_per_channel', 'linear']
    """
    return decomposed(model, example_inputs, dynamic_shapes, "export_program").program


def capture(
    model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], dynamic_shapes: DynamicShapes | None
) -> ExportedProgram:
    """Capture a model by `torch.export`, with the keyword arguments by name."""
    return torch.export.export(by_name(model, kwargs), args, kwargs, dynamic_shapes=dynamic_shapes)


def decomposed(model: nn.Module, example_inputs: object, dynamic_shapes: DynamicShapes | None, what: str) -> Decomposed:
    """Return a model in the decomposed form; errors begin with `what`, the public function."""
    source = ExportSource.of(model, example_inputs, what)
    converted = source.model
    for name, grid in converted.named_modules():
        if reason := _reason(grid):
            raise ValueError(f"{what}: quantized_decomposed cannot hold {name!r}, which has {reason}.")
    args, kwargs = call_arguments(converted, source.example_inputs, f"{what}: example_inputs do")
    misfits = naming_misfits(converted, source.example_inputs, f"{what}: example_inputs do")
    with misfits, ONE_AT_A_TIME, evaluating(converted), in_float(converted), torch.no_grad():
        with shaped_weights(converted, partial(converted, *args, **kwargs), what):
            captured = capture(converted, args, kwargs, dynamic_shapes).module()
        quantizers = Decomposition(captured, names_of_weights(converted)).run()
        return Decomposed(captured, converted, args, kwargs, dynamic_shapes, quantizers)


def _reason(grid: nn.Module) -> str:
    """Return why the form cannot hold a quantizer, and the remedy; "" if it can."""
    if isinstance(grid, DynamicActivation):
        return "scales that are computed from each input; take a spec without dynamic"
    if not isinstance(grid, Grid):
        return ""
    if grid.spec.format != "int":
        return f"format={grid.spec.format!r}; take integers"
    if grid.spec.block_size:
        return f"a scale for each block of {grid.spec.block_size} channels; take a spec without group_size"
    if grid.group > 1 and grid.scale.numel() > 1:
        return (
            f"{grid.scale.numel()} scales along the output channels of {grid.group} groups of a transposed convolution; give "
            f"the layer a weight spec with axis=None by QConfigMapping.set_module_name"
        )
    return ""
