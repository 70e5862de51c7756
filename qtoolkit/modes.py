"""Eval mode for a while: each module then is in the mode it was in, frozen batch norms included."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in eval mode for a `with` block.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Dropout().eval())
        >>> with evaluating(model):
        ...     [module.training for module in model]
        [False, False]
        >>> [module.training for module in model]
        [True, False]
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
