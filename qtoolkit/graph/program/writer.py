"""Write the code of a part of a model's graph: the nodes that it runs, and the calls of the blocks in it."""

import ast
import functools
import linecache
import operator
from collections import OrderedDict
from collections.abc import Callable, Sequence, Set
from contextlib import nullcontext
from typing import Any
from uuid import uuid4
from weakref import finalize

from torch import fx, nn

from qtoolkit.graph.nodes import node_name
from qtoolkit.graph.program.division import Division, Part
from qtoolkit.model_inputs import Keys, leaves
from qtoolkit.model_state import evaluating
from qtoolkit.op_kinds.recorded import check_argument


class Writer:
    """Writes a part of a graph as it is: the part that the call of this index runs. `written` has its nodes by the model's."""

    def __init__(self, division: Division, index: int) -> None:
        self.division, self.index = division, index
        self.name = division.calls[index].block
        self.graph, self.written = fx.Graph(), dict[fx.Node, Any]()
        # what the part runs, in order: nodes, and the indices of the calls of blocks
        self.items = list(division.items(index))

    def write(self) -> fx.Graph:
        """Return the graph."""
        part = self.division.parts.get(self.index)
        if part is None:
            # Private: set_codegen has no getter. The codegen may take apart arguments that are containers.
            self.graph.set_codegen(self.division.gm.graph._codegen)
        else:
            self._write_arguments(part)
        for item in self.items:
            if isinstance(item, int):
                self._write_call(item)
            else:
                self._write_node(item)
        if part is not None:
            self.graph.output(self._built(part.result, self._value))
        return self.graph

    def _write_node(self, node: fx.Node) -> None:
        mode = self.division.of_eval_mode.get(node)
        run: Callable[..., object] = OpOfEvalMode(node).run
        if mode is None and node.op == "call_module":
            mode, run = self.division.of_training_mode.get(node), call_of_training_mode
        if mode is None:
            self._copy(node)
            return
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._value)
        called = (self._module(node),) if node.op == "call_module" else ()
        self.written[node] = self.graph.create_node(
            "call_function", run, (self._value(mode), *called, *args), kwargs, node.name
        )

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

    def _write_call(self, index: int) -> None:
        part = self.division.parts[index]
        args, kwargs = self._built((part.args, part.kwargs), self._known)
        target = self._target(part.call.block)
        modes = {self.division.of_training_mode.get(node) for node in self.division.members[index] if node.users}
        mode = modes.pop() if len(modes) == 1 else None
        if mode is None:
            result = self.graph.create_node("call_module", target, args, kwargs, node_name(target))
        else:
            called = self._value(mode), self.graph.get_attr(target)
            result = self.graph.call_function(call_of_training_mode, (*called, *args), kwargs)
        self._write_items(part.result, result)

    def _write_items(self, tree: Any, whole: fx.Node) -> None:
        """Write the nodes that take the values in nested tuples, lists and dicts."""
        items: dict[Keys, fx.Node] = {(): whole}
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

    def _module(self, node: fx.Node) -> fx.Node:
        """Return a node that reads the module that a node calls."""
        target = self._target(str(node.target))
        return self.graph.create_node("get_attr", target, name=node_name(target))

    def _target(self, name: str) -> str:
        """Return the name of a submodule or a tensor of the model, as the block of this part finds it."""
        inside = name.removeprefix(f"{self.name}.")
        return name if not self.name else inside if inside != name else f"_block_model.{name}"


class OpOfEvalMode:
    """Runs an op whose result eval mode alone takes; a module that it calls is the first argument."""

    def __init__(self, node: fx.Node) -> None:
        target: Any = node.target
        calls: dict[str, Callable[..., object]] = {
            "call_module": _call_module,
            "call_method": functools.partial(_call_method, target),
        }
        self.function = calls.get(node.op, target)

    def run(self, training: bool, /, *args: object, **kwargs: object) -> object:
        """Return what the op computes; None in training mode."""
        return None if training else self.function(*args, **kwargs)


def call_of_training_mode(training: bool, module: nn.Module, /, *args: object, **kwargs: object) -> object:
    """Call a module whose result training mode alone takes. In eval mode, for ranges and hooks, it changes no statistics."""
    with nullcontext() if training or not module.training else evaluating(module):
        return module(*args, **kwargs)


def _call_module(module: nn.Module, /, *args: object, **kwargs: object) -> object:
    return module(*args, **kwargs)  # operator.call is a builtin that torch.compile does not trace


def _call_method(name: str, value: object, /, *args: object, **kwargs: object) -> object:
    return getattr(value, name)(*args, **kwargs)


def compiled(graph: fx.Graph, name: str) -> Callable[..., Any]:
    """Return the function `forward(self, ...)` of a graph. Tracebacks show its lines."""
    code = graph.python_code("self")
    file = f"<forward of {name or 'the model'}>.{uuid4().hex}"  # torch.compile tells code apart by it, too
    scope, source = dict(code.globals), code.src
    hidden = {str(node.target) for node in graph.nodes if node.op == "placeholder"} & scope.keys()
    if hidden:
        source = _Globals(hidden).visit(ast.parse(source))
        scope |= {f"global_{name}": scope[name] for name in hidden}
    exec(compile(source, file, "exec", dont_inherit=True), scope)
    forward: Any = scope["forward"]
    linecache.cache[file] = (len(code.src), None, code.src.splitlines(keepends=True), file)
    finalize(forward.__code__, linecache.cache.pop, file, None).atexit = False
    return forward  # type: ignore[no-any-return]  # a function


class _Globals(ast.NodeTransformer):
    """Give globals of code that torch.fx has written other names, where an argument of the forward has the name of one.

    torch.fx writes a device as `device(type='cpu')`, also where `device` is an argument. Its code reads arguments in
    assignments of their own.
    """

    def __init__(self, names: Set[str]) -> None:
        self.names = names

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        return node if isinstance(node.value, ast.Name) else self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.copy_location(ast.Name(f"global_{node.id}", node.ctx), node) if node.id in self.names else node


def function_of(node: fx.Node, operands: Sequence[fx.Node]) -> Callable[..., Any]:
    """Return a function of some operands that does what a function or a method does in a graph."""
    graph = fx.Graph()
    arguments = {operand: graph.placeholder(f"value_{place}") for place, operand in enumerate(operands)}
    graph.output(graph.node_copy(node, arguments.__getitem__))
    return functools.partial(compiled(graph, node.name), None)
