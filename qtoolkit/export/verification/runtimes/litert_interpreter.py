"""LiteRT's interpreter with its reference kernels, or with the XNNPACK delegate, its default on the CPU.

The reference kernels keep all tensors (`experimental_preserve_all_tensors`). The delegate keeps no intermediate tensors:
quantized values are read from a second file that has them as outputs.
"""

import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from qtoolkit import ops
from qtoolkit.errors import first_line
from qtoolkit.export.files.reading import UnreadableFileError
from qtoolkit.export.tflite.flatbuffer import IDENTIFIER, METADATA, FileFacts
from qtoolkit.export.verification.codes import CodeCount, largest_difference
from qtoolkit.export.verification.follower import Follower, NodeCodes, Nodes, check_names, in_shapes_of_calls
from qtoolkit.graph.graph_module import plan_in
from qtoolkit.quantizers.frozen import QuantizesAs, rounding_of
from qtoolkit.runtimes.execution import Array, Executed, ExecutedLayer
from qtoolkit.runtimes.table import LITERT, LITERT_RUNTIMES

if TYPE_CHECKING:
    from ai_edge_litert.interpreter import Interpreter

Detail = Mapping[str, Any]  # what the interpreter says of a tensor
PLACE = 4  # of the identifier in a file
# Kernels with fixed-point numbers or tables coarser than float, and the share of values that may differ by one step.
COARSE = {"LEAKY_RELU": 5e-2, "HARD_SWISH": 1e-2, "BATCH_MATMUL": 5e-3, "RESIZE_BILINEAR": 5e-2}
# On int16 one step is 1/65536 of the range, so 15-bit factors and interpolated tables cause differences.
OF_INT16 = 0.1
OF_ANOTHER = (
    "The model has the arithmetic of other kernels: convert it with qtoolkit.convert(prepared, arithmetic='integer', "
    "runtime='litert') for the reference kernels, or with runtime='xnnpack' for the delegate."
)
COARSE_ON_INT16 = dict.fromkeys(("LEAKY_RELU", "TANH", "LOGISTIC", "SOFTMAX"), 1.0)


class LitertFile:
    """A LiteRT file from `export_litert`, and the inputs of a comparison, which may hold several batches of the file's size.

    Raises UnreadableFileError: the file is not from `export_litert`; ValueError: it belongs to another model, or takes other
    inputs.
    """

    def __init__(self, path: Path, model: nn.Module, tensors: Sequence[Tensor]) -> None:
        self.path, self.content = path, _content(path)
        self.plain = _interpreter(self.content, True, path)  # which checks the flatbuffer
        self.plain.allocate_tensors()
        self.facts = self._facts()
        self.tensors, self.rounding = tensors, rounding_of(model)
        # the names of the activation quantizers in the order of the file, and of quantizers that do not depend on the inputs
        self.quantizers = list(dict.fromkeys(name for name, *_ in self.facts["quantizers"]))
        self.constants = {*self.facts["constants"]}
        # Not compared: LiteRT's kernels use tables, which have their own errors.
        self.smooth_outputs = frozenset[int]()
        check_names(self.quantizers, model, "verify")
        self.batches = self._batches()

    def compare_weights(self, follower: Follower) -> dict[str, CodeCount]:
        """Compare the quantized weights of the layers with the model's."""
        found = {}
        for name, tensor, axes, shape in self.facts["weights"]:
            codes = self.plain.get_tensor(tensor)
            arranged = codes.reshape([shape[axis] for axis in axes])
            found[name] = [NodeCodes(arranged.transpose(np.argsort(axes)), True)]
        return follower.compare_weights(found)

    def execute(self, runtime: str, follower: Follower) -> tuple[Executed, Nodes]:
        """Run the file, and return its quantized values by quantizer."""
        references = runtime == "litert"
        content = self.content if references else self._with_outputs()
        outputs, codes = self._run(_interpreter(content, references, self.path))
        change = 0.0
        if not references:
            plain, _ = self._run(_interpreter(self.content, references, self.path), read=False)
            change, outputs = largest_difference(plain, outputs), plain
        names = (name for name, *_ in self.facts["quantizers"])
        layers = tuple(ExecutedLayer(*facts) for facts in self.facts["layers"])
        wide = any(array.dtype == np.int16 for array in codes)
        coarse = COARSE_ON_INT16 if wide else COARSE
        shares = (coarse.get(layer.kernel, OF_INT16 if wide else 0.0) for layer in layers)
        how = "reference kernels" if references else "XNNPACK"
        share = max(LITERT_RUNTIMES[runtime].tie_share, *shares)
        if references and _computes_exactly(follower.model) and all(layer.integer for layer in layers):
            share = 0.0  # the model computes as these kernels do
        executed = Executed(
            f"ai-edge-litert {version('ai-edge-litert')} ({how})",
            outputs,
            {},
            layers,
            self.facts["conversions"],
            change,
            share,
            remark="" if self.rounding in (None, LITERT_RUNTIMES[runtime].quantizes_as) else OF_ANOTHER,
            steps=2 if wide else 1,
        )
        return executed, in_shapes_of_calls(zip(names, codes, strict=True), follower)

    # ---- the file

    def _facts(self) -> FileFacts:
        from ai_edge_litert import schema_py_generated as schema

        model = schema.Model.GetRootAs(self.content, 0)
        for i in range(model.MetadataLength()):
            entry = model.Metadata(i)
            if entry.Name().decode() == METADATA:
                facts: FileFacts = json.loads(bytes(model.Buffers(entry.Buffer()).DataAsNumpy()))
                return facts
        raise UnreadableFileError(
            f"{str(self.path)!r} was not written by qtoolkit.export_litert: it has no record of the model's quantizers. Export "
            "the model with qtoolkit.export_litert."
        )

    def _batches(self) -> list[list[Tensor]]:
        """Split the inputs into batches of the file's size."""
        details = self.plain.get_input_details()
        shapes = [
            tuple(detail["shape"][np.argsort(order)].tolist())
            for detail, order in zip(details, self.facts["inputs"], strict=True)
        ]
        counts = {
            len(x) // shape[0] if x.dim() and shape and len(x) % shape[0] == 0 and x.shape[1:] == shape[1:] else 0
            for x, shape in zip(self.tensors, shapes, strict=False)
        }
        if len(shapes) != len(self.tensors) or len(counts) != 1 or 0 in counts:
            given = ", ".join(str(tuple(x.shape)) for x in self.tensors)
            raise ValueError(
                f"verify: the file takes inputs of {', '.join(map(str, shapes))}, got {given}; pass inputs like the example "
                "inputs of the export, or several batches of them."
            )
        (count,) = counts
        parts = [x.chunk(count) for x in self.tensors]
        return [list(batch) for batch in zip(*parts, strict=True)]

    def _with_outputs(self) -> bytes:
        """Return the file with all quantized values as additional outputs."""
        import flatbuffers
        from ai_edge_litert import schema_py_generated as schema

        model = schema.ModelT.InitFromPackedBuf(self.content, 0)
        (graph,) = model.subgraphs
        known = {*graph.outputs, *graph.inputs}
        more = dict.fromkeys(tensor for _, tensor, _ in self.facts["quantizers"] if tensor not in known)
        graph.outputs = np.array([*graph.outputs, *more], np.int32)
        model.signatureDefs = None
        builder = flatbuffers.Builder(len(self.content) + 1024)
        builder.Finish(model.Pack(builder), IDENTIFIER)
        return bytes(builder.Output())

    # ---- the execution

    def _run(self, interpreter: "Interpreter", read: bool = True) -> tuple[list[Array], list[Array]]:
        """Return the outputs as floats in the model's order of dimensions, and the quantized values at each quantizer."""
        interpreter.allocate_tensors()
        count = len(self.facts["outputs"])
        results = []
        for batch in self.batches:
            for detail, order, x in zip(interpreter.get_input_details(), self.facts["inputs"], batch, strict=True):
                interpreter.set_tensor(detail["index"], _as_input(x, detail, order, self.rounding))
            interpreter.invoke()
            outputs = [
                _as_floats(interpreter.get_tensor(detail["index"]), detail).transpose(np.argsort(order))
                for detail, order in zip(interpreter.get_output_details()[:count], self.facts["outputs"], strict=True)
            ]
            quantizers = self.facts["quantizers"] if read else ()
            codes = [interpreter.get_tensor(tensor).transpose(np.argsort(order)) for _, tensor, order in quantizers]
            results.append((outputs, codes))
        joined = [[np.concatenate(parts) for parts in zip(*each, strict=True)] for each in zip(*results, strict=True)]
        return joined[0], joined[1]


def _computes_exactly(model: nn.Module) -> bool:
    """Return whether a model computes all its ops in the arithmetic of the reference kernels."""
    if (plan := plan_in(model)) is None:
        return False
    return rounding_of(model) is LITERT.quantizes_as and all(how.kernel for how in plan.computed.values())


def _content(path: Path) -> bytes:
    content = path.read_bytes()
    if content[PLACE : PLACE + len(IDENTIFIER)] != IDENTIFIER:
        raise UnreadableFileError(
            f"{str(path)!r} is not a LiteRT file; pass the path of qtoolkit.export_litert's file."
        )
    return content


def _interpreter(content: bytes, references: bool, path: Path) -> "Interpreter":
    from ai_edge_litert.interpreter import Interpreter, OpResolverType

    kind = OpResolverType.BUILTIN_REF if references else OpResolverType.BUILTIN
    try:
        return Interpreter(
            model_content=content,
            experimental_op_resolver_type=kind,
            experimental_preserve_all_tensors=references,
            num_threads=torch.get_num_threads(),
        )
    except (ValueError, RuntimeError) as error:
        raise UnreadableFileError(f"LiteRT cannot open {str(path)!r}: {first_line(error)}.") from error


def _as_input(x: Tensor, detail: Detail, order: Sequence[int], rounding: QuantizesAs | None) -> Array:
    """Return an input in the type of the file: floats, or integers quantized to the tensor's grid like in the model."""
    values = x.detach().cpu().float().permute(tuple(order)).contiguous()
    if detail["dtype"] is np.float32:
        return values.numpy()
    limits = np.iinfo(detail["dtype"])
    dtype, bounds = getattr(torch, limits.dtype.name), (limits.min, limits.max)
    values = values if rounding is None else rounding(values, *_grid_of(detail), *bounds)
    return ops.quantize(values, *_grid_of(detail), *bounds, dtype=dtype).numpy()


def _as_floats(array: Array, detail: Detail) -> Array:
    if array.dtype == np.float32:
        return array
    return ops.dequantize(torch.from_numpy(array), *_grid_of(detail)).numpy()


def _grid_of(detail: Detail) -> tuple[Tensor, Tensor]:
    """Return the scale and the zero point of a tensor, float32."""
    (scale,), (zero_point,) = (detail["quantization_parameters"][name] for name in ("scales", "zero_points"))
    return torch.tensor(scale), torch.tensor(float(zero_point))
