"""The layers with choices, and the costs of choices."""

from dataclasses import dataclass
from typing import Self

from torch import nn

from qtoolkit.config import QConfig, QuantSpec
from qtoolkit.errors import shown
from qtoolkit.layer_rules import LayerRules, Rule
from qtoolkit.op_kinds.table import kind_of_type
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer
from qtoolkit.report.layer_costs import LAYERS, stored_bytes


@dataclass(frozen=True)
class Layer:
    """A layer with a choice.

    Attributes:
        name: Its dotted name.
        kind: Its kind of op.
        weights: The number of its weights.
        macs: Multiplications with a weight in a forward of the example inputs, over all its calls.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).eval()
        >>> bits = {f"w{n}": qt.QConfig(qt.QuantSpec(), qt.QuantSpec(bits=n, axis=0)) for n in (4, 8)}
        >>> search = qt.tuning.mixed_precision.MixedPrecision(model, torch.zeros(1, 8), bits, backend="tensorrt")
        >>> search.layers["2"]
        Layer(name='2', kind='linear', weights=64, macs=64)
    """

    name: str
    kind: str
    weights: int
    macs: int

    @classmethod
    def of(cls, name: str, module: nn.Module, macs: int) -> Self:
        """Return the record of a layer of the float model."""
        return cls(name, str(kind_of_type(LAYERS[type(module)])), module.get_parameter("weight").numel(), macs)


def own_config(rules: LayerRules, module: nn.Module, config: QConfig | None) -> QConfig | None:
    """Return the config of a choice for a layer: completed by the backend, with the axis of the layer's weight."""
    config = rules.completed(config)
    if config is None:
        return None
    return QConfig(config.activation, rules.weight_spec(Rule(config, "global"), kind_of_type(LAYERS[type(module)])))


def weight_quantizer_of(module: nn.Module, spec: QuantSpec, name: str) -> TensorQuantizer:
    """Return the weight quantizer of the QAT form of a float layer, with the weight's range."""
    layer = LAYERS[type(module)].from_float(module, spec, name)
    (quantizer,) = layer.weight_quantizers().values()
    if not isinstance(quantizer, TensorQuantizer):
        raise TypeError(f"layer {name!r}: a new weight quantizer must be a TensorQuantizer, got {shown(quantizer)}.")
    return quantizer


def size_of(module: nn.Module, config: QConfig | None, name: str) -> float:
    """Return the bytes of a layer's quantized weight, with a float32 for each scale and zero point."""
    weights = module.get_parameter("weight").numel()
    spec = None if config is None else config.weight
    return stored_bytes(weights, spec, 0 if spec is None else weight_quantizer_of(module, spec, name).scale.numel())
