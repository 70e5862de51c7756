"""Replace chains of ops that the user describes by modules of the user's."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from qtoolkit.errors import with_article
from qtoolkit.graph.graph_module import QuantizedGraphModule
from qtoolkit.graph.module_calls import ModuleCalls
from qtoolkit.op_kinds.facts import replace_node
from qtoolkit.op_kinds.rules import called_module, module_of

Element = type[nn.Module] | Callable[..., Any]
FusePatterns = Mapping[tuple[Element, ...], Callable[..., nn.Module]]


def check(fuse_patterns: object) -> None:
    """Raise TypeError or ValueError unless patterns are tuples of two or more module types or functions, fusers callable."""
    if not isinstance(fuse_patterns, Mapping):
        raise TypeError(f"prepare: fuse_patterns must map patterns to fusers, got {with_article(type(fuse_patterns))}.")
    for pattern, fuser in fuse_patterns.items():
        if not isinstance(pattern, tuple) or len(pattern) < 2:
            raise ValueError(
                f"prepare: a pattern of fuse_patterns must be a tuple of two or more module types or functions, got "
                f"{pattern!r}."
            )
        for element in pattern:
            if not callable(element) or isinstance(element, nn.Module):
                raise ValueError(
                    f"prepare: fuse_patterns: an element of a pattern must be a module type or a function, got "
                    f"{element!r} in {_show(pattern)}."
                )
        if not callable(fuser):
            raise TypeError(f"prepare: fuse_patterns: the fuser of {_show(pattern)} must be callable, got {fuser!r}.")


def module_types(fuse_patterns: FusePatterns) -> list[type[nn.Module]]:
    """Return the module types in the patterns: their modules are leaf modules."""
    return [e for pattern in fuse_patterns for e in pattern if isinstance(e, type) and issubclass(e, nn.Module)]


def run(gm: QuantizedGraphModule, fuse_patterns: FusePatterns) -> QuantizedGraphModule:
    """Replace every chain that matches a pattern by the module that the pattern's fuser returns.

    A chain is not replaced if the output of an op before the last has a second user, if an op takes an input from outside the
    chain, or if a module is called more than once. Raises ValueError: a pattern matches no chain, or its fuser raises;
    TypeError: a fuser does not return a module.
    """
    for pattern, fuser in fuse_patterns.items():
        chains = _chains(gm, pattern)
        if not chains:
            raise ValueError(
                f"prepare: fuse_patterns: {_show(pattern)} matches no chain in the model: each op must alone take the "
                f"output of the one before, and each module must be called once. Name the exact types."
            )
        for chain in chains:
            _replace(gm, chain, fuser, pattern)
    gm.graph.lint()
    gm.recompile()
    return gm


def _chains(gm: fx.GraphModule, pattern: Sequence[Element]) -> list[list[fx.Node]]:
    found: list[list[fx.Node]] = []
    used: set[fx.Node] = set()
    calls = ModuleCalls(gm.graph)
    for node in gm.graph.nodes:
        chain = _match(node, pattern)
        if chain and all(map(calls.is_only_one, chain)) and not used & set(chain):
            found.append(chain)
            used |= set(chain)
    return found


def _match(node: fx.Node, pattern: Sequence[Element]) -> list[fx.Node]:
    if not _is(node, pattern[0]):
        return []
    chain = [node]
    for element in pattern[1:]:
        followers = list(chain[-1].users)
        if len(followers) != 1 or not _is(followers[0], element) or followers[0].all_input_nodes != chain[-1:]:
            return []
        chain.append(followers[0])
    return chain


def _is(node: fx.Node, element: Element) -> bool:
    if node.op == "call_module":
        return type(module_of(node)) is element
    if node.op == "call_method":
        return getattr(torch.Tensor, str(node.target), None) is element
    return node.op == "call_function" and node.target is element


def _replace(
    gm: QuantizedGraphModule, chain: list[fx.Node], fuser: Callable[..., nn.Module], pattern: Sequence[Element]
) -> None:
    modules = [called_module(node) for node in chain]
    names = [str(node.target) for node in chain if node.op == "call_module"]
    where = f"{_show(pattern)} at {' -> '.join(node.name for node in chain)}"
    try:
        new = fuser(*modules)
    except Exception as error:  # of the user's fuser
        raise ValueError(f"prepare: fuse_patterns: the fuser of {where} failed: {error}") from error
    if not isinstance(new, nn.Module):
        raise TypeError(
            f"prepare: fuse_patterns: the fuser of {where} must return a module, got {with_article(type(new))}."
        )
    old = {part for module in modules if module is not None for part in module.modules()}
    for part in new.modules():
        if part not in old:
            part.training = gm.training
    for name in names:
        gm.delete_submodule(name)
    target = names[0] if names else chain[0].name
    gm.add_submodule(target, new)
    with gm.graph.inserting_before(chain[0]):
        node = gm.graph.call_module(target, chain[0].args, chain[0].kwargs)
    replace_node(chain[-1], node)
    for member in reversed(chain[:-1]):
        gm.graph.erase_node(member)


def _show(pattern: Sequence[Any]) -> str:
    return "(" + ", ".join(getattr(element, "__name__", repr(element)) for element in pattern) + ")"
