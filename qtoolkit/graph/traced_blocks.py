"""The blocks of a traced model: modules that hold its layers, and run their part of the graph where the graph allows it."""

from abc import ABCMeta
from collections.abc import Callable, Iterable
from functools import wraps
from importlib import import_module
from inspect import getattr_static, getmembers_static
from operator import attrgetter
from types import MethodType, new_class
from typing import Any, NoReturn

from torch import Tensor, nn

from qtoolkit.errors import with_article

NO_CALL = "its forward is not called as one part of the graph"
# What copies and pickles leave out: the model that they belong to compiles it again.
COMPILED = ("forward", "_block_forward", "_block_model", "_block_reason")


def _checked(register: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(register)
    def checked(self: "TracedBlock", *args: Any, **kwargs: Any) -> Any:
        self._check_runs("given hooks, as sharding and checkpointing do")
        return register(self, *args, **kwargs)

    return checked


class TracedBlock(nn.Module):
    """A block of the model that was traced.

    It holds the block's layers, and can be read like the block: by attributes (layers, numbers, strings and None) and, where
    the block is a Sequential, a ModuleList or a ModuleDict, by index, `len` and iteration. It is an instance of the block's
    class, unless that derives from a layer of torch; the methods of `torch.nn.Module` are torch's.

    Where the model calls the block once, and takes from it only what it returns, the block runs its part of the graph: it can
    be called with the arguments that the model gives it, and hooks, activation checkpointing and sharding work on it. Other
    blocks raise RuntimeError that says why; `qtoolkit.prepare(..., untraced=["its name"])` keeps a block that is a module of
    its own.

    Attributes:
        block_type: The name of the block's type.
    """

    block_type = "Module"
    _block_name = ""
    _block_class: type[nn.Module] | None = None
    _block_reason = NO_CALL

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Do nothing: what the block's class does with its subclasses is not meant for this one."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise RuntimeError: a block that runs has a forward of its own."""
        self._check_runs("called on its own")

    def block_runs(self) -> bool:
        """Return whether the block runs its part of the graph."""
        return "forward" in vars(self)

    def has_other_forward(self) -> bool:
        """Return whether somebody has set another forward than the block's code."""
        return vars(self).get("forward") is not vars(self).get("_block_forward")

    def set_block_code(self, code: Callable[..., Any], model: nn.Module) -> None:
        """Let the block run code that takes itself and its arguments, and finds the whole model as `_block_model`."""
        forward = MethodType(code, self)
        vars(self).update(forward=forward, _block_forward=forward, _block_model=model)

    def set_block_reason(self, why: str) -> None:
        """Let the block refuse calls for a reason."""
        vars(self).pop("forward", None)
        vars(self).update(_block_reason=why)

    register_forward_pre_hook = _checked(nn.Module.register_forward_pre_hook)
    register_forward_hook = _checked(nn.Module.register_forward_hook)
    register_full_backward_hook = _checked(nn.Module.register_full_backward_hook)
    register_full_backward_pre_hook = _checked(nn.Module.register_full_backward_pre_hook)

    def __setattr__(self, name: str, value: Any) -> None:
        check_replaced(self, name, value)
        super().__setattr__(name, value)

    # Copies are made by __reduce_ex__: a wrapper that passes on attributes would be copied by the block's __deepcopy__.
    __copy__ = __deepcopy__ = None

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        base = next(base for base in (*CONTAINERS.values(), TracedBlock) if isinstance(self, base))
        state = {name: value for name, value in vars(self).items() if name not in COMPILED}
        return restore_block, (base, ClassReference(self._block_class)), state

    def _get_name(self) -> str:
        return self.block_type

    def _check_runs(self, what: str) -> None:
        if not self.block_runs():
            self._refuse(what, self._block_reason)

    def _refuse(self, what: str, why: str) -> NoReturn:
        raise RuntimeError(
            f"{with_article(self.block_type)} of a prepared model cannot be {what}: {why}. Do so with the whole model or with "
            f"single layers, or call qtoolkit.prepare(..., untraced=[its name]), which keeps it as a module."
        )


def refuse_change(self: nn.Module, *args: Any, **kwargs: Any) -> NoReturn:
    """Raise RuntimeError."""
    kind = getattr(self, "block_type", type(self).__name__)
    raise RuntimeError(
        f"no layer can be added to {with_article(kind)} of a prepared model, or removed from it: its graph would not change. "
        f"Change the float model, and prepare it again."
    )


class TracedSequential(TracedBlock, nn.Sequential):
    """A Sequential of the model that was traced."""

    block_type = "Sequential"
    append = extend = insert = pop = __delitem__ = __iadd__ = __imul__ = refuse_change

    @classmethod
    def of_layers(cls, layers: Iterable[tuple[str, nn.Module]]) -> "TracedSequential":
        """Return one with some layers of a model, which can be read and not called."""
        result = TracedSequential()
        result._modules.update(layers)
        result.set_block_reason("the quantizers between its layers are not in it")
        return result

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.of_layers(list(self._modules.items())[index])
        return super().__getitem__(index)


class TracedModuleList(TracedBlock, nn.ModuleList):
    """A ModuleList of the model that was traced."""

    block_type = "ModuleList"
    append = extend = insert = pop = __delitem__ = __iadd__ = refuse_change

    def __getitem__(self, index: Any) -> Any:
        return nn.ModuleList([*self][index]) if isinstance(index, slice) else super().__getitem__(index)


class TracedModuleDict(TracedBlock, nn.ModuleDict):
    """A ModuleDict of the model that was traced."""

    block_type = "ModuleDict"
    pop = clear = update = __delitem__ = refuse_change


CONTAINERS: dict[type[nn.Module], type[TracedBlock]] = {
    nn.Sequential: TracedSequential,
    nn.ModuleList: TracedModuleList,
    nn.ModuleDict: TracedModuleDict,
}
# torch's classes that a block's class may derive from. Code that looks for layers must not find a block.
BASES = (nn.Module, *CONTAINERS, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder, nn.TransformerEncoderLayer,
         nn.TransformerDecoderLayer)  # fmt: skip

# What each class has of its own.
OF_EACH_CLASS = {"__annotations__", "__class__", "__dict__", "__weakref__"}


class Computed:
    """A property of a block's class, whose name an attribute of the block may have too.

    Args:
        value: The property.
    """

    def __init__(self, value: property) -> None:
        self.value = value

    def __get__(self, instance: object, owner: type) -> Any:
        return self.value.__get__(instance, owner)


class ClassTensor:
    """A tensor of a block's class, which a buffer of the block hides, as an attribute of the model's own block hides it.

    Args:
        name: Its name.
        value: The tensor.
    """

    def __init__(self, name: str, value: Tensor) -> None:
        self.name, self.value = name, value

    def __get__(self, instance: nn.Module | None, owner: type) -> Tensor:
        held = None if instance is None else vars(instance)["_buffers"].get(self.name)
        return self.value if held is None else held


_types: dict[type[nn.Module], type[TracedBlock]] = {}


def traced_type(kind: type[nn.Module]) -> type[TracedBlock]:
    """Return the type of TracedBlock for blocks of a class: a subclass of it, where that is safe."""
    if kind not in _types:
        _types[kind] = _make_type(kind)
    return _types[kind]


def _make_type(kind: type[nn.Module]) -> type[TracedBlock]:
    base = next((ours for theirs, ours in CONTAINERS.items() if issubclass(kind, theirs)), TracedBlock)
    if issubclass(base, kind) or not _may_be_base(kind):
        return base
    overridden = {name for each in kind.__mro__ if each not in base.__mro__ for name in vars(each)}
    members = {name: getattr_static(base, name) for name in overridden.intersection(dir(base)) - OF_EACH_CLASS}
    own = [(name, value) for name, value in getmembers_static(kind) if name not in members]
    members |= {name: Computed(value) for name, value in own if type(value) is property}
    members |= {name: ClassTensor(name, value) for name, value in own if isinstance(value, Tensor)}
    members |= {"__module__": kind.__module__, "__doc__": kind.__doc__, "_block_class": kind}
    try:
        return new_class(kind.__name__, (base, kind), {}, lambda namespace: namespace.update(members))
    except TypeError:  # Python finds no order of the bases
        return base


def _may_be_base(kind: type[nn.Module]) -> bool:
    from_torch = (base for base in kind.__mro__ if base.__module__.partition(".")[0] == "torch")
    return type(kind) in (type, ABCMeta) and all(base in BASES for base in from_torch)


def object_of_name(module: str, name: str) -> Any:
    """Return what has a dotted name in a module; None if the module or the name is not there."""
    try:
        return attrgetter(name)(import_module(module))
    except (ImportError, AttributeError):
        return None


class ClassReference:
    """A class of the user's, which pickles name, and load as None where its code is not there.

    Args:
        kind: The class, or None.
    """

    def __init__(self, kind: type[nn.Module] | None) -> None:
        self.kind = kind

    @classmethod
    def by_name(cls, module: str, name: str) -> "ClassReference":
        """Return the reference to a class of a module."""
        return cls(object_of_name(module, name))

    def __deepcopy__(self, memo: dict[int, Any]) -> "ClassReference":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        kind = self.kind
        return (ClassReference, (None,)) if kind is None else (self.by_name, (kind.__module__, kind.__qualname__))


def restore_block(base: type[TracedBlock], reference: ClassReference) -> TracedBlock:
    """Return an empty block: of the block's class, or of `base` where the class is not there."""
    kind = base if reference.kind is None else traced_type(reference.kind)
    return kind.__new__(kind)


def check_replaced(parent: nn.Module, name: str, value: object) -> None:
    """Raise RuntimeError if an attribute that is set replaces a TracedBlock.

    A wrapper around a block that runs is none: it must pass on the block's layers as its attributes, as those of torch do.
    """
    block = parent.__dict__.get("_modules", {}).get(name)
    if not isinstance(block, TracedBlock) or value is block:
        return
    what = f"replaced or wrapped, here {name!r} by {with_article(type(value))}"
    block._check_runs(what)
    if not isinstance(value, nn.Module) or any(
        getattr(value, part, None) is not module for part, module in block._modules.items()
    ):
        block._refuse(what, "the graph calls the layers in it, which the new value does not have as attributes")


def real_name(root: nn.Module, name: str) -> str:
    """Return the dotted name of a submodule with the names that wrappers of blocks add to it."""
    modules, atoms = root._modules, list[str]()
    for atom in name.split("."):
        while atom not in modules and len(modules) == 1:
            inner, wrapped = next(iter(modules.items()))
            modules = {} if wrapped is None else wrapped._modules
            atoms.append(inner)
        atoms.append(atom)
        child = modules.get(atom)
        modules = {} if child is None else child._modules
    return ".".join(atoms)


def name_in_graph(root: nn.Module, name: str) -> str:
    """Return the dotted name of a submodule or a tensor without the names of wrappers: the reverse of `real_name`."""
    module: nn.Module | None = root
    result: list[str] = []
    for atom in name.split("."):
        module = None if module is None else module._modules.get(atom)
        result = [module._block_name] if isinstance(module, TracedBlock) else [*result, atom]
    return ".".join(result)


def node_name(target: str) -> str | None:
    """Return the name that the node of a submodule or a tensor must have; None leaves the choice to torch.fx.

    torch.fx names a node after its target. A node called "self" would replace the model in the code of the graph.
    """
    return "self_1" if target == "self" else None


def find_block(root: nn.Module, name: str) -> TracedBlock | None:
    """Return the block of a dotted name, inside its wrappers; None if there is none."""
    module: nn.Module | None = root
    for atom in real_name(root, name).split("."):
        module = None if module is None else module._modules.get(atom)
    while module is not None and not isinstance(module, TracedBlock) and len(module._modules) == 1:
        module = next(iter(module._modules.values()))
    return module if isinstance(module, TracedBlock) and module._block_name == name else None
