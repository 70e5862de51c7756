"""What earlier methods have made of a model: its layers without quantizers are then no longer those of the float model."""

import warnings
from collections.abc import Iterable, Mapping

from torch import nn

from qtoolkit.errors import some
from qtoolkit.nn import QuantWeighted
from qtoolkit.nn.rounded import is_rounded

ANEW = "take a new model of qtoolkit.prepare or qtoolkit.quant_modules.replace"


def warn_before_rounding(model: nn.Module, names: Iterable[str], what: str) -> None:
    """Warn, in a sentence that begins with `what`, of layers whose weights or biases an earlier method has changed."""
    layers = {name: model.get_submodule(name) for name in names}
    rounded = _rounded(layers)
    if rounded:
        warnings.warn(
            f"{what}: the weights of {some(rounded)} lie on their codes already, as after qtoolkit.tuning.reconstruct or gptq: "
            f"their float values are lost, and they stay as they are. To choose these codes anew, {ANEW}.",
            stacklevel=3,
        )
    corrected = [
        repr(name) for name, layer in layers.items() if isinstance(layer, QuantWeighted) and layer.bias_is_corrected
    ]
    if corrected:
        warnings.warn(
            f"{what}: qtoolkit.tuning.bias_correction has changed the biases of {some(corrected)} for weights that are rounded "
            f"to nearest. They do not fit other codes. Before you choose codes, {ANEW}.",
            stacklevel=3,
        )


def warn_before_correction(layers: Mapping[str, nn.Module]) -> None:
    """Warn of layers whose weights an earlier method has rounded, before biases are corrected."""
    rounded = _rounded(layers)
    if rounded:
        warnings.warn(
            f"bias_correction: the weights of {some(rounded)} lie on their codes already, as after qtoolkit.tuning.reconstruct "
            f"or gptq: the means to reach are those of the rounded weights, so that only shifts by activations are corrected. "
            f"Correct the biases of models whose weights are rounded to nearest.",
            stacklevel=3,
        )


def _rounded(layers: Mapping[str, nn.Module]) -> list[str]:
    """Return the names of the layers whose weights lie on their codes."""
    return [repr(name) for name, layer in layers.items() if is_rounded(layer)]
