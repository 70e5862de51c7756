"""Compare an exported file's integer codes, as onnxruntime computes them, with the model's own."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from qtoolkit.export.codes import CodeCount, compare_weight, grid_of, sum_of, weights_of
from qtoolkit.export.hooked import Hooked
from qtoolkit.export.stepwise import Stepwise
from qtoolkit.model_inputs import tensors_of
from qtoolkit.quantizers.tensor_quantizer import WEIGHT_HOLDER


@dataclass(frozen=True)
class Verification:
    """How onnxruntime's results compare with the model's.

    Attributes:
        weight_codes: Codes of all weights, and of other constants that are stored.
        quantizer_codes: Codes of each activation quantizer, given the very input that onnxruntime's node had.
        layer_codes: Codes of each activation quantizer, where the ops before it were computed by torch from the codes that
            onnxruntime had at their inputs: differences are rounding ties of a layer's sums.
        by_quantizer: `layer_codes` of each quantizer.
        output_difference: Largest absolute difference of the outputs end to end, where ties have spread.
        missing: Quantizers that the file has no node for.
        unreached: Quantizers of a model without a graph that the inputs do not come to, as they take another way: the file
            computes the way of its example inputs alone.
    """

    weight_codes: CodeCount
    quantizer_codes: CodeCount
    layer_codes: CodeCount
    by_quantizer: dict[str, CodeCount]
    output_difference: float
    missing: tuple[str, ...] = field(default=())
    unreached: tuple[str, ...] = field(default=())

    def check(self) -> None:
        """Raise RuntimeError if codes differ where they must not, naming where."""
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
                f"export: layers compute other codes in onnxruntime than rounding ties explain: {self.layer_codes}; worst "
                f"at {worst!r}: {self.by_quantizer[worst]}."
            )

    def __str__(self) -> str:
        lines = [
            f"weight codes:     {self.weight_codes}",
            f"quantizer codes:  {self.quantizer_codes}",
            f"layer by layer:   {self.layer_codes}",
            f"outputs, end to end: largest difference {self.output_difference:.3g}",
        ]
        lines += [f"not on the way that these inputs take: {', '.join(self.unreached)}"] if self.unreached else []
        return "\n".join(lines)


def verify_onnx(converted: nn.Module, model: Any, inputs: Any) -> Verification:
    """Run a file in onnxruntime (graph optimizations off), and compare all its integer codes with the model's.

    Of a model without a graph, only the way that these inputs take is compared; the rest is `unreached`.

    Args:
        converted: What `qtoolkit.convert` returned.
        model: The exported ModelProto, or the path of its file.
        inputs: A tuple of inputs (tensors, alone or in lists and dicts), or one tensor.

    Returns:
        Counts of differing codes; `check()` raises where there must be none.
    """
    import onnx

    proto = model if isinstance(model, onnx.ModelProto) else onnx.load(str(model))
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    pairs = _find_pairs(proto)
    found = _run(proto, inputs, [name for p in pairs for name in (p.source, p.codes)])
    codes: dict[str, list[Any]] = defaultdict(list)
    for pair in pairs:
        codes[pair.quantizer].append(found[pair.codes])
    step = _follower(converted, codes, pairs)
    with torch.no_grad():
        step.follow(*inputs)
        outputs = converted(*inputs)
        in_layers = weights_of(converted)
        weights = {
            name: compare_weight(converted, name, weight, codes)
            for name, weight in in_layers.items()
            if name in codes or name not in step.unreached
        }
        quantizer_codes = sum_of(
            CodeCount.of(grid_of(converted, p.quantizer).codes(torch.tensor(found[p.source])), found[p.codes])
            for p in pairs
            if not p.is_constant and p.quantizer not in in_layers and not p.quantizer.startswith(WEIGHT_HOLDER)
        )
    return Verification(
        sum_of(count for count in weights.values() if count is not None) + step.constants,
        quantizer_codes,
        sum_of(step.counts.values()),
        step.counts,
        _largest_difference(outputs, [found[o.name] for o in proto.graph.output]),
        (*step.missing, *(name for name, count in weights.items() if count is None)),
        step.unreached,
    )


@dataclass(frozen=True)
class _Pair:
    """A quantizer's node in the file: the values that go in and the codes, or, of a constant, the codes alone."""

    quantizer: str
    source: str
    codes: str
    is_constant: bool


def _find_pairs(proto: Any) -> list[_Pair]:
    made_by = {output: node for node in proto.graph.node for output in node.output}
    pairs = []
    for node in proto.graph.node:
        if node.op_type != "DequantizeLinear" or not node.name.split(".dequantize")[0]:
            continue
        quantizer, _, _ = node.name.rpartition(".dequantize")
        origin = made_by.get(node.input[0])
        while origin is not None and origin.op_type in ("Clip", "Cast"):
            origin = made_by.get(origin.input[0])
        quantize = origin if origin is not None and origin.op_type == "QuantizeLinear" else None
        source = node.input[0] if quantize is None else quantize.input[0]
        pairs.append(_Pair(quantizer, source, node.input[0], quantize is None))
    return pairs


def _run(proto: Any, inputs: Sequence[Any], names: Sequence[str]) -> dict[str, Any]:
    """Run the model and return its outputs, and the tensors of these names."""
    import onnx
    import onnxruntime
    from onnx import numpy_helper

    constants = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer if t.name in names}
    opened = onnx.ModelProto()
    opened.CopyFrom(proto)
    shown = {o.name for o in opened.graph.output} | {i.name for i in opened.graph.input}
    wanted = [name for name in dict.fromkeys(names) if name not in shown and name not in constants]
    opened.graph.output.extend(onnx.ValueInfoProto(name=name) for name in wanted)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(opened.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = {i.name: x.detach().cpu().numpy() for i, x in zip(session.get_inputs(), tensors_of(inputs), strict=True)}
    outputs = [o.name for o in session.get_outputs()]
    return {**constants, **feeds, **dict(zip(outputs, session.run(outputs, feeds), strict=True))}


def _follower(converted: nn.Module, codes: Mapping[str, Sequence[Any]], pairs: Sequence[_Pair]) -> Stepwise | Hooked:
    if isinstance(converted, fx.GraphModule):
        return Stepwise(converted, codes)
    return Hooked(converted, codes, {name: [p.is_constant for p in pairs if p.quantizer == name] for name in codes})


def _largest_difference(ours: Any, theirs: Sequence[Any]) -> float:
    gaps = [np.abs(t.numpy() - a).max(initial=0) for t, a in zip(tensors_of(ours), theirs, strict=True)]
    return float(max(gaps, default=0.0))
