"""Verification: an exported file's integer codes, as onnxruntime computes them, compared with the model's own."""

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
    """How onnxruntime's results compare with the model's.

    Attributes:
        weight_codes: Codes of all weights, and of other parameters and buffers that are quantized.
        quantizer_codes: Codes of each activation quantizer for exactly the input of its node in onnxruntime.
        layer_codes: Codes of each activation quantizer when torch computes the ops before it from onnxruntime's codes at
            their inputs. Differences are rounding ties of a layer's sums. Max pools return the positions that onnxruntime's
            do, where these hold a maximum up to a rounding error.
        by_quantizer: `layer_codes` of each quantizer.
        output_difference: Largest absolute difference of the outputs end to end, where ties accumulate.
        missing: Quantizers without a node in the file.
        unreached: Quantizers that are not executed for these inputs, because forward branches on values (the file contains only
            the branches that its example inputs take), and those on which nothing that the model returns depends.
        output_error: Largest difference of the outputs when torch computes them from onnxruntime's codes, as a share of the
            largest value: of those behind layers and ops whose results change little where their inputs do.
        drawn: Quantizers whose codes depend on random numbers, as behind `torch.randn_like`: each run draws others, so that
            `layer_codes` leaves them out. The ops behind them are compared from the runtime's codes.
        nan: Quantizers that get NaN, for which there is nothing to compare.
        refused: Why onnxruntime does not run the file in a session without options, although it does without graph
            optimizations; "" where it runs, and where nobody tried (`verify_onnx`).
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
        """Return how a model that was followed layer by layer compares with a file that has these outputs.

        `codes` compares the quantizers for exactly the inputs of their nodes; `smooth` are the places of the outputs that are
        equal up to rounding where the codes are.
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
        """Check that codes differ only where rounding ties explain it.

        Raises:
            RuntimeError: Other codes differ, or a quantizer has no node or gets NaN; the message names it. Or outputs have NaN.
        """
        check_numbers(self.output_difference, self.nan, "export")
        if self.missing:
            raise RuntimeError(f"export: the file has no QuantizeLinear for: {', '.join(self.missing)}.")
        if self.weight_codes.differing or self.quantizer_codes.differing:
            raise RuntimeError(
                f"export: onnxruntime's codes must equal the model's. Weights: {self.weight_codes}. Quantizers: "
                f"{self.quantizer_codes}."
            )
        if not self.layer_codes.are_ties():
            worst = max(self.by_quantizer, key=lambda name: self.by_quantizer[name].share)
            raise RuntimeError(
                f"export: the codes of layers differ in onnxruntime by more than rounding ties: {self.layer_codes}; worst "
                f"at {worst!r}: {self.by_quantizer[worst]}. If the scale of that quantizer is below 1e-7 of the values that "
                f"the op before it computes with, its range holds rounding errors alone, as behind a batch norm whose input is "
                f"constant because another one before it starts with gamma 0: train that gamma and calibrate again, or turn "
                f"the quantizer off (qtoolkit.disable_quantization(prepared.get_submodule(name))). Otherwise "
                f"onnxruntime computes the op differently: report it with the model."
            )
        check_outputs(self.output_error, "onnxruntime", "export")

    def __str__(self) -> str:
        lines = [
            f"weight codes:     {self.weight_codes}",
            f"quantizer codes:  {self.quantizer_codes}",
            f"layer by layer:   {self.layer_codes}",
            f"output error:     max abs {self.output_difference:.3g} end to end; "
            f"{self.output_error:.1e} relative when the last layer gets identical inputs",
        ]
        lines += [f"not executed, or not used, for these inputs: {', '.join(self.unreached)}"] if self.unreached else []
        lines += [f"not compared, as each run draws others: {', '.join(self.drawn)}"] if self.drawn else []
        lines += [f"NaN, for which nothing can be compared: {', '.join(self.nan)}"] if self.nan else []
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
    """Run a file in onnxruntime without graph optimizations, and compare all its integer codes with the model's.

    Where forward branches on values, only the branches that these inputs take are compared; the rest is `unreached`.

    Args:
        converted: What `qtoolkit.convert` returned.
        inputs: A tuple of inputs (tensors, alone or in lists and dicts), a mapping of keyword inputs, or one tensor.
        path: The path of the exported file, or its ModelProto.
        progress: Show a progress bar.

    Returns:
        Counts of differing codes; call `check()` to raise an error where rounding ties do not explain them.

    Raises:
        TypeError: The model was not converted, or the inputs do not match its forward.
        ValueError: The file is not ONNX, or not of this model; or it takes inputs of another number, dtype or size.
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
    """Compare the codes of a file and of a converted model as `verify_onnx` does; model and inputs are on the CPU."""
    args, kwargs = call_arguments(converted, inputs, "verify_onnx: inputs do")
    nodes = _nodes_of(file.proto.graph, converted, "verify_onnx")
    tensors = file.taken(tensors_of((args, kwargs)), "verify_onnx")
    taken = {name for node in file.proto.graph.node for name in node.input}
    pools = [node for node in file.proto.graph.node if node.op_type == "MaxPool" and len(node.output) > 1]
    positions = [node.output[1] for node in pools if node.output[1] in taken]
    grids = {node.quantizer: grid_named(converted, node.quantizer) for node in nodes}
    names = [name for node in nodes for name in (node.source, node.codes, *_shifting(node, grids))]
    values = file.run(tensors, [*names, *positions])
    with naming_misfits(converted, inputs, "verify_onnx: inputs do"):
        follower = Follower(converted, args, kwargs)
    with ChosenMaxima(values[name] for name in positions):
        followed = follower.layer_by_layer(_by_quantizer(nodes, values, grids), complete=True, progress=progress)
    outputs = [values[output.name] for output in file.proto.graph.output]
    codes, smooth = _codes_of_own_inputs(nodes, values, follower), _smooth_outputs(file.proto.graph, nodes)
    return Verification.of(follower, followed, outputs, codes, smooth)


def _by_quantizer(
    nodes: Sequence[QuantizerNode], tensors: Arrays, grids: Mapping[str, Grid]
) -> dict[str, list[NodeCodes]]:
    """Return the nodes of each quantizer whose codes are there, by the names of their tensors."""
    there = (node for node in nodes if node.codes in tensors)
    return by_quantizer((node.quantizer, _node_codes(node, tensors, grids)) for node in there)


def _shifting(node: QuantizerNode, grids: Mapping[str, Grid]) -> tuple[str, ...]:
    """Return the name of a node's zero points, if its codes may be higher in the file than in the model."""
    return (node.zero_points,) if grids[node.quantizer].shifts and node.zero_points else ()


def _node_codes(node: QuantizerNode, tensors: Arrays, grids: Mapping[str, Grid]) -> NodeCodes:
    """Return the codes of a node as the model's quantizer numbers them: higher or lower by what the zero points are."""
    codes, grid = tensors[node.codes], grids[node.quantizer]
    for name in _shifting(node, grids):
        # A transposed convolution may have each channel's zero point several times.
        own = 0 if grid.zero_point is None else int(grid.zero_point.min())
        codes = codes.astype(np.int16) - (int(tensors[name].min()) - own)
    return NodeCodes(codes, node.is_constant)


def _codes_of_own_inputs(nodes: Sequence[QuantizerNode], values: Arrays, follower: Follower) -> CodeCount:
    """Compare the codes of activations for exactly the inputs of their nodes."""
    computed = [(grid_named(follower.model, node.quantizer), node) for node in nodes if not node.is_stored]
    return sum_of(
        compare_codes(grid, torch.tensor(values[node.source]), values[node.codes])
        for grid, node in computed
        if not (grid.of_weight or node.quantizer in follower.weights)
    )


def _smooth_outputs(graph: "onnx.GraphProto", nodes: Sequence[QuantizerNode]) -> set[int]:
    """Return the places of a file's outputs between which and the quantized tensors behind them there are smooth ops alone."""
    from qtoolkit.export.files.kinds import ops_where

    # Ops behind which a small difference of the inputs stays small.
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
    """Compare all codes of a model and of its file end to end, as users run the file.

    Each runtime computes at its default settings, with integer kernels where it has them. Nothing is corrected on the way, so
    a code that differs early may change many after it: `first_difference` names where it began. The float reference of
    `qtoolkit.convert` rounds in another order than integer kernels do; `verify_onnx` compares it layer by layer.

    The verdict of each runtime is one of `Verdict`: "equal", where all codes that could be compared are the same end to end;
    "rounding", where some differ end to end, but each quantizer's, computed from the runtime's own codes before it, only as
    the order of float sums explains; "different"; and two more. The codes of weights are compared first, and the outputs of
    an ONNX file last: behind the last quantizers, ops whose results change little where their inputs do must give the model's
    outputs. What the runtime does not give is in `not_compared`.

    A file in float16 (`export_onnx(float_type="float16")`) is compared with a copy of the model in float16, without integer
    kernels. Its verdict is "rounding of float16" where codes differ only as the rounding of float16 explains.

    Codes in onnxruntime are read from the optimized graph itself. OpenVINO returns the values behind each DequantizeLinear as
    further outputs, which may keep it from fusing some ops: `changed_by_reading` is the difference this makes.

    Args:
        model: What `qtoolkit.convert` returned, in eval mode.
        inputs: A tuple of inputs (tensors, alone or in lists and dicts), a mapping of keyword inputs, or one tensor.
        path: The exported file.
        runtimes: "onnxruntime", "openvino" or both, on the CPU. For a file of `export_litert`: "litert", with the reference
            kernels, "litert-xnnpack", with the delegate that LiteRT takes on the CPU, or both.
        optimized: False runs onnxruntime without graph optimizations: every op in float between its Q/DQ nodes.
        progress: Show a progress bar.

    Returns:
        For each runtime: the codes compared and differing at each quantizer, the first that differs, the difference of the
        outputs, and the nodes of the optimized graph that compute in integers and in float. Call `check()` to raise an error.

    Raises:
        TypeError: The model was not converted, or the inputs do not match its forward.
        ValueError: A runtime is not known, or cannot run without optimizations; the file is not ONNX, or not of this model; or
            it takes inputs of another number, dtype or size.
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
                note(bar, f"{name}: {codes.codes.differing:,} of {codes.codes.compared:,} codes differ")
    return DeployedVerification(found)


def _in_type_of(
    file: "OpenedFile | None", model: nn.Module, inputs: object, what: str
) -> AbstractContextManager[nn.Module]:
    """Return a context with the model that computes in the float type of a file."""
    from qtoolkit.export.float16 import computing_in_float16

    if file is None or not file.is_float16:
        return nullcontext(model)
    return computing_in_float16(model, inputs, what)


def _check_runtimes(runtimes: Sequence[str], optimized: bool) -> bool:
    """Check that runtimes are known, installed and read one form of file; return whether it is LiteRT's."""
    check_sequence(runtimes, "verify", "runtimes", "names", empty=False)
    for runtime in runtimes:
        if runtime in RUNTIMES and runtime not in (*EXECUTES, *LITERT_RUNTIMES):
            raise ValueError(
                f"verify: {runtime!r} is a runtime that qtoolkit does not execute; it executes "
                f"{', '.join(map(repr, (*EXECUTES, *LITERT_RUNTIMES)))}. qtoolkit.convert(prepared, arithmetic='integer', "
                f"runtime={runtime!r}) computes by its documented rules."
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
    """An ONNX file, with the inputs of a comparison; `optimized` is whether onnxruntime optimizes the graph."""

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
        # Quantizers of codes that do not depend on the inputs.
        self.constants = {node.quantizer for node in self.constant} - varying
        # Constants that quantizers of other tensors quantize too, such as the zeros that a state begins with.
        among_others = [node for node in self.constant if node.quantizer in varying]
        self.among_others = [name for node in among_others for name in (node.codes, *_shifting(node, self.grids))]
        self.smooth_outputs = _smooth_outputs(self.file.proto.graph, self.nodes)

    def compare_weights(self, follower: Follower) -> dict[str, CodeCount]:
        """Compare the codes of the layers' weights with the model's, by the names of their quantizers."""
        weights = [node for node in self.constant if node.quantizer in follower.weights]
        names = [name for node in weights for name in (node.codes, *_shifting(node, self.grids))]
        return follower.compare_weights(_by_quantizer(weights, self.file.constants(names), self.grids))

    def execute(self, runtime: str, follower: Follower) -> tuple[Executed, Nodes]:
        """Run the file in a runtime, and return its codes by quantizer."""
        return self.executed_by(EXECUTES[runtime])

    def executed_by(self, execute: Execute) -> tuple[Executed, Nodes]:
        """Run the file, and return its codes by quantizer."""
        varying = [node for node in self.nodes if not node.is_constant]
        executed = execute(self.path, self.tensors, varying, self.grids, self.optimized)
        codes = {**self.file.constants(self.among_others), **executed.codes}
        return executed, _by_quantizer(self.nodes, codes, self.grids)


def _opened(model: "onnx.ModelProto | str | os.PathLike[str] | None", what: str) -> "OpenedFile":
    """Open a model, or a file, which anybody may have written."""
    if isinstance(model, str | os.PathLike):
        open_model(model)
    elif model is None or type(model).__name__ != "ModelProto":
        raise _no_path(model, what)
    from qtoolkit.export.files.files import OpenedFile

    return OpenedFile.of(model)


def _no_path(path: object, what: str) -> TypeError:
    return TypeError(f"{what}: path must be the path of the exported file, got {shown(path)}.")


def _nodes_of(graph: "onnx.GraphProto", model: nn.Module, what: str) -> list[QuantizerNode]:
    """Return the quantizers of a file; raise an error, which begins with `what`, for a file that is not of the model."""
    nodes = quantizer_nodes(graph)
    if not nodes and any(grid.quantizing for grid in grids_of(model).values()):
        raise ValueError(
            f"{what}: no quantizer of the file has a name of the model's: qtoolkit.export_onnx did not write it. Export the "
            f"model by it, or compare what runtimes compute from the file by qtoolkit.export.compare_runtimes."
        )
    check_names(list(dict.fromkeys(node.quantizer for node in nodes)), model, what)
    return nodes
