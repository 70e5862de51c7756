"""pytorch_quantization.optim.helper: choose parameters by name, for parameter groups or to freeze them."""

import re
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn


def match_parameters(model: nn.Module, patterns: Iterable[str]) -> Iterator[nn.Parameter]:
    """Return each parameter whose name matches one of the regular expressions at any position.

    Example:
        >>> len(list(match_parameters(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), ["0", "bias"])))
        3
    """
    patterns = list(patterns)
    return (p for name, p in model.named_parameters() if any(re.search(pattern, name) for pattern in patterns))


def group_parameters(
    model: nn.Module,
    patterns_list: Sequence[Sequence[str]],
    lrs: Sequence[float] | None = None,
    momentums: Sequence[float] | None = None,
    weight_decays: Sequence[float] | None = None,
) -> list[dict[str, object]]:
    """Return parameter groups for an optimizer, with the options of each.

    `patterns_list` has for each group the regular expressions of its parameters' names. Raises TypeError: it is not a list of
    lists, an option is not a list, or its length differs.
    """
    if not _is_list(patterns_list) or not all(_is_list(patterns) for patterns in patterns_list):
        raise TypeError(f"patterns_list must be list of list of patterns, got {patterns_list!r}.")
    given = {"lr": lrs, "momentum": momentums, "weight_decay": weight_decays}
    options = {key: values for key, values in given.items() if values is not None}
    for key, values in options.items():
        if not _is_list(values):
            raise TypeError(f"{key}s must be a list or None, got {values!r}.")
        if len(values) != len(patterns_list):
            raise TypeError(f"len({key}s) must match len(patterns_list), got {len(values)} and {len(patterns_list)}.")
    return [
        {"params": list(match_parameters(model, patterns)), **{key: values[i] for key, values in options.items()}}
        for i, patterns in enumerate(patterns_list)
    ]


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple)


def freeze_parameters(model: nn.Module, patterns: Iterable[str]) -> None:
    """Set requires_grad to False for the parameters that `match_parameters` returns."""
    for parameter in match_parameters(model, patterns):
        parameter.requires_grad = False


@torch.no_grad()
def quant_weight_inplace(model: nn.Module) -> None:
    """Replace the values of each weight with a `_weight_quantizer` by their quantized values."""
    for module in model.modules():
        quantizer = getattr(module, "_weight_quantizer", None)
        if isinstance(quantizer, nn.Module) and isinstance(module.weight, torch.Tensor):
            module.weight.copy_(quantizer(module.weight))
