"""The frozen form of a TensorQuantizer, which takes its place in a converted model."""

from typing import TYPE_CHECKING

import torch

from qtoolkit.quantizers.checks import check_spec
from qtoolkit.quantizers.frozen import DynamicActivation, Grid, ShapedActivation, check_scale

if TYPE_CHECKING:
    from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer


def frozen_form(quantizer: "TensorQuantizer") -> Grid | DynamicActivation | ShapedActivation:
    """Return a Grid with the present scale, and with the shape function of the quantizer, if it has one. It is off if this is.

    Raises:
        RuntimeError: It has no range.
        ValueError: A scale is not positive and finite, or the spec was exchanged for one with other integers.
    """
    kind, name, inserted = quantizer.kind, quantizer.name, quantizer.inserted
    if not quantizer.ready:
        raise RuntimeError(
            f"quantizer {name!r} saw no data, so it has no scale: call qtoolkit.calibrate(model, batches) on data "
            f"that reaches it, or leave its layer in float by the QConfigMapping."
        )
    check_spec(quantizer)
    if quantizer.dynamic:
        dynamic = DynamicActivation(quantizer.spec, quantizer.group, name, of_weight=False, inserted=inserted)
        dynamic.quantizing = quantizer.active
        return dynamic
    scale, zero_point, spec, of_weight = quantizer.scale, quantizer.zero_point, quantizer.grid_spec, quantizer.of_weight
    check_scale(name, scale, spec)
    if zero_point is not None:
        zero_point = zero_point.clamp(spec.qmin, spec.qmax)
    with torch.no_grad():
        shape = kind.shape(quantizer).to(scale.device) if kind.shapes(quantizer.spec) else None
    grid = Grid(
        scale.clone(),
        zero_point,
        spec,
        quantizer.group,
        name=name,
        of_weight=of_weight,
        inserted=inserted,
        shape=shape if of_weight else None,
    )
    grid.quantizing, grid.weight_codes = quantizer.active, quantizer.weight_codes
    return grid if shape is None or of_weight else ShapedActivation(shape, grid)
