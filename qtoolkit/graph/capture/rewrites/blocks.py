"""Make the blocks of a traced model TracedBlocks, which hold its layers."""

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from qtoolkit.foreign import integration_of
from qtoolkit.graph.block_calls import calls_with_nodes
from qtoolkit.graph.capture.rewrites.both_modes import Traced
from qtoolkit.graph.capture.shapes import is_plain
from qtoolkit.graph.traced_blocks import TracedBlock, traced_type


def with_traced_blocks(traced: Traced) -> nn.Module:
    """Return a module with the attributes of a model in which blocks are TracedBlocks; the model does not change."""
    model, calls = traced.model, tuple(traced.calls)
    called = [calls[i].block for i in calls_with_nodes(traced.graph, calls)]
    used = [node for node in traced.graph.nodes if node.op in ("call_module", "get_attr")]
    leaves = {str(node.target) for node in used if node.op == "call_module"}
    around = {name for node in used for name in _prefixes(str(node.target))}
    blocks = {model.get_submodule(name): name for name in (*around, *called) if name not in {*leaves, ""}}
    root, made = nn.Module(), dict[nn.Module, TracedBlock]()
    vars(root).update({**vars(model), "_modules": _traced_children(model, blocks, made)})
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


def _prefixes(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _traced_children(
    module: nn.Module, blocks: Mapping[nn.Module, str], made: dict[nn.Module, TracedBlock]
) -> dict[str, nn.Module | None]:
    children = module._modules.items()
    return {name: _traced(m, blocks, made) if m is not None and m in blocks else m for name, m in children}


def _traced(block: nn.Module, blocks: Mapping[nn.Module, str], made: dict[nn.Module, TracedBlock]) -> TracedBlock:
    if block in made:
        return made[block]
    kind = traced_type(type(block))
    made[block] = result = kind.__new__(kind)
    nn.Module.__init__(result)
    held = ((name, value) for name, value in vars(block).items() if is_plain(value) and not name.startswith("_"))
    vars(result).update(held)
    if (integration := integration_of(type(block))) is not None:
        vars(result).update(integration.attributes_of(block))
    vars(result).update(
        block_type=type(block).__name__,
        _block_name=blocks[block],
        _parameters=dict(block._parameters),
        _buffers=dict(block._buffers),
        _non_persistent_buffers_set=set(block._non_persistent_buffers_set),
        _modules=_traced_children(block, blocks, made),
    )
    return result
