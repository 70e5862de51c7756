"""What all layers with a quantized weight share: batch norm, folding, and the road from float and back."""

from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from qtoolkit import ops
from qtoolkit.config import QuantSpec
from qtoolkit.frozen import Grid
from qtoolkit.quantizer import TensorQuantizer


def batch_norm_factor(bn: _BatchNorm) -> Tensor:
    """Return gamma / sqrt(running_var + eps), by which a batch norm in eval mode scales each channel."""
    if bn.running_var is None or bn.running_mean is None:
        raise ValueError("a batch norm without running statistics cannot be folded; set track_running_stats=True.")
    variance = ops.snapshot(bn.running_var) if torch.compiler.is_compiling() else bn.running_var
    factor = torch.rsqrt(variance + bn.eps)
    return factor if bn.weight is None else bn.weight * factor


class QuantWeighted(nn.Module):
    """A layer with a weight that is fake-quantized in forward; mixed into torch's own class.

    With a batch norm linked (training), the weight is scaled by gamma / sqrt(running_var + eps) before it is quantized, as
    it will be when the batch norm is folded, and the output is scaled back before it goes on to the real batch norm, which
    stays in its place in the model (one convolution with un-scaling; MQBench's strategy 4, arXiv 2111.03759).

    Attributes:
        weight_quantizer: Quantizer of the weight (a Grid once converted), or None.
        input_quantizer: Quantizer of the input where no graph pass inserts one, or None.
    """

    FLOAT: ClassVar[type[nn.Module]]

    weight: Any  # a Parameter, and a Parameter or None; torch's own classes declare them each in its way
    bias: Any
    weight_quantizer: TensorQuantizer | Grid | None
    input_quantizer: TensorQuantizer | Grid | None
    _batch_norm: tuple[_BatchNorm, ...]

    @classmethod
    def from_float(cls, module: nn.Module, weight: QuantSpec | None, name: str = "") -> Self:
        """Build the QAT layer of a float layer; it takes over the parameters themselves, hooks and mode.

        Args:
            module: The float layer, of exactly the type `FLOAT`.
            weight: Spec of the weight; its axis is the weight's own axis.
            name: What errors call the layer.

        Raises:
            TypeError: The layer is of another type.
            ValueError: The spec's axis or group_size does not fit the weight.
        """
        if type(module) is not cls.FLOAT:
            raise TypeError(f"{cls.__name__}.from_float takes a {cls.FLOAT.__name__}, got {type(module).__name__}.")
        layer = cls.__new__(cls)
        layer.__dict__.update({k: dict(v) if isinstance(v, dict) else v for k, v in module.__dict__.items()})
        layer._init_quantizers(weight, name)
        return layer

    def _init_quantizers(self, weight: QuantSpec | None, name: str) -> None:
        self._batch_norm = ()
        self.input_quantizer = None
        self.weight_quantizer = None
        if weight is None:
            return
        group = self.scale_groups(weight.axis) if weight.group_size is None else 1
        dims = self.weight.dim()
        if weight.axis is not None and not -dims <= weight.axis < dims:
            raise ValueError(
                f"layer {name!r}: the axis of a weight of {dims} dimensions must lie in [{-dims}, {dims - 1}], got "
                f"{weight.axis}."
            )
        try:
            shape = weight.scale_shape(self.weight.shape, group)
        except ValueError as error:
            raise ValueError(f"layer {name!r}: {error}") from None
        self.weight_quantizer = TensorQuantizer(weight, shape, group, f"{name}.weight_quantizer")
        self.weight_quantizer.to(self.weight.device)
        self.reset_weight_range()

    def to_float(self) -> nn.Module:
        """Return the float layer with the same parameters."""
        layer = self.FLOAT.__new__(self.FLOAT)
        layer.__dict__.update({k: dict(v) if isinstance(v, dict) else v for k, v in self.__dict__.items()})
        for name in ("weight_quantizer", "input_quantizer"):
            layer._modules.pop(name, None)
            layer.__dict__.pop(name, None)
        layer.__dict__.pop("_batch_norm")
        return layer

    # ---- batch norm

    @property
    def batch_norm(self) -> _BatchNorm | None:
        """The batch norm that follows and will be folded, or None. It stays where it is in the model."""
        return self._batch_norm[0] if self._batch_norm else None

    def link_batch_norm(self, bn: _BatchNorm) -> None:
        """Quantize the weight as it will be once this batch norm is folded."""
        self._batch_norm = (bn,)  # in a tuple, so that its parameters keep their one name in the state dict
        self.reset_weight_range()

    def fold_batch_norm(self, bn: _BatchNorm) -> None:
        """Put a batch norm's eval-mode scaling and shift into weight and bias; the caller removes it."""
        factor = batch_norm_factor(bn).detach()
        mean: Tensor = bn.running_mean  # type: ignore[assignment]  # batch_norm_factor has checked it
        shift = torch.zeros_like(mean) if bn.bias is None else bn.bias.detach()
        bias = torch.zeros_like(mean) if self.bias is None else self.bias.detach()
        self.weight = nn.Parameter(self.scale_output_channels(self.weight.detach(), factor), self.weight.requires_grad)
        self.bias = nn.Parameter((bias - mean) * factor + shift, self.weight.requires_grad)
        self._batch_norm = ()

    def output_factor(self) -> Tensor | None:
        """Return the linked batch norm's factor per output channel, or None. Zeros count as 1, to divide by."""
        if not self._batch_norm:
            return None
        factor = batch_norm_factor(self._batch_norm[0])
        return torch.where(factor == 0, torch.ones_like(factor), factor)

    # ---- weight

    def effective_weight(self) -> Tensor:
        """Return the weight as it is quantized: with the linked batch norm's factor."""
        factor = self.output_factor()
        return self.weight if factor is None else self.scale_output_channels(self.weight, factor)

    def reset_weight_range(self) -> None:
        """Set the weight quantizer's range to that of the weight as it is now."""
        quantizer = self.weight_quantizer
        if isinstance(quantizer, TensorQuantizer) and self.weight.device.type != "meta":
            quantizer.observer.reset()
            quantizer.observer(self.effective_weight())
            quantizer.load_observed()

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        """Compute the layer with its quantized input and weight; further arguments as torch's layer takes them."""
        if self.input_quantizer is not None:
            x = self.input_quantizer(x)
        factor = self.output_factor()
        weight = self.weight if factor is None else self.scale_output_channels(self.weight, factor)
        if self.weight_quantizer is not None:
            weight = self.weight_quantizer(weight)
        if factor is None:
            return self.compute(x, weight, self.bias, *args)
        y = self.compute(x, weight, None, *args) / self.along_channels(factor, x.dim())
        return y if self.bias is None else y + self.along_channels(self.bias, x.dim())

    def forward_fp32(self, x: Tensor, *args: Any) -> Tensor:
        """Compute the layer in float, without quantizers (and without the batch norm, as the float layer does)."""
        return self.compute(x, self.weight, self.bias, *args)

    # ---- what a kind of layer has to say

    def compute(self, x: Tensor, weight: Tensor, bias: Tensor | None, *args: Any) -> Tensor:
        """Compute the float layer with this weight and bias."""
        raise NotImplementedError

    def scale_output_channels(self, weight: Tensor, factor: Tensor) -> Tensor:
        """Multiply each output channel of a weight by its factor."""
        return weight * factor.reshape(-1, *[1] * (weight.dim() - 1))

    def along_channels(self, values: Tensor, dims: int) -> Tensor:
        """Shape one value per output channel to broadcast over an output of `dims` dimensions."""
        return values.reshape(-1, *[1] * (self.weight.dim() - 2))

    def scale_groups(self, axis: int | None) -> int:
        """Return the `group` argument of ops on the weight with scales along an axis."""
        return 1
