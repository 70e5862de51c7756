"""Parameters with integer grids: their integers, their values, and their ranges."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn

from qtoolkit import ops
from qtoolkit.errors import some
from qtoolkit.foreign import refuse_foreign_quantizers
from qtoolkit.nn import QuantModule, QuantWeighted
from qtoolkit.nn.batch_norm import (
    LinkedBatchNorm,
    QuantFrozenBatchNorm,
    divisor_of,
    rescale_to_bn_factor,
    running_variance,
    step_variance,
)
from qtoolkit.processes import is_sharded, ranks
from qtoolkit.quantizers.quantizer import Quantizer
from qtoolkit.quantizers.spec_ops import clip, per_element, range_of
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer, quantizers_of
from qtoolkit.running import running
from qtoolkit.tuning.rounding.grids import codes_on_grid
from qtoolkit.verdicts import Obstacle
from qtoolkit.wrapped import unwrapped

OTHER_UNITS = (
    "a batch norm multiplies its channels before quantization, and its scale cannot follow the factor of each: give its "
    "QuantSpec axis=0 and scales that are not powers of two"
)


@dataclass(frozen=True)
class GridWeight:
    """A parameter with an integer grid, quantized directly or times the factor of a linked batch norm."""

    layer: Any  # the QuantModule
    attribute: str  # the name of the layer's attribute that is the quantizer
    quantizer: TensorQuantizer  # the quantizer

    @property
    def parameter(self) -> nn.Parameter:
        """The trained parameter. A wrapper or a cast may have replaced it after the last call."""
        layer = self.layer
        weight: nn.Parameter = (
            layer.weight if isinstance(layer, QuantWeighted) else layer.weights_to_quantize()[self.attribute]
        )
        return weight

    @property
    def batch_norm(self) -> LinkedBatchNorm | None:
        """The batch norm that multiplies the parameter before it is quantized, or None."""
        return self.layer.batch_norm if isinstance(self.layer, QuantWeighted) else None

    @property
    def active(self) -> bool:
        """Whether forward quantizes the weight."""
        return self.quantizer.quantizing and self.quantizer.ready

    @property
    def per_channel(self) -> int:
        """The number of elements of an output channel."""
        weight = self.parameter
        channels = self.layer.channels() if isinstance(self.layer, QuantWeighted) else weight.size(0)
        return weight.numel() // channels

    def factor(self, variance: Tensor | None = None) -> Tensor | None:
        """Return the factor of each output channel in this training step, or by a variance; None without a batch norm."""
        bn = self.batch_norm
        if bn is None:
            return None
        return divisor_of(bn, step_variance(running(), self.layer, bn) if variance is None else variance).detach()

    def rescale_to_bn_factor(self, variance: Tensor | None) -> Tensor | None:
        """Return the factor of the next step, by its variance. The scales follow it, as in that step's forward."""
        if variance is not None and self.layer.takes_factor:
            rescale_to_bn_factor(running(), self.layer, self.layer.batch_norm, variance, frozen=True)
        return self.factor(variance)

    @property
    def keeps_units(self) -> bool:
        """Whether the grid is the same in units of the parameter in each step."""
        if self.batch_norm is None or isinstance(self.batch_norm, QuantFrozenBatchNorm):
            return True
        takes_factor: bool = self.layer.takes_factor
        return takes_factor and self.quantizer.scale.numel() == self.layer.channels()

    def scaled(self, weight: Tensor, factor: Tensor | None) -> Tensor:
        """Multiply each output channel of a tensor like the parameter by its factor."""
        scaled: Tensor = weight if factor is None else self.layer.scale_output_channels(weight, factor)
        return scaled

    def take_range(self, quantized: Tensor) -> None:
        """Set a range that follows the weight to the range of the quantized tensor, like the next training forward."""
        if self.quantizer.training and self.quantizer.follows:
            self.quantizer.follow(quantized)

    def values(self, codes: Tensor) -> Tensor:
        """Dequantize integers, in the dtype of the scale."""
        q, spec = self.quantizer, self.quantizer.spec
        scale = q.scale
        return ops.dequantize(codes, scale, q.zero_point, spec.axis, q.group, spec.block_size, scale.dtype)

    def store(self, codes: Tensor, where: Tensor, factor: Tensor | None) -> None:
        """Set elements of the parameter so that their quantized values are these integers."""
        values = self.scaled(self.values(codes), None if factor is None else factor.reciprocal())
        weight = self.parameter
        weight.copy_(torch.where(where, values.to(weight.dtype), weight))

    def error(self) -> Tensor:
        """Return clip(w, the grid's range) - Q(w), of the parameter's shape and in its units.

        Gradients flow to the parameter if it is in the range; the grid and Q(w) are constants.
        """
        factor = self.factor()
        x = self.scaled(self.parameter, factor)
        with torch.no_grad():
            self.take_range(x)
            values = self.values(codes_on_grid(self.quantizer, x))
            q, spec = self.quantizer, self.quantizer.spec
            bounds = range_of(spec, q.scale, q.zero_point)
            low, high = (per_element(bound, x, spec, q.group).to(values.dtype) for bound in bounds)
        error = clip(x.to(values.dtype), low, high) - values
        return self.scaled(error, None if factor is None else factor.reciprocal())


def weights_on_grids(
    model: nn.Module, max_bits: int, what: str, in_units: bool = False
) -> tuple[dict[str, GridWeight], dict[str, str]]:
    """Return the weights with integer grids, each once, by the first name of the parameter; and the reasons for skipped ones.

    `in_units` skips weights with a grid that, in units of the parameter, changes with a batch norm.

    Raises ValueError: there is none; TypeError: the quantizers belong to `qtoolkit.compat.pytorch_quantization`.
    """
    model = unwrapped(model)
    found: dict[str, GridWeight] = {}
    skipped: dict[str, str] = {}
    owners: dict[int, str] = {}
    for name, layer in model.named_modules():
        for attribute, (quantizer, _) in layer.quantized_weights().items() if isinstance(layer, QuantModule) else ():
            place = ".".join(part for part in (name, layer.weight_name(attribute)) if part)
            weight = _grid_weight(layer, attribute, quantizer, max_bits, in_units, owners)
            if isinstance(weight, Obstacle):
                skipped[place] = weight.why
            else:
                found[place], owners[id(weight.parameter)] = weight, place
    for name, quantizer in quantizers_of(model).items():
        if quantizer.of_weight and quantizer.inserted:
            skipped[name] = "it quantizes the weight of a function; use a layer, which owns its weight"
    if not found:
        refuse_foreign_quantizers(model, what)
        raise ValueError(f"{what}: the model has no weight with an integer grid{_remedy(skipped, max_bits)}")
    return found, skipped


def _grid_weight(
    layer: QuantModule, attribute: str, quantizer: Quantizer, max_bits: int, in_units: bool, owners: Mapping[int, str]
) -> GridWeight | Obstacle:
    """Return a weight with an integer grid, or the reason why it is skipped."""
    spec = quantizer.spec
    if not isinstance(quantizer, TensorQuantizer):
        return Obstacle("it is converted, so it is not trained")
    if quantizer.capability.bits is None or not quantizer.capability.direct:
        return Obstacle(f"it is quantized as {spec.describe()}, which is not a plain integer grid")
    if spec.bits > max_bits:
        return Obstacle(f"it has {spec.bits} bits, more than max_bits={max_bits}")
    weight = GridWeight(layer, attribute, quantizer)
    if not isinstance(weight.parameter, nn.Parameter):
        return Obstacle("it is computed from others (pruned or parametrized); make it plain with torch.nn.utils first")
    if is_sharded(weight.parameter):
        return Obstacle("it is sharded over processes; train in DistributedDataParallel instead of fully_shard")
    if id(weight.parameter) in owners:
        return Obstacle(f"it is the same parameter as {owners[id(weight.parameter)]}")
    return Obstacle(OTHER_UNITS) if in_units and not weight.keeps_units else weight


def _remedy(skipped: Mapping[str, str], max_bits: int) -> str:
    if not skipped:
        return (
            "; pass the result of qtoolkit.prepare or qtoolkit.quant_modules.replace, with a QuantSpec for weights in its "
            "QConfigMapping."
        )
    reasons = some([f"{name}: {why}" for name, why in skipped.items()], most=3)
    return (
        f" of at most max_bits={max_bits} bits ({reasons}). Raise max_bits, or give the layers a weight spec of few bits with "
        f"quantizer='lsq' or 'fixed' in the QConfigMapping."
    )


def shared_variances(weights: Sequence[GridWeight]) -> list[Tensor | None]:
    """Return the running variances by which batch norms scale the weights in the next forward; None without a batch norm.

    In a process group they are the variances of rank 0, which DistributedDataParallel broadcasts before the next forward.
    """
    norms = [weight.batch_norm for weight in weights]
    own = [None if bn is None else running_variance(bn) for bn in norms]
    present = [variance for variance in own if variance is not None]
    if ranks() == 1 or not present:
        return list(own)
    flat = torch.cat([variance.double() for variance in present])
    distributed.broadcast(flat, src=0)
    parts = iter(torch.split(flat, [variance.numel() for variance in present]))
    return [None if variance is None else next(parts).to(variance.dtype) for variance in own]
