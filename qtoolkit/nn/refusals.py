"""Why a layer or an op cannot compute in integers: the rules that training and runtimes share."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from qtoolkit.errors import with_article
from qtoolkit.quantizers.capability import NO_CODES, Capability
from qtoolkit.quantizers.quantizer import Quantizer
from qtoolkit.verdicts import Cause, Refusal

if TYPE_CHECKING:
    from qtoolkit.nn.on_codes import Layer
    from qtoolkit.nn.weighted import QuantWeighted

NO_GRID = Refusal(Cause.INPUT_CODES, "its inputs are not quantized, or have different quantizers")
NOT_DIRECT = Refusal(Cause.INPUT_CODES, "its inputs are transformed before rounding, or have dynamic scales")
NO_BYTES = Refusal(Cause.INPUT_CODES, "its inputs are not quantized to integers of at most 8 bits with one scale")
NO_INTEGERS = Refusal(Cause.WEIGHT_CODES, "its weight is not quantized to integers of at most 8 bits")
ZERO_POINT = Refusal(Cause.WEIGHT_CODES, "its weight has a zero point")
OTHER_AXIS = Refusal(Cause.WEIGHT_CODES, "its weight has scales along another axis than the output channels")
FLOAT_OUTPUT = Refusal(Cause.OUTPUT_CODES, "its output is not quantized")
WIDE_OUTPUT = Refusal(Cause.OUTPUT_CODES, "its output is not quantized to integers of at most 8 bits with one scale")
OTHER_ARGUMENTS = Refusal(Cause.CALL, "its arguments are not two tensors")


def refusal_of(layer: "QuantWeighted", weight: Capability, source: Capability | None) -> Refusal | None:
    """Return why a layer has no integer sums with one step for each output channel; None where it has.

    Args:
        layer: The layer.
        weight: How its weight is quantized.
        source: How its inputs are quantized; None for inputs without a quantizer.
    """
    if not layer.OP_KIND.layer:
        return Refusal(Cause.NO_KERNEL, f"there is no integer kernel for {with_article(layer.KIND)}")
    return of_inputs(source) or of_weight(layer, weight)


def of_inputs(*sources: Capability | None) -> Refusal | None:
    """Return why one of several inputs is not quantized to one byte with one scale; None where all are."""
    for source in sources:
        if source is None or source is NO_CODES:
            return NO_GRID
        if not source.codes:
            return NO_BYTES if source.direct else NOT_DIRECT
    return None


def of_weight(layer: "Layer", weight: Capability) -> Refusal | None:
    """Return why integer sums with a layer's weight do not have one step for each output channel."""
    if not weight.sums:
        return NO_INTEGERS
    if weight.zero_point:
        return ZERO_POINT
    return None if layer.scales_along_outputs() else OTHER_AXIS


def of_signs(runtime: str, cause: Cause, *quantizers: Quantizer | None) -> Refusal | None:
    """Return why a runtime without unsigned types does not take these quantizers; None where it takes all."""
    signed = all(quantizer is None or quantizer.spec.signed for quantizer in quantizers)
    return None if signed else Refusal(cause, f"{runtime} has no unsigned types")


def of_signed_layer(
    runtime: str, layer: "QuantWeighted", source: Quantizer, output: Quantizer | None
) -> Refusal | None:
    """Return why a runtime without unsigned types has no integer kernel for a layer between two quantizers."""
    unsigned = of_signs(runtime, Cause.INPUT_CODES, source)
    unsigned = unsigned or of_signs(runtime, Cause.WEIGHT_CODES, layer.weight_quantizer)
    return unsigned or of_signed_output(runtime, output)


def of_signed_op(runtime: str, inputs: Sequence[Quantizer], output: Quantizer | None) -> Refusal | None:
    """Return why a runtime without unsigned types has no integer kernel for an op between quantizers."""
    refusal = of_inputs(*(each.capability_now for each in inputs))
    return refusal or of_signs(runtime, Cause.INPUT_CODES, *inputs) or of_signed_output(runtime, output)


def of_signed_output(runtime: str, output: Quantizer | None) -> Refusal | None:
    """Return why an op's output is not quantized to one signed byte with one scale."""
    return of_output(output) or of_signs(runtime, Cause.OUTPUT_CODES, output)


def of_output(output: Quantizer | None) -> Refusal | None:
    """Return why an op's output is not quantized to one byte with one scale; None where its quantizer does this."""
    if output is None:
        return FLOAT_OUTPUT
    return None if output.capability_now.codes else WIDE_OUTPUT
