"""Quantizers of weights: one builder for layers and for functions that take a weight."""

from torch import Tensor, nn

from qtoolkit.config import QuantSpec
from qtoolkit.processes import whole
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer


def weight_quantizer(
    weight: Tensor, spec: QuantSpec, layer: str, group: int = 1, name: str | None = None, *, inserted: bool = False
) -> TensorQuantizer:
    """Return a new quantizer of a weight, on the weight's device and with the weight's range.

    A learned scale of a parameter that is not trained (`requires_grad_(False)`) is not trained either.
    A weight on the meta device has no range, and its quantizer then has none either. Errors name the layer, and the
    quantizer's errors its own name, by default `layer` + ".weight_quantizer". Raises ValueError if the axis or the
    group_size does not fit the weight.

    Example:
        >>> weight_quantizer(torch.ones(6, 64), QuantSpec(axis=1, group_size=32), "fc").scale.shape
        torch.Size([6, 2])
    """
    if spec.group_size is not None:
        group = 1
    try:
        shape = spec.scale_shape(weight.shape, group)
    except ValueError as error:
        raise ValueError(f"layer {layer!r}: {error}") from None
    name = f"{layer}.weight_quantizer" if name is None else name
    quantizer = TensorQuantizer(spec, shape, group, name, of_weight=True, inserted=inserted).to(weight.device)
    set_weight_range(quantizer, weight)
    if isinstance(weight, nn.Parameter) and not weight.requires_grad:  # what is not trained keeps its grid
        quantizer.requires_grad_(False)
    return quantizer


def set_weight_range(quantizer: TensorQuantizer, weight: Tensor, trained: Tensor | None = None) -> None:
    """Set a quantizer's range to a weight's present range; a weight on the meta device leaves it unchanged.

    A learned scale is trained as if it were the scale of `trained`, the parameter, where a batch norm multiplies it.
    """
    if weight.device.type == "meta":
        return
    weight, trained = whole(weight), None if trained is None else whole(trained)
    quantizer.observer.reset()
    quantizer.observer(weight)
    quantizer.load_observed()
    quantizer.set_weight_rate(weight, weight if trained is None else trained)
