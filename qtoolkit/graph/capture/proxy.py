"""The proxy: what a model's forward is run with in place of its tensors."""

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx

from qtoolkit.graph.capture.in_place import ASSIGNS
from qtoolkit.graph.capture.sizes import UNKNOWN
from qtoolkit.op_kinds.recorded import length_of, set_item

if TYPE_CHECKING:
    from qtoolkit.graph.capture.tracer import ModelTracer


class SizedProxy(fx.Proxy):
    """A proxy whose size, where the example inputs tell it, Python can decide on."""

    tracer: "ModelTracer"
    _is_param = _is_buffer = False  # what torch.nn.Parameter and Buffer ask whoever says to be a tensor

    @property
    def __class__(self) -> type:  # what isinstance sees
        return Tensor if isinstance(self.tracer.value_of(self), Tensor) else SizedProxy

    @__class__.setter
    def __class__(self, kind: type) -> None:
        raise TypeError("the class of a proxy cannot be set.")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith(
            "__"
        ):  # a protocol that somebody asks for, and a proxy does not have
            raise AttributeError(f"a traced value has no {name}.")
        value = self.tracer.value_of(self)
        if value is UNKNOWN or callable(getattr(value, name, _missing)):
            return super().__getattr__(name)
        return self.tracer.create_proxy("call_function", getattr, (self, name), {})

    def __len__(self) -> int:
        value = self.tracer.value_of(self)
        if value is UNKNOWN:
            return super().__len__()
        if not hasattr(value, "__len__"):
            raise TypeError(f"a value of type {type(value).__name__} has no length.")
        return int(self.tracer.decide(self.tracer.create_proxy("call_function", length_of, (self,), {})))

    def __int__(self) -> int:
        return int(self.tracer.decide(self))

    def __index__(self) -> int:
        return int(self.tracer.decide(self))

    def __float__(self) -> float:
        return float(self.tracer.decide(self))

    def __contains__(self, item: Any) -> bool:
        return item in self.tracer.decide(self)

    def __setitem__(self, index: Any, value: Any) -> None:
        new = self.tracer.create_proxy("call_function", set_item, (self, index, value), {})
        self.tracer.rebound.append((self, self.node))
        self.node = new.node  # who takes the tensor from now on takes it after the assignment


def _assigning(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what += (say) does: torch.fx records it as +, and forgets that the tensor itself is changed."""

    def assign(proxy: SizedProxy, other: Any) -> fx.Proxy:
        result = proxy.tracer.create_proxy("call_function", function, (proxy, other), {})
        result.node.meta[ASSIGNS] = True
        return result

    return assign


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"):
    setattr(SizedProxy, f"__i{_name}__", _assigning(getattr(operator, f"__{_name}__")))


def _missing() -> None:
    """Stand for an attribute that a value does not have: fx's proxies take any name for a method."""
