"""The tracer: fx.Tracer with more leaf modules, shape propagation, and errors for what a graph would lose."""

import functools
import traceback
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.fx.node import Argument, Target
from torch.utils._pytree import tree_leaves

from qtoolkit.errors import with_article
from qtoolkit.graph.blocks import BASES, name_in_graph
from qtoolkit.graph.capture.attributes import (
    BranchesOnModeError,
    Mode,
    check_hooks,
    name_in,
    returns_input,
)
from qtoolkit.graph.capture.calls import CallRecorder
from qtoolkit.graph.capture.functions import (
    answer_if_finite,
    as_python,
    is_checkpointed,
    is_composite,
    is_foreign,
    is_weight,
    patched,
    recorded_functions,
    torchvision_ops,
    traced_checkpoints,
)
from qtoolkit.graph.capture.proxy import SizedProxy, TensorProxy
from qtoolkit.graph.capture.rewrites.subclasses import equivalent_type
from qtoolkit.graph.capture.rewrites.torch_modes import TorchModes
from qtoolkit.graph.capture.shapes import (
    UNKNOWN,
    ShapePropagation,
    dims_of,
    holds_no_floats,
    is_plain,
    is_sequence_of_tensors,
)
from qtoolkit.graph.capture.signature import ForwardCall
from qtoolkit.graph.capture.untraceable import describe_line, user_line
from qtoolkit.graph.nodes import node_name
from qtoolkit.graph.output_types import OutputTypes, types_in
from qtoolkit.model_inputs import Args, Kwargs
from qtoolkit.model_state import RandomState
from qtoolkit.nn import QuantModule
from qtoolkit.nn.batch_norm import is_batch_norm
from qtoolkit.op_kinds.facts import set_facts
from qtoolkit.op_kinds.recorded import RECORDED, TrainingMode, call_scripted, check_none, check_size, items_of
from qtoolkit.quantizers.frozen import Grid
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer

# Functions and methods that compute gradients, whose calls a graph does not record rightly. `torch._make_dual` is what
# torch.autograd.forward_ad.make_dual calls.
GRADIENT_CALLS = (torch.autograd.grad, torch.autograd.backward, torch._make_dual, "backward", "register_hook")
LEAVES = (QuantModule, TensorQuantizer, Grid, TrainingMode, torch.jit.ScriptModule)
# How torch.fx ends its error for another value of a fixed argument, and what this package adds.
OF_FIXED = "but got another value"
TO_PASS_ANOTHER = (
    ": qtoolkit.prepare has fixed this argument. Leave it at that value, prepare the model with another one in concrete_args, "
    "or quantize the model by qtoolkit.quant_modules.replace, which fixes no argument."
)


class TraceCheckpoint(NamedTuple):
    """The state of a trace, to which `ModelTracer` can roll back."""

    last: fx.Node
    # the stack of modules of torch.fx, which does not restore it after an error
    module_stack: OrderedDict[str, tuple[str, Any]]
    rebound: int  # the number of proxies that were rebound
    calls: int  # the number of calls of blocks


class ModelTracer(fx.Tracer):
    """fx.Tracer with more leaf modules, shape propagation, and a record of the submodule that is being traced.

    `shapes` propagates shapes, where example values are known; `scripted` has the module and the name of each function compiled
    by torch.jit.script; `call` says how forward is called, or is None where its arguments are passed as torch.fx does.
    """

    proxy_buffer_attributes = True  # otherwise values computed from buffers alone would be constants of the graph

    # torch.fx calls the constructor without arguments when it unpickles a GraphModule.
    def __init__(
        self,
        leaf_modules: Sequence[type[nn.Module]] = (),
        leaf_submodules: Collection[nn.Module] = (),
        shapes: ShapePropagation | None = None,
        scripted: Mapping[Callable[..., object], tuple[str, str]] | None = None,
        call: ForwardCall | None = None,
    ) -> None:
        self.scripted = dict(scripted or {})
        self.leaf_functions: tuple[Callable[..., object], ...] = (*RECORDED, *self.scripted, *torchvision_ops())
        super().__init__(autowrap_functions=self.leaf_functions)
        self.leaf_modules, self.leaf_submodules, self.shapes = tuple(leaf_modules), set(leaf_submodules), shapes
        self.call = call
        # names and modules of the submodules that are being traced, outermost first; after an error, where it was raised
        self.path: list[tuple[str, nn.Module]] = []
        self.tensors: set[Tensor] = set()  # parameters and buffers of the model
        self.checkpointed = False  # whether the forward calls torch.utils.checkpoint
        self.propagating = self.has_ended = False
        self.modes: dict[nn.Module, fx.Node] = {}  # the node that reads the training mode of each submodule
        # the submodules whose Python branches on their mode; the graph has the branch of this mode only
        self.branching: dict[nn.Module, None] = {}
        # proxies that an assignment to an item has bound to a new node, each with its former node
        self.rebound: list[tuple[SizedProxy, fx.Node]] = []
        self.inlined: list[fx.Node] = []  # nodes that return the result of an inlined function
        self.blocks = CallRecorder()  # the calls of submodules that are traced
        self.without_grad: list[fx.Node] = []  # nodes made under torch.no_grad
        self.output_types: OutputTypes = ()  # the classes of mappings that forward returned
        # nodes that test whether values are finite, each with the submodule whose Python branches on it
        self.finite_checks: dict[fx.Node, str] = {}
        self.torch_modes = TorchModes(shapes is not None)
        self.patches = [*recorded_functions(), *self.torch_modes.patches()]
        self.originals = [(owner, name, getattr(owner, name)) for owner, name, _ in self.patches]

    def trace(self, root: nn.Module | Callable[..., object], concrete_args: Kwargs | None = None) -> fx.Graph:
        """Return the graph of a model."""
        if isinstance(root, nn.Module):
            self.tensors = {*root.parameters(), *root.buffers()}
        # Ops on fake tensors import torch.compile's tracer. It makes a table of the functions of `math`, which torch.fx
        # replaces during a trace: imported then, it would not know them later. This public function imports it.
        torch.compiler.assume_constant_result(lambda: None)  # type: ignore[no-untyped-call]
        try:
            with torch.enable_grad(), traced_checkpoints(), patched(self.patches):
                return super().trace(root, concrete_args)
        finally:
            self.has_ended = True

    def create_args_for_root(
        self, root_fn: Callable[..., object], is_module: bool, concrete_args: Kwargs | Args | None = None
    ) -> tuple[Callable[..., object], list[object]]:
        """Make the placeholders; return the function to call and its arguments."""
        if self.call is None and hasattr(root_fn, "__wrapped__"):
            raise RuntimeError(
                "the forward is decorated and takes *args or **kwargs, which can be traced only where example_inputs give "
                "nothing for them."
            )
        function = root_fn if self.call is None else self.call.of(root_fn)
        called, arguments = super().create_args_for_root(function, is_module, concrete_args)

        @functools.wraps(called)  # the code of the graph has its annotations
        def call(*args: object) -> object:
            result = called(*args)
            self.output_types = tuple(types_in(result))
            return result

        return call, arguments

    # ---- modules

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether a submodule becomes one node."""
        if m in self.leaf_submodules or isinstance(m, (*LEAVES, *self.leaf_modules)):
            return True
        if is_batch_norm(m) or equivalent_type(m) is not None:  # FrozenBatchNorm is not in a torch package
            return True
        return type(m) not in BASES and super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Callable[..., object], args: Args, kwargs: Kwargs) -> object:
        """Trace a submodule, or make it a node; `path` has the submodule meanwhile."""
        if self.propagating or self._is_built_in_forward(m):
            return forward(*args, **kwargs)
        name = self.path_of_module(m)
        self._check_call(m, name, (args, kwargs))
        if self.is_leaf_module(m, name):
            return super().call_module(m, forward, args, kwargs)
        self.path.append((name, m))
        check_hooks(m)
        before = self._checkpoint()
        self.blocks.enter(name, m, args, kwargs)
        try:
            result = super().call_module(m, forward, args, kwargs)
            self.blocks.leave(result)
        except BranchesOnModeError:
            self._roll_back(before)
            result = self.create_proxy("call_module", name, args, kwargs)
            set_facts(result.node, returns_input=returns_input(m))
        for value in tree_leaves(result):
            self._check_traced(value)
        self.path.pop()
        return result

    def _is_built_in_forward(self, m: nn.Module) -> bool:
        """Return whether a module is none of the model's, as a loss that forward builds, or a slice of a Sequential.

        Its operations are traced. Raises RuntimeError: it has parameters or buffers that the model does not have.
        """
        if m in (self.submodule_paths or ()):
            return False
        if not {*m.parameters(), *m.buffers()} <= self.tensors:
            raise RuntimeError(
                f"the forward builds a {type(m).__name__}, which the model does not keep; build it in __init__."
            )
        return True

    def _check_call(self, m: nn.Module, name: str, arguments: object) -> None:
        if not set(m.parameters()) <= self.tensors:
            raise RuntimeError(
                f"a parameter of {name!r} is replaced here, as torch.func.functional_call does, which a graph does not record."
            )
        for value in tree_leaves(arguments):
            self._check_traced(value)

    def _check_traced(self, value: object) -> None:
        """Raise RuntimeError for a tensor that was computed from a traced value without a node."""
        if not isinstance(value, Tensor) or isinstance(value, fx.Proxy) or not value.is_meta:
            return
        if value not in self.tensors and value not in self.tensor_attrs:
            raise RuntimeError(
                "a tensor is used here that was computed from a traced value in C++, which a graph does not record, as "
                "torch.tensor(x), torch.Tensor(x) and torch.func.vmap do; use x.clone() for a copy."
            )

    def getattr(self, attr: str, attr_val: object, parameter_proxy_cache: dict[str, fx.Proxy]) -> object:
        """Return a proxy for a parameter or buffer of the model."""
        return attr_val if self.propagating else super().getattr(attr, attr_val, parameter_proxy_cache)

    # ---- functions

    def create_proxy(
        self,
        kind: str,
        target: Target,
        args: Args,
        kwargs: Kwargs,
        name: str | None = None,
        type_expr: object = None,
        proxy_factory_fn: Callable[[fx.Node], fx.Proxy] | None = None,
    ) -> fx.Proxy:
        """Make a node, or inline a Python function that takes weights.

        torch.fx.wrap makes such a function one op, in which its layers would stay in float without a report.
        """
        if target in GRADIENT_CALLS:
            called = getattr(target, "__name__", target)
            raise RuntimeError(f"{called} is called here; a graph does not record gradients inside a forward.")
        if callable(target) and self._takes_weights(target, (args, kwargs)):
            inlined = self._inline(target, args, kwargs)
            if inlined is not None:
                return inlined  # type: ignore[return-value]  # what the function returns, a proxy or a tuple with one
        return super().create_proxy(kind, target, args, kwargs, name, type_expr, proxy_factory_fn)

    def _takes_weights(self, target: Target, arguments: object) -> bool:
        if self.shapes is None or not is_composite(target) or target in self.leaf_functions:
            return False
        proxies = [a for a in tree_leaves(arguments) if isinstance(a, fx.Proxy)]
        return any(is_weight(p.node, self.shapes[p.node]) for p in proxies)

    def _inline(self, function: Callable[..., object], args: Args, kwargs: Kwargs) -> object:
        before, random = self._checkpoint(), RandomState.now()
        try:
            with nullcontext() if is_foreign(function) else as_python():
                result = function(*args, **kwargs)
        except Exception:  # the function cannot be traced: it stays one op
            result = None
        first = result[0] if isinstance(result, tuple) and result else result
        if isinstance(first, SizedProxy) and random == RandomState.now():
            self.inlined.append(first.node)
            return result
        random.restore()
        self._roll_back(before)
        return None

    def _checkpoint(self) -> TraceCheckpoint:
        last = next(iter(reversed(self.graph.nodes)))
        return TraceCheckpoint(last, self.module_stack.copy(), len(self.rebound), len(self.blocks.calls))

    def _roll_back(self, to: TraceCheckpoint) -> None:
        self.module_stack = to.module_stack
        for proxy, node in reversed(self.rebound[to.rebound :]):
            proxy.node = node
        del self.rebound[to.rebound :]
        self.blocks.roll_back(to.calls)
        for node in reversed(list(self.graph.nodes)):
            if node is to.last:
                break
            self.graph.erase_node(node)
        self.modes = {module: node for module, node in self.modes.items() if node in self.graph.nodes}
        self.without_grad = [node for node in self.without_grad if node in self.graph.nodes]
        self.finite_checks = {node: name for node, name in self.finite_checks.items() if node in self.graph.nodes}

    # ---- nodes

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Return the proxy of a node."""
        value = UNKNOWN if self.shapes is None else self.shapes[node]
        return TensorProxy.of(value, node, self) if isinstance(value, Tensor) else SizedProxy(node, self)

    def create_arg(self, a: object) -> Argument:
        """Return a value as the argument of a node.

        torch.fx would take a proxy that is an instance of Tensor for a constant, an OrderedDict for a dict and a mode for an
        int, and write a number of NumPy as text that names NumPy. Raises RuntimeError: a tensor was computed from a traced
        value without a node, or no graph can hold a value of this type.
        """
        if isinstance(a, fx.Proxy):
            return a.node
        self._check_traced(a)
        if isinstance(a, Mode):
            return self._read_mode(a)
        if isinstance(a, np.generic):
            return super().create_arg(a.item())
        if type(a) is OrderedDict:
            return self.create_node(
                "call_function", OrderedDict, ([(k, self.create_arg(v)) for k, v in a.items()],), {}
            )
        try:
            return super().create_arg(a)
        except NotImplementedError:
            raise RuntimeError(
                f"the forward returns {with_article(type(a))}, or passes it to an op, which a graph does not record."
            ) from None

    def create_node(
        self,
        kind: str,
        target: Target,
        args: tuple[Argument, ...],
        kwargs: dict[str, Argument],
        name: str | None = None,
        type_expr: object = None,
    ) -> fx.Node:
        """Make a node, and propagate shapes through it; RuntimeError in a mode of torch that a graph does not record."""
        is_op = kind not in ("placeholder", "output")
        if is_op:
            self.torch_modes.check()
        self.checkpointed = self.checkpointed or is_checkpointed()
        if kind in ("call_module", "get_attr"):
            target = name_in_graph(self.root, str(target))
            name = name or node_name(target)
        if kind == "call_function":
            target, args = self._picklable_call(target, args)
        node = super().create_node(kind, target, args, kwargs, name, type_expr)
        set_facts(node, call=self.blocks.open[-1])
        if self.shapes is not None and kind != "output":
            self.propagating = True
            with patched(self.originals):  # the modules that this code imports keep what they see
                self.shapes.add(node)
            self.propagating = False
            value = self.shapes[node]
            if isinstance(value, Tensor) or (is_plain(value) and not isinstance(value, str | None)):
                set_facts(node, is_number=not isinstance(value, Tensor))
            set_facts(node, is_discrete=holds_no_floats(value), is_sequence=is_sequence_of_tensors(value))
            set_facts(node, input_dims=next((dims_of(self.shapes[source]) for source in node.all_input_nodes), None))
        if is_op and kind != "get_attr" and not torch.is_grad_enabled():
            self.without_grad.append(node)
        return node

    def _picklable_call(self, target: Target, args: tuple[Argument, ...]) -> tuple[Target, tuple[Argument, ...]]:
        """Return a call of a function that a pickle can name: the function and its arguments."""
        if target in self.scripted:
            return call_scripted, (*self.scripted[target], *args)
        if target is torch._assert and str(args[-1]).endswith(OF_FIXED):
            return target, (*args[:-1], f"{args[-1]}{TO_PASS_ANOTHER}")
        # torch.fx cannot trace any more after a pickle with its own check of a None argument was loaded (torch 2.14).
        return (check_none if getattr(target, "__name__", "") == "_assert_is_none" else target), args

    # ---- training modes

    def _read_mode(self, mode: Mode) -> fx.Node:
        module = mode.module
        if module not in self.modes:
            path = "" if module is self.root else f"{self.path_of_module(module)}."
            self.modes[module] = self.create_node("call_module", f"{path}{name_in(module)}", (), {})
            if self.shapes is not None:
                self.shapes.values[self.modes[module]] = mode != 0
        return self.modes[module]

    def mode_before_all(self, module: nn.Module) -> fx.Node:
        """Return the node that reads the mode of a submodule, before all ops of the graph, which is traced."""
        first = next(node for node in self.graph.nodes if node.op != "placeholder")
        if self.modes.get(module) not in self.graph.nodes:  # a rewrite has erased the node, with the op that took it
            self.modes.pop(module, None)
        with self.graph.inserting_before(first):
            mode = self._read_mode(Mode.of(module, self.branch_on_mode))
        if mode is not first:
            first.prepend(mode)
        return mode

    def branch_on_mode(self, module: nn.Module) -> None:
        """Note that a submodule branches on its mode; BranchesOnModeError for one without state, to become a leaf module."""
        has_state = bool(module._parameters or module._buffers or module._modules)
        if self.path and self.path[-1][1] is module and not has_state:
            raise BranchesOnModeError
        if not type(module).__module__.startswith("torch."):  # torch's modules compute the same in all branches
            self.branching[module] = None

    # ---- values that Python uses

    def value_of(self, proxy: fx.Proxy) -> object:
        """Return the example value of a proxy, with tensors on the meta device; UNKNOWN if it depends on data."""
        return UNKNOWN if self.shapes is None else self.shapes[proxy.node]

    def guard(self, proxy: fx.Proxy, kind: type = object) -> Any:
        """Return the example value of a proxy, and let the graph check that it stays the same; TraceError if data decides."""
        value = self.value_of(proxy)
        if not is_plain(value):
            return super().to_bool(proxy)  # raises
        expected = bool(value) if kind is bool else value
        where = describe_line(user_line(traceback.extract_stack()))
        self.create_proxy("call_function", check_size, (proxy, expected, where), {})
        return expected

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Return whether a condition holds. Values are taken to be finite."""
        answer = answer_if_finite(obj.node)
        if answer is None:
            return bool(self.guard(obj, bool))
        self.finite_checks[obj.node] = self.path[-1][0] if self.path else type(self.root).__name__
        return answer

    def erase_finite_checks(self) -> None:
        """Remove the tests of values from the graph, which is traced."""
        for node in self.finite_checks:
            for unused in (node, *node.all_input_nodes):
                if not unused.users:
                    self.graph.erase_node(unused)

    def iter(self, obj: fx.Proxy) -> Iterator[object]:
        """Return the items of a proxy, if their number is known."""
        value = self.value_of(obj)
        if value is UNKNOWN:
            return super().iter(obj)
        items: Any = obj
        if not isinstance(value, tuple | list | Tensor):
            items = self.create_proxy("call_function", items_of, (obj,), {})
        return (items[i] for i in range(len(items)))
