"""Layers with a batch norm after them, which folds into weight and bias."""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from qtoolkit.nn import batch_norm
from qtoolkit.nn.batch_norm import LinkedBatchNorm, QuantFrozenBatchNorm
from qtoolkit.nn.computed_weights import bake, mask
from qtoolkit.nn.hooks import is_watched
from qtoolkit.nn.layer_op import LayerOp
from qtoolkit.nn.module import QuantModule
from qtoolkit.processes import whole
from qtoolkit.quantizers.quantizer import Quantizer
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer
from qtoolkit.running import running
from qtoolkit.unregistered import Unregistered


class FoldsBatchNorm(LayerOp, QuantModule):
    """A layer that may be linked to the batch norm after it: its weight is then quantized as folding would scale it."""

    _linked_batch_norm: Unregistered[LinkedBatchNorm] | None = None
    _holds_batch_norm: bool = False  # linked or folded
    _holds_batch_norm_before: bool = False  # one of its input, folded

    @property
    def batch_norm(self) -> LinkedBatchNorm | None:
        """The batch norm after the layer, which conversion folds, or None. It keeps its place in the model."""
        return None if self._linked_batch_norm is None else self._linked_batch_norm.value

    def link_batch_norm(self, bn: LinkedBatchNorm) -> None:
        """Quantize the weight as folding this batch norm scales it."""
        self._linked_batch_norm, self._holds_batch_norm = Unregistered(bn), True
        quantizer = self.weight_quantizer
        if isinstance(quantizer, TensorQuantizer) and quantizer.takes_any_scale and self.scales_along_outputs():
            quantizer.follow_factor()
        self.reset_weight_range()

    def replace_batch_norm(self, bn: nn.Module, name: str) -> LinkedBatchNorm:
        """Link to another batch norm, of this dotted name, instead; return it as LinkedBatchNorm."""
        old = self.batch_norm
        if old is None:
            raise ValueError(f"batch norm {name!r} takes the place of none: its layer is linked to no batch norm.")
        new = batch_norm.linked(bn, old.strategy, name)
        new.frozen = old.frozen
        self._linked_batch_norm = Unregistered(new)
        return new

    def fold_batch_norm(self, bn: nn.Module) -> None:
        """Fold a batch norm's running statistics, scale and shift into weight and bias; the caller removes the batch norm.

        A pruned weight stays pruned. Other weights that a hook or a parametrization computes become plain parameters.
        """
        masks = bake(self)
        factor = batch_norm.factor_of(bn).detach()
        weight = self.scale_output_channels(self.weight.detach(), factor)
        self._set_folded(weight, batch_norm.folded_bias(bn, self.bias, factor).detach(), masks)
        self._linked_batch_norm, self._holds_batch_norm = None, True

    def fold_batch_norm_before(self, bn: nn.Module) -> None:
        """Fold a batch norm of the input, as `fold_batch_norm` does one of the output; `takes_affine` must hold."""
        masks = bake(self)
        factor, weight = batch_norm.factor_of(bn).detach(), self.weight.detach()
        shift = batch_norm.folded_bias(bn, None, factor).detach()
        bias = self.sum_per_output(self.scale_input_channels(weight, shift))
        bias = bias if self.bias is None else bias + self.bias.detach()
        self._set_folded(self.scale_input_channels(weight, factor), bias, masks)
        self._holds_batch_norm_before = True

    def _set_folded(self, weight: Tensor, bias: Tensor, masks: Mapping[str, Tensor]) -> None:
        dtype = self.weight.dtype  # a batch norm may be in float32 after a layer in half precision
        self.weight = nn.Parameter(weight.to(dtype), self.weight.requires_grad)
        self.bias = nn.Parameter(bias.to(dtype), self.weight.requires_grad)
        mask(self, masks)

    def why_batch_norm_stays(self) -> str | None:
        """Return why no batch norm can be linked, or folded; None if one can."""
        quantizer = self.weight_quantizer
        if not isinstance(quantizer, TensorQuantizer) or quantizer.kind.KEEPS_SIZE:
            return None
        return f"quantizer={quantizer.spec.quantizer!r} gives all weights the size of 1"

    def depends_on(self) -> Sequence[nn.Module]:
        return () if self.batch_norm is None else (self.batch_norm,)

    def effective_weight(self) -> Tensor:
        """Return the tensor that is quantized in eval mode: the weight, scaled by the linked batch norm's nonzero factors."""
        if self.batch_norm is None:
            return self.weight  # type: ignore[no-any-return]  # a Parameter
        return self.scale_output_channels(whole(self.weight), batch_norm.divisor_of(self.batch_norm))

    def trained_weights(self) -> Mapping[str, Tensor]:
        """Return the weight, if a linked batch norm multiplies it."""
        return {} if self.batch_norm is None else {"weight_quantizer": self.weight}

    def _scaled(self, weight: Tensor, factor: Tensor | None) -> Tensor:
        return weight if factor is None else self.scale_output_channels(weight, factor)

    @property
    def weight_quantizer_active(self) -> bool:
        """Whether the weight's quantizer, or a hook on it, does anything with the weight in a forward."""
        quantizer = self.weight_quantizer
        return not isinstance(quantizer, Quantizer) or quantizer.active or is_watched(quantizer)

    def _followed(self, factor: Tensor | None) -> Tensor:
        """Return the tensor that gives a range its values in this forward, if the range follows the weight.

        In eval mode it is convert's: a factor of zero leaves no range, and the bias is rounded in steps of the scale.
        """
        if not self.training:
            return self.effective_weight().detach()
        return self._scaled(self.weight.detach(), None if factor is None else factor.detach())

    # ---- scales in units of the weight

    @property
    def takes_factor(self) -> bool:
        """Whether the weight's scales are in units of the weight, as the papers train them.

        The weight is quantized times the factor of a linked batch norm. In each training step, scales of any value
        follow the change of the factor: a scale for each output channel follows its channel, one for all follows the
        root of the mean square.
        """
        quantizer, bn = self.weight_quantizer, self.batch_norm
        constant = bn is None or isinstance(bn, QuantFrozenBatchNorm)
        return not constant and isinstance(quantizer, TensorQuantizer) and quantizer.follows_factor

    def rescale_to_bn_factor(self, frozen: bool = False) -> None:
        """Let scales in units of the weight take the factor of the present running statistics, with frozen ranges too."""
        bn = self.batch_norm
        if bn is not None and self.takes_factor and not bn.running_var.is_meta:
            batch_norm.rescale_to_bn_factor(running(), self, bn, bn.running_var, frozen=frozen)

    def follow_weights(self) -> None:
        """Set the range as in the class above, after the scales have taken the factor of the running statistics."""
        self.rescale_to_bn_factor()
        super().follow_weights()
