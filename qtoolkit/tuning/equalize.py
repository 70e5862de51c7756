"""equalize(): cross-layer equalization of a float model (arXiv 1906.04721, section 4.1)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, fx, nn

from qtoolkit.errors import check_known, check_sequence
from qtoolkit.graph.capture import trace
from qtoolkit.graph.graph_module import calls_of
from qtoolkit.model_state import check_module, deepcopy_model, removing
from qtoolkit.nn import QuantModule
from qtoolkit.nn.batch_norm import is_batch_norm
from qtoolkit.op_kinds.nodes import kind_of, module_of
from qtoolkit.progress import note, progress_bar
from qtoolkit.shared_modules import names_by_module
from qtoolkit.tuning.channels import LAYERS, ChannelView
from qtoolkit.tuning.unchanged import largest_change, outputs_of

M = TypeVar("M", bound=nn.Module)

# Ops through which a positive factor of each channel passes, by kind.
HOMOGENEOUS = ("relu", "leaky_relu", "prelu", "max_pool", "avg_pool", "mean", "upsample_nearest", "upsample_linear",
               "zero_pad", "edge_pad", "identity")  # fmt: skip
ROUNDS, CLOSE = 40, 1e-3
LEAST = (
    0.01  # a channel of activations counts as at least this part of the widest: other data may need more of its range
)


@dataclass(frozen=True)
class Pair:
    """Two layers whose channels are equalized.

    Attributes:
        first: The dotted name of the layer whose output channels are divided.
        second: That of the layer whose input channels are multiplied.
        batch_norm: That of the batch norm between them, whose scale and shift are divided instead; "" for none.
        before: How much wider the widest channel is than the median one, before: of the weights of both layers, or of the
            activations.
        after: The same at the end.
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
        skipped: Why the output channels of other layers stay, by the layer's name.
        change: The largest change of an output, as a share of the largest output.
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
        return "\n".join(lines + [f"{name}: as it was: {why}" for name, why in self.skipped.items()])


def equalize(
    model: M,
    example_inputs: Any,
    skip: Sequence[str] = (),
    inplace: bool = False,
    activations: float | None = None,
    progress: bool = True,
) -> Equalization[M]:
    """Scale the channels between consecutive layers so that all have about the same range.

    A channel that leaves a layer is divided by a factor, and multiplied by it where it enters the next one: the function of the
    model stays the same, in training mode too, which is checked. By default the weights get the same ranges: per-tensor weights
    lose far less after it; with one scale for each output channel there is little to gain. With `activations` the tensors
    between the layers get them, which have one scale for all channels: at the weights' cost, which training makes up for.
    Layers are convolutions, transposed convolutions and linear layers of every
    dimension, with groups; between them may be a batch norm, ReLU, LeakyReLU, PReLU, pools, padding and dropout.

    Args:
        model: A float model, before `qtoolkit.prepare` or `qtoolkit.quant_modules.replace`.
        example_inputs: As for `qtoolkit.prepare`: the model is traced with them, and run for the check. The ranges of
            activations are those of these inputs: pass a batch of real data.
        skip: Dotted names of layers that stay as they are.
        inplace: Change the model itself; otherwise a copy.
        activations: None for the weights. Or the power of its range, relative to the widest, that a channel is divided by: 1
            makes all channels of the activations equally wide, 0.5 shares the work with the weights.
        progress: Show a progress bar.

    Returns:
        The model, the pairs, and why other layers stay as they were.

    Raises:
        TypeError: `model` is no module, or has quantizers.
        ValueError: A name in `skip` is unknown, or `activations` is not above 0 and at most 1.
        UntraceableError: The model cannot be traced.
        RuntimeError: The outputs would change; the model is then unchanged.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> result = qt.tuning.equalize(model, torch.randn(16, 4))
        >>> [(pair.first, pair.second) for pair in result.pairs], result.change < 1e-5
        ([('0', '2')], True)
    """
    check_module(model, "equalize")
    if any(isinstance(module, QuantModule) for module in model.modules()):
        raise TypeError("equalize: the model must be a float model; equalize it before it is prepared or replaced.")
    check_sequence(skip, "equalize", "skip")
    if activations is not None and not 0 < activations <= 1:
        raise ValueError(f"equalize: activations must be None, or above 0 and at most 1, got {activations!r}.")
    own = model if inplace else deepcopy_model(model, what="equalize")
    names = names_by_module(own)
    layers = {aliases[0]: module for module, aliases in names.items() if type(module) in LAYERS}
    for name in skip:
        check_known("layer in skip of equalize", name, layers)
    before = outputs_of(own, example_inputs)
    links, skipped = _links(own, example_inputs, skip)
    state = [tensor.detach().clone() for tensor in (*own.parameters(), *own.buffers())]
    if activations is None:
        widths = _equalize_weights(links, progress)
    else:
        widths = _equalize_activations(links, _ranges_of_inputs(own, links, example_inputs), activations)
    try:
        change = largest_change(before, outputs_of(own, example_inputs), "equalize")
    except RuntimeError:
        with torch.no_grad():
            for tensor, old in zip((*own.parameters(), *own.buffers()), state, strict=True):
                tensor.copy_(old)
        raise
    pairs = tuple(Pair(*link.names, *width) for link, width in zip(links, widths, strict=True))
    return Equalization(own, pairs, skipped, change)


class _Link:
    """Two layers, and what is between them."""

    def __init__(self, first: fx.Node, second: fx.Node, batch_norm: fx.Node | None) -> None:
        self.names = str(first.target), str(second.target), "" if batch_norm is None else str(batch_norm.target)
        self.taken_by = module_of(second)
        self.first, self.second = ChannelView(module_of(first)), ChannelView(self.taken_by)
        self.batch_norm: Any = None if batch_norm is None else module_of(batch_norm)

    def _ranges(self) -> tuple[Tensor, Tensor]:
        outputs, bn = self.first.outputs_amax(), self.batch_norm
        if bn is not None:
            outputs = outputs * (bn.weight.detach() * torch.rsqrt(bn.running_var + bn.eps)).abs()
        return outputs, self.second.inputs_amax()

    def width(self) -> float:
        """Return how much wider the widest channel of both layers is than the median one."""
        return max(map(_width, self._ranges()))

    def equalize(self) -> float:
        """Equalize the two layers; return how far the largest factor was from 1."""
        first, second = self._ranges()
        usable = (first > 0) & (second > 0)
        factor = torch.where(usable, torch.sqrt(first / second), torch.ones_like(first))
        factor = torch.where(torch.isfinite(factor) & (factor > 0), factor, torch.ones_like(factor))
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
    """Return how much wider the widest channel is than the median one."""
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


def _equalize_activations(links: Sequence[_Link], ranges: Sequence[Tensor], power: float) -> list[tuple[float, float]]:
    """Divide the channels of all pairs by a power of their ranges; return how wide they were and are."""
    widths = []
    for link, observed in zip(links, ranges, strict=True):
        share = (observed / observed.max()).nan_to_num(1.0).clamp(min=LEAST)
        factor = torch.where(observed > 0, share**power, torch.ones_like(share))
        link.divide(factor)
        widths.append((_width(observed), _width(observed / factor)))
    return widths


def _ranges_of_inputs(model: nn.Module, links: Sequence[_Link], example_inputs: Any) -> list[Tensor]:
    """Return the range of each channel that the second layer of each pair takes, zero included."""
    ranges: dict[nn.Module, Tensor] = {}

    def observe(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs["input"]
        channels = x.detach().movedim(-1 - dims[layer], 0).flatten(1)
        ranges[layer] = channels.amax(1).clamp(min=0) - channels.amin(1).clamp(max=0)

    dims = {link.taken_by: link.second.dims for link in links}
    handles = [layer.register_forward_pre_hook(observe, with_kwargs=True) for layer in dims]
    with removing(handles):
        outputs_of(model, example_inputs)
    return [ranges[link.taken_by] for link in links]


def _links(model: nn.Module, example_inputs: Any, skip: Sequence[str]) -> tuple[list[_Link], dict[str, str]]:
    gm = trace.run(model, example_inputs=example_inputs)
    links, skipped, calls = [], dict[str, str](), calls_of(gm)
    names = names_by_module(model)
    owners: dict[int, int] = {}
    for module in names:
        for parameter in module._parameters.values():
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1

    def obstacle(node: fx.Node) -> str:
        module, name = module_of(node), str(node.target)
        if name in skip:
            return "skip names it"
        if calls[name] > 1 or len(names.get(module, ())) > 1 or owners.get(id(module._parameters.get("weight")), 0) > 1:
            return f"{name!r} or its weight is used more than once"
        return "" if "weight" in module._parameters else f"the weight of {name!r} is computed from others"

    for node in gm.graph.nodes:
        if not _is_layer(node):
            continue
        found = obstacle(node) or _follow(node)
        if isinstance(found, str):
            skipped[str(node.target)] = found
            continue
        second, batch_norm = found
        why = obstacle(second)
        if why:
            skipped[str(node.target)] = why
        else:
            links.append(_Link(node, second, batch_norm))
    return links, skipped


def _is_layer(node: fx.Node) -> bool:
    return node.op == "call_module" and type(module_of(node)) in LAYERS


def _follow(layer: fx.Node) -> tuple[fx.Node, fx.Node | None] | str:
    """Return the layer that takes a layer's channels, with the batch norm between them, or why there is none."""
    batch_norm: fx.Node | None = None
    node = layer
    while True:
        users = list(node.users)
        if len(users) != 1:
            return f"{len(users)} ops take the output of {node.name!r}"
        (node,) = users
        kind = kind_of(node).name
        if _is_layer(node):
            bn: Any = None if batch_norm is None else module_of(batch_norm)
            count = ChannelView(module_of(node)).inputs_amax().numel()
            if count != ChannelView(module_of(layer)).outputs_amax().numel():
                return f"{node.target!r} takes {count} channels, which are not its own"
            return (node, batch_norm) if bn is None or bn.weight is not None else "its batch norm has no scale"
        if kind == "batch_norm" and node.op == "call_module" and batch_norm is None and node.args[0] is layer:
            bn = module_of(node)
            if not is_batch_norm(bn) or bn.running_var is None:
                return "its batch norm has no running statistics"
            batch_norm = node
        elif not _keeps_channels(node, kind, ChannelView(module_of(layer)).dims):
            return f"{node.name!r} ({kind}) follows it, through which no factor of a channel passes"


def _keeps_channels(node: fx.Node, kind: str, dims: int) -> bool:
    """Return whether an op on channels of some dimensions passes on a positive factor of each channel."""
    if kind == "mean":  # over positions, as (2, 3) or (-2, -1)
        over = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
        over = over if isinstance(over, tuple | list) else (over,)
        return all(isinstance(d, int) and (d >= 2 or -dims <= d < 0) for d in over)
    if kind == "zero_pad" and node.op == "call_function":  # of positions only
        pads = node.kwargs.get("pad", node.args[1] if len(node.args) > 1 else ())
        return isinstance(pads, tuple | list) and not any(pads[2 * dims :])
    return kind in HOMOGENEOUS and len([n for n in node.all_input_nodes if n.op != "get_attr"]) == 1
