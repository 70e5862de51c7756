"""Why a layer cannot compute on the codes of its inputs: the rules that training and the kernels of runtimes share."""

from typing import TYPE_CHECKING

from qtoolkit.quantizers.capability import Capability
from qtoolkit.verdicts import Cause, Refusal

if TYPE_CHECKING:
    from qtoolkit.nn.weighted import QuantWeighted

NO_GRID = Refusal(Cause.INPUT_CODES, "its inputs are on no grid, or on several")
NOT_DIRECT = Refusal(Cause.INPUT_CODES, "its inputs are shaped before they are rounded, or have scales of their own")
NO_BYTES = Refusal(Cause.INPUT_CODES, "its inputs have no codes of one byte and one scale")
NO_INTEGERS = Refusal(Cause.WEIGHT_CODES, "its weight is not on a grid of integers of at most 8 bits")
ZERO_POINT = Refusal(Cause.WEIGHT_CODES, "its weight has a zero point")
OTHER_AXIS = Refusal(Cause.WEIGHT_CODES, "its weight's scales do not run along its output channels")


def refusal_of(layer: "QuantWeighted", weight: Capability, source: Capability | None) -> Refusal | None:
    """Return why a layer has no sums of products of codes with one step for each output channel; None where it has.

    Args:
        layer: The layer.
        weight: What the codes of its weight are.
        source: What the codes of its inputs are; None for inputs on no grid.
    """
    return refusal_of_inputs(source) or refusal_of_weight(layer, weight)


def refusal_of_inputs(source: Capability | None) -> Refusal | None:
    """Return why inputs have no codes of one byte and one scale; None where they have."""
    if source is None:
        return NO_GRID
    if not source.direct:
        return NOT_DIRECT
    return None if source.codes else NO_BYTES


def refusal_of_weight(layer: "QuantWeighted", weight: Capability) -> Refusal | None:
    """Return why no sums of products with the codes of a layer's weight have one step for each output channel."""
    if not weight.sums:
        return NO_INTEGERS
    if weight.zero_point:
        return ZERO_POINT
    return None if layer.scales_along_outputs() else OTHER_AXIS
