"""Find out which submodules read their training mode in a forward."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch import nn

from qtoolkit.model_inputs import clone_tensors, split
from qtoolkit.model_state import evaluating, random_state_kept, values_kept


def readers_of_modes(model: nn.Module, example_inputs: object) -> set[nn.Module]:
    """Run a model on example inputs in both modes; return the modules that read their own mode. Its state does not change."""
    found: set[nn.Module] = set()
    for training in (False, True):
        args, kwargs = clone_tensors(split(example_inputs))
        with (
            random_state_kept(model),
            values_kept([*model.buffers()]),
            torch.no_grad(),
            evaluating(model),
            warnings.catch_warnings(action="ignore"),
            suppress(Exception),  # its capture reports what forward raises in eval mode
        ):
            for module in model.modules():
                module.training = training
            with _noting_reads(found):
                model(*args, **kwargs)
    return found


@contextmanager
def _noting_reads(found: set[nn.Module]) -> Iterator[None]:
    """Add each module whose attribute `training` is read in a block to a set."""

    def read(module: nn.Module) -> bool:
        found.add(module)
        # By `vars`, here and below: the property hides the attribute, which getattr and setattr no longer reach.
        return vars(module)["training"]  # type: ignore[no-any-return]  # a flag

    def write(module: nn.Module, value: bool) -> None:
        vars(module)["training"] = value

    nn.Module.training = property(read, write)  # type: ignore[assignment]  # it hides the attribute of each module
    try:
        yield
    finally:
        del nn.Module.training
