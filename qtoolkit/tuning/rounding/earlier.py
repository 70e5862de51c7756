"""Detect changes by earlier methods, after which a model without quantizers differs from the float model."""

from collections.abc import Iterable, Mapping

from torch import nn

from qtoolkit.errors import some, warn
from qtoolkit.nn.rounded import corrected_in, rounded_in

ANEW = "use a new model from qtoolkit.prepare or qtoolkit.quant_modules.replace"


def warn_before_rounding(model: nn.Module, names: Iterable[str], what: str) -> None:
    """Warn about layers with weights or biases changed by an earlier method; the message begins with `what`."""
    layers = {name: model.get_submodule(name) for name in names}
    rounded = rounded_in(layers)
    if rounded:
        warn(
            f"{what}: the weights of {some(rounded)} are already rounded (qtoolkit.tuning.reconstruct or gptq): their float "
            f"values are lost, and they do not change. To choose their rounding again, {ANEW}.",
        )
    corrected = corrected_in(layers)
    if corrected:
        warn(
            f"{what}: qtoolkit.tuning.bias_correction has changed the biases of {some(corrected)} for weights that are "
            f"rounded to nearest. They do not fit another rounding. Before you choose the rounding, {ANEW}.",
        )


def warn_before_correction(layers: Mapping[str, nn.Module]) -> None:
    """Warn, before a correction of biases, about layers with weights rounded by an earlier method."""
    rounded = rounded_in(layers)
    if rounded:
        warn(
            f"bias_correction: the weights of {some(rounded)} are already rounded (qtoolkit.tuning.reconstruct or gptq), and "
            "the target means are computed with them, so only shifts by activations are corrected. Apply it to models with "
            "weights that are rounded to nearest.",
        )
