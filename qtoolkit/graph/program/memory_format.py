"""The memory format in which a prepared model computes in training: channels_last where its layers compute in integers.

torch's int8 convolutions take and return channels_last. The convolutions of backward are faster in it too: without
conversions at each layer, the convolutions return it, and the model converts its outputs back.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor, fx, nn

from qtoolkit.graph.block_calls import map_leaves
from qtoolkit.graph.nodes import kind_of
from qtoolkit.graph.program.units import snapshot_of
from qtoolkit.nn import QuantConv2d, QuantConvTranspose2d, QuantWeighted, on_codes
from qtoolkit.nn.computed_weights import computing_still
from qtoolkit.nn.layers.conv import is_strided_pointwise
from qtoolkit.op_kinds.rules import argument
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer
from qtoolkit.running import Run

FLOAT_LAYERS = (nn.Conv2d, nn.ConvTranspose2d)
STRIDE = 3  # its position among the arguments of a function that is a convolution
ONES = (1, (1,), [1], (1, 1), [1, 1])
# Methods that fail, or compute something else, where a tensor has other strides than the model expects. The names are torch's:
# their kind of op has reshape too, which takes any strides.
OF_STRIDES = ("view", "view_as", "as_strided")


def in_channels_last(gm: fx.GraphModule, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that computes the same as another one, in channels_last in training where that is faster.

    Both take the run before the model. The 2-d convolutions of the model get the memory format for their images.
    """
    names = [name for name, module in gm.named_modules() if isinstance(module, QuantConv2d)]
    converts = bool(names) and _takes_any_strides(gm) and not _has_unsafe_gradient(gm)
    for module in gm.modules():
        if isinstance(module, QuantConv2d | QuantConvTranspose2d):
            module.returns_channels_last = converts
    if not converts:
        return forward
    quantized, choice = _quantized_inputs(gm), _Choice(gm, names)

    @functools.wraps(forward)
    def converted(run: Run, self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        trains = self.training and torch.is_grad_enabled()
        images = [x for x in (*args, *kwargs.values()) if _may_be_in_rows(x)] if trains else []
        pixels = max([x.numel() // x.size(1) for x in images]) if images else 0
        if not pixels or not choice.of(run, self, pixels):
            return forward(run, self, *args, **kwargs)
        args = tuple(x if i in quantized else map_leaves(x, _to_channels_last) for i, x in enumerate(args))
        kwargs = {name: x if name in quantized else map_leaves(x, _to_channels_last) for name, x in kwargs.items()}
        return map_leaves(forward(run, self, *args, **kwargs), _to_rows)

    return converted


class _Choice:
    """Whether one of the layers of a model with these names computes in integers, for images of each number of pixels."""

    def __init__(self, gm: fx.GraphModule, names: Sequence[str]) -> None:
        self.owner, self.names = ref(gm), names
        self.snapshot: Any = None
        self.known: dict[int, bool] = {}

    def of(self, run: Run, model: nn.Module, pixels: int) -> bool:
        """Return it for a model, or a replica of it; it holds while the attributes of the layers are the same objects."""
        if run.compiled or self.owner() is not model:
            return self._ask(model, pixels)
        if self.snapshot is None or not self.snapshot.holds():
            self.snapshot, self.known = snapshot_of(model, self.names), {}
        if pixels not in self.known:
            self.known[pixels] = self._ask(model, pixels)
        return self.known[pixels]

    def _ask(self, model: nn.Module, pixels: int) -> bool:
        layers = (functools.reduce(getattr, name.split("."), model) for name in self.names)
        return any(_computes_on_codes(layer, pixels) for layer in layers)


def _quantized_inputs(gm: fx.GraphModule) -> frozenset[int | str]:
    """Return the places and the names of the inputs that quantizers alone take: to convert them would copy a batch.

    A learned quantizer keeps its input for backward. After it, a convolution converts integers, a quarter of the bytes.
    """
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    found = [(place, node.target) for place, node in enumerate(inputs) if all(_is_quantizer(gm, u) for u in node.users)]
    return frozenset(key for keys in found for key in keys)


def _is_quantizer(gm: fx.GraphModule, node: fx.Node) -> bool:
    return node.op == "call_module" and isinstance(gm.get_submodule(str(node.target)), TensorQuantizer)


def _computes_on_codes(layer: Any, pixels: int) -> bool:
    """Return whether a layer of a model, whose images have so many pixels, may compute in integers."""
    if not isinstance(layer, QuantConv2d):
        return False
    with computing_still(layer):
        if not on_codes.pays(layer, pixels) or on_codes.refusal_to_compute(layer) or on_codes.refusal_to_keep(layer):
            return False
    return all(quantizer is not None and quantizer.quantizing for quantizer in (layer.source, layer.weight_quantizer))


def _takes_any_strides(gm: fx.GraphModule) -> bool:
    """Return whether the model computes the same for any strides: it has no views, nor code that was not traced."""
    plan = vars(gm).get("_plan")
    if plan is None or plan.tracing.leaf_modules or plan.tracing.skip:
        return False
    return not any(node.op == "call_method" and node.target in OF_STRIDES for node in gm.graph.nodes)


def _has_unsafe_gradient(gm: fx.GraphModule) -> bool:
    """Return whether torch itself computes a 1x1 convolution with a stride, whose gradient is not safe in channels_last."""
    layers = (m for m in gm.modules() if isinstance(m, FLOAT_LAYERS) and not isinstance(m, QuantWeighted))
    if any(is_strided_pointwise(layer) for layer in layers):
        return True
    functions = (n for n in gm.graph.nodes if n.op == "call_function" and kind_of(n).convolves)
    return any(argument(node, STRIDE, "stride", 1) not in ONES for node in functions)


def _may_be_in_rows(x: Any) -> bool:
    """Return whether a value is an image for int8 kernels that is not in channels_last, or, with one channel, in both."""
    if not isinstance(x, Tensor) or x.dim() != 4 or not on_codes.has_kernel_type(x):
        return False
    return x.is_contiguous() or not x.is_contiguous(memory_format=torch.channels_last)


def _to_channels_last(x: Any) -> Any:
    return x.contiguous(memory_format=torch.channels_last) if _may_be_in_rows(x) else x


def _to_rows(y: Any) -> Any:
    return y.contiguous() if isinstance(y, Tensor) and y.dim() == 4 else y
