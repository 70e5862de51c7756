"""The blocks of a traced model: containers of its layers, with the names, the classes and the numbers of the model's blocks."""

from abc import ABCMeta
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from inspect import getattr_static, getmembers_static
from operator import attrgetter
from types import new_class
from typing import Any, NoReturn

from torch import Tensor, fx, nn

from qtoolkit.errors import warn, with_article

NO_CALL = "its forward is not called as one part of the graph"
NO_MODEL = "the quantizers between its layers are not in it"
# The attributes with a module's tensors, submodules and mode.
HELD = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set", "training")
# What copies and pickles leave out: the model that they belong to compiles it again.
COMPILED = ("_block_code", "_block_model", "_block_reason")


class TracedBlock(nn.Module):
    """A block of the model that was traced.

    It holds the block's layers, and can be read like the block: by attributes (layers, numbers, strings and None) and, where
    the block is a Sequential, a ModuleList or a ModuleDict, by index, `len` and iteration. It is an instance of the block's
    class, unless that derives from a layer of torch; the methods of `torch.nn.Module` are torch's.

    If the model calls the block once, and uses only what it returns, the block runs its part of the graph: it can
    be called with the arguments that the model gives it, and hooks, activation checkpointing and sharding work on it. Other
    blocks raise RuntimeError that says why when they are called, and when the model is called while they have hooks or a
    wrapper; `qtoolkit.prepare(..., untraced=["its name"])` keeps a block that is a module of its own.

    An attribute that gets another number, string or flag than it had when the model was traced has no effect on the graph, and
    a warning says so.

    Attributes:
        block_type: The name of the block's type.
    """

    block_type = "Module"
    _block_name = ""
    _block_class: type[nn.Module] = nn.Module
    _block_code: Callable[..., object] | None = None
    _block_reason = NO_MODEL

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Do nothing: the hook of the block's class for its subclasses is not meant for this one."""

    def forward(self, *args: object, **kwargs: object) -> object:
        """Run the block's part of the graph; RuntimeError if it has none."""
        if self._block_code is None:
            self.refuse("called on its own", self._block_reason)
        return self._block_code(self, *args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in HELD and not name.startswith("_"):
            warn_of_traced_value(self, vars(self), name, value, f"block {self._block_name!r} of the prepared model")
        nn.Module.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        refuse_removal(vars(self).get("_block_model"), f"{self._block_name}.{name}", self.block_type)
        nn.Module.__delattr__(self, name)

    def set_code(self, code: Callable[..., object] | None, model: nn.Module, reason: str = NO_CALL) -> None:
        """Let the block run a function of itself and its arguments, which finds the model as `_block_model`; or say why not."""
        # `vars`: an assignment would make the model a submodule of its own block.
        vars(self).update(_block_code=code, _block_model=model, _block_reason=reason)

    def check_watched(self, held: nn.Module | None) -> None:
        """Raise RuntimeError if hooks or a wrapper of the block would have no effect.

        `held` is the object in its place in the model: the block or a wrapper, which passes on the layers as its attributes.
        """
        if self._block_code is None:
            self.refuse("hooked, compiled, wrapped or replaced, as sharding and checkpointing do", self._block_reason)
        if any(getattr(held, name, None) is not module for name, module in self._modules.items()):
            why = "the graph calls the layers in it, which the new value does not have as attributes"
            self.refuse(f"replaced by {with_article(type(held))}", why)

    def refuse(self, what: str, why: str) -> NoReturn:
        """Raise RuntimeError."""
        name = repr(self._block_name) if self._block_name else "its name"
        raise RuntimeError(
            f"{with_article(self.block_type)} of a prepared model cannot be {what}: {why}. Do so with the whole model or with "
            f"single layers, or call qtoolkit.prepare(..., untraced=[{name}]), which keeps it as a module."
        )

    # Copies are made by __reduce_ex__: a wrapper that passes on attributes would be copied by the block's __deepcopy__.
    __copy__ = __deepcopy__ = None

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        state = {"block_type": self.block_type, **vars(self)}
        kept = {name: value for name, value in state.items() if name not in COMPILED}
        return restore_block, (container_of(self._block_class), ClassReference(self._block_class)), kept

    def _get_name(self) -> str:
        return self.block_type


def warn_of_traced_value(module: nn.Module, traced: Mapping[str, object], name: str, value: object, owner: str) -> None:
    """Warn once of a new value of an attribute, where the graph has constants from its value in `traced`."""
    told: tuple[str, ...] = vars(module).get("_told", ())
    if name in traced and name not in told and _differs(traced[name], value):
        vars(module)["_told"] = (*told, name)
        warn(
            f"attribute {name!r} of {owner} was {traced[name]!r} when the model was traced, and the graph keeps what forward "
            f"computed with that; a new value has no effect. Set it in the float model, and prepare that; or make it a buffer "
            f"of the float model, and write into the buffer.",
        )


def _differs(traced: object, value: object) -> bool:
    return not isinstance(value, type(traced) | int | float) or bool(traced != value)


def refuse_removal(model: fx.GraphModule | None, name: str, of: str) -> None:
    """Raise RuntimeError if a submodule of this dotted name is in a model, and its graph calls it or a layer in it."""
    nodes = model.graph.nodes if model is not None and find_module(model, name) is not None else ()
    if any(node.op in ("call_module", "get_attr") and f"{node.target}.".startswith(f"{name}.") for node in nodes):
        raise RuntimeError(
            f"{with_article(of)} of a prepared model cannot lose {name!r}, which the graph calls. To reparameterize or fuse "
            f"a network, do so with the float model before qtoolkit.prepare. After a training, load prepared.state_dict() into "
            f"a float model with strict=False, reparameterize that, and prepare and calibrate it."
        )


def refuse_change(self: nn.Module, *args: object, **kwargs: object) -> NoReturn:
    """Raise RuntimeError."""
    kind = getattr(self, "block_type", type(self).__name__)
    raise RuntimeError(
        f"no layer can be added to {with_article(kind)} of a prepared model, or removed from it: its graph would not change. "
        f"Change the float model, and prepare it again."
    )


# ---- classes

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
CHANGES = ("append", "extend", "insert", "pop", "clear", "update", "__delitem__", "__iadd__", "__imul__")
# torch's classes that are traced, and that a block's class may derive from. Code that looks for layers must not find a block.
BASES = (nn.Module, *CONTAINERS, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder, nn.TransformerEncoderLayer,
         nn.TransformerDecoderLayer)  # fmt: skip
# What each class has of its own.
OF_EACH_CLASS = {"__annotations__", "__class__", "__dict__", "__weakref__"}


class Hidden:
    """A property or a tensor of a block's class, which an attribute or a buffer of the block hides."""

    def __init__(self, name: str, value: property | Tensor) -> None:
        self.name, self.value = name, value

    def __get__(self, instance: nn.Module | None, owner: type) -> object:
        if isinstance(self.value, property):
            return self.value.__get__(instance, owner)
        # Not by getattr, which would find this descriptor again.
        held = None if instance is None else vars(instance)["_buffers"].get(self.name)
        return self.value if held is None else held


def container_of(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the container of torch that a class derives from; nn.Module if there is none."""
    return next((container for container in CONTAINERS if issubclass(kind, container)), nn.Module)


@cache
def traced_type(kind: type[Any]) -> type[TracedBlock]:
    """Return the type of TracedBlock for blocks of a class: a subclass of it, where that is safe."""
    container = container_of(kind)
    base = kind if _may_be_base(kind) else container
    ours = OF_EACH_CLASS.union(vars(TracedBlock))
    own = {name for each in base.__mro__ if each not in container.__mro__ for name in vars(each)}.difference(ours)
    members: dict[str, object] = {name: getattr_static(container, name) for name in own.intersection(dir(container))}
    members |= {
        name: Hidden(name, value)
        for name, value in getmembers_static(base)
        if name not in members and name not in ours and (type(value) is property or isinstance(value, Tensor))
    }
    members |= dict.fromkeys(set(CHANGES).intersection(dir(container)), refuse_change)
    if container is nn.ModuleList:
        members["__getitem__"] = lambda self, index: nn.ModuleList(self)[index]  # a slice is a plain one
    members |= {
        "__module__": base.__module__,
        "__doc__": base.__doc__,
        "block_type": kind.__name__,
        "_block_class": base,
    }
    return new_class(base.__name__, (TracedBlock, base), {}, lambda namespace: namespace.update(members))


def _may_be_base(kind: type[nn.Module]) -> bool:
    from_torch = (base for base in kind.__mro__ if base.__module__.partition(".")[0] == "torch")
    return type(kind) in (type, ABCMeta) and all(base in BASES for base in from_torch)


def object_of_name(module: str, name: str) -> Any:
    """Return the object of a dotted name in a module; None if the module or the name is not there."""
    try:
        return attrgetter(name)(import_module(module))
    except (ImportError, AttributeError):
        return None


class ClassReference:
    """A class of the user's, which pickles name, and load as None where it cannot be imported."""

    def __init__(self, kind: type[nn.Module] | None) -> None:
        self.kind = kind

    @classmethod
    def by_name(cls, module: str, name: str) -> "ClassReference":
        """Return the reference to a class of a module."""
        return cls(object_of_name(module, name))

    def __deepcopy__(self, memo: dict[int, object]) -> "ClassReference":
        return self

    def __reduce__(self) -> tuple[object, ...]:
        kind = self.kind
        return (ClassReference, (None,)) if kind is None else (self.by_name, (kind.__module__, kind.__qualname__))


def restore_block(container: type[nn.Module], reference: ClassReference) -> TracedBlock:
    """Return an empty block: of the block's class, or of torch's container where the class is not there."""
    kind = traced_type(reference.kind or container)  # type: ignore[arg-type]  # mypy takes no class of modules for hashable
    return kind.__new__(kind)


# ---- names


def name_in_graph(root: nn.Module, name: str) -> str:
    """Return the dotted name of a submodule or a tensor without the names that wrappers of blocks add to it."""
    module: nn.Module | None = root
    result: list[str] = []
    for atom in name.split("."):
        module = None if module is None else module._modules.get(atom)
        result = [module._block_name] if isinstance(module, TracedBlock) else [*result, atom]
    return ".".join(result)


def find_module(root: nn.Module, name: str) -> nn.Module | None:
    """Return the module of a dotted name, a block without its wrappers, which pass on attributes; None if there is none."""
    held: nn.Module | None = root
    for atom in filter(None, name.split(".")):
        held = getattr(held, atom, None)
    if not name or not isinstance(held, nn.Module) or getattr(held, "_block_name", "") != name:
        return held
    return next((m for m in held.modules() if isinstance(m, TracedBlock) and m._block_name == name), held)
