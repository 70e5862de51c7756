"""equalize(): cross-layer equalization of a float model (arXiv 1906.04721, section 4.1)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from qtoolkit.backends import Backend, backend_of
from qtoolkit.errors import check_flags, check_known, check_sequence
from qtoolkit.graph.capture import trace
from qtoolkit.graph.module_calls import ModuleCalls
from qtoolkit.graph.nodes import kind_of
from qtoolkit.model_inputs import bind
from qtoolkit.model_state import deepcopy_model, values_unchanged_on_error
from qtoolkit.nn.batch_norm import is_batch_norm
from qtoolkit.nn.computed_weights import is_parametrized
from qtoolkit.op_kinds.kind import OpKind
from qtoolkit.op_kinds.rules import argument, called_by, called_module, module_of
from qtoolkit.op_kinds.table import MEANS
from qtoolkit.progress import note, progress_bar
from qtoolkit.shared_modules import names_by_module, owners_of_parameters
from qtoolkit.tuning.channels import LAYERS, ChannelView
from qtoolkit.tuning.unchanged import check_float, largest_change, outputs_of
from qtoolkit.verdicts import Obstacle

M = TypeVar("M", bound=nn.Module)

ROUNDS, CLOSE = 40, 1e-3
# A channel of activations counts as at least this fraction of the widest: other data may need a wider range.
LEAST = 0.01


@dataclass(frozen=True)
class Pair:
    """Two layers with equalized channels.

    Attributes:
        first: The dotted name of the layer with divided output channels.
        second: The dotted name of the layer with multiplied input channels.
        batch_norm: The dotted name of the batch norm between them; its scale and shift are divided instead. "" for none.
        before: The ratio of the widest to the median channel before equalization: the largest ratio of both weights, or of the
            tensors between them.
        after: The same ratio after equalization.
    """

    first: str
    second: str
    batch_norm: str
    before: float
    after: float


@dataclass(frozen=True)
class Equalization(Generic[M]):
    """The result of `equalize`. It prints as a list.

    Attributes:
        model: The equalized model, of the same type.
        pairs: The pairs of layers.
        skipped: The reason for each layer with unchanged output channels, by name.
        change: The largest change of an output, relative to the largest output.
    """

    model: M
    pairs: tuple[Pair, ...]
    skipped: Mapping[str, str]
    change: float

    def __str__(self) -> str:
        lines = [f"{len(self.pairs)} pairs of layers equalized; outputs changed by {self.change:.1e}"]
        lines += [
            f"{p.first} -> {p.second}: widest channel {p.before:.3g} -> {p.after:.3g} of the median" for p in self.pairs
        ]
        return "\n".join(lines + [f"{name}: unchanged: {why}" for name, why in self.skipped.items()])


def equalize(
    model: M,
    example_inputs: object,
    skip: Sequence[str] = (),
    inplace: bool = False,
    activations: float | None = None,
    backend: str | Backend | None = None,
    progress: bool = True,
) -> Equalization[M]:
    """Scale the channels between consecutive layers so that they have similar ranges.

    An output channel of a layer is divided by a factor, and the input channel of the next layer is multiplied by it. The
    function of the model stays the same, also in training mode; this is checked. By default the ranges of the weights are
    equalized: this greatly reduces the error of per-tensor weights, and hardly changes the error of per-channel weights. With
    `activations`, the tensors between the layers are equalized, which have one scale for all channels. This increases the error
    of the weights, which training can compensate. Layers are convolutions, transposed convolutions and linear layers of all
    dimensions, with groups; between them may be a batch norm, ReLU, LeakyReLU, PReLU, pools, padding and dropout.

    Args:
        model: A float model, before `qtoolkit.prepare` or `qtoolkit.quant_modules.replace`.
        example_inputs: As for `qtoolkit.prepare`: the model is traced and checked with them. They determine the ranges of
            activations: pass a batch of real data.
        skip: Dotted names of layers to leave unchanged.
        inplace: Change the model itself instead of a copy.
        activations: None equalizes the weights. A number is the power of the channel's relative range by which the channel is
            divided: 1 makes all activation channels equally wide, 0.5 distributes the spread between activations and weights.
            If several tensors are between the layers, the tensor counts in which the channel is relatively widest.
        backend: The target that the model will be prepared for, by name or as a Backend. With `activations`, only the tensors
            that it quantizes count. Example: for a layer followed by a PReLU, "tensorrt" and "academic" quantize only the
            output of the pair, "onnxruntime" both outputs. None counts all tensors, which is valid for every target but optimal
            for none.
        progress: Show a progress bar.

    Returns:
        The model, the pairs, and the reasons for unchanged layers.

    Raises:
        TypeError: `model` is not a module, or has quantizers.
        ValueError: A name in `skip` or the backend is unknown, or `activations` is not above 0 and at most 1.
        UntraceableError: The model cannot be traced.
        RuntimeError: The outputs would change; the model is then unchanged.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> result = qt.tuning.equalize(model, torch.randn(16, 4))
        >>> [(pair.first, pair.second) for pair in result.pairs], result.change < 1e-5
        ([('0', '2')], True)
    """
    check_flags("equalize", inplace=inplace, progress=progress)
    check_float(model, "equalize", "equalize")
    check_sequence(skip, "equalize", "skip")
    if activations is not None and not 0 < activations <= 1:
        raise ValueError(f"equalize: activations must be None, or above 0 and at most 1, got {activations!r}.")
    target = None if backend is None else backend_of(backend)
    own = model if inplace else deepcopy_model(model, what="equalize")
    layers = {name: module for name, module in own.named_modules() if type(module) in LAYERS}
    for name in skip:
        check_known("layer in skip of equalize", name, layers)
    bind(own, example_inputs, "equalize: example_inputs do")
    before = outputs_of(own, example_inputs)
    gm = trace.run(own, example_inputs=example_inputs).gm
    links, skipped = _links(gm, own, skip, target)
    with values_unchanged_on_error([*own.parameters(), *own.buffers()]):
        if activations is None:
            widths = _equalize_weights(links, progress)
        else:
            widths = _equalize_activations(links, _ranges_between(gm, links, example_inputs), activations)
        change = largest_change(before, outputs_of(own, example_inputs), "equalize")
    pairs = tuple(Pair(*link.names, *width) for link, width in zip(links, widths, strict=True))
    return Equalization(own, pairs, skipped, change)


class _Link:
    """Two layers and the nodes between them, on a path from the first to the second; for any backend, or for one.

    `source` is the node of the first layer, or of the batch norm after it. `between` are the nodes between the layers with
    outputs that the target can quantize. Fused ops have one output; every target fuses a layer and the ReLU after it, so the
    values that ReLU removes have no scale.
    """

    def __init__(self, path: Sequence[fx.Node], backend: Backend | None) -> None:
        first, second = path[0], path[-1]
        batch_norm = path[1] if kind_of(path[1]).normalizes_batches else None
        self.names = str(first.target), str(second.target), "" if batch_norm is None else str(batch_norm.target)
        self.first, self.second = ChannelView(module_of(first)), ChannelView(module_of(second))
        self.batch_norm: Any = None if batch_norm is None else module_of(batch_norm)
        self.source, self.kind = batch_norm or first, kind_of(first)
        divided = path[path.index(self.source) :]
        self.between = [node for node, user in pairwise(divided) if not self._joins(node, kind_of(user), backend)]

    def _joins(self, node: fx.Node, activation: OpKind, backend: Backend | None) -> bool:
        """Return whether the target fuses an activation into the layer before it."""
        if backend is None or node is not self.source or not activation.activation:
            return activation.is_relu
        return activation.is_relu or backend.joins(self.kind, activation)

    def _ranges(self) -> tuple[Tensor, Tensor]:
        outputs, bn = self.first.outputs_amax(), self.batch_norm
        if bn is not None:
            outputs = outputs * (bn.weight.detach() * torch.rsqrt(bn.running_var + bn.eps)).abs()
        return outputs, self.second.inputs_amax()

    def width(self) -> float:
        """Return the larger ratio of the widest to the median channel of both layers."""
        return max(map(_width, self._ranges()))

    def equalize(self) -> float:
        """Equalize the two layers; return how far the largest factor was from 1."""
        first, second = self._ranges()
        factor = torch.sqrt(first / second)
        usable = (first > 0) & (second > 0) & torch.isfinite(factor) & (factor > 0)
        factor = torch.where(usable, factor, 1)
        self.divide(factor)
        return float((factor.log()).abs().max())

    def divide(self, factor: Tensor) -> None:
        """Divide the channels between the two layers by factors."""
        with torch.no_grad():
            if self.batch_norm is None:
                self.first.multiply_outputs(1 / factor)
                shift = self.first.layer.bias
            else:
                self.batch_norm.weight.div_(factor)
                shift = self.batch_norm.bias
            if shift is not None:
                shift.div_(factor)
            self.second.multiply_inputs(factor)


def _width(ranges: Tensor) -> float:
    """Return the ratio of the widest channel to the median channel."""
    used = ranges[ranges > 0]
    return float(used.max() / used.median()) if len(used) else 1.0


def _equalize_weights(links: Sequence[_Link], progress: bool) -> list[tuple[float, float]]:
    """Equalize all pairs of layers; return their widths before and after."""
    before = [link.width() for link in links]
    with progress_bar("equalize", "rounds", progress, range(ROUNDS)) as bar:
        for _ in bar:
            change = max((link.equalize() for link in links), default=0.0)
            note(bar, f"largest factor e^{change:.1g}")
            if change < CLOSE:
                break
    return [(width, link.width()) for width, link in zip(before, links, strict=True)]


def _equalize_activations(
    links: Sequence[_Link], ranges: Sequence[Sequence[Tensor]], power: float
) -> list[tuple[float, float]]:
    """Divide the channels of each pair of layers by powers of their ranges; return the widths before and after.

    A channel counts by the tensor in which it is widest: a target can quantize both the input of a PReLU and its output, in
    which channels with a small slope are narrow. Thus no channel becomes wider than the widest channel of its tensor.
    """
    widths = []
    for link, observed in zip(links, ranges, strict=True):
        shares = torch.stack([(each / each.max()).nan_to_num(1.0) for each in observed]).amax(0)
        used = torch.stack(list(observed)).amax(0) > 0
        factor = torch.where(used, shares.clamp(min=LEAST) ** power, torch.ones_like(shares))
        link.divide(factor)
        widths.append((max(map(_width, observed)), max(_width(each / factor) for each in observed)))
    return widths


def _ranges_between(gm: fx.GraphModule, links: Sequence[_Link], example_inputs: object) -> list[list[Tensor]]:
    """Return for each pair of layers the channel ranges, including zero, of every tensor between them."""
    graph, written = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.set_codegen(gm.graph._codegen)
    link_of = {node: link for link in links for node in link.between}
    ranges: dict[_Link, list[fx.Node]] = {link: [] for link in links}
    for node in gm.graph.nodes:
        if node.op == "output":
            break
        written[node] = graph.node_copy(node, written.__getitem__)
        if node in link_of:  # at once: a later op may change it in place
            link = link_of[node]
            known = written[node], written[link.source], link.first.dims
            ranges[link].append(graph.call_function(ranges_of_channels, known))
    graph.output(tuple(each for of_link in ranges.values() for each in of_link))
    found = iter(outputs_of(fx.GraphModule(gm, graph), example_inputs))
    return [[next(found) for _ in of_link] for of_link in ranges.values()]


def ranges_of_channels(x: Tensor, source: Tensor, dims: int) -> Tensor:
    """Return the range of each channel of a tensor, including zero.

    The channel axis is the axis in the output of `source`, with `dims` position dimensions after it.

    Example:
        >>> ranges_of_channels(torch.tensor([[1.0, -2.0], [3.0, 4.0]]), torch.zeros(2, 2, 5, 5), 2)
        tensor([3., 6.])
    """
    channels = x.detach().movedim(source.dim() - 1 - dims, 0).unsqueeze(-1).flatten(1)
    return channels.amax(1).clamp(min=0) - channels.amin(1).clamp(max=0)


def _links(
    gm: fx.GraphModule, model: nn.Module, skip: Sequence[str], backend: Backend | None
) -> tuple[list[_Link], dict[str, str]]:
    links, skipped = [], dict[str, str]()
    uses = _Uses(gm, model, skip)
    for node in gm.graph.nodes:
        if not _is_layer(node):
            if _is_parametrized_layer(node):
                skipped[str(node.target)] = f"the parameters of {node.target!r} are computed from others"
            continue
        why = uses.obstacle(node, "weight")
        path = Obstacle(why) if why else _path_from(node)
        if isinstance(path, list) and (why := uses.obstacle_on(path)):
            path = Obstacle(why)
        if isinstance(path, Obstacle):
            skipped[str(node.target)] = path.why
        else:
            links.append(_Link(path, backend))
    return links, skipped


class _Uses:
    """The users of a model's modules and parameters. Shared ones cannot be scaled for only one of their uses."""

    def __init__(self, gm: fx.GraphModule, model: nn.Module, skip: Sequence[str]) -> None:
        self.calls, self.skip = ModuleCalls(gm.graph), skip
        self.names, self.owners = names_by_module(model), owners_of_parameters(model)
        self.read = {id(attrgetter(str(node.target))(gm)) for node in gm.graph.find_nodes(op="get_attr")}

    def obstacle(self, node: fx.Node, *attributes: str) -> str:
        """Return why parameters of a layer, or of a batch norm, cannot be scaled; "" if they can."""
        module, name = module_of(node), str(node.target)
        if name in self.skip:
            return "skip names it"
        several = len(self.names.get(module, ())) > 1 or not self.calls.is_only_one(node)
        for attribute in attributes:
            parameter = module._parameters.get(attribute)
            if several or len(self.owners.get(id(parameter), ())) > 1 or id(parameter) in self.read:
                return f"{name!r} or its {attribute} is used more than once"
            if attribute not in module._parameters:
                return f"the {attribute} of {name!r} is computed from others"
        return ""

    def obstacle_on(self, path: Sequence[fx.Node]) -> str:
        """Return why the channels between two layers cannot be scaled; "" if they can."""
        source = path[1] if kind_of(path[1]).normalizes_batches else path[0]
        return self.obstacle(source, "weight", "bias") or self.obstacle(path[-1], "weight")


def _is_layer(node: fx.Node) -> bool:
    return type(called_module(node)) in LAYERS


def _is_parametrized_layer(node: fx.Node) -> bool:
    module = called_module(node)
    return module is not None and is_parametrized(module) and type_before_parametrizations(module) in LAYERS


def _path_from(layer: fx.Node) -> list[fx.Node] | Obstacle:
    """Return the nodes from a layer to the layer that takes its channels, or the reason why there is none."""
    batch_norm: fx.Node | None = None
    path = [layer]
    while True:
        users = list(path[-1].users)
        if len(users) != 1:
            return Obstacle(f"{len(users)} ops use the output of {path[-1].name!r}")
        path += users
        (node,) = users
        kind = kind_of(node)
        if _is_layer(node):
            scales = batch_norm is None or getattr(module_of(batch_norm), "weight", None) is not None
            count = ChannelView(module_of(node)).inputs_amax().numel()
            if count != ChannelView(module_of(layer)).outputs_amax().numel():
                return Obstacle(f"{node.target!r} takes another number of input channels ({count})")
            return path if scales else Obstacle("its batch norm has no scale")
        if kind.normalizes_batches and node.op == "call_module" and batch_norm is None and node.args[0] is layer:
            bn = module_of(node)
            if not is_batch_norm(bn) or getattr(bn, "running_var", None) is None:
                return Obstacle("its batch norm has no running statistics")
            batch_norm = node
        elif not _keeps_channels(node, kind, ChannelView(module_of(layer)).dims):
            return Obstacle(f"{node.name!r} ({kind}) follows it, which does not commute with a factor per channel")


def _keeps_channels(node: fx.Node, kind: OpKind, dims: int) -> bool:
    """Return whether an op commutes with a positive factor of each channel."""
    if called_by(node) in MEANS:  # over positions, as (2, 3) or (-2, -1); a linear layer has its channels last
        over = argument(node, 1, "dim")
        over = over if isinstance(over, tuple | list) else (over,)
        return all(isinstance(d, int) and ((dims > 0 and d >= 2) or -dims <= d < 0) for d in over)
    if kind.pads_with_zero and node.op == "call_function":  # of positions only
        pads = argument(node, 1, "pad")
        return isinstance(pads, tuple | list) and not any(pads[2 * dims :])
    return kind.homogeneous and len([n for n in node.all_input_nodes if n.op != "get_attr"]) == 1
