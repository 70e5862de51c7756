"""Verification: an exported file's integer codes, as onnxruntime computes them, compared with the model's own."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from qtoolkit.export.codes import CodeComparison, CodeCount, NodeCodes, compare_codes, sum_of
from qtoolkit.export.files import OpenedFile
from qtoolkit.model_inputs import call_arguments, tensors_of

if TYPE_CHECKING:
    import os

    import onnx


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
        unreached: Quantizers that are not executed for these inputs, because forward branches on values. The file contains
            only the branches that its example inputs take.
    """

    weight_codes: CodeCount
    quantizer_codes: CodeCount
    layer_codes: CodeCount
    by_quantizer: dict[str, CodeCount]
    output_difference: float
    missing: tuple[str, ...] = field(default=())
    unreached: tuple[str, ...] = field(default=())

    def check(self) -> None:
        """Check that codes differ only where rounding ties explain it.

        Raises:
            RuntimeError: Other codes differ, or a quantizer has no node; the message names it.
        """
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
                f"at {worst!r}: {self.by_quantizer[worst]}."
            )

    def __str__(self) -> str:
        lines = [
            f"weight codes:     {self.weight_codes}",
            f"quantizer codes:  {self.quantizer_codes}",
            f"layer by layer:   {self.layer_codes}",
            f"outputs, end to end: largest difference {self.output_difference:.3g}",
        ]
        lines += [f"not executed for these inputs: {', '.join(self.unreached)}"] if self.unreached else []
        return "\n".join(lines)


def verify_onnx(converted: nn.Module, model: "onnx.ModelProto | str | os.PathLike[str]", inputs: Any) -> Verification:
    """Run a file in onnxruntime without graph optimizations, and compare all its integer codes with the model's.

    Where forward branches on values, only the branches that these inputs take are compared; the rest is `unreached`.

    Args:
        converted: What `qtoolkit.convert` returned.
        model: The exported ModelProto, or the path of its file.
        inputs: A tuple of inputs (tensors, alone or in lists and dicts), a mapping of keyword inputs, or one tensor.

    Returns:
        Counts of differing codes; call `check()` to raise an error where rounding ties do not explain them.

    Raises:
        TypeError: The model was not converted, or the inputs do not match its forward.
        ValueError: The file has another number of inputs.
        RuntimeError: onnxruntime cannot run the file.
    """
    args, kwargs = call_arguments(converted, inputs, "verify_onnx: inputs do")
    file = OpenedFile.of(model)
    nodes = _quantizer_nodes(file.proto)
    positions = _positions_of_maxima(file.proto.graph)
    names = [name for node in nodes for name in (node.source, node.codes)]
    values = file.run(tensors_of((args, kwargs)), [*names, *positions])
    codes: dict[str, list[NodeCodes]] = defaultdict(list)
    for node in nodes:
        codes[node.quantizer].append(NodeCodes(values[node.codes], node.is_constant))
    with torch.no_grad():
        comparison = CodeComparison(converted, codes, [values[name] for name in positions])
        outputs = comparison.run(*args, **kwargs)
        computed = [(comparison.grids[node.quantizer], node) for node in nodes if not node.is_stored]
        quantizer_codes = sum_of(
            compare_codes(grid, torch.tensor(values[node.source]), values[node.codes])
            for grid, node in computed
            if not (grid.of_weight or node.quantizer in comparison.weights)
        )
    return Verification(
        comparison.stored,
        quantizer_codes,
        sum_of(comparison.counts.values()),
        comparison.counts,
        _largest_difference(outputs, [values[o.name] for o in file.proto.graph.output]),
        tuple(dict.fromkeys(comparison.missing)),
        comparison.unreached,
    )


@dataclass(frozen=True)
class _QuantizerNode:
    """A quantizer's node in the file, by the names of the tensors.

    Attributes:
        quantizer: Its dotted name in the model.
        source: The values that are quantized, or the codes where the file stores them.
        codes: The codes.
        is_constant: Whether the codes do not depend on the inputs of the model.
    """

    quantizer: str
    source: str
    codes: str
    is_constant: bool

    @property
    def is_stored(self) -> bool:
        """Whether the file stores the codes themselves, without a QuantizeLinear node."""
        return self.source == self.codes


def _quantizer_nodes(proto: Any) -> list[_QuantizerNode]:
    made_by = {output: node for node in proto.graph.node for output in node.output}
    varying = _varying(proto.graph)
    found = []
    for node in proto.graph.node:
        quantizer, _, _ = node.name.rpartition(".dequantize")
        if node.op_type != "DequantizeLinear" or not quantizer:
            continue
        codes = node.input[0]
        origin = made_by.get(codes)
        while origin is not None and origin.op_type in ("Clip", "Cast"):
            origin = made_by.get(origin.input[0])
        source = codes if origin is None or origin.op_type != "QuantizeLinear" else origin.input[0]
        found.append(_QuantizerNode(quantizer, source, codes, codes not in varying))
    return found


def _varying(graph: Any) -> set[str]:
    """Return the names of the tensors that depend on the inputs of a graph."""
    varying = {value.name for value in graph.input}
    for node in graph.node:
        has_body = any(attribute.HasField("g") for attribute in node.attribute)  # a body may read any outer tensor
        if has_body or varying.intersection(node.input):
            varying.update(node.output)
    return varying


def _positions_of_maxima(graph: Any) -> list[str]:
    """Return the names of the positions that max pools return, where a node takes them."""
    taken = {name for node in graph.node for name in node.input}
    pools = [node for node in graph.node if node.op_type == "MaxPool" and len(node.output) > 1]
    return [node.output[1] for node in pools if node.output[1] in taken]


def _largest_difference(ours: Any, theirs: Sequence[Any]) -> float:
    pairs = zip(tensors_of(ours), theirs, strict=True)
    gaps = [np.abs(t.detach().cpu().double().numpy() - np.float64(a)).max(initial=0) for t, a in pairs]
    return float(max(gaps, default=0.0))
