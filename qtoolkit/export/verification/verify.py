"""Verification: compare the quantized values of an exported file, as computed by a runtime, with the model."""

import os
from collections.abc import Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from qtoolkit.convert import check_converted
from qtoolkit.errors import check_flags, check_known, check_sequence, shown
from qtoolkit.export.files.quantizer_nodes import QuantizerNode, quantizer_nodes
from qtoolkit.export.files.reading import open_model
from qtoolkit.export.inputs import grids_of, on_cpu
from qtoolkit.export.verification.codes import (
    ChosenMaxima,
    CodeCount,
    check_numbers,
    check_outputs,
    compare_codes,
    largest_difference,
    sum_of,
)
from qtoolkit.export.verification.deployed import DeployedVerification, RuntimeCodes, compare_execution
from qtoolkit.export.verification.follower import (
    Followed,
    Follower,
    NodeCodes,
    Nodes,
    by_quantizer,
    check_names,
    grid_named,
)
from qtoolkit.export.verification.runtimes.litert_interpreter import LitertFile
from qtoolkit.instead import in_order
from qtoolkit.model_inputs import call_arguments, naming_misfits, tensors_of
from qtoolkit.op_kinds.reached import reached
from qtoolkit.progress import note, progress_bar
from qtoolkit.quantizers.frozen import Grid
from qtoolkit.runtimes.execution import Array, Execute, Executed
from qtoolkit.runtimes.table import EXECUTES, LITERT_RUNTIMES, RUNTIMES, ExecutingRuntime, LitertRuntime

if TYPE_CHECKING:
    import onnx

    from qtoolkit.export.files.files import OpenedFile


Arrays = Mapping[str, Array]  # of a file, by the names of its tensors


@dataclass(frozen=True)
class Verification:
    """The comparison of onnxruntime's results with the model.

    Attributes:
        weight_codes: Quantized weights, and other quantized parameters and buffers.
        quantizer_codes: Quantized values of each activation quantizer for the exact input of its node in onnxruntime.
        layer_codes: Quantized values of each activation quantizer if torch computes the layers before it from onnxruntime's
            quantized values. Differences are rounding ties of a layer's sums. Max pools return the same positions as
            onnxruntime if these hold a maximum up to a rounding error.
        by_quantizer: `layer_codes` of each quantizer.
        output_difference: Maximum absolute difference of the outputs, end to end; ties accumulate.
        missing: Quantizers without a node in the file.
        unreached: Quantizers that are not executed for these inputs because forward branches on values (the file contains only
            the branches of its example inputs), and quantizers that no output depends on.
        output_error: Largest relative difference of the outputs if torch computes them from onnxruntime's quantized values. It
            covers outputs that are smooth functions of the last quantized values.
        drawn: Quantizers that depend on random numbers, as after `torch.randn_like`. They differ in each run, so `layer_codes`
            excludes them. Later layers are compared with the runtime's quantized values as inputs.
        nan: Quantizers that get NaN, and cannot be compared.
        refused: Why onnxruntime does not run the file in a default session, although it does without graph optimizations; "" if
            it runs, or was not tried (`verify_onnx`).
    """

    weight_codes: CodeCount
    quantizer_codes: CodeCount
    layer_codes: CodeCount
    by_quantizer: dict[str, CodeCount]
    output_difference: float
    missing: tuple[str, ...] = ()
    unreached: tuple[str, ...] = ()
    output_error: float = 0.0
    drawn: tuple[str, ...] = ()
    nan: tuple[str, ...] = ()
    refused: str = ""

    @classmethod
    def of(
        cls, follower: Follower, followed: Followed, outputs: Sequence[Array], codes: CodeCount, smooth: Set[int]
    ) -> "Verification":
        """Return the comparison of a model, run layer by layer, with a file that has these outputs.

        `codes` compares the quantizers for the exact inputs of their nodes; `smooth` are the positions of outputs that match up
        to rounding if the quantized values match.
        """
        unused = follower.unused(followed.missing)
        return cls(
            weight_codes=followed.stored,
            quantizer_codes=codes,
            layer_codes=sum_of(followed.counts.values()),
            by_quantizer=dict(followed.counts),
            output_difference=largest_difference(tensors_of(follower.outputs), outputs),
            missing=tuple(name for name in followed.missing if name not in unused),
            unreached=(*follower.unreached, *unused),
            output_error=followed.output_error(outputs, smooth),
            drawn=followed.drawn.quantizers,
            nan=follower.nan,
        )

    def check(self) -> None:
        """Check that quantized values differ only by rounding ties.

        Raises:
            RuntimeError: Other values differ, a quantizer has no node or gets NaN (the message names it), or outputs contain
                NaN.
        """
        check_numbers(self.output_difference, self.nan, "export")
        if self.missing:
            raise RuntimeError(f"export: the file has no QuantizeLinear for: {', '.join(self.missing)}.")
        if self.weight_codes.differing or self.quantizer_codes.differing:
            raise RuntimeError(
                f"export: onnxruntime's quantized values must equal the model's. Weights: {self.weight_codes}. Quantizers: "
                f"{self.quantizer_codes}."
            )
        if not self.layer_codes.are_ties():
            worst = max(self.by_quantizer, key=lambda name: self.by_quantizer[name].share)
            raise RuntimeError(
                f"export: quantized values of layers differ in onnxruntime by more than rounding ties: {self.layer_codes}; "
                f"worst at {worst!r}: {self.by_quantizer[worst]}. If the scale of that quantizer is below 1e-7 of the values "
                "in the op before it, its range contains only rounding errors. This happens after a batch norm with a "
                "constant input, for example if an earlier batch norm starts with gamma 0: train that gamma and calibrate "
                "again, or disable the quantizer (qtoolkit.disable_quantization(prepared.get_submodule(name))). Otherwise "
                "onnxruntime computes the op differently: please report it with the model."
            )
        check_outputs(self.output_error, "onnxruntime", "export")

    def __str__(self) -> str:
        lines = [
            f"weights:          {self.weight_codes}",
            f"quantizers:       {self.quantizer_codes}",
            f"layer by layer:   {self.layer_codes}",
            f"output error:     max abs {self.output_difference:.3g} end to end; "
            f"{self.output_error:.1e} relative when the last layer gets identical inputs",
        ]
        lines += [f"not executed or not used for these inputs: {', '.join(self.unreached)}"] if self.unreached else []
        lines += [f"not compared (random numbers): {', '.join(self.drawn)}"] if self.drawn else []
        lines += [f"not compared (NaN): {', '.join(self.nan)}"] if self.nan else []
        if self.refused:
            lines.append(
                f"runs in:          onnxruntime without graph optimizations (ORT_DISABLE_ALL); not in its default session: "
                f"{self.refused}"
            )
        return "\n".join(lines)


@in_order(model="converted", inputs="inputs", path="path")
def verify_onnx(
    converted: nn.Module,
    inputs: object,
    path: "onnx.ModelProto | str | os.PathLike[str] | None" = None,
    progress: bool = True,
) -> Verification:
    """Run a file in onnxruntime without graph optimizations, and compare all its quantized values with the model.

    If forward branches on values, only the branches for these inputs are compared; the other quantizers are in `unreached`.

    Args:
        converted: The result of `qtoolkit.convert`.
        inputs: A tuple of inputs (tensors, alone or in lists and dicts), a mapping of keyword inputs, or one tensor.
        path: The path of the exported file, or its ModelProto.
        progress: Show a progress bar.

    Returns:
        Counts of differing quantized values; call `check()` to raise an error if rounding ties do not explain them.

    Raises:
        TypeError: The model was not converted, or the inputs do not match its forward.
        ValueError: The file is not ONNX, belongs to another model, or takes inputs of another number, dtype or size.
        RuntimeError: onnxruntime cannot run the file.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     result = qt.quantize(torch.nn.Linear(4, 2), [torch.rand(8, 4)], "onnxruntime", folder + "/model.onnx")
        ...     found = qt.export.verify_onnx(result.converted, torch.rand(8, 4), result.export.path)
        >>> found.weight_codes.differing, found.quantizer_codes.differing
        (0, 0)
    """
    check_flags("verify_onnx", progress=progress)
    converted, inputs = on_cpu(check_converted(converted, "verify_onnx"), inputs, "verify_onnx")
    call_arguments(converted, inputs, "verify_onnx: inputs do")
    file = _opened(path, "verify_onnx")
    with _in_type_of(file, converted, inputs, "verify_onnx") as model:
        return compare_layers(model, inputs, file, progress)


def compare_layers(converted: nn.Module, inputs: object, file: "OpenedFile", progress: bool) -> Verification:
    """Compare a file with a converted model like `verify_onnx`; model and inputs are on the CPU."""
    args, kwargs = call_arguments(converted, inputs, "verify_onnx: inputs do")
    nodes = _nodes_of(file.proto.graph, converted, "verify_onnx")
    tensors = file.taken(tensors_of((args, kwargs)), "verify_onnx")
    taken = {name for node in file.proto.graph.node for name in node.input}
    pools = [node for node in file.proto.graph.node if node.op_type == "MaxPool" and len(node.output) > 1]
    positions = [node.output[1] for node in pools if node.output[1] in taken]
    orders = [node.output[1] for node in file.proto.graph.node if node.op_type == "TopK"]
    grids = {node.quantizer: grid_named(converted, node.quantizer) for node in nodes}
    names = [name for node in nodes for name in (node.source, node.codes, *_shifting(node, grids))]
    values = file.run(tensors, [*names, *positions, *filter(None, orders)])
    with naming_misfits(converted, inputs, "verify_onnx: inputs do"):
        follower = Follower(converted, args, kwargs)
    with ChosenMaxima(values[name] for name in positions):
        followed = follower.layer_by_layer(
            _by_quantizer(nodes, values, grids), complete=True, progress=progress, orders=map(values.get, orders)
        )
    outputs = [values[output.name] for output in file.proto.graph.output]
    codes, smooth = _codes_of_own_inputs(nodes, values, follower), _smooth_outputs(file.proto.graph, nodes)
    return Verification.of(follower, followed, outputs, codes, smooth)


def _by_quantizer(
    nodes: Sequence[QuantizerNode], tensors: Arrays, grids: Mapping[str, Grid]
) -> dict[str, list[NodeCodes]]:
    """Return the nodes of each quantizer with available values, by tensor names."""
    there = (node for node in nodes if node.codes in tensors)
    return by_quantizer((node.quantizer, _node_codes(node, tensors, grids)) for node in there)


def _shifting(node: QuantizerNode, grids: Mapping[str, Grid]) -> tuple[str, ...]:
    """Return the name of a node's zero points if its integers may be higher in the file than in the model."""
    return (node.zero_points,) if grids[node.quantizer].shifts and node.zero_points else ()


def _node_codes(node: QuantizerNode, tensors: Arrays, grids: Mapping[str, Grid]) -> NodeCodes:
    """Return the integers of a node relative to the zero point of the model's quantizer."""
    codes, grid = tensors[node.codes], grids[node.quantizer]
    for name in _shifting(node, grids):
        # A transposed convolution may have each channel's zero point several times.
        own = 0 if grid.zero_point is None else int(grid.zero_point.min())
        codes = codes.astype(np.int16) - (int(tensors[name].min()) - own)
    return NodeCodes(codes, node.is_constant)


def _codes_of_own_inputs(nodes: Sequence[QuantizerNode], values: Arrays, follower: Follower) -> CodeCount:
    """Compare quantized activations for the exact inputs of their nodes."""
    computed = [(grid_named(follower.model, node.quantizer), node) for node in nodes if not node.is_stored]
    return sum_of(
        compare_codes(grid, torch.tensor(values[node.source]), values[node.codes])
        for grid, node in computed
        if not (grid.of_weight or node.quantizer in follower.weights)
    )


def _smooth_outputs(graph: "onnx.GraphProto", nodes: Sequence[QuantizerNode]) -> set[int]:
    """Return the positions of a file's outputs that smooth ops compute from quantized tensors."""
    from qtoolkit.export.files.kinds import ops_where

    # Ops for which a small difference of the inputs stays small.
    smooth = ops_where(lambda kind: kind.smooth) | {"DequantizeLinear"}
    made_by = {output: node for node in graph.node for output in node.output}

    for node in nodes:
        made_by.pop(node.values, None)

    def sources(tensor: str) -> Sequence[str]:
        return made_by[tensor].input if tensor in made_by else ()

    def is_smooth(output: str) -> bool:
        return all(made_by[tensor].op_type in smooth for tensor in reached([output], sources) if tensor in made_by)

    return {place for place, value in enumerate(graph.output) if is_smooth(value.name)}


@in_order(model="model", inputs="inputs", path="path")
def verify(
    model: nn.Module,
    inputs: object,
    path: str | os.PathLike[str],
    runtimes: Sequence[ExecutingRuntime | LitertRuntime] = ("onnxruntime",),
    optimized: bool = True,
    progress: bool = True,
) -> DeployedVerification:
    """Compare all quantized values of a model and its file end to end, with the runtime's default settings.

    Each runtime uses its integer kernels. Differences are not corrected layer by layer, so one early difference may change many
    later values: `first_difference` names the first quantizer that differs. A float model from `qtoolkit.convert` rounds
    differently from integer kernels; use `verify_onnx` to compare it layer by layer.

    The verdict of each runtime is one of `Verdict`: "equal" if all compared values are identical end to end; "rounding" if some
    differ end to end, but layer by layer only by the order of float sums; "different"; and two more. Quantized weights are
    compared first. Outputs of an ONNX file are compared last: smooth ops after the last quantizers must give the model's
    outputs. Quantizers that the runtime does not return are in `not_compared`.

    A file in float16 (`export_onnx(float_type="float16")`) is compared with a copy of the model in float16, without integer
    kernels. Its verdict is "rounding of float16" if values differ only by float16 rounding.

    onnxruntime's quantized values are read from the optimized graph itself. OpenVINO returns the values after each
    DequantizeLinear as additional outputs, which may prevent some fusions: `changed_by_reading` is the effect on the outputs.

    Args:
        model: The result of `qtoolkit.convert`, in eval mode.
        inputs: A tuple of inputs (tensors, alone or in lists and dicts), a mapping of keyword inputs, or one tensor.
        path: The exported file.
        runtimes: "onnxruntime", "openvino" or both, on the CPU. For a file of `export_litert`: "litert" (reference kernels),
            "litert-xnnpack" (LiteRT's default delegate on the CPU), or both.
        optimized: False runs onnxruntime without graph optimizations: every op in float between Q/DQ nodes.
        progress: Show a progress bar.

    Returns:
        For each runtime: the number of compared and of differing values at each quantizer, the first quantizer that differs,
            the difference of the outputs, and the nodes of the optimized graph that compute in integers and in float. Call
            `check()` to raise an error.

    Raises:
        TypeError: The model was not converted, or the inputs do not match its forward.
        ValueError: A runtime is unknown, or cannot run without optimizations; the file is not ONNX or belongs to another model;
            or it takes inputs of another number, dtype or size.
        ImportError: A runtime is not installed.
        RuntimeError: A runtime cannot run the file.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     result = qt.quantize(torch.nn.Linear(4, 2), [torch.rand(8, 4)], "onnxruntime", folder + "/model.onnx")
        ...     found = qt.export.verify(result.converted, torch.rand(8, 4), result.export.path)
        >>> found.runtimes["onnxruntime"].codes.differing
        0
    """
    check_flags("verify", optimized=optimized, progress=progress)
    of_litert = _check_runtimes(runtimes, optimized)
    model = check_converted(model, "verify")
    model, inputs = on_cpu(model, inputs, "verify")
    args, kwargs = call_arguments(model, inputs, "verify: inputs do")
    tensors = tensors_of((args, kwargs))
    if not isinstance(path, str | os.PathLike):
        raise _no_path(path, "verify")
    opened = None if of_litert else _opened(path, "verify")
    with _in_type_of(opened, model, inputs, "verify") as model:
        file = (
            LitertFile(Path(path), model, tensors)
            if opened is None
            else OnnxFile(Path(path), opened, model, tensors, optimized)
        )
        with naming_misfits(model, inputs, "verify: inputs do"):
            follower = Follower(model, args, kwargs)
        weights = file.compare_weights(follower)
        names = [name for name in (*file.quantizers, *follower.codes) if name not in file.constants]
        found: dict[str, RuntimeCodes] = {}
        with progress_bar("verify", "runtimes", progress, runtimes) as bar:
            for name in bar:
                executed, read = file.execute(name, follower)
                codes = compare_execution(follower, executed, read, names, file.smooth_outputs, weights=weights)
                found[name] = replace(codes, float16=opened is not None and opened.is_float16)
                note(bar, f"{name}: {codes.codes.differing:,} of {codes.codes.compared:,} values differ")
    return DeployedVerification(found)


def _in_type_of(
    file: "OpenedFile | None", model: nn.Module, inputs: object, what: str
) -> AbstractContextManager[nn.Module]:
    """Return a context with the model in the float type of a file."""
    from qtoolkit.export.float16 import computing_in_float16

    if file is None or not file.is_float16:
        return nullcontext(model)
    return computing_in_float16(model, inputs, what)


def _check_runtimes(runtimes: Sequence[str], optimized: bool) -> bool:
    """Check that runtimes are known, installed and read the same file format; return whether it is LiteRT's."""
    check_sequence(runtimes, "verify", "runtimes", "names", empty=False)
    for runtime in runtimes:
        if runtime in RUNTIMES and runtime not in (*EXECUTES, *LITERT_RUNTIMES):
            raise ValueError(
                f"verify: qtoolkit cannot execute the runtime {runtime!r}, only "
                f"{', '.join(map(repr, (*EXECUTES, *LITERT_RUNTIMES)))}. To simulate its documented arithmetic, use "
                f"qtoolkit.convert(prepared, arithmetic='integer', runtime={runtime!r})."
            )
        check_known(
            "runtime of verify:", runtime, (*EXECUTES, *LITERT_RUNTIMES), {"ort": "onnxruntime", "tflite": "litert"}
        )
        {**RUNTIMES, **LITERT_RUNTIMES}[runtime].check_installed("verify")
        if not optimized and runtime != "onnxruntime":
            raise ValueError(f"verify: optimized=False needs runtimes=('onnxruntime',), got {tuple(runtimes)!r}.")
    forms = {runtime in LITERT_RUNTIMES for runtime in runtimes}
    if len(forms) > 1:
        raise ValueError(
            f"verify: the runtimes {tuple(runtimes)!r} do not read the same file; call verify for each file."
        )
    return True in forms


class OnnxFile:
    """An ONNX file, and the inputs of a comparison; `optimized` is whether onnxruntime optimizes the graph."""

    def __init__(
        self, path: Path, file: "OpenedFile", model: nn.Module, tensors: Sequence[Tensor], optimized: bool
    ) -> None:
        self.path, self.file, self.optimized = path, file, optimized
        self.nodes = _nodes_of(self.file.proto.graph, model, "verify")
        self.grids = {node.quantizer: grid_named(model, node.quantizer) for node in self.nodes}
        self.tensors = self.file.taken(tensors, "verify")
        self.constant = [node for node in self.nodes if node.is_constant]
        self.quantizers = list(self.grids)  # their names, in the order of the file
        varying = {node.quantizer for node in self.nodes if not node.is_constant}
        # Quantizers that do not depend on the inputs.
        self.constants = {node.quantizer for node in self.constant} - varying
        # Constants quantized by activation quantizers, such as the zeros of an initial state.
        among_others = [node for node in self.constant if node.quantizer in varying]
        self.among_others = [name for node in among_others for name in (node.codes, *_shifting(node, self.grids))]
        self.smooth_outputs = _smooth_outputs(self.file.proto.graph, self.nodes)

    def compare_weights(self, follower: Follower) -> dict[str, CodeCount]:
        """Compare the quantized weights of layers with the model's, by the names of their quantizers."""
        weights = [node for node in self.constant if node.quantizer in follower.weights]
        names = [name for node in weights for name in (node.codes, *_shifting(node, self.grids))]
        return follower.compare_weights(_by_quantizer(weights, self.file.constants(names), self.grids))

    def execute(self, runtime: str, follower: Follower) -> tuple[Executed, Nodes]:
        """Run the file in a runtime, and return its quantized values by quantizer."""
        return self.executed_by(EXECUTES[runtime])

    def executed_by(self, execute: Execute) -> tuple[Executed, Nodes]:
        """Run the file, and return its quantized values by quantizer."""
        varying = [node for node in self.nodes if not node.is_constant]
        executed = execute(self.path, self.tensors, varying, self.grids, self.optimized)
        codes = {**self.file.constants(self.among_others), **executed.codes}
        return executed, _by_quantizer(self.nodes, codes, self.grids)


def _opened(model: "onnx.ModelProto | str | os.PathLike[str] | None", what: str) -> "OpenedFile":
    """Open a model, or a file of unknown origin."""
    if isinstance(model, str | os.PathLike):
        open_model(model)
    elif model is None or type(model).__name__ != "ModelProto":
        raise _no_path(model, what)
    from qtoolkit.export.files.files import OpenedFile

    return OpenedFile.of(model)


def _no_path(path: object, what: str) -> TypeError:
    return TypeError(f"{what}: path must be the path of the exported file, got {shown(path)}.")


def _nodes_of(graph: "onnx.GraphProto", model: nn.Module, what: str) -> list[QuantizerNode]:
    """Return the quantizers of a file; raise an error, which begins with `what`, if the file belongs to another model."""
    nodes = quantizer_nodes(graph)
    if not nodes and any(grid.quantizing for grid in grids_of(model).values()):
        raise ValueError(
            f"{what}: no quantizer of the file has a name from the model, so qtoolkit.export_onnx did not write the file. "
            "Export the model with it, or compare runtimes with qtoolkit.export.compare_runtimes."
        )
    check_names(list(dict.fromkeys(node.quantizer for node in nodes)), model, what)
    return nodes
