"""The proxy that stands for a tensor, or another value, while the model's forward is traced."""

import operator
from collections.abc import Callable
from math import ceil, floor, trunc
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor, fx

from qtoolkit.graph.capture.shapes import UNKNOWN, is_plain
from qtoolkit.op_kinds.facts import set_facts
from qtoolkit.op_kinds.recorded import length_of, set_item

if TYPE_CHECKING:
    from qtoolkit.graph.capture.tracer import ModelTracer


class SizedProxy(fx.Proxy):
    """A proxy whose sizes, where the example inputs determine them, Python can use."""

    tracer: "ModelTracer"

    def __getattr__(self, name: str) -> Any:
        if name == "tracer":  # Python asks a fresh object for attributes before torch.fx has set any
            raise AttributeError(name)
        value = self.tracer.value_of(self)
        is_protocol = name.startswith("__") and name.endswith("__")  # which proxies do not implement
        if is_protocol or (value is not UNKNOWN and not hasattr(value, name)):
            raise AttributeError(f"a traced value has no {name!r}.")
        if name == "data" and isinstance(value, Tensor):  # exporters would write its values as a constant
            return self.tracer.create_proxy("call_method", "detach", (self,), {})
        holder = Tensor if value is UNKNOWN and hasattr(Tensor, name) else value
        if holder is UNKNOWN or callable(getattr(holder, name)):
            return super().__getattr__(name)
        read = self.tracer.create_proxy("call_function", getattr, (self, name), {})
        # The layers of einops look up how many dimensions there are, which no proxy finds.
        return int(self.tracer.guard(read)) if name == "ndim" and value is not UNKNOWN else read

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The type of the example value, which `isinstance` asks for; a tensor's proxy is an instance of Tensor already."""
        value = self.tracer.value_of(self)
        return type(self) if value is UNKNOWN or isinstance(value, Tensor) else type(value)

    def __setattr__(self, name: str, value: object) -> None:
        if hasattr(Tensor, name):
            raise RuntimeError(f"{name!r} of a tensor is assigned here, which a graph does not record.")
        super().__setattr__(name, value)

    def __deepcopy__(self, memo: object = None) -> NoReturn:
        raise RuntimeError(
            "copy.deepcopy of a traced value is called here, which a graph does not record; use x.clone()."
        )

    def __call__(self, *args: object, **kwargs: object) -> fx.Proxy:
        """Return the proxy of a value that cannot be called: Python that takes values or functions asks `callable`."""
        value = self.tracer.value_of(self)
        return super().__call__(*args, **kwargs) if value is UNKNOWN or callable(value) else self

    def __len__(self) -> int:
        value = self.tracer.value_of(self)
        if value is UNKNOWN:
            return super().__len__()
        if not hasattr(value, "__len__"):
            raise TypeError(f"a value of type {type(value).__name__} has no length.")
        return int(self.tracer.guard(self.tracer.create_proxy("call_function", length_of, (self,), {})))

    def __int__(self) -> int:
        return int(self.tracer.guard(self))

    def __index__(self) -> int:
        return int(self.tracer.guard(self))

    def __float__(self) -> float:
        return float(self.tracer.guard(self))

    def __eq__(self, other: object) -> Any:
        """Record a comparison; a value that a cache has kept from another trace, or from one that has ended, equals nothing."""
        is_of_another = isinstance(other, fx.Proxy) and other.tracer is not self.tracer
        return False if self.tracer.has_ended or is_of_another else super().__eq__(other)

    def __hash__(self) -> int:
        """Return the hash of a number, which finds it among the keys of a dict; a tensor has the hash of the object."""
        value = self.tracer.value_of(self)
        return hash(self.tracer.guard(self)) if is_plain(value) else object.__hash__(self)

    def __repr__(self) -> str:
        """Return a number as text, which Python may use as a key; a tensor stays a placeholder."""
        value = self.tracer.value_of(self)
        return repr(self.tracer.guard(self)) if is_plain(value) else super().__repr__()

    def __format__(self, form: str) -> str:
        value = self.tracer.value_of(self)
        return format(self.tracer.guard(self), form) if is_plain(value) else object.__format__(self, form)

    def __round__(self, digits: int | None = None) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", round, (self, digits), {})

    def __floor__(self) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", floor, (self,), {})

    def __ceil__(self) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", ceil, (self,), {})

    def __trunc__(self) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", trunc, (self,), {})

    def __divmod__(self, other: object) -> tuple[fx.Proxy, ...]:
        parts = (operator.floordiv, operator.mod)
        return tuple(self.tracer.create_proxy("call_function", part, (self, other), {}) for part in parts)

    def __rdivmod__(self, other: object) -> tuple[fx.Proxy, ...]:
        parts = (operator.floordiv, operator.mod)
        return tuple(self.tracer.create_proxy("call_function", part, (other, self), {}) for part in parts)

    def __contains__(self, item: object) -> bool:
        return item in self.tracer.guard(self)

    def __setitem__(self, index: object, value: object) -> None:
        new = self.tracer.create_proxy("call_function", set_item, (self, index, value), {})
        self.tracer.rebound.append((self, self.node))
        self.node = new.node  # later readers of the tensor read it after the assignment


def _assigning(function: Callable[[object, object], object]) -> Callable[[SizedProxy, object], fx.Proxy]:
    """Return the method of an augmented assignment such as +=, which torch.fx records as + on a new tensor."""

    def assign(proxy: SizedProxy, other: object) -> fx.Proxy:
        result = proxy.tracer.create_proxy("call_function", function, (proxy, other), {})
        set_facts(result.node, assigns_in_place=True)
        return result

    return assign


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"):
    setattr(SizedProxy, f"__i{_name}__", _assigning(getattr(operator, f"__{_name}__")))


class TensorProxy(SizedProxy, Tensor):  # type: ignore[misc]  # Proxy comes first in the method resolution order
    """The proxy of a value that is known to be a tensor: a tensor on the meta device, whose operations are recorded.

    Python and C++ may treat it as a tensor. A C++ function that does not call `__torch_function__`, such as torch.tensor,
    returns a plain tensor on the meta device, which the tracer refuses.
    """

    _is_param = _is_buffer = False  # torch.nn.Parameter and Buffer read these of every instance of Tensor

    @classmethod
    def of(cls, value: Tensor, node: fx.Node, tracer: "ModelTracer") -> "TensorProxy":
        """Return the proxy of a node whose example value is a tensor on the meta device."""
        proxy = value.detach().as_subclass(cls)
        SizedProxy.__init__(proxy, node, tracer)
        return proxy

    def __getattribute__(self, name: str) -> object:
        """Return an attribute of the proxy, or record the read of a tensor's attribute."""
        is_own = name in _OWN or name in super().__getattribute__("__dict__")
        return super().__getattribute__(name) if is_own else self.__getattr__(name)

    def __copy__(self) -> fx.Proxy:
        """Record what copy.copy does with a tensor: the result shares its memory, and passes no gradient on."""
        return self.tracer.create_proxy("call_method", "detach", (self,), {})


_OWN = frozenset((*dir(SizedProxy), "node", "tracer", "_is_param", "_is_buffer"))
