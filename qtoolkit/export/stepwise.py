"""Run a converted model's graph with onnxruntime's codes put in place of its own, node by node."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, fx

from qtoolkit.export.codes import CodeCount, as_stored, compare_layer, twin_of, values_of, weights_of
from qtoolkit.export.hooked import hooked
from qtoolkit.model_inputs import copy_containers
from qtoolkit.op_kinds.nodes import kind_of, parameters_in
from qtoolkit.quantizers.frozen import Grid
from qtoolkit.shared_modules import first_names


class Stepwise(fx.Interpreter):
    """Runs a converted model, and puts onnxruntime's codes in place of its own after every quantizer.

    Args:
        converted: The model.
        codes: Of each quantizer, onnxruntime's codes at its nodes, in the order in which the graph comes to them.
    """

    def __init__(self, converted: fx.GraphModule, codes: Mapping[str, Sequence[Any]]) -> None:
        super().__init__(converted)
        self.converted, self.codes = converted, codes
        self.names = first_names(converted)
        targets = Counter(str(node.target) for node in converted.graph.nodes if node.op == "call_module")
        self.paired = {name: iter(of) for name, of in codes.items() if len(of) == targets[name]}
        self.missing: dict[str, None] = {}
        self.unreached: tuple[str, ...] = ()
        self.counts: dict[str, CodeCount] = {}
        self.apart = {*targets, *weights_of(converted)}
        self.inside: dict[str, Any] = {}
        self.constants = CodeCount()
        self.parameters = parameters_in(converted.graph)

    def follow(self, *inputs: Any) -> None:
        """Run the model; before that, where submodules are kept whole, count the calls of the quantizers inside them."""
        grids = [module for module, name in self.names.items() if isinstance(module, Grid) and name not in self.apart]
        calls: Counter[str] = Counter()
        with hooked(grids, lambda grid, *_: calls.update([self.names[grid]])):
            if grids:
                self.converted(*inputs)
        self.inside = {name: iter(of) for name, of in self.codes.items() if len(of) == calls[name]}
        with hooked(grids, self._put_theirs):
            self.run(*inputs)

    def run_node(self, n: fx.Node) -> Any:
        """Run a node; of a quantizer, compare the codes and go on with onnxruntime's, or, of a constant, with its own."""
        grid = self.fetch_attr(str(n.target)) if n.op == "call_module" else None
        if not isinstance(grid, Grid):
            return super().run_node(n)
        (x,), _ = self.fetch_args_kwargs_from_env(n)
        constant, name = n.all_input_nodes[0] in self.parameters, str(n.target)
        ours = as_stored(grid, x) if constant else grid.codes(x).cpu()
        theirs = next(self.paired[name]) if name in self.paired else twin_of(self.converted, self.codes, grid, x, ours)
        if theirs is None:
            self.missing[name] = None
            return grid(x)
        count = CodeCount.of(ours, theirs) if constant else compare_layer(grid, x, ours, theirs)
        if constant and _is_stored(n.all_input_nodes[0]):
            self.constants += count
            return grid(x)
        self.counts[name] = self.counts.get(name, CodeCount()) + count
        if constant:  # the file may have its codes in another shape
            return grid(x)
        return values_of(grid, theirs, x)

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a node's arguments as the model's own code has them: a function may write into its lists."""
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        return copy_containers(args), copy_containers(kwargs)

    def _put_theirs(self, grid: Any, args: tuple[Tensor], output: Tensor) -> Tensor:
        x, name = args[0], self.names[grid]
        ours = grid.codes(x).cpu()
        theirs = next(self.inside[name]) if name in self.inside else twin_of(self.converted, self.codes, grid, x, ours)
        if theirs is None:
            self.missing[name] = None
            return output
        self.counts[name] = self.counts.get(name, CodeCount()) + compare_layer(grid, x, ours, theirs)
        return values_of(grid, theirs, x)


def _is_stored(constant: fx.Node) -> bool:
    """Return whether a constant is a parameter, or values of one: in a computed one runtimes may differ by rounding ties."""
    while constant.op != "get_attr" and kind_of(constant).moves:
        constant = constant.all_input_nodes[0]
    return constant.op == "get_attr"
