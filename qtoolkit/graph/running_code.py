"""Compile the graph of a model to the code that runs.

The graph of the model does not change: passes, reports and exporters read its one list of nodes. The compiled code may differ
from it: a block can run its own part of the graph, and ops that `qtoolkit.nn.epilogue` or `qtoolkit.nn.prelu` compute as one op
are one call.
"""

import functools
import linecache
import operator
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any
from uuid import uuid4
from weakref import finalize, ref

import torch
from torch import fx, nn

from qtoolkit.graph.block_calls import ROOT, BlockCall, Path, leaves
from qtoolkit.graph.block_code import Division, Part, free_nodes
from qtoolkit.graph.capture.in_place import changed_by
from qtoolkit.graph.chains import (
    Chain,
    Pair,
    find_chains,
    find_pairs,
    is_activation_quantizer,
    is_max_pool_call,
    is_weighted_call,
)
from qtoolkit.graph.nodes import is_quantizer, kind_of
from qtoolkit.graph.products import function_of
from qtoolkit.graph.traced_blocks import TracedBlock, find_block, node_name
from qtoolkit.nn.epilogue import epilogue_of, layer_output, max_pool, max_pool2d
from qtoolkit.nn.hooks import all_watched, has_hooks, is_transformed
from qtoolkit.nn.prelu import prelu
from qtoolkit.nn.product import Product
from qtoolkit.nn.units import BatchNormUnit, FunctionUnit, LayerUnit, Names
from qtoolkit.nn.units.function import NONE, OF_FUNCTION, Function, function_of_module
from qtoolkit.op_kinds.bounds import Bounds
from qtoolkit.op_kinds.recorded import check_argument
from qtoolkit.op_kinds.rules import module_of
from qtoolkit.op_kinds.table import OTHER
from qtoolkit.ops.recording import is_recorded

Products = Mapping[str, Product] | None


class Whole:
    """A graph as one part: like a Division without parts.

    Args:
        gm: The model.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm, self.free = gm, free_nodes(gm)
        self.calls = (BlockCall(""),)
        self.parts: dict[int, Part] = {}

    def items(self, index: int) -> Iterator[fx.Node | int]:
        """Yield the nodes in order."""
        return (node for node in self.gm.graph.nodes if node not in self.free)


def compile_forward(gm: fx.GraphModule, calls: tuple[BlockCall, ...], products: Products) -> Callable[..., Any] | None:
    """Compile the part of each block that can run its own part of the graph; tell the other blocks why they cannot.

    Args:
        gm: The model.
        calls: The calls of its blocks.
        products: What computes the products of two activations, by the names of their nodes. None: the code calls no other
            ops than the graph has.

    Returns:
        The forward of the model. In training it runs the whole graph in one piece; in eval mode, in exports and while a block
        is watched (it has a hook, for example), it calls the blocks. None if both would be the code that torch.fx generates.
    """
    whole = _Writer(Whole(gm), ROOT, products)
    code = _compile(whole.write(), "")
    units = _UnitWriter(whole)
    has_units = bool(units.in_chains or units.units)
    if has_units:
        code = _trained(code, units.write(), gm)
    changed = whole.changed or has_units
    division = Division(gm, calls) if calls else None
    if division is None or not division.parts:
        return code if changed else None
    for index, part in division.parts.items():
        part.block.set_block_code(_compile(_Writer(division, index, products).write(), part.call.block), gm)
    divided = _compile(_Writer(division, ROOT, products).write(), "")
    return _chosen(code, divided, _Blocks(gm, division)) if changed else divided


def calls_now(gm: fx.GraphModule, calls: tuple[BlockCall, ...], products: Products) -> list[Chain | Pair]:
    """Return the ops that are one call in a training forward now: those of the parts while a block is watched."""
    division = Division(gm, calls) if calls else None
    if division is None or not _Blocks(gm, division).are_watched():
        writers = [_Writer(Whole(gm), ROOT, products)]
    else:
        writers = [_Writer(division, index, products) for index in (ROOT, *division.parts)]
    found: list[Chain | Pair] = []
    for writer in writers:
        found += [*writer.chains, *writer.pairs.values()]
    return found


def runs_its_graph(gm: fx.GraphModule, calls: tuple[BlockCall, ...]) -> bool:
    """Return whether a call of a model runs the nodes of its graph and nothing else, as the model now is.

    Hooks and wrappers of the model and of its blocks, and other forwards of them, run besides.
    """
    division = Division(gm, calls)
    return not (has_hooks(gm) or "forward" in vars(gm) or _Blocks(gm, division).are_watched())


class _Blocks:
    """The blocks that run their parts.

    Args:
        gm: The model.
        division: Its parts.
    """

    def __init__(self, gm: fx.GraphModule, division: Division) -> None:
        self.places: list[tuple[nn.Module, str, TracedBlock]] = []
        for part in division.parts.values():
            parent, _, name = part.call.block.rpartition(".")
            holder = find_block(gm, parent) if parent else gm
            if holder is not None:
                self.places.append((holder, name, part.block))

    def are_watched(self) -> bool:
        """Return whether a block has hooks, a wrapper or another forward, so that it must be called."""
        return all_watched() or any(
            holder._modules.get(name) is not block or block.has_other_forward() or has_hooks(block)
            for holder, name, block in self.places
        )


def _trained(code: Callable[..., Any], graph: fx.Graph, gm: fx.GraphModule) -> Callable[..., Any]:
    """Return a forward that runs the graph of units where the model trains, without a tracer of any kind, and else the code.

    The graph is compiled by the first step: passes recompile a model many times before.
    """
    owner = ref(gm)  # replicas of the model share its code
    units: Callable[..., Any] | None = None

    @functools.wraps(code)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run the units or the code."""
        nonlocal units
        if not self.training or torch.compiler.is_compiling() or not torch.is_grad_enabled() or owner() is not self:
            return code(self, *args, **kwargs)
        if is_recorded() or is_transformed() or all_watched():
            return code(self, *args, **kwargs)
        if units is None:
            units = _compile(graph, "")
        return units(self, *args, **kwargs)

    return forward


def _chosen(whole: Callable[..., Any], divided: Callable[..., Any], blocks: _Blocks) -> Callable[..., Any]:
    @functools.wraps(whole)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Exported programs name the blocks. In eval mode there is nothing to gain.
        calls_blocks = not self.training or torch.compiler.is_exporting() or blocks.are_watched()
        return (divided if calls_blocks else whole)(self, *args, **kwargs)

    return forward


class _Writer:
    """Writes the graph of a part.

    Attributes:
        chains: The chains of ops in it that are one call.
        pairs: The pairs of ops that are one call, by their last node.
        functions: The functions that compute the written chains, by their last node.
        changed: Whether the written code differs from the nodes of the model's graph.
    """

    def __init__(self, division: Division | Whole, index: int, products: Products) -> None:
        self.division, self.index, self.products = division, index, products
        self.name = division.calls[index].block
        self.graph, self.written = fx.Graph(), dict[fx.Node, Any]()
        self.items = list(division.items(index))
        part = division.parts.get(index)
        self.results = results = {
            leaf for _, leaf in leaves(() if part is None else part.result) if isinstance(leaf, fx.Node)
        }
        nodes = [] if products is None else [item for item in self.items if isinstance(item, fx.Node)]
        self.chains = find_chains(nodes, results)
        self.layers = {chain.layer: chain for chain in self.chains if chain.layer is not None}
        self.ends = {chain.last: chain for chain in self.chains}
        self.pairs = {pair.quantizer: pair for pair in find_pairs(nodes, results)}
        self.inner = {node for chain in self.chains for node in chain.nodes}
        self.inner |= {pair.activation for pair in self.pairs.values()}
        self.changed = bool(self.chains or self.pairs)
        self.functions = dict[fx.Node, Callable[..., Any]]()

    def write(self) -> fx.Graph:
        """Return the graph."""
        part = self.division.parts.get(self.index)
        if part is None:
            self.graph.set_codegen(self.division.gm.graph._codegen)  # it may take apart arguments that are containers
        else:
            self._write_arguments(part)
        for item in self.items:
            if isinstance(item, int):
                self._write_call(self.division.parts[item])
            elif item in self.layers:
                self._write_layer(item, self.layers[item].batch_norm)
            elif item in self.ends:
                self._write_chain(self.ends[item])
            elif item in self.pairs:
                self._write_pair(self.pairs[item])
            elif self.products is not None and is_max_pool_call(item):
                self._write_pool(item)
            elif self.products is not None and item.name in self.products:
                self._write_product(item, self.products[item.name])
            elif item not in self.inner:
                self._write_op(item)
        if part is not None:
            self.graph.output(self._built(part.result, self._value))
        return self.graph

    # ---- ops in other words

    def _write_op(self, node: fx.Node) -> None:
        self._copy(node)

    def _write_layer(self, layer: fx.Node, batch_norm: fx.Node) -> None:
        args, kwargs = self._built((layer.args, layer.kwargs), self._value)
        modules = self._module(layer), self._module(batch_norm)
        self.written[layer] = self.graph.call_function(layer_output, (*modules, *args), dict(kwargs))

    def _write_chain(self, chain: Chain) -> None:
        """Write one call that replaces the nodes of a chain, where its last node was."""
        source, function = chain.batch_norm.all_input_nodes[0], chain.bounds is not None
        tensors = self._value(source), None if chain.residual is None else self._value(chain.residual)
        modules = [chain.layer, chain.batch_norm, None if function else chain.activation, chain.quantizer]
        called = [None if node is None else self._module(node) for node in modules]
        self.functions[chain.last] = epilogue_of(*_steps(chain))
        self.written[chain.last] = self.graph.call_function(self.functions[chain.last], (*tensors, *called))

    def _write_pair(self, pair: Pair) -> None:
        modules = self._module(pair.activation), self._module(pair.quantizer)
        source = self._value(pair.activation.all_input_nodes[0])
        self.written[pair.quantizer] = self.graph.call_function(prelu, (source, *modules))

    def _write_pool(self, node: fx.Node) -> None:
        self.changed = True
        args, kwargs = self._built((node.args, node.kwargs), self._value)
        if node.op == "call_module":
            self.written[node] = self.graph.call_function(max_pool, (self._module(node), *args))
        else:
            sizes = {name: value for name, value in kwargs.items() if name != "return_indices"}
            self.written[node] = self.graph.call_function(max_pool2d, args, sizes)

    def _write_product(self, node: fx.Node, how: Product) -> None:
        self.changed = True
        args, kwargs = self._built((node.args, node.kwargs), self._value)
        self.written[node] = self.graph.call_function(function_of(node, how), args, kwargs)

    def _module(self, node: fx.Node) -> fx.Node:
        """Return a node that reads the module that a node calls."""
        target = self._target(str(node.target))
        return self.graph.create_node("get_attr", target, name=node_name(target))

    # ---- blocks

    def _write_arguments(self, part: Part) -> None:
        values = {**dict(zip(part.call.names, part.args, strict=True)), **part.kwargs}
        fixed = [name for name, value in values.items() if not isinstance(value, tuple | list | dict | fx.Node)]
        last = max((i for i, name in enumerate(values) if name not in fixed), default=-1)
        arguments = [
            self.graph.placeholder(name, default_value=values[name]) if i > last else self.graph.placeholder(name)
            for i, name in enumerate(values)
        ]
        for name, argument in zip(values, arguments, strict=True):
            if name in fixed:
                self.graph.call_function(check_argument, (argument, values[name], name))
            else:
                self._write_items(values[name], argument)

    def _write_call(self, part: Part) -> None:
        args, kwargs = self._built((part.args, part.kwargs), self._known)
        target = self._target(part.call.block)
        result = self.graph.create_node("call_module", target, args, kwargs, node_name(target))
        self._write_items(part.result, result)

    def _write_items(self, tree: Any, whole: fx.Node) -> None:
        """Write the nodes that take the values in nested tuples, lists and dicts."""
        items: dict[Path, fx.Node] = {(): whole}
        for path, leaf in leaves(tree):
            if isinstance(leaf, fx.Node) and leaf not in self.written:
                for depth, key in enumerate(path):
                    if path[: depth + 1] not in items:
                        items[path[: depth + 1]] = self.graph.call_function(
                            operator.getitem, (items[path[:depth]], key)
                        )
                self.written[leaf] = items[path]

    def _built(self, tree: Any, value: Callable[[fx.Node], Any]) -> Any:
        """Return arguments or a result in this part."""
        if isinstance(tree, OrderedDict):  # torch.fx would take it for a dict
            items = [(key, self._built(item, value)) for key, item in tree.items()]
            return self.graph.call_function(OrderedDict, (items,))
        if isinstance(tree, dict):
            return {key: self._built(item, value) for key, item in tree.items()}
        if isinstance(tree, tuple | list):
            return type(tree)(self._built(item, value) for item in tree)
        return value(tree) if isinstance(tree, fx.Node) else tree

    def _value(self, node: fx.Node) -> fx.Node:
        """Return what a node is in this part. A parameter is read where it is used."""
        return self._copy(node) if node in self.division.free and node not in self.written else self.written[node]

    def _known(self, node: fx.Node) -> fx.Node | None:
        """Return what a node is in this part; None if it is not there, which nothing in the block uses then."""
        return self._value(node) if node in self.written or node in self.division.free else None

    def _copy(self, node: fx.Node) -> fx.Node:
        self.written[node] = copy = self.graph.node_copy(node, self._value)
        if node.op in ("call_module", "get_attr"):
            copy.target = self._target(str(node.target))
        return copy

    def _target(self, name: str) -> str:
        """Return the name of a submodule or a tensor of the model, as the block of this part finds it."""
        inside = name.removeprefix(f"{self.name}.")
        return name if not self.name else inside if inside != name else f"_block_model.{name}"


class _UnitWriter(_Writer):
    """Writes the graph with one call for each unit.

    A layer with its chain is one; a layer without a batch norm, with a quantizer right behind it; and any other quantizer, with
    an activation or a layer norm right before it.

    Args:
        whole: What has written the graph as one part, with the chains and their functions.

    Attributes:
        units: The units that are no chains, by their last nodes: the node of the layer or of the function before the
            quantizer, if there is one.
    """

    def __init__(self, whole: _Writer) -> None:
        vars(self).update(vars(whole))
        self.graph, self.written = fx.Graph(), {}
        self.handed = dict[fx.Node, fx.Node]()
        self.order = {item: place for place, item in enumerate(self.items) if isinstance(item, fx.Node)}
        self.in_chains = [chain for chain in self.chains if self._is_unit(chain)]
        taken = self.inner | set(self.layers) | set(self.ends) | set(self.pairs)
        self.units = {} if self.products is None else self._found(taken)
        self.inner = self.inner | {before for last, before in self.units.items() if before not in (None, last)}
        takers = [node for chain in self.in_chains for node in (chain.layer, chain.add)]
        self.takers = {*takers, *(node for node in self.units.values() if node is not None and is_weighted_call(node))}

    def _is_unit(self, chain: Chain) -> bool:
        """Return whether the layer of a chain may run where the chain ends: no op in between changes its input in place."""
        return (
            chain.layer is not None and is_weighted_call(chain.layer) and self._nothing_between(chain.layer, chain.last)
        )

    def _nothing_between(self, first: fx.Node, last: fx.Node) -> bool:
        between = self.items[self.order[first] + 1 : self.order[last]]
        return all(isinstance(node, fx.Node) and self._leaves_tensors(node) for node in between)

    def _leaves_tensors(self, node: fx.Node) -> bool:
        """Return whether a node changes no tensor that others read; what is not in the table of ops might."""
        if node in self.inner or is_quantizer(node):
            return True
        return kind_of(node) is not OTHER and changed_by(node, self.division.gm) is None

    def _found(self, taken: Collection[fx.Node]) -> dict[fx.Node, fx.Node | None]:
        """Return the units that are no chains."""
        found: dict[fx.Node, fx.Node | None] = {}
        for node in self.order:
            if node in taken or not (is_weighted_call(node) or is_activation_quantizer(node)):
                continue
            before = node if is_weighted_call(node) else self._joined(node, taken)
            if before is not node and before is not None:
                found.pop(before, None)  # a layer with its quantizer
            found[node] = before
        return found

    def _joined(self, quantizer: fx.Node, taken: Collection[fx.Node]) -> fx.Node | None:
        """Return the op before a quantizer that is computed with it."""
        before = quantizer.args[0]
        if not isinstance(before, fx.Node) or before in taken or before in self.results or before not in self.order:
            return None
        joins = is_weighted_call(before) or self._function(before) is not None
        return before if joins and len(before.users) == 1 and self._nothing_between(before, quantizer) else None

    def _function(self, node: fx.Node) -> Function | None:
        """Return what an op before a quantizer computes; None where it is not computed with it."""
        if len(node.args) != 1 or not isinstance(node.args[0], fx.Node) or node.kwargs:
            return None
        return function_of_module(module_of(node)) if node.op == "call_module" else OF_FUNCTION.get(node.target)

    def _write_layer(self, layer: fx.Node, batch_norm: fx.Node) -> None:
        if layer not in self.takers:
            super()._write_layer(layer, batch_norm)

    def _write_chain(self, chain: Chain) -> None:
        if chain not in self.in_chains or chain.layer is None:
            super()._write_chain(chain)
            return
        unit = BatchNormUnit(
            self.division.gm, self._names(chain), self.functions[chain.last], chain.bounds, self._gives(chain.last)
        )
        sources = [chain.layer.args[0], *([] if chain.residual is None else [chain.residual])]
        self._write_unit(unit.run, sources, chain.layer.name, chain.last)

    def _write_op(self, node: fx.Node) -> None:
        if node not in self.units:
            super()._write_op(node)
            return
        before, gm, codes = self.units[node], self.division.gm, self._hands_on(node)
        if before is not None and is_weighted_call(before):
            quantizer = None if before is node else self._target(str(node.target))
            of_layer = LayerUnit(gm, self._target(str(before.target)), quantizer, codes, self._gives(node))
            self._write_unit(of_layer.run, before.args, before.name, node)
            return
        module = before is not None and before.op == "call_module"
        called = None if before is None or module else _function_of(before, before.all_input_nodes)
        function = NONE if before is None or module else OF_FUNCTION[before.target]
        name = self._target(str(before.target)) if before is not None and module else None
        unit = FunctionUnit(gm, name, self._target(str(node.target)), called, function, codes, self._gives(node))
        source = node if before is None else before
        self._write_unit(unit.run, source.args, source.name, node)

    def _write_unit(self, run: Callable[..., Any], sources: Sequence[Any], name: str, last: fx.Node) -> None:
        """Write the call of a unit, which takes tensors with their codes if a layer is in it."""
        takes_codes = not isinstance(getattr(run, "__self__", None), FunctionUnit)
        arguments = [each for x in sources for each in (self._value(x), self.handed.get(x))[: 1 + takes_codes]]
        result = self.graph.create_node("call_function", run, tuple(arguments), name=f"{name}_unit")
        self.written[last] = self._item(result, 0, last.name)
        if self._hands_on(last):
            self.handed[last] = self._item(result, 1, f"{last.name}_codes")

    def _hands_on(self, node: fx.Node) -> bool:
        """Return whether a unit takes a result, with its codes."""
        return any(user in self.takers for user in node.users)

    def _gives(self, node: fx.Node) -> bool:
        """Return whether others than units take a result."""
        return any(user not in self.takers for user in node.users)

    def _item(self, result: fx.Node, place: int, name: str) -> fx.Node:
        return self.graph.create_node("call_function", operator.getitem, (result, place), name=name)

    def _names(self, chain: Chain) -> Names:
        activation = chain.activation if chain.bounds is None else None
        layer, bn, *others = (
            None if node is None else self._target(str(node.target))
            for node in (chain.layer, chain.batch_norm, activation, chain.quantizer)
        )
        return Names(str(layer), str(bn), *others)


def _steps(chain: Chain) -> tuple[Callable[..., Any] | None, Callable[..., Any] | None, Bounds | None]:
    """Return what the functions of a chain do: that of its add, that of its activation, and the bounds of that."""
    add, function = chain.add, chain.activation if chain.bounds is not None else None
    return (
        None if add is None else _function_of(add, add.all_input_nodes),
        None if function is None else _function_of(function, function.all_input_nodes),
        chain.bounds,
    )


def _compile(graph: fx.Graph, name: str) -> Callable[..., Any]:
    """Return the function `forward(self, ...)` of a graph. Tracebacks show its lines."""
    code = graph.python_code("self")
    file = f"<forward of {name or 'the model'}>.{uuid4().hex}"  # torch.compile tells code apart by it, too
    scope = dict(code.globals)
    exec(compile(code.src, file, "exec", dont_inherit=True), scope)
    forward: Any = scope["forward"]
    linecache.cache[file] = (len(code.src), None, code.src.splitlines(keepends=True), file)
    finalize(forward.__code__, linecache.cache.pop, file, None).atexit = False
    return forward  # type: ignore[no-any-return]  # a function


def _function_of(node: fx.Node, operands: Sequence[fx.Node]) -> Callable[..., Any]:
    """Return a function of some operands that does what a function or a method does in a graph."""
    graph = fx.Graph()
    arguments = {operand: graph.placeholder(f"value_{place}") for place, operand in enumerate(operands)}
    graph.output(graph.node_copy(node, arguments.__getitem__))
    return functools.partial(_compile(graph, node.name), None)
