"""export_program(): a model as a torch.export program, in the PT2E form that ExecuTorch's delegates expect."""

from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from qtoolkit.export.inputs import ONE_AT_A_TIME, DynamicShapes, ExportSource, by_name
from qtoolkit.export.pairs.shaped_weights import shaped_weights
from qtoolkit.export.pt2e import Decomposition, Quantizers
from qtoolkit.graph.capture.exported import graph_of
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
    """Return a calibrated or converted model as a torch.export program with the ops of `quantized_decomposed`.

    This is the form of torchao's `convert_pt2e`, which XNNPACK and other ExecuTorch delegates recognize. Weights are integers
    with a dequantize op. An activation has one quantize op, and a dequantize op for each user. Biases stay float.

    Weights equal the converted model's exactly. `quantize_per_tensor` multiplies by 1 / scale, while qtoolkit and ONNX divide
    by the scale: values at a rounding boundary may differ by one step.

    Args:
        model: The result of `qtoolkit.prepare`, `qtoolkit.quant_modules.replace` or `qtoolkit.convert`. It is not changed.
        example_inputs: A tuple of inputs (tensors, alone or in lists and dicts), a mapping of keyword inputs, or one tensor.
        dynamic_shapes: Dynamic dimensions in the format of torch.export: ({0: torch.export.Dim("batch")},) for one input.

    Returns:
        The program. Run it with `.module()`, and save it with `torch.export.save`. A process that loads it must first register
        the ops, for example with `import executorch.exir` or `import torchao.quantization.pt2e`.

    Raises:
        ValueError: The form cannot express a quantizer (a float format, blocks of channels, per-output-channel scales of a
            grouped transposed convolution, dynamic scales), or the model is not float32.
        RuntimeError: A quantizer is not calibrated, torch.export cannot export the model, or this torch version lacks the ops.
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
            raise ValueError(f"{what}: quantized_decomposed cannot express {name!r}, which has {reason}.")
    args, kwargs = call_arguments(converted, source.example_inputs, f"{what}: example_inputs do")
    misfits = naming_misfits(converted, source.example_inputs, f"{what}: example_inputs do")
    with misfits, ONE_AT_A_TIME, evaluating(converted), in_float(converted), torch.no_grad():
        with shaped_weights(converted, partial(converted, *args, **kwargs), what):
            captured = graph_of(capture(converted, args, kwargs, dynamic_shapes))
        quantizers = Decomposition(captured, names_of_weights(converted)).run()
        return Decomposed(captured, converted, args, kwargs, dynamic_shapes, quantizers)


def _reason(grid: nn.Module) -> str:
    """Return why the form cannot express a quantizer, and the remedy; "" if it can."""
    if isinstance(grid, DynamicActivation):
        return "scales that are computed from each input; use a spec without dynamic"
    if not isinstance(grid, Grid):
        return ""
    if grid.spec.format != "int":
        return f"format={grid.spec.format!r}; use format='int'"
    if grid.spec.block_size:
        return f"a scale for each block of {grid.spec.block_size} channels; use a spec without group_size"
    if grid.group > 1 and grid.scale.numel() > 1:
        return (
            f"{grid.scale.numel()} scales along the output channels of {grid.group} groups of a transposed convolution; give "
            "the layer a weight spec with axis=None with QConfigMapping.set_module_name"
        )
    return ""
