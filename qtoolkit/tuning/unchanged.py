"""The checks of methods that transform a float model: that it is one, and that it still computes the same outputs."""

import torch
from torch import Tensor, nn

from qtoolkit.graph.capture.trace import check_not_wrapped
from qtoolkit.model_inputs import clone_tensors, split, tensors_of
from qtoolkit.model_state import check_module, evaluating, random_state_kept
from qtoolkit.nn import QuantModule

# Of the largest output: some hundred roundings of float32 in a row.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


def check_float(model: nn.Module, what: str, do: str) -> None:
    """Raise TypeError, which begins with `what` and says what to do to the model, for anything but a float model."""
    check_module(model, what)
    check_not_wrapped(model, what)
    if any(isinstance(module, QuantModule) for module in model.modules()):
        raise TypeError(f"{what}: the model must be a float model; {do} it before it is prepared or replaced.")


def outputs_of(model: nn.Module, example_inputs: object) -> list[Tensor]:
    """Return the tensors that a model returns in eval mode."""
    args, kwargs = split(clone_tensors(example_inputs))
    with torch.no_grad(), random_state_kept(model), evaluating(model):
        return tensors_of(clone_tensors(model(*args, **kwargs)))


def largest_change(before: list[Tensor], after: list[Tensor], what: str) -> float:
    """Return the largest difference of two outputs, as a share of the largest magnitude.

    Raises RuntimeError: it is larger than roundings explain; ValueError: the outputs have NaN, which no change shows in.
    """
    largest = 0.0
    for old, new in zip(before, after, strict=True):
        if bool(old.isnan().any()):
            raise ValueError(
                f"{what}: the model's output has NaN before anything was changed, so that it cannot be compared; pass inputs "
                f"that give finite outputs."
            )
        differs = old != new  # infinities, as of masks, stay what they are
        if old.is_floating_point() and bool(differs.any()):
            scale = max(float(old.nan_to_num(posinf=0, neginf=0).abs().max()), 1e-30)
            change = float((old[differs].double() - new[differs].double()).abs().max()) / scale
            largest = max(largest, change)
            if not change <= TOLERANCE.get(old.dtype, 2e-2):
                raise RuntimeError(
                    f"{what}: the model's output would change by {change:.1%} of its largest value, so nothing was changed: "
                    f"the model uses a tensor in a way that its graph does not show. Leave out the layers concerned by skip."
                )
    return largest
