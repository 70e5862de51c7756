"""What earlier methods have made of a model: without quantizers it no longer computes the float model."""

from collections.abc import Iterable, Mapping

from torch import nn

from qtoolkit.errors import some, warn
from qtoolkit.nn.rounded import corrected_in, rounded_in

ANEW = "take a new model of qtoolkit.prepare or qtoolkit.quant_modules.replace"


def warn_before_rounding(model: nn.Module, names: Iterable[str], what: str) -> None:
    """Warn, in a sentence that begins with `what`, of layers whose weights or biases an earlier method has changed."""
    layers = {name: model.get_submodule(name) for name in names}
    rounded = rounded_in(layers)
    if rounded:
        warn(
            f"{what}: the weights of {some(rounded)} lie on their codes already, as after qtoolkit.tuning.reconstruct or gptq: "
            f"their float values are lost, and they stay as they are. To choose these codes anew, {ANEW}.",
        )
    corrected = corrected_in(layers)
    if corrected:
        warn(
            f"{what}: qtoolkit.tuning.bias_correction has changed the biases of {some(corrected)} for weights that are rounded "
            f"to nearest. They do not fit other codes. Before you choose codes, {ANEW}.",
        )


def warn_before_correction(layers: Mapping[str, nn.Module]) -> None:
    """Warn of layers whose weights an earlier method has rounded, before biases are corrected."""
    rounded = rounded_in(layers)
    if rounded:
        warn(
            f"bias_correction: the weights of {some(rounded)} lie on their codes already, as after qtoolkit.tuning.reconstruct "
            f"or gptq: the means to reach are those of the rounded weights, so that only shifts by activations are corrected. "
            f"Correct the biases of models whose weights are rounded to nearest.",
        )
