"""Write the Python of a part of a graph in units: a call for each layer and quantizer, with the ops fused into it."""

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import fx, nn

from qtoolkit.graph.capture.rewrites.in_place import changed_by, changes_first
from qtoolkit.graph.module_calls import number_of
from qtoolkit.graph.nodes import is_quantizer, kind_of, operands_of, readers_of
from qtoolkit.graph.program import products
from qtoolkit.graph.program.chains import (
    Chain,
    ChainFinder,
    FunctionPair,
    addends,
    is_activation_quantizer,
    is_attention_call,
    is_max_pool_call,
    is_weighted_call,
)
from qtoolkit.graph.program.division import Division
from qtoolkit.graph.program.epilogue import Rearrangement, epilogue_of, max_pool, max_pool2d
from qtoolkit.graph.program.units import AttentionUnit, BatchNormUnit, FunctionUnit, LayerUnit
from qtoolkit.graph.program.units.function import NONE, OF_FUNCTION, function_of_module, is_norm
from qtoolkit.graph.program.views import PermutedParts, unbind_permuted
from qtoolkit.graph.program.writer import Writer, function_of
from qtoolkit.model_inputs import leaves
from qtoolkit.nn.output_grid import Function
from qtoolkit.nn.product import Product
from qtoolkit.op_kinds.rules import is_number, module_of
from qtoolkit.op_kinds.table import OTHER
from qtoolkit.running import running

Products = Mapping[str, Product]
COPIES = ("contiguous", "clone")


class UnitWriter(Writer):
    """Writes a part of a graph with one call for each unit, and for each other op that training computes in its own way.

    A layer with its chain is a unit; a layer without a batch norm, with a quantizer right after it; and any other quantizer,
    with an activation or a norm right before it, and a norm with the add before it. `codes` has the nodes of the results as
    integers, which units return.
    """

    def __init__(self, division: Division, index: int, found: Products) -> None:
        super().__init__(division, index)
        self.products, self.codes = found, dict[fx.Node, fx.Node]()
        part = division.parts.get(index)
        self.owner: nn.Module = division.gm if part is None else part.block
        # the nodes that training mode takes, each with its place
        taken = (item for item in enumerate(self.items) if item[1] not in division.of_eval_mode)
        self.order = {item: place for place, item in taken if isinstance(item, fx.Node)}
        self.results = {leaf for _, leaf in leaves(() if part is None else part.result) if isinstance(leaf, fx.Node)}
        self.chains = ChainFinder(list(self.order), self.results).run()  # the chains of ops that are one call
        self.inner = {node for chain in self.chains for node in chain.nodes}
        for chain in self.chains:
            if chain.layer is not None and not self._runs_at_the_end(chain.layer, chain):
                self.inner.remove(chain.layer)
                chain.layer = None
        self.ends = {chain.last: chain for chain in self.chains}
        # the units that are no chains, by their last nodes: the node of the layer or function before the quantizer, if any
        self.units = self._found(self.inner)
        self.inner |= {before for last, before in self.units.items() if before not in (None, last)}
        # the add whose sum a unit's norm takes, and what reads numbers of the sum before, by the unit's last node
        self.added = {last: nodes for last in self.units if (nodes := self._added(last))}
        self.inner |= {node for nodes in self.added.values() for node in nodes}
        layers = (before for before in self.units.values() if before is not None and is_weighted_call(before))
        joined = (node for chain in self.chains for node in (chain.layer, chain.add) if node is not None)
        self.permuted = self._permuted()
        self.inner |= {parts.permute for parts in self.permuted.values()}
        others = list(filter(self._is_other, self.order))
        self.takers = {*layers, *joined, *others}  # the nodes whose ops take their inputs as integers
        self.run: fx.Node | None = None  # the present run, which the forward asks for before its first unit
        # whether the written code differs from the nodes of the model's graph
        self.changed = bool(self.chains or self.units or others or self.permuted)

    def _runs_at_the_end(self, layer: fx.Node, chain: Chain) -> bool:
        """Return whether the layer of a chain may run where the chain ends: no op in between changes its input in place."""
        return is_weighted_call(layer) and self._nothing_between(layer, chain.last)

    def _nothing_between(self, first: fx.Node, last: fx.Node) -> bool:
        between = self.items[self.order[first] + 1 : self.order[last]]
        return all(isinstance(node, fx.Node) and self._leaves_tensors(node) for node in between)

    def _leaves_tensors(self, node: fx.Node) -> bool:
        """Return whether a node changes no tensor that others read; ops that are not in the table might."""
        if node in self.inner or is_quantizer(node):
            return True
        return is_number(node) or (kind_of(node) is not OTHER and changed_by(node, self.division.gm) is None)

    def _found(self, taken: Collection[fx.Node]) -> dict[fx.Node, fx.Node | None]:
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
        if not isinstance(before, fx.Node) or before in taken:
            return None
        joins = is_weighted_call(before) or _function(before) is not None
        return before if joins and self._reads_alone(quantizer, before) else None

    def _added(self, last: fx.Node) -> list[fx.Node]:
        """Return the add whose sum the norm of a unit takes, if the unit may compute it, and what reads sizes of it before."""
        norm = self.units[last]
        add = norm.args[0] if norm is not None and norm.op == "call_module" and is_norm(module_of(norm)) else None
        if not isinstance(add, fx.Node) or add not in self.order or add in self.inner or not addends(add):
            return []
        if changes_first(add) or not self._nothing_between(add, last):
            return []
        found = [add]
        for node in self.items[self.order[add] + 1 : self.order[last]]:
            if isinstance(node, fx.Node) and node is not norm and not set(found).isdisjoint(node.all_input_nodes):
                found.append(node)
        return found if all(map(is_number, found[1:])) else []

    def _permuted(self) -> dict[fx.Node, PermutedParts]:
        """Return the nodes that take a permuted tensor apart, which nothing else reads."""
        found = {node: parts for node in self.order if (parts := PermutedParts.of(node)) is not None}
        return {node: parts for node, parts in found.items() if self._reads_alone(node, parts.permute)}

    def _reads_alone(self, node: fx.Node, source: fx.Node) -> bool:
        here = source in self.order and source not in self.results
        return here and len(source.users) == 1 and self._nothing_between(source, node)

    def pairs(self) -> list[FunctionPair]:
        """Return the functions that run with the quantizers after them."""
        found = ((last, before) for last, before in self.units.items() if before is not None)
        return [FunctionPair(before, last) for last, before in found if not is_weighted_call(before)]

    def _is_other(self, node: fx.Node) -> bool:
        """Return whether training computes an op in its own way, which is no unit."""
        return is_max_pool_call(node) or is_attention_call(node) or node.name in self.products

    # ---- calls

    def _write_node(self, node: fx.Node) -> None:
        if node in self.ends:
            self._write_chain(self.ends[node])
        elif node in self.units:
            self._write_unit_of(node, self.units[node])
        elif self._is_other(node):
            self._write_other(node)
        elif node in self.permuted:
            self._write_parts(node, self.permuted[node])
        elif node not in self.inner:
            super()._write_node(node)
            self._rearrange_codes(node)

    def _write_parts(self, node: fx.Node, parts: PermutedParts) -> None:
        args = (self._value(parts.source), parts.dims, parts.dim)
        self.written[node] = self.graph.create_node("call_function", unbind_permuted, args, name=node.name)

    def _write_chain(self, chain: Chain) -> None:
        """Write one call that replaces the nodes of a chain, where its last node was."""
        function = chain.bounds is not None
        called = (chain.add, chain.activation if function else None)
        add, activate = (None if node is None else function_of(node, node.all_input_nodes) for node in called)
        epilogue = epilogue_of(add, activate, chain.bounds)
        modules = (chain.batch_norm, None if function else chain.activation, chain.quantizer)
        if chain.layer is None:
            residual = (None, None) if chain.residual is None else tuple(self._with_codes([chain.residual]))
            read = [node and self._module(node) for node in modules]
            value = self._value(chain.batch_norm.all_input_nodes[0])
            self._write_unit(epilogue, (value, *residual, None, *read), chain.batch_norm.name, chain.last)
            return
        names = [None if node is None else self._target(str(node.target)) for node in (chain.layer, *modules)]
        unit = BatchNormUnit(self.owner, names, epilogue, chain.bounds, number_of(chain.layer))
        sources = [chain.layer.args[0], *([] if chain.residual is None else [chain.residual])]
        self._write_unit(unit.run, self._with_codes(sources), chain.layer.name, chain.last)

    def _write_unit_of(self, node: fx.Node, before: fx.Node | None) -> None:
        target, codes = self._target(str(node.target)), self._wants_codes(node)
        if before is not None and is_weighted_call(before):
            name = self._target(str(before.target))
            layer = LayerUnit(self.owner, name, None if before is node else target, codes, number_of(before))
            self._write_unit(layer.run, self._with_codes(before.args), before.name, node)
            return
        module = self._target(str(before.target)) if before is not None and before.op == "call_module" else None
        called = None if before is None or module else function_of(before, before.all_input_nodes)
        function = NONE if before is None or module else OF_FUNCTION[before.target]
        arguments = (self.owner, module, target, called, function, codes, self._goes_to_a_layer(node))
        source = node if before is None else before
        if node not in self.added:
            self._write_unit(FunctionUnit(*arguments).run, [self._value(source.all_input_nodes[0])], source.name, node)
            return
        add, *read = self.added[node]
        unit = FunctionUnit(*arguments, adds=function_of(add, addends(add)))
        result = self._write_unit(unit.run_adding, map(self._value, addends(add)), source.name, node)
        self.written[add] = self._item(result, 2, add.name)
        for each in read:
            super()._write_node(each)

    def _write_unit(
        self,
        run: Callable[..., object],
        arguments: Iterable[object],
        name: str,
        last: fx.Node,
        named: dict[str, object] | None = None,
    ) -> fx.Node:
        result = self._called(run, arguments, named, f"{name}_unit")
        self.written[last] = self._item(result, 0, last.name)
        if any(self._takers_of(last)):
            self.codes[last] = self._item(result, 1, f"{last.name}_codes")
        return result

    def _called(self, function: Callable[..., object], args: Any, kwargs: Any, name: str) -> fx.Node:
        """Write a call that takes the run before the arguments."""
        if self.run is None:
            self.run = self.graph.create_node("call_function", running, name="run")
        return self.graph.create_node("call_function", function, (self.run, *args), kwargs, name=name)

    def _write_other(self, node: fx.Node) -> None:
        args, kwargs = self._built((node.args, node.kwargs), self._value)
        input_codes = [self._codes_of(source) for source in node.args if isinstance(source, fx.Node)]
        if node.name in self.products:
            function = products.function_of(node, self.products[node.name])
            self.written[node] = self._called(function, (input_codes, *args), kwargs, node.name)
        elif is_attention_call(node):
            attention = (self._module(node), tuple(map(self._codes_of, operands_of(node))), *args)
            self.written[node] = self._called(AttentionUnit().run, attention, kwargs, node.name)
        elif node.op == "call_module":
            self._write_unit(max_pool, (self._module(node), *args, *input_codes), node.name, node)
        else:
            named = {name: value for name, value in kwargs.items() if name != "return_indices"}
            named["input_codes"] = self._codes_of(node.all_input_nodes[0])
            self._write_unit(max_pool2d, args, node.name, node, named)

    # ---- integers

    def _with_codes(self, sources: Sequence[Any]) -> Iterator[Any]:
        """Yield each tensor and its integers, which are None where no unit of the part returns them."""
        for source in sources:
            yield self._value(source)
            yield self._codes_of(source)

    def _codes_of(self, source: Any) -> fx.Node | None:
        """Return the node of an argument's integers; if an op may return its tensor, the node of this one's integers."""
        while isinstance(source, fx.Node) and source not in self.codes and self._may_return_input(source):
            source = source.args[0]
        return self.codes.get(source)

    def _takers_of(self, node: fx.Node) -> Iterator[fx.Node]:
        """Yield the nodes whose ops take a result as integers."""
        for user in node.users:
            if user in self.takers:
                yield user
            elif self._may_return_input(user) or self._rearranges(user):
                yield from self._takers_of(user)

    def _rearranges(self, node: fx.Node) -> bool:
        """Return whether a function or a method returns the values of its first argument in another shape, order or memory."""
        plain = node.op in ("call_function", "call_method") and node.target is not getattr and bool(node.args)
        rearranges = kind_of(node).rearranges or (node.op == "call_method" and node.target in COPIES)
        return plain and rearranges and changed_by(node, self.division.gm) is None

    def _rearrange_codes(self, node: fx.Node) -> None:
        """Write a call that rearranges the integers of a tensor as an op did the tensor."""
        source = node.args[0] if self._rearranges(node) else None
        codes = self._codes_of(source)
        if isinstance(source, fx.Node) and codes is not None and any(self._takers_of(node)):
            operands = [source, *(each for each in node.all_input_nodes if each is not source)]
            of_tensor, *others = map(self._value, operands)
            given = (of_tensor, codes, self.written[node], *others)
            rearrangement = Rearrangement(function_of(node, operands))
            self.codes[node] = self._called(rearrangement.codes_of, given, {}, f"{node.name}_codes")

    def _may_return_input(self, node: fx.Node) -> bool:
        """Return whether an op may return the tensor that it is given, unchanged; ops that take its integers check this."""
        returns = kind_of(node).returns_input and bool(node.args) and isinstance(node.args[0], fx.Node)
        return returns and changed_by(node, self.division.gm) is None

    def _goes_to_a_layer(self, node: fx.Node) -> bool:
        """Return whether one layer or attention takes a result, and nothing else."""
        readers = readers_of(node)
        if len(readers) != 1 or node in self.results or readers[0] not in self.takers:
            return False
        user = readers[0]
        return is_weighted_call(user) or (is_attention_call(user) and all(each is node for each in operands_of(user)))

    def _wants_codes(self, node: fx.Node) -> bool:
        """Return whether an op takes a result as integers; a max pool takes only the grid."""
        return not all(map(is_max_pool_call, self._takers_of(node)))

    def _item(self, result: fx.Node, place: int, name: str) -> fx.Node:
        return self.graph.create_node("call_function", operator.getitem, (result, place), name=name)


def _function(node: fx.Node) -> Function | None:
    """Return the function of an op before a quantizer; None if it is not computed with the quantizer."""
    if len(node.args) != 1 or not isinstance(node.args[0], fx.Node) or node.kwargs:
        return None
    return function_of_module(module_of(node)) if node.op == "call_module" else OF_FUNCTION.get(node.target)
