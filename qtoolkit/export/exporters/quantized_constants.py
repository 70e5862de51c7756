"""Keep the quantizers of parameters and buffers out of the graph that torch records; add them to the ONNX graph later.

Otherwise most nodes of the recorded graph compute constants, and torch.onnx.export takes milliseconds per node. The recorded
graph has a buffer in place of each quantized constant.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import onnx_ir
import torch
from onnx_ir.tensor_adapters import TorchTensor
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qtoolkit.export.exporters.translation import DOMAIN, TRANSLATIONS, Arguments, placeholder
from qtoolkit.export.files.graph import unused_name
from qtoolkit.nn.layer_call import LayerCall
from qtoolkit.nn.weighted import QuantWeighted
from qtoolkit.ops.recording import ops_taken
from qtoolkit.quantizers.frozen import Grid


@dataclass(frozen=True)
class _Call:
    """The call of a quantizing op on a constant."""

    kept: str  # the name of the buffer that stands for its result
    # the dotted names of its tensors: the constant, the scale, and the zero point if it exists; "" for computed tensors
    names: Sequence[str]
    tensors: Sequence[Tensor]  # their values
    settings: Arguments  # its other arguments by name


class QuantizedConstants:
    """The quantized constants of a converted model; `run` runs the model once to find them."""

    def __init__(self, model: nn.Module, run: Callable[[], object]) -> None:
        self._model = model
        self._named = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
        self._calls: dict[_Quantizing, _Call | None] = {}  # None: of several constants, or of none
        with ops_taken(), _replaced({method: self._recording(method) for method in _quantizing(model)}):
            run()

    def _recording(self, method: "_Quantizing") -> Callable[[Tensor], Tensor]:
        def record(x: Tensor, *args: LayerCall) -> Tensor:
            """Call the method and record the call, unless the method quantizes several constants or an activation."""
            with _Ops() as ops:
                y = method.call(x, *args)
            call = self._call_in(ops.calls)
            before = self._calls.setdefault(method, call)
            if before is None or call is None or not all(map(torch.equal, before.tensors, call.tensors)):
                self._calls[method] = None
            return y

        return record

    def _call_in(self, calls: Sequence[Arguments]) -> _Call | None:
        """Return the only call of a quantizer; None if it has several calls or does not quantize a constant."""
        if len(calls) != 1:
            return None
        tensors = [value.detach() for value in calls[0].values() if isinstance(value, Tensor)]
        named = [self._named.get(id(value), "") for value in calls[0].values() if isinstance(value, Tensor)]
        if not named[0]:
            return None
        settings = {name: value for name, value in calls[0].items() if not isinstance(value, Tensor)}
        return _Call(f"qtoolkit_constant_{len(self._calls)}", named, tensors, settings)

    @contextmanager
    def kept_out(self) -> Iterator[None]:
        """Let each quantizer of a constant return a buffer in place of its result within a `with` block."""
        calls = {method: call for method, call in self._calls.items() if call is not None}
        for call in calls.values():
            self._model.register_buffer(call.kept, call.tensors[0])
        try:
            with _replaced({method: self._returning(method, call) for method, call in calls.items()}):
                yield
        finally:
            for call in calls.values():
                delattr(self._model, call.kept)

    def _returning(self, method: "_Quantizing", call: _Call) -> Callable[[Tensor], Tensor]:
        owner, _, attribute = call.names[0].rpartition(".")

        def kept(x: Tensor, *args: LayerCall) -> Tensor:
            """Return the stored values of the constant; compute the values of any other tensor."""
            # While torch records, the attributes of the model are stand-ins for its tensors.
            is_constant = x is getattr(self._model.get_submodule(owner), attribute)
            return self._model.get_buffer(call.kept) if is_constant else method.call(x, *args)

        return kept

    def put_back(self, model: onnx_ir.Model) -> None:
        """Add the placeholders of the quantizers to a file's graph; the buffers are its initializers."""
        graph, first = model.graph, model.graph[0]
        for call in self._calls.values():
            x = None if call is None else graph.initializers.pop(call.kept, None)
            if call is None or x is None:
                continue
            x.name = unused_name(graph, call.names[0])
            graph.register_initializer(x)
            grid = [
                _constant(graph, name or unused_name(graph, f"{x.name}.{part}"), tensor)
                for part, name, tensor in zip(("scale", "zero_point"), call.names[1:], call.tensors[1:], strict=False)
            ]
            node = placeholder([x, *grid], call.settings)
            y = node.outputs[0]
            y.name, y.shape, y.type = f"{x.name}.quantized", x.shape, x.type
            onnx_ir.convenience.replace_all_uses_with(x, y)
            node.replace_input_with(0, x)
            graph.insert_before(first, node)
        model.opset_imports[DOMAIN] = 1


def _constant(graph: onnx_ir.Graph, name: str, tensor: Tensor) -> onnx_ir.Value:
    if name not in graph.initializers:
        value = TorchTensor(tensor)
        made = onnx_ir.Value(name=name, const_value=value, shape=value.shape, type=onnx_ir.TensorType(value.dtype))
        graph.register_initializer(made)
    return graph.initializers[name]


@dataclass(frozen=True)
class _Quantizing:
    """A method of a module that may quantize a constant."""

    module: nn.Module
    name: str

    def call(self, x: Tensor, *args: LayerCall) -> Tensor:
        function: Callable[..., Tensor] = getattr(type(self.module), self.name)
        return function(self.module, x, *args)


def _quantizing(model: nn.Module) -> Iterator[_Quantizing]:
    for module in model.modules():
        if isinstance(module, Grid):
            yield _Quantizing(module, "forward")
        if isinstance(module, QuantWeighted):
            yield _Quantizing(module, "bias_in_sums")


@contextmanager
def _replaced(methods: Mapping[_Quantizing, Callable[[Tensor], Tensor]]) -> Iterator[None]:
    """Replace methods within a `with` block."""
    for method, function in methods.items():
        # Not by setattr: in the module's own dict the function hides the method, and `del` brings the method back.
        vars(method.module)[method.name] = function
    try:
        yield
    finally:
        for method in methods:
            del vars(method.module)[method.name]


class _Ops(TorchFunctionMode):
    """The calls of quantizing ops in a `with` block: the arguments of each by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Arguments] = []

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        if func in TRANSLATIONS:
            given = inspect.signature(TRANSLATIONS[func]).bind(*args, **(kwargs or {}))
            given.apply_defaults()
            self.calls.append(given.arguments)
        return func(*args, **(kwargs or {}))
