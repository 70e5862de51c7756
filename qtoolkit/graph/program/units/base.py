"""What all units share: the decision how a unit computes, made once and kept while its modules are as they were.

What a unit computes depends on its modules: their modes, hooks, types, parameters and quantizers. It is decided once, and holds
as long as the attributes of these modules are the same objects, which `Snapshot` compares in some microseconds. While no
decision holds, and where one op may not compute the unit, its ops are called one by one.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from qtoolkit._snapshot import Snapshot
from qtoolkit.nn import on_codes
from qtoolkit.nn.output_grid import Grid, codes_by_op, quantized_by, why_quantizer_not_fused
from qtoolkit.nn.weighted import QuantWeighted
from qtoolkit.quantizers.codes import TensorCodes
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer

WATCHING = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
CHANGING = ("_seen", "stale", "steps", "seen_in_step", "looked", "warned", "_range_of")  # in training
IGNORED = frozenset({*CHANGING, *(name for name in vars(nn.Module()) if "hooks" in name and name not in WATCHING)})
"""Attributes on which it does not depend what a unit is."""

MOST_PLANS = 64
"""Of one unit, for inputs of different sizes."""

NOT_FOLLOWED = (None, None, False)
NOT_RAW = (None, None, 1.0)


class Decided:
    """A unit of a prepared model, and how one op computes it for each kind of input.

    Args:
        root: The model, or the block of it in which the unit runs.
        names: The names of its modules there, that of its quantizer last; None stands for those that there are not.

    Attributes:
        modules: The modules, as they were when it was last decided.
    """

    def __init__(self, root: nn.Module, names: Sequence[str | None]) -> None:
        self.root, self.names = ref(root), tuple(names)
        self.snapshot: Snapshot | None = None
        self.modules: tuple[Any, ...] = ()
        self.plans: dict[Hashable, Any] = {}
        self.last: tuple[Hashable, Any] | None = None

    def look(self) -> None:
        """Take the modules as they are now, if that may be other ones than before."""
        if self.snapshot is not None and self.snapshot.holds():
            return
        self.modules = self.modules_now()
        names = [name for name in self.names if name is not None]
        self.snapshot, self.plans, self.last = snapshot_of(self.model(), names), {}, None

    def model(self) -> nn.Module:
        """Return the model."""
        model = self.root()
        if model is None:
            raise RuntimeError("the model of this code does not exist any more.")
        return model

    def modules_now(self) -> tuple[Any, ...]:
        """Return the modules, as compiled code asks for them."""
        model = self.model()
        return tuple(None if name is None else model.get_submodule(name) for name in self.names)

    def plan(self, kind: Hashable, *inputs: Any) -> Any:
        """Return how one op computes the unit for inputs of a kind; None where it may not.

        Args:
            kind: What a plan depends on besides the modules.
            inputs: Inputs of this kind, for `planned`.
        """
        last = self.last
        if last is None or last[0] != kind:
            if kind not in self.plans:
                if len(self.plans) == MOST_PLANS:
                    self.plans.clear()
                self.plans[kind] = self.planned(*inputs)
            last = self.last = kind, self.plans[kind]
        return last[1]

    def planned(self, *inputs: Any) -> Any:
        """Ask the modules for the plan."""
        raise NotImplementedError

    def quantizer_in_op(self) -> TensorQuantizer | None:
        """Return the quantizer if the op may compute what it does now; None where it must be called, or there is none."""
        quantizer = self.modules[-1]
        return quantizer if quantizer is not None and why_quantizer_not_fused(quantizer) is None else None

    def output(
        self, y: Tensor, codes: Tensor | None, scale: Tensor, grid: Grid, in_op: TensorQuantizer | None
    ) -> tuple[Tensor, TensorCodes | None]:
        """Return the output of the unit with its codes.

        Args:
            y: What the op has returned.
            codes: Its codes; None where they are not known yet.
            scale: The scale that the op has returned.
            grid: What the op was told about the output's grid.
            in_op: The quantizer that the op has computed. Another one is called here.
        """
        quantizer = self.modules[-1]
        if quantizer is in_op:
            return y, codes_by_op(y, codes, scale, grid, quantizer)
        return quantized_by(quantizer, y)


def snapshot_of(root: nn.Module, names: Sequence[str]) -> Snapshot:
    """Return the attributes of submodules now, and of the quantizers on which it depends how they compute."""
    modules = [root.get_submodule(name) for name in names]
    seen = [*modules, *(each for m in modules if isinstance(m, QuantWeighted) for each in m.computes_by())]
    holders = [root.get_submodule(parent)._modules for parent in {p for name in names for p in _parents(name)}]
    return Snapshot((*seen, *holders), IGNORED)


def _parents(name: str) -> list[str]:
    """Return the names of the modules on the way to a submodule, with "" for the model."""
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(len(parts))]


# ---- what may be one op


def layer_is_plain(layer: Any) -> bool:
    """Return whether an op may compute a layer, and quantize its weight, as its modules are now."""
    if layer.integer_kernel is not None or layer.input_quantizer is not None:
        return False
    parameters = (p for p in (layer.weight, layer.bias) if p is not None)
    return _gives_grid(layer.weight_quantizer) and all(type(p) is nn.Parameter for p in parameters)


def _gives_grid(quantizer: Any) -> bool:
    """Return whether the quantizer of a weight leaves it to an op to quantize it."""
    if not isinstance(quantizer, TensorQuantizer) or quantizer.stopping or not quantizer.ready:
        return False
    return quantizer.gives_grid()


class LayerArguments(NamedTuple):
    """What an op is told about a layer, for inputs of a kind, in its order.

    Attributes:
        grid: The weight's scale and grid, and the range that it follows; None where they are computed at each call.
        geometry: What the layer computes, and whether on codes.
        computed: The type and the memory format of its output.
        like: A tensor of the output's shape, without memory.
        takes_raw: Whether the scale of the input is trained by what the input was before it was quantized, if that is known.
    """

    grid: tuple[Grid, Grid] | None
    geometry: tuple[Any, ...]
    computed: tuple[Any, ...]
    like: Tensor
    takes_raw: bool

    @property
    def integer(self) -> bool:
        """Whether the layer computes on codes."""
        return bool(self.geometry[-1])


def layer_arguments(layer: Any, x: Tensor, dtype: torch.dtype) -> LayerArguments | None:
    """Return what an op is told about a layer of an input like x, in a type; None where it may not compute it."""
    g = layer.geometry(x)
    if g is None:
        return None
    integer = on_codes.computes_on_codes(layer, x, g)
    if not integer and (layer.training_arithmetic.save == "float" or on_codes.copies_weight(layer, x)):
        return None
    layer.check_input(x)
    try:
        with torch.no_grad():  # gradient checkpointing counts the tensors that a forward saves
            like = layer.compute(x.to("meta"), layer.weight.to("meta"), None)
    except RuntimeError:  # the input does not fit: the layer has a clearer error
        return None
    sizes = (g.stride, g.padding, g.dilation, g.output_padding, g.transposed, g.groups)
    computed = dtype, on_codes.computed_format(layer, x, integer)
    takes_raw = dtype == x.dtype and on_codes.reads_image(layer, x, g)
    return LayerArguments(_grid_of_weight(layer), (*sizes, integer), computed, like, takes_raw)


def kind_of_inputs(layer: Any, x: Tensor) -> tuple[Hashable, ...] | None:
    """Return on what it depends, besides the modules, how an op computes a layer; None where its weight is computed.

    The last of it is the type in which the layer computes.
    """
    weight = layer._parameters.get("weight")
    if weight is None:
        return None
    return x.shape, x.stride(), x.dtype, x.device, weight.dtype, on_codes.computed_type(weight, x)


def layer_call(
    layer: Any,
    arguments: LayerArguments,
    x: Tensor,
    codes: TensorCodes,
    factor: Callable[[], Tensor | None],
    name: str | None,
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the first arguments of an op that computes a layer, up to its bias, and the last ones.

    Args:
        layer: The layer.
        arguments: What the op is told about it.
        x: Its input.
        codes: The codes of x.
        factor: Returns what multiplies the output channels of the weight before it is quantized, or None.
        name: The name of the layer.
    """
    grid, followed = arguments.grid or _weight_grid_now(layer, factor(), name)
    if followed is not NOT_FOLLOWED:
        vars(layer.weight_quantizer)["stale"] = True  # the step after this forward changes the weight
    raw = codes.raw_of(x) if arguments.takes_raw else None
    of_x = x if raw is None else x.detach(), codes.codes, codes.scale, codes.zero_point, codes.qmin, codes.qmax
    last = NOT_RAW if raw is None else (raw.values, raw.scale, raw.grad_factor)
    return (*of_x, layer.weight, *grid, *arguments.geometry, *followed, *arguments.computed, layer.bias), last


# ---- scales and grids


def _grid_of_weight(layer: Any) -> tuple[Grid, Grid] | None:
    """Return the scale and the grid of a weight, and the range that the op sets."""
    quantizer = layer.weight_quantizer
    start = quantizer.kind.start(quantizer)
    followed = _followed(layer) if quantizer.training and quantizer.follows else NOT_FOLLOWED
    if start is None or followed is None:
        return None
    spec, factor = quantizer.spec, quantizer.kind.grad_factor(quantizer, layer.weight)
    of_codes = (spec.qmin, spec.qmax, spec.axis, quantizer.group, spec.block_size, factor)
    return (*start, quantizer._zero_point, *of_codes), followed


def _followed(layer: Any) -> Grid | None:
    """Return the range that the op sets to that of a weight, and the grid with it; None where the quantizer sets it."""
    quantizer, bn = layer.weight_quantizer, layer.batch_norm
    spec, observer, scale = quantizer.spec, quantizer.observer, quantizer._scale
    along_outputs = spec.axis is not None and spec.axis % layer.weight.dim() == 0 == layer.OUTPUT_AXIS
    plain = along_outputs and spec.symmetric and spec.group_size is None and not layer.weight_groups()[0]
    others = (observer.lo, observer.hi, *(() if bn is None else (bn.weight, bn.running_var)))
    if not plain or any(t is not None and (t.dtype, t.device) != (scale.dtype, scale.device) for t in others):
        return None
    return observer.lo, observer.hi, spec.pow2_scale


def _weight_grid_now(layer: Any, factor: Tensor | None, name: str | None) -> tuple[Grid, Grid]:
    """Return the scale and the grid of a weight whose quantizer makes them anew at each call."""
    grid = on_codes.weight_grid(layer, factor)
    if grid is None:
        raise RuntimeError(f"the weight quantizer of {name!r} changed while its layer ran.")
    of_codes = (grid.qmin, grid.qmax, grid.axis, grid.group, grid.block_size, grid.grad_factor)
    return (grid.scale, None, None, grid.zero_point, *of_codes), NOT_FOLLOWED
