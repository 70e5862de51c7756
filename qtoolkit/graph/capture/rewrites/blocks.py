"""Make the blocks of a traced model containers of its layers."""

from collections.abc import Iterator
from copy import copy

from torch import Tensor, nn

from qtoolkit.foreign import integration_of
from qtoolkit.graph.blocks import HELD, TracedBlock, traced_type
from qtoolkit.graph.capture.attributes import plain_attributes
from qtoolkit.graph.capture.rewrites.both_modes import Traced


def with_blocks(traced: Traced) -> nn.Module:
    """Return a module with the attributes of a model in which blocks are TracedBlocks; the model does not change."""
    model = traced.model
    used = [node for node in traced.graph.nodes if node.op in ("call_module", "get_attr")]
    leaves = {str(node.target) for node in used if node.op == "call_module"}
    inside = (*(str(node.target) for node in used), *(f"{call.block}." for call in traced.calls))
    names = [name for each in inside for name in _around(each) if name and name not in leaves]
    made = {block: _traced(block, name) for block, name in {model.get_submodule(name): name for name in names}.items()}
    root = nn.Module()  # without the constructor and the `__setattr__` of the model's class
    vars(root).update({**vars(model), "_modules": model._modules.copy()})
    for module in (root, *made.values()):
        for name, child in module._modules.items():
            module._modules[name] = made.get(child, child)  # type: ignore[arg-type]  # a child may be None
    for node in used:
        owner, _, name = str(node.target).rpartition(".")
        value = getattr(model.get_submodule(owner), name)
        new = root.get_submodule(owner)
        if owner and isinstance(value, Tensor) and getattr(new, name, None) is not value:
            # A tensor that is no buffer of the block: it moves with the module, and no checkpoint has it.
            # register_buffer refuses the name of a tensor that the block's class has too.
            new._buffers[name] = value
            new._non_persistent_buffers_set.add(name)
    return root


def _around(name: str) -> Iterator[str]:
    """Yield the names of the modules around a dotted name."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _traced(block: nn.Module, name: str) -> TracedBlock:
    """Return a block's container, with its tensors, submodules, plain values, and the attributes for integrations."""
    kind = traced_type(type(block))  # type: ignore[arg-type]  # mypy takes no class of modules for hashable
    result = kind.__new__(kind)
    nn.Module.__init__(result)
    vars(result).update(plain_attributes(block))
    if (integration := integration_of(type(block))) is not None:
        vars(result).update(integration.attributes_of(block))
    vars(result).update({key: copy(vars(block)[key]) for key in HELD}, _block_name=name)
    return result
