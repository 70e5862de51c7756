"""The tracer: fx.Tracer with more leaves, that decides on sizes by example inputs and refuses what a graph would lose."""

import inspect
import linecache
import os
import sys
import traceback
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from qtoolkit.graph.capture.mode import NAME, DecidesOnModeError, Mode, holds_nothing
from qtoolkit.graph.capture.proxy import SizedProxy
from qtoolkit.graph.capture.sizes import UNKNOWN, Sizes, is_plain
from qtoolkit.graph.capture.subclasses import plain_type
from qtoolkit.nn import QuantModule
from qtoolkit.nn.batch_norm import is_batch_norm
from qtoolkit.op_kinds.recorded import RECORDED, call_scripted, check_none, check_size, items_of
from qtoolkit.op_kinds.rules import NUMBER
from qtoolkit.quantizers.frozen import Grid
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer

OWN_FOLDERS = tuple(str(Path(file).parent) + os.sep for file in (torch.__file__, __file__))

LEAVES = (QuantModule, TensorQuantizer, Grid, torch.jit.ScriptModule)
# torch.nn's own containers: their forward is traced, so that the graph sees what is in them.
CONTAINERS = (
    nn.Sequential,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)


def user_line(frames: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    """Return the innermost of some frames that is neither torch's nor the tracer's."""
    foreign = [f for f in frames if not f.filename.startswith(OWN_FOLDERS)]
    return foreign[-1] if foreign else None


def describe_line(frame: traceback.FrameSummary) -> str:
    """Return file, line, function and source of a frame."""
    source = linecache.getline(frame.filename, frame.lineno or 0).strip()
    return f"{frame.filename}, line {frame.lineno}, in {frame.name}: `{source}`"


class ModelTracer(fx.Tracer):
    """fx.Tracer with more leaves, that knows which submodule it is in.

    Args:
        leaf_modules: Types of submodules to keep whole.
        whole: Submodules to keep whole.
        sizes: Values of nodes by example inputs, or None.
        scripted: Of compiled functions: module and name, by id.

    Attributes:
        path: The submodules that are being traced, outermost first; an error leaves it as it was then.
        decisive: The submodules that decided on their mode, and did so for good.
    """

    proxy_buffer_attributes = True  # else what is computed from buffers alone would be a constant of the graph

    # The defaults are for torch.fx, which makes a tracer of this class when it unpickles a GraphModule.
    def __init__(
        self,
        leaf_modules: Sequence[type[nn.Module]] = (),
        whole: Collection[nn.Module] = (),
        sizes: Sizes | None = None,
        scripted: Mapping[Any, tuple[str, str]] | None = None,
    ) -> None:
        self.scripted = dict(scripted or {})
        self.whole_functions = (*RECORDED, *self.scripted, *_whole_functions())
        super().__init__(autowrap_functions=self.whole_functions)
        self.leaf_modules, self.whole, self.sizes = tuple(leaf_modules), set(whole), sizes
        self.path: list[tuple[str, nn.Module]] = []
        self.mode = _mode()
        self.measuring = False
        self.modes: dict[str, fx.Node] = {}
        self.decisive: dict[nn.Module, None] = {}
        self.rebound: list[tuple[SizedProxy, fx.Node]] = []
        self.seen_through: list[fx.Node] = []

    # ---- leaves

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether a submodule becomes one node."""
        if m in self.whole or isinstance(m, (*LEAVES, *self.leaf_modules)):
            return True
        if is_batch_norm(m) or plain_type(m) is not None:  # FrozenBatchNorm is of no torch package
            return True
        return type(m) not in CONTAINERS and super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Trace a submodule, or make it a node; `path` says which one it is meanwhile."""
        if self.measuring:
            return forward(*args, **kwargs)
        name = self.path_of_module(m)
        if self.is_leaf_module(m, name):
            return super().call_module(m, forward, args, kwargs)
        self.path.append((name, m))
        check_hooks(m)
        before = self._mark()
        try:
            result = super().call_module(m, forward, args, kwargs)
        except DecidesOnModeError:
            self._go_back(before)
            result = self.create_proxy("call_module", name, args, kwargs)
        self.path.pop()
        return result

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **more: Any) -> fx.Proxy:
        """Make a node, or, for a Python function that weights are handed to, trace what it does with them.

        torch.fx.wrap makes such a function one op, in which its layers would stay in float unseen.
        """
        hides = kind == "call_function" and self._hides_layers(target, (args, kwargs))
        seen = self._see_through(target, args, kwargs) if hides else None
        return super().create_proxy(kind, target, args, kwargs, *rest, **more) if seen is None else seen

    def _see_through(self, function: FunctionType, args: Any, kwargs: Any) -> fx.Proxy | None:
        before, random = self._mark(), torch.get_rng_state()
        try:
            result = function(*args, **kwargs)
        except Exception:  # whatever it raises on proxies: then it stays one op, as its author asks
            result = None
        if isinstance(result, SizedProxy) and torch.equal(random, torch.get_rng_state()):
            self.seen_through.append(result.node)
            return result
        torch.set_rng_state(random)
        self._go_back(before)
        return None

    def _hides_layers(self, target: Any, arguments: Any) -> bool:
        if self.sizes is None or not isinstance(target, FunctionType) or target in self.whole_functions:
            return False
        if (target.__module__ or "").partition(".")[0] == "torch":
            return False
        proxies: list[Any] = [a for a in tree_leaves(arguments) if isinstance(a, fx.Proxy)]
        return any(_is_weight(p.node, self.sizes[p.node]) for p in proxies)

    def _mark(self) -> tuple[fx.Node, Any, int]:
        return next(iter(reversed(self.graph.nodes))), self.module_stack.copy(), len(self.rebound)

    def _go_back(self, mark: tuple[fx.Node, Any, int]) -> None:
        """Undo what was traced since a mark."""
        last, self.module_stack, count = mark  # fx does not take its stack back on an error
        for proxy, node in reversed(self.rebound[count:]):
            proxy.node = node
        del self.rebound[count:]
        for node in reversed(list(self.graph.nodes)):
            if node is last:
                break
            self.graph.erase_node(node)
        self.modes = {path: node for path, node in self.modes.items() if node in self.graph.nodes}

    def decided_on_mode(self, module: nn.Module) -> None:
        """Keep the submodule that is traced whole, where that loses nothing, or note it: it decides on its mode.

        Raises:
            DecidesOnModeError: So it is.
        """
        if self.path and self.path[-1][1] is module and holds_nothing(module):
            raise DecidesOnModeError
        if not type(module).__module__.startswith("torch."):  # whose own decisions are on how to compute the same
            self.decisive[module] = None

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        """Return a proxy for a parameter or buffer of the model."""
        return attr_val if self.measuring else super().getattr(attr, attr_val, parameter_proxy_cache)

    # ---- nodes

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Return what stands for a node in the user's code."""
        return SizedProxy(node, self)

    def create_arg(self, a: Any) -> Any:
        """Return a value as a node's argument.

        A proxy that says to be a tensor is no constant, an OrderedDict stays one, and a mode is read at each run.
        """
        if isinstance(a, fx.Proxy):
            return a.node
        if isinstance(a, Mode):
            return self._read_mode(a)
        if type(a) is OrderedDict:
            return self.create_node(
                "call_function", OrderedDict, ([(k, self.create_arg(v)) for k, v in a.items()],), {}
            )
        return super().create_arg(a)

    def create_node(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **more: Any) -> fx.Node:
        """Make a node, and compute its value if there are example inputs.

        Raises:
            RuntimeError: It is made in a mode that a graph does not keep.
        """
        if kind not in ("placeholder", "output") and _mode() != self.mode:
            raise RuntimeError(
                "torch.no_grad, inference_mode or autocast is entered here, which a graph does not keep."
            )
        if kind == "call_function":
            target, args = self._with_home(target, args)
        node = super().create_node(kind, target, args, kwargs, *rest, **more)
        if self.sizes is not None and kind != "output":
            self.measuring = True
            self.sizes.add(node)
            self.measuring = False
            if is_plain(self.sizes[node]) and not isinstance(self.sizes[node], str | None):
                node.meta[NUMBER] = True
        return node

    def _read_mode(self, mode: Mode) -> fx.Node:
        path = self.path_of_module(mode.module) if mode.module is not self.root else ""
        if path not in self.modes:
            self.modes[path] = self.create_node("call_module", f"{path}.{NAME}".removeprefix("."), (), {})
            if self.sizes is not None:
                self.sizes.values[self.modes[path]] = mode != 0
        return self.modes[path]

    def _with_home(self, target: Any, args: Any) -> tuple[Any, Any]:
        """Return a function that a pickle can find again, with its arguments."""
        if target in self.scripted:
            return call_scripted, (*self.scripted[target], *args)
        # After a pickle with fx's own check of a fixed argument was loaded, fx can trace no more (torch 2.14).
        return (check_none if getattr(target, "__name__", "") == "_assert_is_none" else target), args

    # ---- decisions

    def value_of(self, proxy: fx.Proxy) -> Any:
        """Return what a proxy stands for in the example, with tensors on the meta device; UNKNOWN where data decides."""
        return UNKNOWN if self.sizes is None else self.sizes[proxy.node]

    def decide(self, proxy: fx.Proxy, kind: type = object) -> Any:
        """Return what a proxy stands for, and have the graph check that it stays so.

        Raises:
            TraceError: It depends on data.
        """
        value = self.value_of(proxy)
        if not is_plain(value):
            return super().to_bool(proxy)  # raises
        expected = bool(value) if kind is bool else value
        frame = user_line(traceback.extract_stack())
        where = describe_line(frame) if frame is not None else "its forward"
        self.create_proxy("call_function", check_size, (proxy, expected, where), {})
        return expected

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Return which way a condition goes."""
        return bool(self.decide(obj, bool))

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        """Return the items of a proxy, where their number is known."""
        value = self.value_of(obj)
        if value is UNKNOWN:
            return super().iter(obj)
        items: Any = obj
        if not isinstance(value, tuple | list | Tensor):
            items = self.create_proxy("call_function", items_of, (obj,), {})
        return (items[i] for i in range(len(items)))


def _is_weight(node: fx.Node, value: Any) -> bool:
    return node.op == "get_attr" and isinstance(value, nn.Parameter) and value.dim() > 1


def check_hooks(module: nn.Module) -> None:
    """Raise RuntimeError for a module with forward hooks, which would see proxies once, at tracing, and then be lost."""
    if any(module.__dict__.get(name) for name in ("_forward_hooks", "_forward_pre_hooks")):
        raise RuntimeError("this module has forward hooks, which a graph does not keep; remove them first.")


def check_assigned(model: nn.Module) -> None:
    """Raise RuntimeError where a forward has put a traced value in place of a buffer."""
    for name, module in model.named_modules():
        for buffer, value in module._buffers.items():
            if isinstance(value, fx.Proxy):
                raise RuntimeError(
                    f"buffer {buffer!r} of {name or 'the model'!r} is assigned to, which a graph does not keep; write into it "
                    f"with copy_ or add_."
                )


def _mode() -> tuple[bool, bool, bool, bool]:
    """Return the modes that a block of a forward may switch."""
    autocast = torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu")
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast


def scripted_functions(model: nn.Module) -> dict[Any, tuple[str, str]]:
    """Return the functions compiled by torch.jit.script that a model's forwards can see, with their module and name."""
    forwards = [inspect.getattr_static(type(m), "forward", None) for m in model.modules()]
    spaces = [space for forward in forwards if (space := getattr(forward, "__globals__", None))]
    return {
        value: (space["__name__"], name)
        for space in {id(s): s for s in spaces}.values()
        for name, value in space.items()
        if isinstance(value, torch.jit.ScriptFunction)
    }


def _whole_functions() -> tuple[FunctionType, ...]:
    """Return torchvision's ops, which look at the types of their arguments. Where it is not loaded, no model has them."""
    ops = sys.modules.get("torchvision.ops")
    found = [getattr(ops, name) for name in getattr(ops, "__all__", ())]
    return tuple(f for f in found if isinstance(f, FunctionType))
