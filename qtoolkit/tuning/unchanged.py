"""Checks for methods that transform a float model: it is a float model, and its outputs stay the same."""

import torch
from torch import Tensor, nn

from qtoolkit.graph.capture.trace import check_not_wrapped
from qtoolkit.model_inputs import clone_tensors, split, tensors_of
from qtoolkit.model_state import check_module, evaluating, random_state_kept
from qtoolkit.nn import QuantModule

# Relative to the largest output: a few hundred successive float32 roundings.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


def check_float(model: nn.Module, what: str, do: str) -> None:
    """Raise TypeError, which begins with `what`, unless the model is a float model; `do` is the action to take before."""
    check_module(model, what)
    check_not_wrapped(model, what)
    if any(isinstance(module, QuantModule) for module in model.modules()):
        raise TypeError(f"{what}: the model must be a float model; {do} it before it is prepared or replaced.")


def outputs_of(model: nn.Module, example_inputs: object) -> list[Tensor]:
    """Return the output tensors of a model in eval mode."""
    args, kwargs = split(clone_tensors(example_inputs))
    with torch.no_grad(), random_state_kept(model), evaluating(model):
        return tensors_of(clone_tensors(model(*args, **kwargs)))


def largest_change(before: list[Tensor], after: list[Tensor], what: str) -> float:
    """Return the largest difference of two outputs, relative to the largest magnitude.

    Raises RuntimeError: it is larger than rounding explains; ValueError: the outputs contain NaN and cannot be compared.
    """
    largest = 0.0
    for old, new in zip(before, after, strict=True):
        if bool(old.isnan().any()):
            raise ValueError(
                f"{what}: the model's output contains NaN before any change, so it cannot be compared; pass inputs with finite "
                "outputs."
            )
        differs = old != new  # infinities, as of masks, stay what they are
        if old.is_floating_point() and bool(differs.any()):
            scale = max(float(old.nan_to_num(posinf=0, neginf=0).abs().max()), 1e-30)
            change = float((old[differs].double() - new[differs].double()).abs().max()) / scale
            largest = max(largest, change)
            if not change <= TOLERANCE.get(old.dtype, 2e-2):
                raise RuntimeError(
                    f"{what}: the model's output would change by {change:.1%} of its largest value, so nothing was changed: "
                    "the model uses a tensor in a way that its graph does not show. Exclude the affected layers with skip."
                )
    return largest
