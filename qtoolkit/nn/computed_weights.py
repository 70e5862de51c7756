"""Weights that are computed from others: pruned ones, weight and spectral norm, and parametrizations of torch.nn.utils."""

from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune, remove_spectral_norm, remove_weight_norm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from qtoolkit.model_state import evaluating
from qtoolkit.running import Run

COMPUTING_HOOKS = (prune.BasePruningMethod, WeightNorm, SpectralNorm)


def computing_hooks(module: nn.Module) -> list[Any]:
    """Return the forward pre-hooks of a module that set one of its weights, a plain attribute."""
    return [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, COMPUTING_HOOKS)]


def has_weight(module: nn.Module) -> bool:
    """Return whether a module has a parameter `weight`, or a weight that is computed from others; nothing is computed."""
    is_parameter, is_set_by_hook = "weight" in module._parameters, isinstance(vars(module).get("weight"), Tensor)
    return is_parameter or is_set_by_hook or parametrize.is_parametrized(module, "weight")


def refresh(module: nn.Module) -> None:
    """Compute the weights that hooks set, as a forward does: an optimizer or a state dict may have changed their sources."""
    with torch.no_grad():
        for hook in computing_hooks(module):
            if not (isinstance(hook, SpectralNorm) and module.training):  # a step of its power iteration
                hook(module, ())


def is_parametrized(module: nn.Module) -> bool:
    """Return whether a module has parametrizations of torch.nn.utils: torch's test takes ten times as long."""
    return "parametrizations" in module._modules


def computing_once(run: Run, module: nn.Module) -> AbstractContextManager[None]:
    """Compute each parametrized weight of a module once in a `with` block, however often it is taken.

    A parametrization may draw random numbers, and a step of spectral norm's power iteration changes its state. Nothing is kept
    while an exporter records: torch.jit.trace refuses it.
    """
    return parametrize.cached() if is_parametrized(module) and not run.recorded else nullcontext()


def computing_still(module: nn.Module) -> AbstractContextManager[None]:
    """Compute the parametrized weights of a module in a `with` block without a change of the parametrizations' state."""
    computing = module._modules.get("parametrizations")
    return nullcontext() if computing is None else evaluating(computing)


def bake(module: nn.Module) -> dict[str, Tensor]:
    """Make the computed tensors of a module plain parameters with their values; return the mask of each pruned one."""
    masks: dict[str, Tensor] = {}
    for hook in computing_hooks(module):
        if isinstance(hook, WeightNorm):
            remove_weight_norm(module, hook.name)
        elif isinstance(hook, SpectralNorm):
            remove_spectral_norm(module, hook.name)
        else:
            name = hook._tensor_name
            masks[name] = getattr(module, f"{name}_mask")
            prune.remove(module, name)  # type: ignore[no-untyped-call]
    if parametrize.is_parametrized(module):
        _take("", module)
        _drop_loading_hooks(module)
    return masks


def _drop_loading_hooks(module: nn.Module) -> None:
    """Drop the hooks that convert the state dicts of an older weight norm: they cannot be pickled."""
    hooks: dict[int, Any] = module._load_state_dict_pre_hooks
    for key in [key for key, held in hooks.items() if held.hook.__module__ == parametrizations.__name__]:
        del hooks[key]


def mask(module: nn.Module, masks: Mapping[str, Tensor]) -> None:
    """Prune the weight of a module, into which a batch norm was folded, by its mask; its bias is another one now."""
    if "weight" in masks:
        prune.custom_from_mask(module, "weight", masks["weight"])  # type: ignore[no-untyped-call]


# ---- parametrizations while layers are replaced


class Parametrization(NamedTuple):
    """A parametrization that was taken off a layer."""

    layer: str  # the dotted name of the layer
    tensor: str  # the name of the weight that it computes
    computes: nn.Module  # what computes the weight
    parameter: nn.Parameter  # the plain weight that the layer has instead


def take_parametrizations(model: nn.Module, types: Collection[type[nn.Module]]) -> list[Parametrization]:
    """Take the parametrizations off the layers of some types: they get plain weights, and can be replaced."""
    taken: list[Parametrization] = []
    for name, module in model.named_modules():
        if parametrize.is_parametrized(module) and parametrize.type_before_parametrizations(module) in types:
            taken += _take(name, module)
    return taken


def _take(name: str, layer: nn.Module) -> list[Parametrization]:
    # Not by remove_parametrizations: it changes the class, which the copies of a parametrized module share.
    taken = []
    with computing_still(layer):
        of_tensors: Any = layer.parametrizations
        for tensor, computes in of_tensors.items():
            needs_grad = any(parameter.requires_grad for parameter in computes.parameters())
            parameter = nn.Parameter(getattr(layer, tensor).detach().clone(), needs_grad)
            taken.append(Parametrization(name, tensor, computes, parameter))
    layer.__class__ = parametrize.type_before_parametrizations(layer)
    del layer.parametrizations
    for each in taken:
        layer.register_parameter(each.tensor, each.parameter)
    return taken


def put_parametrizations(model: nn.Module, taken: Iterable[Parametrization]) -> None:
    """Put parametrizations on the layers of the same names; a weight that was replaced meanwhile, by folding, stays plain."""
    for each in taken:
        layer = model.get_submodule(each.layer)
        if layer._parameters.get(each.tensor) is each.parameter:
            parametrize.register_parametrization(layer, each.tensor, nn.Identity())
            of_tensors: Any = layer.parametrizations
            of_tensors[each.tensor] = each.computes
        else:
            _drop_loading_hooks(layer)
