"""The costs of layers with one weight: multiplications, bytes and bits."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from qtoolkit.config import QConfig, QuantSpec
from qtoolkit.model_inputs import split
from qtoolkit.model_state import evaluating, removing
from qtoolkit.nn import QAT_MODULES
from qtoolkit.nn.weighted import QuantWeighted
from qtoolkit.shared_modules import first_names

LAYERS = {float_type: qat for float_type, qat in QAT_MODULES.items() if issubclass(qat, QuantWeighted)}
FLOAT_BITS = 32


def layers_of(model: nn.Module) -> dict[str, Any]:
    """Return the layers with one weight, by the first of their names."""
    return {name: module for module, name in first_names(model).items() if type(module) in LAYERS}


def input_of(args: tuple[object, ...], kwargs: Mapping[str, object]) -> Any:
    """Return the input of a layer from the arguments of its call."""
    return args[0] if args else kwargs.get("input")


def count_macs(model: nn.Module, modules: Mapping[str, nn.Module], example_inputs: object) -> dict[str, int]:
    """Return the multiplications with a weight of each layer, in one forward."""
    counts = dict.fromkeys(modules, 0)
    names = {module: name for name, module in modules.items()}

    def count(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: Tensor) -> None:
        counts[names[module]] += _macs(module, input_of(args, kwargs), output)

    args, kwargs = split(example_inputs)
    handles = [module.register_forward_hook(count, with_kwargs=True) for module in modules.values()]
    with removing(handles), torch.no_grad(), evaluating(model):
        model(*args, **kwargs)
    return counts


def _macs(module: Any, x: Tensor, output: Tensor) -> int:
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return 0
    weights: int = module.weight.numel()
    if not isinstance(module, _ConvNd):  # a linear layer of any package: its weight may be (in, out)
        return multiplications(output.numel(), weights, output.size(-1))
    return multiplications((x if module.transposed else output).numel(), weights, module.weight.size(0))


def multiplications(values: int, weights: int, channels: int) -> int:
    """Return the multiplications of a layer's output values, each of which meets the weights of one of the channels.

    Of a transposed convolution these are values and channels of the input.

    Example:
        >>> multiplications(values=16 * 8 * 8, weights=16 * 3 * 3 * 3, channels=16)
        27648
    """
    return values * (weights // max(channels, 1))


def stored_bytes(weights: int, spec: QuantSpec | None, scales: int) -> float:
    """Return the bytes of weights: of integers with a float32 for each scale and zero point, or of floats."""
    if spec is None:
        return weights * FLOAT_BITS / 8
    return float(-(-weights * spec.bits // 8) + 4 * scales * (1 if spec.symmetric else 2))


def bit_product(config: QConfig | None) -> int:
    """Return the bits of the weight times the activation's."""
    specs = (None, None) if config is None else (config.weight, config.activation)
    weight, activation = (FLOAT_BITS if spec is None else spec.bits for spec in specs)
    return weight * activation
