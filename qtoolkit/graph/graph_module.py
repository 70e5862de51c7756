"""QuantizedGraphModule: a GraphModule that keeps all of its model's names, and takes its plan and attributes into copies."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from torch import fx, nn

from qtoolkit.graph.plan import Plan
from qtoolkit.nn import QuantWeighted
from qtoolkit.nn.batch_norm import is_batch_norm
from qtoolkit.op_kinds.rules import NUMBER
from qtoolkit.shared_modules import names_by_module

HELD = (
    "_modules",
    "_parameters",
    "_buffers",
    "_non_persistent_buffers_set",
    "training",
)  # what copies of a module take along


class Method:
    """A method bound to a module; copies and pickles leave the module out, and `QuantizedGraphModule` binds them anew.

    Args:
        function: The function of the model's class.
        owner: What it gets as `self`.
    """

    def __init__(self, function: Callable[..., Any], owner: nn.Module | None = None) -> None:
        self.function, self.owner = function, owner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method."""
        return self.function(self.owner, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return Method, (self.function,)


class QuantizedGraphModule(fx.GraphModule):
    """What `qtoolkit.prepare` and `qtoolkit.convert` return.

    torch's GraphModule drops what its graph does not use: this one keeps all parameters, buffers and submodules of the model
    that it was traced from, by their names, and the attributes in `kept`.

    Attributes:
        plan: What prepare decided; None until it has.
        kept: Attributes to keep, by dotted name.
        aliases: All names of each shared submodule, by each of its names.
    """

    plan: Plan | None
    kept: dict[str, Any]
    aliases: dict[str, tuple[str, ...]]

    @classmethod
    def of(
        cls,
        root: nn.Module,
        graph: fx.Graph,
        name: str,
        plan: Plan | None = None,
        kept: Mapping[str, Any] | None = None,
    ) -> Self:
        """Build one from a module and a graph that calls its submodules, parameters and buffers."""
        result = cls(root, graph, name)
        _take_over(result, root)
        result.plan, result.kept, result.aliases = plan, {}, _aliases(result)
        for attribute, value in (kept or {}).items():
            result.keep(attribute, value)
        return result

    def set_submodule(self, target: str, module: nn.Module, strict: bool = False) -> None:
        """Replace a submodule under each of its names, so that it stays shared."""
        for name in self.aliases.get(target, (target,)):
            super().set_submodule(name, module, strict)

    def delete_submodule(self, target: str) -> bool:
        """Delete a submodule under each of its names."""
        deleted = True
        for name in self.aliases.get(target, (target,)):
            deleted = super().delete_submodule(name) and deleted
        return deleted

    def keep(self, name: str, value: Any) -> None:
        """Set an attribute, by dotted name, that copies and pickles keep."""
        self.kept[name] = value
        self.set_kept()

    def set_kept(self) -> None:
        """Set the kept attributes, on the submodules as they are now. Layers and weights are kept by their names anyway."""
        for name, value in self.kept.items():
            owner_name, _, attribute = name.rpartition(".")
            owner = self.get_submodule(owner_name)
            if attribute not in {*owner._modules, *owner._parameters, *owner._buffers}:
                setattr(owner, attribute, Method(value.function, owner) if isinstance(value, Method) else value)

    def train(self, mode: bool = True) -> Self:
        """Set the mode, and link layers to the batch norms that replaced those linked.

        torch.nn.SyncBatchNorm.convert_sync_batchnorm creates new ones.
        """
        for node, follower in self.linked_batch_norms():
            name = str(follower.target)
            layer, bn = self.get_submodule(str(node.target)), self.get_submodule(name)
            if isinstance(layer, QuantWeighted) and layer.batch_norm is not bn and is_batch_norm(bn):
                self.set_submodule(name, layer.replace_batch_norm(bn, name))
        return super().train(mode)

    def linked_batch_norms(self) -> list[tuple[fx.Node, fx.Node]]:
        """Return the node of each QAT layer with a linked batch norm, with the node of that batch norm."""
        calls = [(node, self.get_submodule(str(node.target))) for node in self.graph.nodes if node.op == "call_module"]
        linked = (node for node, m in calls if isinstance(m, QuantWeighted) and m.batch_norm is not None)
        return [(node, next(iter(node.users))) for node in linked]

    def __deepcopy__(self, memo: dict[int, Any]) -> "QuantizedGraphModule":
        result = super().__deepcopy__(memo)
        if not isinstance(result, QuantizedGraphModule):
            raise TypeError(f"copying gave a {type(result).__name__}.")
        _take_over(result, _bare({name: copy.deepcopy(vars(self)[name], memo) for name in HELD}))
        result.plan, result.aliases = self.plan, self.aliases
        result.kept = copy.deepcopy(self.kept, memo)
        result.set_kept()
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild, arguments = super().__reduce__()
        numbers = [node.name for node in self.graph.nodes if NUMBER in node.meta]
        return _restore, (rebuild, arguments, type(self).__name__, self.plan, self.kept, numbers)


def _restore(
    rebuild: Callable[..., fx.GraphModule],
    arguments: tuple[Any, ...],
    name: str,
    plan: Plan | None,
    kept: Mapping[str, Any],
    numbers: Sequence[str],
) -> QuantizedGraphModule:
    gm = rebuild(*arguments)
    for node in gm.graph.nodes:
        if node.name in numbers:
            node.meta[NUMBER] = True
    return QuantizedGraphModule.of(_bare(arguments[0]), gm.graph, name, plan, kept)


def _bare(state: Mapping[str, Any]) -> nn.Module:
    """Return a plain module that holds what a GraphModule held: torch's copies drop the second name of what is shared."""
    module = nn.Module()
    vars(module).update(state)
    return module


def _aliases(model: nn.Module) -> dict[str, tuple[str, ...]]:
    shared = (names for names in names_by_module(model).values() if len(names) > 1)
    return {name: tuple(names) for names in shared for name in names}


def _take_over(target: nn.Module, source: nn.Module) -> None:
    """Give a module what another one has and it has not: submodules, parameters, buffers, and the mode."""
    target.training = source.training
    for name, parameter in source.named_parameters(recurse=False, remove_duplicate=False):
        if name not in target._parameters:
            target.register_parameter(name, parameter)
    known = dict(source.named_buffers(recurse=False, remove_duplicate=False))
    for name, buffer in {**dict(target.named_buffers(recurse=False)), **known}.items():
        # A constant that tracing found is a buffer too, so that it moves along; no checkpoint has it.
        kept = name in known and name not in source._non_persistent_buffers_set
        target.register_buffer(name, buffer, persistent=kept)
    for name, child in source._modules.items():
        own = target._modules.get(name)
        if own is None:
            target.register_module(name, child)
        elif own is not child and child is not None:
            _take_over(own, child)
