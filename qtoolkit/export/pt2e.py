"""A captured graph in the PT2E form: each fake-quantization becomes ops of `quantized_decomposed`.

- A weight becomes integers and one dequantize op.
- An activation becomes one quantize op, and a dequantize op for each user.
- A constant on the accumulator's grid (a bias) stays float: its values are multiples of the steps.
- Data movement ops are between pairs: the pair of their input is repeated after them, which changes no value.
- A mean over an image keeps the dimensions, because delegates compute this form in integers; a flatten after it drops them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import chain, count
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import Argument

from qtoolkit.op_kinds.table import OF_ATEN
from qtoolkit.quantizers.frozen import code_dtype

FAKE_QUANT = torch.ops.qtoolkit.fake_quant.default
MEAN = torch.ops.aten.mean.dim
QUANTIZE = torch.ops.qtoolkit.quantize.default
LARGEST_CODE = 2**16  # above: a bias, on the grid of sums
PLACES = ("nn_module_stack", "stack_trace")  # what is kept of a node's metadata
# Private in torch: its ops are what the delegates of ExecuTorch and torchao's PT2E flow match. No other file names it.
MODULE = "torch.ao.quantization.fx._decomposed"
NAMES = ("quantize_per_tensor", "dequantize_per_tensor", "quantize_per_channel", "dequantize_per_channel")


@dataclass(frozen=True)
class Quantizers:
    """The quantizers of a decomposed graph."""

    # the dotted name of each quantize op's quantizer, in the order of the graph; "" for a repeated pair
    activations: list[str]
    stored: dict[str, Tensor]  # the codes that the graph stores, by the dotted name of their quantizer


@dataclass(frozen=True)
class PairArguments:
    """The arguments of a quantize op and its dequantize ops."""

    quantizer: str  # the dotted name of the quantizer; "" where the pair is repeated behind an op that moves values
    # scale, zero point, the channel axis for per-channel scales, lowest and highest integer, dtype
    args: tuple[Argument, ...]
    per_channel: bool = False  # whether scales and zero points are tensors, the names of constants


class Decomposition:
    """Replaces each fake-quantization of a graph that `torch.export` captured from a converted model.

    `weights` maps the name of each weight quantizer to the name of its weight. Raises ValueError: the form cannot express a
    quantizer.
    """

    def __init__(self, gm: fx.GraphModule, weights: Mapping[str, str]) -> None:
        self.gm, self.graph, self.ops = gm, gm.graph, decomposed_ops()
        self.weights = weights
        self.constants: dict[fx.Node, Tensor | None] = {}
        self.pairs: dict[fx.Node, PairArguments] = {}  # of codes, and of values on a grid
        self.stored: dict[str, Tensor] = {}

    def run(self) -> Quantizers:
        """Rewrite the graph in place; return its quantizers."""
        for node in list(self.graph.nodes):
            if node.target is MEAN and _is_over_image(node):
                self._keep_dimensions(node)
        for node in list(self.graph.nodes):
            if node.target is FAKE_QUANT:
                self._replace(node)
            elif node.op == "call_function":
                self._repeat_behind(node)
        self.graph.eliminate_dead_code()
        self._check_left()
        self._drop_unused()
        self.graph.lint()
        self.gm.recompile()
        quantize = (self.ops.quantize_per_tensor, self.ops.quantize_per_channel)
        names = [self.pairs[node].quantizer for node in self.graph.nodes if node.target in quantize]
        return Quantizers(names, self.stored)

    def _replace(self, node: fx.Node) -> None:
        x, scale, zero_point, qmin, qmax, axis, *_ = given = [*arguments(node).values()]
        scales = self._constant(scale)
        name = str(scale.target).removesuffix(".scale") if scale.op == "get_attr" else node.name
        if scales is None or x.meta["val"].dtype != torch.float32:
            raise ValueError(
                f"export_program: {name!r} quantizes {x.meta['val'].dtype} with {'dynamic' if scales is None else 'fixed'} "
                "scales, but quantized_decomposed supports only fixed scales and float32 tensors; export model.float(), "
                "without dynamic activations."
            )
        zero_points = None if zero_point is None else self._constant(zero_point)
        constant = self._constant(x)
        for values in [user for user in node.users if user.args[1] == 0]:
            with self.graph.inserting_before(values), torch.no_grad():
                if constant is not None and qmax > LARGEST_CODE:
                    stored = FAKE_QUANT(constant, scales, zero_points, *given[3:])[0]
                    values.replace_all_uses_with(self._add(_place(x), stored))
                    continue
                pair = self._pair(name, scales, zero_points, axis, (qmin, qmax))
                if constant is None:
                    codes = self._quantize(x, pair)
                else:
                    self.stored[name] = QUANTIZE(constant, scales, zero_points, *given[3:8], dtype=pair.args[-1])
                    codes = self._add(self.weights.get(name, _place(x)), self.stored[name])
            self._dequantize(values, codes, pair)

    def _pair(
        self, name: str, scale: Tensor, zero_point: Tensor | None, axis: int | None, codes: tuple[int, int]
    ) -> PairArguments:
        dtype = code_dtype(*codes)
        if axis is None or scale.numel() == 1:
            return PairArguments(name, (float(scale), 0 if zero_point is None else int(zero_point), *codes, dtype))
        zeros = torch.zeros(scale.shape) if zero_point is None else zero_point
        tensors = {"scale": scale.reshape(-1), "zero_point": zeros.reshape(-1).long()}
        places = (str(self._add(f"{name}.{part}", tensor).target) for part, tensor in tensors.items())
        return PairArguments(name, (*places, axis, *codes, dtype), per_channel=True)

    def _quantize(self, x: fx.Node, pair: PairArguments) -> fx.Node:
        codes = self._call("quantize", x, pair)
        codes.meta = {name: value for name, value in x.meta.items() if name in PLACES}
        return codes

    def _dequantize(self, values: fx.Node, codes: fx.Node, pair: PairArguments) -> None:
        """Give each user of a tensor its own dequantize op, as PT2E does."""
        for user in list(values.users):
            if user is codes:
                continue
            with self.graph.inserting_before(user):
                own = self._call("dequantize", codes, pair)
            own.meta = {name: value for name, value in values.meta.items() if name in (*PLACES, "val")}
            user.replace_input_with(values, own)

    def _call(self, op: str, x: fx.Node, pair: PairArguments) -> fx.Node:
        op = f"{op}_per_{'channel' if pair.per_channel else 'tensor'}"
        args = pair.args
        if pair.per_channel:
            args = (*(self.graph.get_attr(str(place)) for place in args[:2]), *args[2:])
        node = self.graph.call_function(getattr(self.ops, op), (x, *args))
        self.pairs[node] = pair
        return node

    def _keep_dimensions(self, mean: fx.Node) -> None:
        """Drop the dimensions after the mean, or after the quantizer that is its only user."""
        mean.args = (*mean.args[:2], True)
        (taker, *others) = mean.users
        quantized = taker.target is FAKE_QUANT and not others
        mean.meta["val"] = (flattened := mean.meta["val"])[..., None, None]
        for end in [user for user in taker.users if user.args[1] == 0] if quantized else [mean]:
            users = list(end.users)
            with self.graph.inserting_after(end):
                flat = self.graph.call_function(torch.ops.aten.flatten.using_ints, (end, 1))
            flat.meta, end.meta["val"] = {**end.meta, "val": flattened}, mean.meta["val"]
            for user in users:
                user.replace_input_with(end, flat)

    # ---- ops that move values

    def _repeat_behind(self, node: fx.Node) -> None:
        moved = self._moved(node)
        if moved is None:
            return
        pair = replace(moved, quantizer="")
        if not isinstance(node.meta.get("val"), Tensor):
            self.pairs[node] = pair  # several tensors, which getitem takes apart
        elif node.meta["val"].dtype == torch.float32:
            with self.graph.inserting_after(node):
                codes = self._quantize(node, pair)
            self._dequantize(node, codes, pair)

    def _moved(self, node: fx.Node) -> PairArguments | None:
        """Return the pair of the inputs of a data movement op; None for another op, or if the inputs differ."""
        kinds = OF_ATEN.get(name_of_op(node), ())
        if not any(kind.moves or kind.concatenates for kind in kinds):
            return None
        if any(kind.pads_with_zero for kind in kinds) and any(node.args[2:]):  # with other values than 0
            return None
        tensors = (source for source in node.all_input_nodes if not isinstance(source.meta.get("val"), torch.SymInt))
        pairs = [self.pairs.get(source) for source in tensors]
        first = pairs[0] if pairs else None
        alike = first is not None and all(pair is not None and pair.args == first.args for pair in pairs)
        return first if alike and first is not None and not first.per_channel else None

    # ---- constants

    def _constant(self, node: fx.Node) -> Tensor | None:
        """Return the tensor of a node that does not depend on the inputs; None for other nodes."""
        if node not in self.constants:
            stored = attrgetter(str(node.target))(self.gm) if node.op == "get_attr" else None
            known = {source: self._constant(source) for source in node.all_input_nodes}
            is_computed = bool(known) and all(value is not None for value in known.values())
            self.constants[node] = computed(node, known) if is_computed and node.op == "call_function" else stored
        return self.constants[node]

    def _add(self, place: str, value: Tensor) -> fx.Node:
        """Return a node that reads a constant, which is added under a new name if necessary."""
        name = place.replace(".", "_")
        names = chain([name], (f"{name}_{number}" for number in count(1)))
        free = next(each for each in names if not hasattr(self.gm, each) or _equal(getattr(self.gm, each), value))
        self.gm.register_buffer(free, value.detach().clone())
        return self.graph.get_attr(free)

    def _check_left(self) -> None:
        left = [node for node in self.graph.nodes if str(node.target).startswith("qtoolkit.")]
        if left:
            raise ValueError(
                f"export_program: quantized_decomposed has no form for {left[0].target} at {left[0].name!r}; use an integer "
                "quantizer there, or keep the layer in float."
            )

    def _drop_unused(self) -> None:
        used = {str(node.target) for node in self.graph.nodes if node.op == "get_attr"}
        for name in [name for name, _ in (*self.gm.named_parameters(), *self.gm.named_buffers()) if name not in used]:
            owner, _, attribute = name.rpartition(".")
            delattr(self.gm.get_submodule(owner), attribute)


def computed(node: fx.Node, known: Mapping[fx.Node, Tensor | None]) -> Tensor:
    """Return the result of a call on known tensors."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
    with torch.no_grad():
        return node.target(*args, **kwargs)  # type: ignore[operator, no-any-return]


def arguments(node: fx.Node) -> dict[str, Any]:
    """Return all arguments of a call, including defaults, by the names of its schema."""
    schema = enumerate(node.target._schema.arguments)  # type: ignore[union-attr]
    return {a.name: node.args[i] if i < len(node.args) else node.kwargs.get(a.name, a.default_value) for i, a in schema}


def name_of_op(node: fx.Node) -> str:
    """Return the name of a node's aten op, without its overload, or of its Python function."""
    return str(getattr(getattr(node.target, "overloadpacket", node.target), "__name__", node.target))


def layer_name(node: fx.Node) -> str:
    """Return the name of the layer of a node, or of the node outside layers."""
    path: str = list(node.meta.get("nn_module_stack", {"": ("", "")}).values())[-1][0]
    return path or node.name


def _is_over_image(mean: fx.Node) -> bool:
    """Return whether a mean is over the last two dimensions of four, and drops them."""
    given = arguments(mean)
    over = isinstance(given["dim"], list | tuple) and given["self"].meta["val"].dim() == 4
    return over and sorted(dim % 4 for dim in given["dim"]) == [2, 3] and not given["keepdim"] and not mean.kwargs


def _equal(one: object, other: Tensor) -> bool:
    return isinstance(one, Tensor) and one.dtype == other.dtype and torch.equal(one, other)


def _place(node: fx.Node) -> str:
    """Return the name of a constant; for a computed constant, the name of the node."""
    return str(node.target) if node.op == "get_attr" else node.name


def decomposed_ops() -> SimpleNamespace:
    """Return the ops by name. Raises RuntimeError: this torch version lacks them."""
    try:
        import_module(MODULE)  # registers the ops
        found = {name: getattr(torch.ops.quantized_decomposed, name).default for name in NAMES}
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"export_program: torch {torch.__version__} does not have the ops of quantized_decomposed ({error}); import the "
            "package that defines them (torchao), or use torch 2.11 to 2.14."
        ) from error
    return SimpleNamespace(**found)
