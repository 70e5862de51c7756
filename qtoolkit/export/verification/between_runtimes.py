"""compare_runtimes(): compare the quantized values of runtimes with a file's own evaluation, without the PyTorch model."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from qtoolkit.config import QuantSpec
from qtoolkit.errors import check_flags, check_known, check_sequence, first_line
from qtoolkit.export.files.quantizer_nodes import QuantizerNode, pairs, quantizers_in_bodies
from qtoolkit.export.files.reading import UnreadableFileError, array_of, open_model
from qtoolkit.export.verification.codes import CodeCount, largest_difference
from qtoolkit.export.verification.deployed import RuntimeCodes
from qtoolkit.instead import in_order
from qtoolkit.model_inputs import tensors_of
from qtoolkit.progress import progress_bar, step
from qtoolkit.quantizers.frozen import Grid
from qtoolkit.runtimes.execution import Array, Executed, ExecutionRequest
from qtoolkit.runtimes.table import EXECUTES, RUNTIMES, ExecutingRuntime

if TYPE_CHECKING:
    import onnx

LARGEST_INPUT = 1 << 25  # values: 256 MiB while they are made
INTEGERS = (np.int8, np.uint8, np.int16, np.uint16)


@dataclass(frozen=True)
class RuntimeComparison:
    """The result of `compare_runtimes`.

    Attributes:
        runtimes: For each runtime, the comparison of its quantized values and outputs with the file's evaluation.
        program: For each runtime, the largest difference between its outputs and the program's outputs; {} without a program.
    """

    runtimes: Mapping[str, RuntimeCodes]
    program: Mapping[str, float]

    @property
    def share(self) -> float:
        """The largest share of differing quantized values of a runtime."""
        return max((codes.codes.share for codes in self.runtimes.values()), default=0.0)

    def __str__(self) -> str:
        lines = [str(codes) for codes in self.runtimes.values()]
        lines += [f"{name}, outputs: max abs difference from the program {d:.3g}" for name, d in self.program.items()]
        return "\n".join(lines)


@in_order(path="path", inputs="inputs")
def compare_runtimes(
    path: str | os.PathLike[str],
    inputs: Mapping[str, ArrayLike] | None = None,
    runtimes: Sequence[ExecutingRuntime] = ("onnxruntime",),
    program: Callable[..., object] | None = None,
    seed: int = 0,
    progress: bool = True,
) -> RuntimeComparison:
    """Run any file with Q/DQ pairs in runtimes at their default settings, and compare all quantized values end to end.

    The reference is the file's evaluation node by node, in onnxruntime without graph optimizations. Runtimes fuse nodes into
    integer kernels, which may round differently. The result shows where differences begin, but not which side is right. If you
    have the PyTorch model, use `verify`, which compares with the model.

    Args:
        path: The file.
        inputs: Arrays by input name. Default: random arrays, with size 1 for dynamic dimensions.
        runtimes: "onnxruntime", "openvino" or both, on the CPU.
        program: A callable with the file's inputs and outputs, such as `torch.export.load("model.pt2").module()`. Its outputs
            are compared too.
        seed: Seed of the random inputs.
        progress: Show a progress bar.

    Returns:
        For each runtime: the number of compared and of differing values at each QuantizeLinear, the first QuantizeLinear that
            differs, the difference of the outputs, and the nodes that compute in integers and in float. Quantizers in the
            bodies of If, Loop and Scan are in `not_compared`.

    Raises:
        ValueError: A runtime is unknown; the inputs do not match; or, as `UnreadableFileError`, the file cannot be read or has
            no Q/DQ nodes.
        ImportError: A runtime is not installed.
        RuntimeError: A runtime cannot run the file.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     result = qt.quantize(torch.nn.Linear(4, 2), [torch.rand(8, 4)], "onnxruntime", folder + "/model.onnx")
        ...     found = qt.export.compare_runtimes(result.export.path, runtimes=("onnxruntime",), progress=False)
        >>> found.runtimes["onnxruntime"].codes.differing
        0
    """
    check_flags("compare_runtimes", progress=progress)
    check_sequence(runtimes, "compare_runtimes", "runtimes", "names", empty=False)
    for runtime in runtimes:
        check_known("runtime of compare_runtimes:", runtime, EXECUTES)
    for runtime in ("onnxruntime", *runtimes):
        RUNTIMES[runtime].check_installed("verify")
    graph = open_model(path).graph
    grids = _grids(graph, Path(path))
    nodes = [node for node in pairs(graph) if node.quantizer in grids and not node.is_constant]
    if not nodes:
        raise UnreadableFileError(
            f"{str(path)!r} has no QuantizeLinear of an activation with a constant scale and 8-bit or 16-bit integers, so "
            "there is nothing to compare."
        )
    names = [*(node.quantizer for node in nodes), *quantizers_in_bodies(graph)]
    tensors = _inputs(graph, inputs, seed)
    with torch.no_grad():
        expected = None if program is None else tensors_of(program(*tensors))
    found, differences = dict[str, RuntimeCodes](), dict[str, float]()
    with progress_bar("verify", "runs", progress, total=1 + len(runtimes), after=0) as bar:
        step(bar, "onnxruntime, as the file is written")
        reference = _run("onnxruntime", Path(path), tensors, nodes, grids, False)
        for name in runtimes:
            step(bar, ", ".join([name, *(f"{other}: {codes.codes}" for other, codes in found.items())]))
            run = _run(name, Path(path), tensors, nodes, grids, True)
            found[name] = _compare(reference, run, nodes, names)
            if expected is not None:
                differences[name] = _difference(expected, run.outputs)
    return RuntimeComparison(found, differences)


def _run(name: str, *request: *ExecutionRequest) -> Executed:
    try:
        return EXECUTES[name](*request)
    except Exception as error:  # runtimes' errors have no base class of their own
        raise RuntimeError(f"{name} cannot run {str(request[0])!r} on these inputs: {first_line(error)}.") from error


def _compare(reference: Executed, run: Executed, nodes: Sequence[QuantizerNode], names: Sequence[str]) -> RuntimeCodes:
    """Return the differences between two runs; `names` lists all quantizers, including quantizers that no run returns."""
    read = {node.quantizer: node.codes for node in nodes if node.codes in reference.codes and node.codes in run.codes}
    counts = {name: CodeCount.of(run.codes[codes], reference.codes[codes]) for name, codes in read.items()}
    return RuntimeCodes.of(run, counts, reference.outputs, names)


def _difference(expected: Sequence[Tensor], outputs: Sequence[Array]) -> float:
    shapes = [tuple(tensor.shape) for tensor in expected], [tuple(np.shape(output)) for output in outputs]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"the program returns tensors of shapes {shapes[0]}, and the file {shapes[1]}; pass the program of this file."
        )
    return largest_difference(expected, outputs)


def _grids(graph: "onnx.GraphProto", file: Path) -> dict[str, Grid]:
    """Return the grid of each integer quantizer with a constant scale, by name."""
    made = [(node.output[0], node.attribute) for node in graph.node if node.op_type == "Constant"]
    values = {name: each.t for name, attributes in made for each in attributes if each.name == "value"}
    constants = {**{tensor.name: tensor for tensor in graph.initializer}, **values}

    def array(name: str) -> Array | None:
        """Return a constant; None if it is computed."""
        return array_of(constants[name], file) if name in constants else None

    by_output = {node.output[0]: node for node in graph.node if node.op_type == "DequantizeLinear"}
    found = {}
    for pair in pairs(graph):
        node = by_output[pair.values]
        scale = array(node.input[1])
        zero = array(node.input[2]) if len(node.input) > 2 and node.input[2] else np.zeros((), np.uint8)
        if scale is None or zero is None or zero.dtype not in INTEGERS or scale.size != 1:
            continue
        info = np.iinfo(zero.dtype)
        spec = QuantSpec(bits=info.bits, signed=info.min < 0, symmetric=info.min < 0 and not zero.any())
        zero_points = None if spec.symmetric else torch.tensor(float(zero.item()))
        found[pair.quantizer] = Grid(torch.tensor(float(scale.item())), zero_points, spec, name=pair.quantizer)
    return found


def _inputs(graph: "onnx.GraphProto", given: Mapping[str, ArrayLike] | None, seed: int) -> list[Tensor]:
    constants = {tensor.name for tensor in graph.initializer}
    values = [value for value in graph.input if value.name not in constants]
    names = ", ".join(value.name for value in values)
    if given is None:
        generator = np.random.default_rng(seed)
        return [torch.from_numpy(_random(value, generator)) for value in values]
    if missing := [value.name for value in values if value.name not in given]:
        raise ValueError(
            f"the inputs must have an array for each input of the file ({names}); {missing[0]!r} is missing."
        )
    tensors = {value.name: torch.from_numpy(np.ascontiguousarray(given[value.name])) for value in values}
    if with_nan := [name for name, tensor in tensors.items() if tensor.isnan().any()]:
        raise ValueError(
            f"compare_runtimes: input {with_nan[0]!r} contains NaN, so nothing can be compared; pass finite numbers."
        )
    return list(tensors.values())


def _random(value: "onnx.ValueInfoProto", generator: np.random.Generator) -> Array:
    from onnx import helper

    kind = value.type.tensor_type
    if not value.type.HasField("tensor_type") or not kind.elem_type:
        raise ValueError(f"input {value.name!r} of the file has no known tensor type; pass inputs.")
    shape = [max(dim.dim_value, 1) for dim in kind.shape.dim]
    if math.prod(shape) > LARGEST_INPUT:
        raise ValueError(
            f"input {value.name!r} of the file has {math.prod(shape)} values, more than the limit of {LARGEST_INPUT} for "
            "random inputs; pass inputs."
        )
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(kind.elem_type))
    if dtype.kind in "iu":  # indices: the first ones are valid wherever any is
        return np.asarray(generator.integers(0, 2, shape)).astype(dtype)
    if dtype.kind not in "fb":
        raise ValueError(
            f"input {value.name!r} of the file has type {dtype}, for which random inputs are not supported; pass inputs."
        )
    numbers = np.asarray(generator.standard_normal(shape))
    return numbers.astype(dtype) if dtype.kind == "f" else np.asarray(numbers > 0)
