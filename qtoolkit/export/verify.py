"""Compare an exported file's integer codes, as onnxruntime computes them, with the model's own."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from qtoolkit.frozen import Grid
from qtoolkit.graph.kind_table import MOVES
from qtoolkit.graph.kinds import kind_of, parameters_in
from qtoolkit.graph.sizes import with_own_lists
from qtoolkit.nn import QuantModule
from qtoolkit.quantizer import WEIGHT_HOLDER
from qtoolkit.values import tensors_of

if TYPE_CHECKING:
    from qtoolkit.export.hooked import Hooked

# A convolution's sum may round differently in two runtimes, and so fall on the other side of a tie: one step, rarely.
TIE_SHARE = 1e-4
TIES_IN_SMALL_TENSORS = 4


@dataclass(frozen=True)
class CodeCount:
    """How many codes were compared, how many differ, and by how many steps at the most."""

    compared: int = 0
    differing: int = 0
    steps: int = 0

    def __add__(self, other: "CodeCount") -> "CodeCount":
        return CodeCount(self.compared + other.compared, self.differing + other.differing, max(self.steps, other.steps))

    @property
    def share(self) -> float:
        """Share of the codes that differ."""
        return self.differing / max(self.compared, 1)

    @classmethod
    def of(cls, ours: Any, theirs: Any) -> "CodeCount":
        """Count the differences between two arrays of codes."""
        gap = np.abs(np.asarray(ours, np.int64) - np.asarray(theirs, np.int64))
        return cls(gap.size, int((gap > 0).sum()), int(gap.max(initial=0)))

    def are_ties(self) -> bool:
        """Return whether rounding ties explain the differences: few, and of one step."""
        return self.steps <= 1 and self.differing <= max(TIES_IN_SMALL_TENSORS, TIE_SHARE * self.compared)

    def __str__(self) -> str:
        return f"{self.differing} of {self.compared} differ ({self.share:.2e}, by {self.steps} steps at the most)"


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
    step = _stepwise(converted, codes, pairs)
    with torch.no_grad():
        step.follow(*inputs)
        outputs = converted(*inputs)
        in_layers = _weights(converted)
        weights = {
            name: _compare_weight(converted, name, weight, codes)
            for name, weight in in_layers.items()
            if name in codes or name not in step.unreached
        }
        quantizer_codes = _sum(
            CodeCount.of(grid_of(converted, p.quantizer).codes(torch.tensor(found[p.source])), found[p.codes])
            for p in pairs
            if not p.is_constant and p.quantizer not in in_layers and not p.quantizer.startswith(WEIGHT_HOLDER)
        )
    return Verification(
        _sum(count for count in weights.values() if count is not None) + step.constants,
        quantizer_codes,
        _sum(step.counts.values()),
        step.counts,
        _largest_difference(outputs, [found[o.name] for o in proto.graph.output]),
        (*step.missing, *(name for name, count in weights.items() if count is None)),
        step.unreached,
    )


def _sum(counts: Iterable[CodeCount]) -> CodeCount:
    return sum(counts, CodeCount())


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


class _Stepwise(fx.Interpreter):
    """Runs a converted model, and puts onnxruntime's codes in place of its own after every quantizer.

    Args:
        converted: The model.
        codes: Of each quantizer, onnxruntime's codes at its nodes, in the order in which the graph comes to them.
    """

    def __init__(self, converted: fx.GraphModule, codes: Mapping[str, Sequence[Any]]) -> None:
        super().__init__(converted)
        self.converted, self.codes = converted, codes
        targets = Counter(str(node.target) for node in converted.graph.nodes if node.op == "call_module")
        self.paired = {name: iter(of) for name, of in codes.items() if len(of) == targets[name]}
        self.missing: dict[str, None] = {}
        self.unreached: tuple[str, ...] = ()
        self.counts: dict[str, CodeCount] = {}
        self.apart = {*targets, *_weights(converted)}
        self.inside: dict[str, Any] = {}
        self.constants = CodeCount()
        self.parameters = parameters_in(converted.graph)

    def follow(self, *inputs: Any) -> None:
        """Run the model; before that, where submodules are kept whole, count the calls of the quantizers inside them."""
        names = {module: name for name, module in self.converted.named_modules()}
        grids = [module for module, name in names.items() if isinstance(module, Grid) and name not in self.apart]
        calls: Counter[str] = Counter()
        hooks = [grid.register_forward_hook(lambda grid, *_: calls.update([names[grid]])) for grid in grids]
        try:
            if grids:
                self.converted(*inputs)
        finally:
            for hook in hooks:
                hook.remove()
        self.inside = {name: iter(of) for name, of in self.codes.items() if len(of) == calls[name]}
        self.run(*inputs)

    def run_node(self, n: fx.Node) -> Any:
        """Run a node; of a quantizer, compare the codes and go on with onnxruntime's, or, of a constant, with its own."""
        grid = self.fetch_attr(str(n.target)) if n.op == "call_module" else None
        if not isinstance(grid, Grid):
            return super().run_node(n)
        (x,), _ = self.fetch_args_kwargs_from_env(n)
        constant, name = n.all_input_nodes[0] in self.parameters, str(n.target)
        ours = as_stored(grid, x) if constant else grid.codes(x).cpu()
        theirs = next(self.paired[name]) if name in self.paired else self._twin(grid, ours)
        if theirs is None:
            self.missing[name] = None
            return grid(x)
        count = CodeCount.of(ours, theirs)
        if constant and _is_stored(n.all_input_nodes[0]):
            self.constants += count
            return grid(x)
        self.counts[name] = self.counts.get(name, CodeCount()) + count
        if constant:  # the file may have its codes in another shape
            return grid(x)
        return values_of(grid, theirs, x)

    def _twin(self, grid: Grid, ours: Tensor) -> Any:
        return twin_of(self.converted, self.codes, grid, ours)

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a node's arguments as the model's own code has them: a function may write into its lists."""
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        return with_own_lists(args), with_own_lists(kwargs)

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a submodule with onnxruntime's codes put after the quantizers inside it."""
        module = self.fetch_attr(target)
        inside = module.named_modules(prefix=target) if isinstance(module, nn.Module) else ()
        grids = [(name, grid) for name, grid in inside if isinstance(grid, Grid) and name not in self.apart]
        hooks = [grid.register_forward_hook(partial(self._put_theirs, name)) for name, grid in grids]
        try:
            return super().call_module(target, args, kwargs)
        finally:
            for hook in hooks:
                hook.remove()

    def _put_theirs(self, name: str, grid: Any, args: tuple[Tensor], output: Tensor) -> Tensor:
        ours = grid.codes(args[0]).cpu()
        theirs = next(self.inside[name]) if name in self.inside else self._twin(grid, ours)
        if theirs is None:
            self.missing[name] = None
            return output
        self.counts[name] = self.counts.get(name, CodeCount()) + CodeCount.of(ours, theirs)
        return values_of(grid, theirs, args[0])


def twin_of(model: nn.Module, codes: Mapping[str, Sequence[Any]], grid: Grid, ours: Tensor) -> Any:
    """Return the codes of a node that stands for a call of a quantizer without one of its own, or None.

    The exporter computes equal expressions once, so a quantizer may have fewer nodes than calls: then some node of an equal
    grid has the very same codes, but for rounding ties of what was computed before it.
    """
    equal = (found for name, of in codes.items() if _same_grid(grid_of(model, name), grid) for found in of)
    counts = [(CodeCount.of(ours, found), found) for found in equal if found.shape == tuple(ours.shape)]
    count, nearest = min(counts, key=lambda found: found[0].differing, default=(CodeCount(), None))
    return nearest if count.are_ties() else None


def values_of(grid: Grid, codes: Any, like: Tensor) -> Tensor:
    """Return the values of onnxruntime's codes, in the dtype of a tensor."""
    return grid.values(torch.tensor(codes)).to(like.dtype)


def _same_grid(one: Grid, other: Grid) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    same = (one.spec, one.group) == (other.spec, other.group) and ours.keys() == theirs.keys()
    return same and all(torch.equal(value, theirs[name]) for name, value in ours.items())


def _stepwise(converted: nn.Module, codes: Mapping[str, Sequence[Any]], pairs: Sequence[_Pair]) -> "_Stepwise | Hooked":
    if isinstance(converted, fx.GraphModule):
        return _Stepwise(converted, codes)
    from qtoolkit.export.hooked import Hooked

    return Hooked(converted, codes, {name: [p.is_constant for p in pairs if p.quantizer == name] for name in codes})


def _is_stored(constant: fx.Node) -> bool:
    """Return whether a constant is a parameter, or values of one: in a computed one runtimes may differ by rounding ties."""
    while constant.op != "get_attr" and kind_of(constant) in MOVES:
        constant = constant.all_input_nodes[0]
    return constant.op == "get_attr"


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Return each quantized weight by the dotted name of its quantizer."""
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, QuantModule)]
    return {f"{n}.{q}": weight for n, layer in layers for q, (_, weight) in layer.quantized_weights().items()}


def grid_of(model: nn.Module, name: str) -> Grid:
    """Return a converted model's quantizer.

    Raises:
        TypeError: The model was not converted.
    """
    grid = model.get_submodule(name)
    if not isinstance(grid, Grid):
        raise TypeError(f"verify_onnx: {name!r} is a {type(grid).__name__}; pass what qtoolkit.convert returned.")
    return grid


def _compare_weight(
    model: nn.Module, name: str, weight: Tensor, codes: Mapping[str, Sequence[Any]]
) -> CodeCount | None:
    """Compare a weight's codes with those of its nodes, or, as the exporter stores equal weights once, of an equal one's."""
    grid = grid_of(model, name)
    ours = as_stored(grid, weight)
    if name in codes:
        return _sum(CodeCount.of(ours, theirs) for theirs in codes[name])
    equal = (theirs for other, of in codes.items() if _same_grid(grid_of(model, other), grid) for theirs in of)
    return next((CodeCount.of(ours, theirs) for theirs in equal if np.array_equal(ours, theirs)), None)


def as_stored(grid: Grid, weight: Tensor) -> Tensor:
    """Return a constant's codes in the shape in which the file has them."""
    codes = grid.codes(weight).cpu()
    if grid.group == 1:
        return codes
    # (groups * out, in * k...)
    return codes.reshape(grid.group, -1, *codes.shape[1:]).transpose(1, 2).flatten(0, 1).flatten(1)


def _largest_difference(ours: Any, theirs: Sequence[Any]) -> float:
    gaps = [np.abs(t.numpy() - a).max(initial=0) for t, a in zip(tensors_of(ours), theirs, strict=True)]
    return float(max(gaps, default=0.0))
