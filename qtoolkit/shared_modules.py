"""Dotted names of modules, of which a shared module has several."""

from collections.abc import Callable, Iterator

from torch import nn


def modules_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """Return each module by its dotted name; a shared module appears under each of its names."""
    return dict(model.named_modules(remove_duplicate=False))


def names_by_module(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Return all dotted names of each module, in the order of `named_modules`."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return names


def first_names(model: nn.Module) -> dict[nn.Module, str]:
    """Return the first dotted name of each module, by which reports, plans and errors call it."""
    return {module: name for name, module in model.named_modules()}


def owners_of_parameters(model: nn.Module) -> dict[int, list[str]]:
    """Return the first names of the modules that have each parameter, by its identity: several for a shared parameter."""
    owners: dict[int, list[str]] = {}
    for module, name in first_names(model).items():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(name)
    return owners


def replace_everywhere(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replace a submodule by another one under each of its names, so that it stays shared."""
    for name in names_by_module(model)[old]:
        model.set_submodule(name, new)


def outermost(model: nn.Module, is_one: Callable[[nn.Module], bool]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules for which a function holds, except modules inside of another one, each with its first name."""
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module not in inside and is_one(module):
            inside.update(module.modules())
            yield name, module
