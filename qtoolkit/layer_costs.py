"""The layers that get a choice, and what a choice costs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from qtoolkit.config import QConfig, QuantSpec
from qtoolkit.layer_rules import LayerRules, Rule
from qtoolkit.model_inputs import split
from qtoolkit.model_state import evaluating, removing
from qtoolkit.nn import QAT_MODULES
from qtoolkit.nn.weighted import QuantWeighted
from qtoolkit.op_kinds.table import kind_of_type
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer
from qtoolkit.shared_modules import first_names

LAYERS = {float_type: qat for float_type, qat in QAT_MODULES.items() if issubclass(qat, QuantWeighted)}
FLOAT_BITS = 32


@dataclass(frozen=True)
class Layer:
    """A layer that gets a choice.

    Attributes:
        name: Its dotted name.
        kind: Its kind of op.
        weights: The number of its weights.
        macs: Multiplications with a weight in a forward of the example inputs, by all its calls.
    """

    name: str
    kind: str
    weights: int
    macs: int

    @classmethod
    def of(cls, name: str, module: nn.Module, macs: int) -> Self:
        """Return what there is to know of a layer of the float model."""
        return cls(name, str(kind_of_type(LAYERS[type(module)])), module.get_parameter("weight").numel(), macs)


def layers_of(model: nn.Module) -> dict[str, Any]:
    """Return the layers with one weight, by the first of their names."""
    return {name: module for module, name in first_names(model).items() if type(module) in LAYERS}


def input_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the input of a layer from the arguments of its call."""
    return args[0] if args else kwargs.get("input")


def count_macs(model: nn.Module, modules: Mapping[str, Any], example_inputs: Any) -> dict[str, int]:
    """Return the multiplications with a weight of each layer, in one forward."""
    counts = dict.fromkeys(modules, 0)
    names = {module: name for name, module in modules.items()}

    def count(module: Any, args: Any, kwargs: Any, output: Tensor) -> None:
        counts[names[module]] += _macs(module, input_of(args, kwargs), output)

    args, kwargs = split(example_inputs)
    handles = [module.register_forward_hook(count, with_kwargs=True) for module in modules.values()]
    with removing(handles), torch.no_grad(), evaluating(model):
        model(*args, **kwargs)
    return counts


def _macs(module: Any, x: Tensor, output: Tensor) -> int:
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return 0
    if isinstance(module, nn.Linear):
        return output.numel() * int(module.in_features)
    elements = x if module.transposed else output  # each meets the weights of one channel
    each: int = module.weight.numel() // module.weight.size(0)
    return elements.numel() * each


def own_config(rules: LayerRules, module: nn.Module, config: QConfig | None) -> QConfig | None:
    """Return a choice as a rule by the layer's name has it: with the axis of its own weight."""
    if config is None:
        return None
    return QConfig(config.activation, rules.weight_spec(Rule(config, "global"), kind_of_type(LAYERS[type(module)])))


def weight_quantizer_of(module: nn.Module, spec: QuantSpec, name: str) -> TensorQuantizer:
    """Return the quantizer that the QAT form of a float layer has for its weight, with the weight's range."""
    layer = LAYERS[type(module)].from_float(module, spec, name)
    (quantizer,) = layer.weight_quantizers().values()
    if not isinstance(quantizer, TensorQuantizer):
        raise TypeError(f"layer {name!r}: a new weight quantizer must be a TensorQuantizer, got {quantizer!r}.")
    return quantizer


def size_of(module: nn.Module, config: QConfig | None, name: str) -> float:
    """Return the bytes of the codes of a layer's weight, with a float32 for each scale and zero point."""
    weights = module.get_parameter("weight").numel()
    spec = None if config is None else config.weight
    return stored_bytes(weights, spec, 0 if spec is None else weight_quantizer_of(module, spec, name).scale.numel())


def stored_bytes(weights: int, spec: QuantSpec | None, scales: int) -> float:
    """Return the bytes of weights: of codes with a float32 for each scale and zero point, or of floats."""
    if spec is None:
        return weights * FLOAT_BITS / 8
    return float(-(-weights * spec.bits // 8) + 4 * scales * (1 if spec.symmetric else 2))


def bit_product(config: QConfig | None) -> int:
    """Return the bits of the weight times those of the activation."""
    specs = (None, None) if config is None else (config.weight, config.activation)
    weight, activation = (FLOAT_BITS if spec is None else spec.bits for spec in specs)
    return weight * activation
