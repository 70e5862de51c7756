"""Functions that take the weight of a replaced layer themselves, as F.linear(x, layer.weight) does: the layer is not called.

Module replacement, of a model or in leaf modules of a graph, does not see functions. A batch that reaches one gives a warning,
and a line in the report of a model without a graph.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from traceback import walk_stack

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from qtoolkit.eager.record import record_of, set_record
from qtoolkit.errors import some, warn
from qtoolkit.graph.graph_module import QuantizedGraphModule
from qtoolkit.model_inputs import Args, Kwargs
from qtoolkit.nn import QuantModule
from qtoolkit.op_kinds.rules import module_of
from qtoolkit.op_kinds.table import names_where
from qtoolkit.running import running
from qtoolkit.shared_modules import outermost
from qtoolkit.verdicts import Cause, Verdict

FUNCTIONS = {
    *names_where(lambda kind: kind.weight_argument or kind.takes_indices),
    *("einsum", "multi_head_attention_forward"),
}


class WeightsTaken(TorchFunctionMode):
    """Notes, in a block, the functions that take the weight of a replaced layer while the layer itself does not run.

    Attributes:
        found: The name of the function, by the dotted name of the weight.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.found: dict[str, str] = {}
        # By their memory: layers may share one.
        self._weights: dict[int | None, dict[str, QuantModule]] = defaultdict(dict)
        for name, weight, layer in _quantized_weights(model):
            self._weights[_memory(weight)][name] = layer

    def __torch_function__(
        self, function: Callable[..., object], types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        """Call a function of torch."""
        if not running().compiled and getattr(function, "__name__", "") in FUNCTIONS:
            for tensor in tree_leaves((args, kwargs)):
                layers = self._weights.get(_memory(tensor), {})
                if layers and not _runs(layers.values()):
                    self.found[next(iter(layers))] = function.__name__
        return function(*args, **(kwargs or {}))

    def note(self, model: nn.Module, what: str) -> None:
        """Store on a model without a graph what was found, for its report, and warn of it; `what` is the public function."""
        if not isinstance(model, QuantizedGraphModule) and (self.found or record_of(model).functions):
            set_record(model, replace(record_of(model), functions=self.found))
        if self.found:
            warn(f"{what}: {sentence(self.found)}")


def sentence(found: Mapping[str, str]) -> str:
    """Return the warning about functions that take weights themselves."""
    taken = some([f"{name!r} ({function})" for name, function in found.items()])
    return (
        f"functions take weights of layers themselves, and compute in float: {taken}. Module replacement quantizes the "
        f"calls of layers alone; call the layer, or let qtoolkit.prepare trace the function."
    )


def verdict_on(function: str) -> Verdict:
    """Return the verdict on a weight that a function takes."""
    why = f"{function} takes it without a call of the layer, which module replacement does not see"
    return Verdict.left_float(Cause.NO_QAT_TYPE, why)


def _quantized_weights(model: nn.Module) -> Iterator[tuple[str, Tensor, QuantModule]]:
    """Yield the parameters of replaced layers, in the outermost one, by name: in a graph, of leaf modules only."""
    for name, module in outermost(model, lambda each: isinstance(each, QuantModule | QuantizedGraphModule)):
        if isinstance(module, QuantModule):
            parameters = module.named_parameters(name) if module.weight_quantizers() else ()
            yield from ((path, weight, module) for path, weight in parameters if weight.dim() > 1)
        elif isinstance(module, QuantizedGraphModule):
            called = {str(node.target): module_of(node) for node in module.graph.find_nodes(op="call_module")}
            leaves = {target: leaf for target, leaf in called.items() if not isinstance(leaf, QuantModule)}
            for target, leaf in leaves.items():
                for path, weight, layer in _quantized_weights(leaf):
                    yield f"{name}.{target}.{path}".removeprefix("."), weight, layer


def _memory(tensor: object) -> int | None:
    """Return where the values of a plain tensor are, and of its views; None for others."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta or tensor.layout is not torch.strided:  # type: ignore[attr-defined]
        return None
    return tensor.untyped_storage().data_ptr() or None  # type: ignore[attr-defined]


def _runs(layers: Iterable[nn.Module]) -> bool:
    """Return whether a method of one of these layers calls what runs now."""
    return not {id(layer) for layer in layers}.isdisjoint(
        id(frame.f_locals.get("self")) for frame, _ in walk_stack(None)
    )
