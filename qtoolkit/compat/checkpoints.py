"""Load ranges from checkpoints of pytorch-quantization and Model Optimizer into qtoolkit's models."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from qtoolkit.checkpoint.file import without_wrapper
from qtoolkit.errors import warn
from qtoolkit.graph.graph_module import QuantizedGraphModule
from qtoolkit.model_state import check_module, check_numbers, unchanged_on_error
from qtoolkit.nn import QuantWeighted
from qtoolkit.nn.batch_norm import divisor_of
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer, quantizers_of
from qtoolkit.report import quantization_report

_AMAX = "._amax"
_OF_A_QUANTIZER = re.compile(r"(^|\.)[^.]*_quantizers?\.")  # an entry of a quantizer, in either tool's naming


def load_amax(model: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> tuple[str, ...]:
    """Set the ranges of a model's quantizers from a checkpoint of another tool.

    It reads the keys `LAYER._input_quantizer._amax` and `LAYER._weight_quantizer._amax` (pytorch-quantization), the same
    without the underscore before the quantizer's name (Model Optimizer), and `NAME._amax` for a quantizer of that name in the
    model. A `module.` (DataParallel) or `_orig_mod.` (torch.compile) before all keys is ignored. The other keys are an ordinary
    state dict of the float model: load them first, into the float model.

    The range of an input is set in the quantizer before the layer. If several layers share that quantizer and their ranges
    differ, it gets the largest one, with a warning. If a batch norm will be folded into a layer, the range of the weight is
    multiplied by the norm's factors, which does not change its quantized values; prepare such a model in training mode. The
    ranges of a grouped transposed convolution, which its groups share in the checkpoint, are repeated for each group.

    Models of `qtoolkit.compat.pytorch_quantization` do not need this function: their `load_state_dict` loads the checkpoint.

    Args:
        model: The result of `qtoolkit.prepare` or `qtoolkit.quant_modules.replace`. It is changed in place, unless an error is
            raised.
        state_dict: The checkpoint.
        strict: Raise if the checkpoint has entries of quantizers that the model does not have. False ignores them.

    Returns:
        The names of the quantizers with new ranges, in the model's order.

    Raises:
        ValueError: The model has no quantizers, or a range does not fit its quantizer.
        TypeError: `model` is not a module, `state_dict` is not a mapping, or a range is not a tensor.
        KeyError: With strict=True: the checkpoint has no ranges, or has entries of quantizers that the model does not have.

    Example:
        >>> model = qt.prepare(torch.nn.Sequential(torch.nn.Linear(2, 2)), backend="tensorrt")
        >>> amax = {"0._input_quantizer._amax": torch.tensor(1.27), "0._weight_quantizer._amax": torch.ones(2, 1)}
        >>> load_amax(model, amax)
        ('0.weight_quantizer', 'activation_quantizers.input_1')
    """
    model = check_module(model, "load_amax")
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"load_amax: state_dict must be a mapping of names to tensors, got {type(state_dict).__name__}."
        )
    quantizers = quantizers_of(model)
    if not quantizers:
        raise ValueError(
            f"load_amax: {type(model).__name__} has no quantizers; call qtoolkit.prepare or qtoolkit.quant_modules.replace "
            f"first. Models of qtoolkit.compat.pytorch_quantization load the checkpoint with load_state_dict."
        )
    entries = {key: value for key, value in without_wrapper(state_dict).items() if _OF_A_QUANTIZER.search(key)}
    inputs = _inputs_of(model)
    places = {key: _place(key.removesuffix(_AMAX), quantizers, inputs) for key in entries if key.endswith(_AMAX)}
    for key in places:
        check_numbers("load_amax", key, entries[key])
    if strict:
        _check_all_placed(entries, places)
    ranges: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for key, place in places.items():
        if place is not None:
            ranges[place][key] = _fitted(model, place, quantizers[place], entries[key], key)
    with unchanged_on_error(nn.ModuleList(quantizers.values()), parameters=True):
        for name, amaxes in ranges.items():
            quantizers[name].amax = _largest(name, amaxes)
    return tuple(name for name in quantizers if name in ranges)


def _inputs_of(model: nn.Module) -> dict[str, str]:
    """Return the input quantizer of each layer of a graph with one quantized input."""
    if not isinstance(model, QuantizedGraphModule):
        return {}
    return {line.name: line.inputs[0] for line in quantization_report(model).layers if len(line.inputs) == 1}


def _place(name: str, quantizers: Iterable[str], inputs: Mapping[str, str]) -> str | None:
    """Return the name of the model's quantizer that corresponds to a quantizer of the checkpoint."""
    layer, _, attribute = name.rpartition(".")
    own = f"{layer}.{attribute.removeprefix('_')}" if layer else attribute.removeprefix("_")
    found = next((candidate for candidate in (name, own) if candidate in quantizers), None)
    return inputs.get(layer) if found is None and own.endswith("input_quantizer") else found


def _check_all_placed(entries: Mapping[str, object], places: Mapping[str, str | None]) -> None:
    if not places:
        raise KeyError("load_amax: the checkpoint has no key '..._quantizer._amax'; strict=False ignores that.")
    lost = [key for key in entries if places.get(key) is None]
    if lost:
        raise KeyError(
            f"load_amax: the checkpoint has entries of quantizers that the model does not have: {', '.join(lost)}; "
            f"strict=False ignores them."
        )


def _fitted(model: nn.Module, place: str, quantizer: TensorQuantizer, amax: Tensor, key: str) -> Tensor:
    """Return a range with one element, or with one element per channel of a quantizer."""
    spec, count = quantizer.spec, quantizer.scale.numel()
    layer = model.get_submodule(place.rpartition(".")[0])
    weighted = layer if isinstance(layer, QuantWeighted) and layer.weight_quantizer is quantizer else None
    kept = [d for d, size in enumerate(amax.shape) if size != 1]
    along = spec.axis is not None and amax.dim() > 0 and spec.axis % amax.dim() in kept
    values = amax.detach().float().flatten()
    if values.numel() != 1 and along and len(kept) == 1:
        values = values.repeat(quantizer.group)
    if values.numel() not in (1, count) or (values.numel() != 1 and not along):
        takes = f"one element, or {count} along axis {spec.axis}" if count > 1 else "one element"
        other_axis = len(kept) == 1 and weighted is not None
        remedy = f"; a QConfig with QuantSpec(axis={kept[0]}) for its layer accepts it" if other_axis else ""
        raise ValueError(
            f"load_amax: {key!r} has the shape {list(amax.shape)}, but quantizer {place!r} takes {takes}{remedy}."
        )
    if weighted is not None:
        values = values * _batch_norm_factor(weighted, count, place).to(values.device)
    return values.reshape(()) if values.numel() == 1 else values


def _batch_norm_factor(layer: QuantWeighted, count: int, place: str) -> Tensor:
    """Return the factor of the linked batch norm on a weight; the checkpoint's range does not include the factor."""
    if layer.batch_norm is None and layer._holds_batch_norm:
        raise ValueError(
            f"load_amax: the weight of {place!r} has its batch norm folded in, but its range in the checkpoint was computed "
            "before folding; prepare the model in training mode, which keeps the batch norm, then call load_amax and eval()."
        )
    if layer.batch_norm is None:
        return torch.ones(())
    factor = divisor_of(layer.batch_norm).detach().abs()
    if factor.numel() != count:
        raise ValueError(
            f"load_amax: the weight of {place!r} is quantized with its batch norm folded, so it needs a range for each of "
            f"{factor.numel()} output channels, got {count}; use a weight spec with axis=0 (the output channels)."
        )
    return factor


def _largest(name: str, amaxes: Mapping[str, Tensor]) -> Tensor:
    largest = reduce(torch.maximum, amaxes.values())
    if any(not bool((other == largest).all()) for other in amaxes.values()):
        warn(
            f"load_amax: quantizer {name!r} is shared by {', '.join(amaxes)}, whose ranges differ; it gets the largest.",
        )
    return largest
