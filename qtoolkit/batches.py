"""How a model is called on a batch of data, without the labels that its forward cannot take."""

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import fx, nn

from qtoolkit.errors import shown, warn
from qtoolkit.model_inputs import Args, Kwargs, bind, given_arguments, naming_misfits, split
from qtoolkit.model_state import removing
from qtoolkit.op_kinds.recorded import check_none

LABELS = re.compile(r"label|target|^(start|end)_positions$")  # as transformers' Trainer knows them, and torchvision


def check_batches(what: str, batches: object, forward: object) -> None:
    """Raise TypeError, which begins with `what`, unless these are an iterable of batches, and a function or None."""
    if isinstance(batches, torch.Tensor | str | Mapping) or not isinstance(batches, Iterable):
        raise TypeError(
            f"{what}: batches must be an iterable of batches, such as a list, got {type(batches).__name__}; write "
            f"[batch] for a single one."
        )
    if forward is not None and not callable(forward):
        raise TypeError(f"{what}: forward must be a function of a model and a batch, or None, got {shown(forward)}.")


def not_finite(what: str, values: str) -> ValueError:
    """Return the error of the function `what` for values that are NaN or infinite on one of the batches."""
    return ValueError(
        f"{what}: {values} has NaN or infinities on a batch, from which nothing can be learned; leave this batch out."
    )


def no_batch(what: str) -> ValueError:
    """Return the error of the public function `what` for batches that hold none."""
    return ValueError(f"{what}: batches must hold at least one batch, got none.")


class Caller:
    """Calls models for a public function: model(**batch) for a mapping, model(*batch) for a tuple or list, else model(batch).

    The signature of the model's forward decides whether it takes the labels of a batch. If it takes all but the last item of a
    tuple, or all but the entries of a mapping that are named as labels, these are left out, and a warning says so once.
    """

    def __init__(self, what: str) -> None:
        self.what, self._said = what, False

    def __call__(self, model: nn.Module, batch: object) -> Any:
        """Return model's output for a batch; TypeError for one that does not match the signature of forward."""
        inputs = tuple(batch) if isinstance(batch, list) else batch
        fewer = _without_labels(model, inputs)
        if fewer is not None and not self._said:
            self._said = True
            warn(
                f"{self.what}: {type(model).__name__}.forward({', '.join(taken_arguments(model))}) does not take "
                f"{_difference(inputs, fewer)} of a batch, which is left out as its labels; pass forward=lambda model, batch: "
                f"... to call it otherwise.{_if_fixed(model, inputs)}",
            )
        return self._call(model, inputs if fewer is None else fewer)

    def _call(self, model: nn.Module, inputs: object) -> Any:
        args, kwargs = split(inputs)
        try:
            with naming_misfits(model, inputs, f"{self.what}: a batch does"):
                return model(*args, **kwargs)
        except TypeError:  # not checked before: hooks may change the inputs
            first = repr(next(iter(kwargs), 0))
            remedy = f"; pass forward=lambda model, batch: model(batch[{first}]) with the items that the model takes"
            bind(model, inputs, f"{self.what}: a batch does", remedy)
            raise


def recorded_inputs(model: nn.Module, batch: object, forward: Callable[[nn.Module, Any], object], what: str) -> object:
    """Run a model on a batch by forward(model, batch), without gradients; return what its forward got, as example inputs.

    Raises TypeError, which begins with `what`, for a batch that does not match the signature of the model's forward, ValueError
    where `forward` does not call the model.

    Example:
        >>> recorded_inputs(nn.Linear(1, 2), {"image": torch.ones(1), "label": 3}, lambda m, b: m(b["image"]), "quantize")
        (tensor([1.]),)
    """
    calls: list[tuple[Args, Kwargs]] = []
    handle = model.register_forward_hook(lambda _, args, kwargs, __: calls.append((args, kwargs)), with_kwargs=True)
    with removing([handle]), torch.no_grad():
        forward(model, batch)
    if not calls:
        raise ValueError(f"{what}: forward must call model(...) with the model's inputs from the batch.")
    args, kwargs = calls[0]
    if not args or not kwargs:
        return args or kwargs
    return dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments)


def _without_labels(model: nn.Module, inputs: object) -> Collection[object] | None:
    """Return the inputs without the labels, if these alone are too many; else None."""
    if model._forward_pre_hooks or _takes(model, inputs):  # hooks may take the labels
        return None
    fewer: Collection[object] | None = None
    if isinstance(inputs, Mapping):
        named = taken_arguments(model)
        fewer = {name: v for name, v in inputs.items() if name in named or not LABELS.search(str(name))}
    elif isinstance(inputs, tuple) and len(inputs) > 1:
        fewer = inputs[:-1]
    return fewer if fewer is not None and _takes(model, fewer) else None


def _takes(model: nn.Module, inputs: object) -> bool:
    """Return whether the forward of a model takes these inputs, by its signature and by what was fixed at tracing."""
    given, named = given_arguments(model, inputs), taken_arguments(model)
    return given is not None and all(name in named or value is None for name, value in given.items())


def _if_fixed(model: nn.Module, inputs: object) -> str:
    """Return the remedy, if an item that is left out of a batch is an argument that the model's graph has fixed at None."""
    named, given = taken_arguments(model), given_arguments(model, inputs) or {}
    fixed = [name for name in given if name not in named and not LABELS.search(name)]
    remedy = "pass it in the example_inputs of qtoolkit.prepare, which fixed it at None"
    return f" If it is no label but the argument {fixed[0]!r}, {remedy}." if fixed else ""


def taken_arguments(model: nn.Module) -> list[str]:
    """Return the names of the arguments of a model's forward, without those that its graph has fixed at None."""
    nodes = model.graph.find_nodes(op="placeholder") if isinstance(model, fx.GraphModule) else []
    fixed = {str(node.target) for node in nodes if any(user.target is check_none for user in node.users)}
    return [name for name in inspect.signature(model.forward).parameters if name not in fixed]


def _difference(inputs: object, taken: Collection[object]) -> str:
    """Return in words which of the inputs are not taken."""
    if isinstance(inputs, Mapping):
        return " and ".join(repr(name) for name in inputs if name not in taken)
    return f"item {len(taken)}"
