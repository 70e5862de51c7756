"""The errors of a TensorQuantizer, which begin with its name."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qtoolkit.quantizers.quantizer import spec_fields
from qtoolkit.running import Run

if TYPE_CHECKING:
    from qtoolkit.quantizers.ranged import RangedQuantizer


def not_finite(quantizer: "RangedQuantizer", verb: str) -> ValueError:
    """Return the error for NaN or infinities that a quantizer has got or observed."""
    of_weight = "the weight, or the batch norm that scales it, has them"
    source = of_weight if quantizer.of_weight else "the layer before it returns them"
    large = ", or values of 8.5e37 or more, which a histogram does not count" * (quantizer.spec.observer == "histogram")
    return ValueError(f"quantizer {quantizer.name!r} {verb} NaN or infinities{large}: {source}, or the data has.")


def check_finite(quantizer: "RangedQuantizer", x: Tensor) -> None:
    """Raise ValueError if `stopping` is set, and x has NaN or infinities."""
    if quantizer.stopping and not bool(torch.isfinite(x).all()):
        raise not_finite(quantizer, "got")


def check_type(quantizer: "RangedQuantizer", x: Tensor) -> None:
    """Raise TypeError for other numbers than floats, which have no range; a graph without example inputs may take any."""
    if x.is_floating_point():
        return
    remedy = "pass its real part" if x.is_complex() else "pass it with .to(torch.float32)"
    if quantizer.inserted:
        what = "complex inputs" if x.is_complex() else "a mask"
        remedy += f", or give {what} in the example_inputs of qtoolkit.prepare, which then leaves it as it is"
    raise TypeError(
        f"quantizer {quantizer.name!r} gets a tensor of {x.dtype}, and quantizes floating-point values; {remedy}."
    )


def check_not_recomputing(run: Run, name: str) -> None:
    """Raise RuntimeError if the quantizer of this name would observe an input of the forward a second time."""
    if run.recomputes:
        raise RuntimeError(
            f"quantizer {name!r} observes in a forward that gradient checkpointing recomputes, so that its range, and the "
            f"gradients, would differ from the first forward's. Calibrate before training and set observing=False, "
            f"as qtoolkit.freeze_ranges(model, 'activations') does, or do not checkpoint this part of the model."
        )


def check_not_transformed(run: Run, name: str) -> None:
    """Raise NotImplementedError if the range of the quantizer of this name would change under a transform."""
    if run.transformed:
        raise NotImplementedError(
            f"quantizer {name!r} changes its range in this forward, which the transforms of torch.func (vmap, grad) and "
            f"forward-mode AD do not support; call model.eval() or qtoolkit.freeze_ranges(model) before. For gradients, use "
            f"torch.autograd.grad or backward, with torch.func.functional_call to pass parameters in."
        )


def not_ready(quantizer: "RangedQuantizer") -> RuntimeError:
    """Return the error for a quantizer without a range to quantize with."""
    way = "qtoolkit.tuning.QuantizationSchedule(model, observe=100)"
    steps = f", or find it in the first steps of the training with {way}" if quantizer.training else ""
    return RuntimeError(
        f"quantizer {quantizer.name!r} has no range yet: call qtoolkit.calibrate(model, batches) first{steps}, or switch it "
        f"off with qtoolkit.disable_quantization(model)."
    )


def check_spec(quantizer: "RangedQuantizer") -> None:
    """Raise ValueError if the spec has other integers than the scale and the observer were made for."""
    differing = quantizer.differing({"spec": spec_fields(quantizer.made_for)})
    if differing is not None:
        raise ValueError(
            f"quantizer {quantizer.name!r}: its spec was changed (made for {differing}), and its scale and its observer were "
            f"not; give the layer another spec by QConfigMapping.set_module_name, and prepare the float model again."
        )
