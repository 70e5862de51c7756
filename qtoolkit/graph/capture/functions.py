"""Functions that the tracer records as one node, functions that it inlines, and tests of values that it answers."""

import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointFunction

from qtoolkit.op_kinds.rules import name_called

# Reductions of tests of values, such as torch.isfinite(x).all(), and what they give where all values are finite.
FINITE_CHECKS = {("all", "isfinite"): True, ("any", "isinf"): False, ("any", "isnan"): False}
Patch = tuple[object, str, object]  # an object, the name of one of its attributes, and the attribute's other value


def torchvision_ops() -> tuple[FunctionType, ...]:
    """Return torchvision's ops, which check the types of their arguments; none if torchvision is not loaded."""
    ops = sys.modules.get("torchvision.ops")
    found = [getattr(ops, name) for name in getattr(ops, "__all__", ())]
    return tuple(f for f in found if isinstance(f, FunctionType))


def scripted_functions(model: nn.Module) -> dict[Callable[..., object], tuple[str, str]]:
    """Return the functions compiled by torch.jit.script in the namespaces of a model's forwards: their module and name."""
    forwards = [inspect.getattr_static(type(m), "forward", None) for m in model.modules()]
    spaces = [space for forward in forwards if (space := getattr(forward, "__globals__", None))]
    return {
        value: (space["__name__"], name)
        for space in {id(s): s for s in spaces}.values()
        for name, value in space.items()
        if isinstance(value, torch.jit.ScriptFunction)
    }


def is_foreign(target: object) -> bool:
    """Return whether a target is a Python function outside torch."""
    return isinstance(target, FunctionType) and (target.__module__ or "").partition(".")[0] != "torch"


@contextmanager
def as_python() -> Iterator[None]:
    """Let `F.multi_head_attention_forward` run on traced values in a block: it would pass the call to them as a whole."""
    with patched([(F, "has_torch_function", lambda _: False)]):  # torch.overrides' function, as this module imports it
        yield


def is_composite(target: object) -> bool:
    """Return whether a target is a Python function that may hold layers: one outside torch, or torch's attention."""
    return is_foreign(target) or (target is F.multi_head_attention_forward and hasattr(F, "has_torch_function"))


def is_weight(node: fx.Node, value: object) -> bool:
    """Return whether a node reads a parameter of two or more dimensions."""
    return node.op == "get_attr" and isinstance(value, nn.Parameter) and value.dim() > 1


def answer_if_finite(node: fx.Node) -> bool | None:
    """Return what a test of values gives if they are finite; None for a node that is no such test."""
    tested = node.args[0] if node.args else None
    if not isinstance(tested, fx.Node):
        return None
    return FINITE_CHECKS.get((name_called(node), name_called(tested)))


@contextmanager
def patched(patches: Iterable[Patch]) -> Iterator[None]:
    """Replace attributes by other values in a block; an attribute that its owner inherits is inherited again after it."""
    before = [(owner, name, vars(owner).get(name, patched)) for owner, name, _ in patches]
    for owner, name, value in patches:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            if value is patched:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


Message = str | Callable[[], object] | None  # of an error, as torch._check takes it
TYPES_OF_LIMITS = ("finfo", "iinfo")
MAKERS = (
    "zeros", "ones", "empty", "full", "arange", "linspace", "eye", "rand", "randn", "randint", "randperm", "tril_indices",
    "triu_indices",
)  # fmt: skip
# Functions and methods, methods alone, and functions of torch.nn.functional, that take sizes beside a tensor.
SIZED = ("broadcast_to", "narrow", "repeat_interleave", "reshape", "roll", "tile", "unflatten")
SIZED_METHODS = ("expand", "repeat", "view", "new_empty", "new_full", "new_ones", "new_zeros")
SIZED_FUNCTIONALS = ("interpolate", "one_hot", "pad")
# The types of torch that make a tensor of a size, whose values are then written.
TENSOR_TYPES = {
    "FloatTensor": torch.float32, "DoubleTensor": torch.float64, "HalfTensor": torch.float16, "LongTensor": torch.int64,
    "IntTensor": torch.int32, "ByteTensor": torch.uint8, "BoolTensor": torch.bool,
}  # fmt: skip


def recorded_functions() -> list[Patch]:
    """Return functions and methods of torch with others that torch.fx records where an argument is traced.

    It does not record the limits of dtypes, which are types, nor a function that takes sizes where no tensor is traced: torch
    reads the sizes.
    """
    functions = [(torch, name) for name in (*MAKERS, *SIZED)] + [(F, name) for name in SIZED_FUNCTIONALS]
    return [
        *((torch, name, _recorded(getattr(torch, name))) for name in TYPES_OF_LIMITS),
        *((torch, name, _TensorType(getattr(torch, name), dtype)) for name, dtype in TENSOR_TYPES.items()),
        *((owner, name, _recorded(getattr(owner, name))) for owner, name in functions),
        *((Tensor, name, _recorded(getattr(Tensor, name), name)) for name in (*SIZED, *SIZED_METHODS)),
        *_checks(),
        *causal_masks(),
        (nn.Module, "get_parameter", _get_parameter),
        *_packing(),
    ]


def _get_parameter(module: nn.Module, target: str) -> object:
    """Return a parameter of a dotted name: torch's method takes no traced value for one."""
    owner, _, name = target.rpartition(".")
    return getattr(module.get_submodule(owner), name)


def _packing() -> list[Patch]:
    """Return the function that pack_padded_sequence calls, which cannot be traced, with one that raises an error."""
    # Private. Where a torch has no such function, the error names the line, and not the cause.
    function = getattr(torch._VF, "_pack_padded_sequence", None)

    def pack(*args: object) -> object:
        if function is None or _traced_in(args) is not None:
            raise RuntimeError(
                "pack_padded_sequence packs traced values here, and their number depends on data, the lengths; let one "
                "submodule pack them, run its layer and unpack them, and make it a leaf module."
            )
        return function(*args)

    return [] if function is None else [(torch._VF, "_pack_padded_sequence", pack)]


def _checks() -> list[Patch]:
    """Return the functions that torch._check and similar ones call, which refuse traced values, with others that take them.

    If torch has no such functions, `prepare` names the line of the check.
    """

    def check(error_type: type[Exception], cond: bool | torch.SymBool | fx.Proxy, message: Message) -> None:
        """Check a number now, and let the graph check it again."""
        original(error_type, bool(cond) if isinstance(cond, fx.Proxy) else cond, message)

    def check_tensor(error_type: type[Exception], cond: Tensor, message: Message) -> None:
        """Check a tensor, but not a traced one: torch.export takes no graph that raises by the values of its tensors."""
        if not isinstance(cond, fx.Proxy):
            original_of_tensors(error_type, cond, message)

    # Private: torch._check and its kin all call these two.
    if not (hasattr(torch, "_check_with") and hasattr(torch, "_check_tensor_all_with")):
        return []
    original, original_of_tensors = torch._check_with, torch._check_tensor_all_with
    return [(torch, "_check_with", check), (torch, "_check_tensor_all_with", check_tensor)]


def causal_masks() -> list[Patch]:
    """Return torch's test for causal masks, which reads their values, with one that takes each mask as it is.

    Both answers give the same values: the kernels that know causal masks are only faster.
    """
    # Private. Where a torch has no such function, `prepare` names the line of the question.
    if not hasattr(nn.modules.transformer, "_detect_is_causal_mask"):
        return []

    def is_causal(mask: object, given: bool | None = None, size: int | None = None) -> bool:
        return given is True

    return [(nn.modules.transformer, "_detect_is_causal_mask", is_causal)]


def _recorded(function: Callable[..., object], method: str = "") -> Callable[..., Any]:
    """Return a function that makes a node of a call, or of a method of the first argument, where an argument is traced."""

    def call(*args: object, **kwargs: object) -> object:
        proxy = _traced_in((args, kwargs))
        if proxy is None:
            return function(*args, **kwargs)
        op, target = ("call_method", method) if method else ("call_function", function)
        return proxy.tracer.create_proxy(op, target, args, kwargs)

    return call


def _traced_in(arguments: object) -> fx.Proxy | None:
    """Return a traced value among arguments; None if there is none."""
    return next((leaf for leaf in tree_leaves(arguments) if isinstance(leaf, fx.Proxy)), None)


class _TensorType:
    """A type such as torch.FloatTensor, whose call with a traced size is torch.empty; `isinstance` takes it as the type."""

    def __init__(self, kind: Any, dtype: torch.dtype) -> None:
        self.kind, self.dtype = kind, dtype

    def __call__(self, *args: object) -> object:
        is_traced = _traced_in(args) is not None and all(isinstance(value, int | torch.Size) for value in args)
        return torch.empty(*args, dtype=self.dtype) if is_traced else self.kind(*args)  # type: ignore[call-overload]

    def __instancecheck__(self, value: object) -> bool:
        return isinstance(value, self.kind)


# ---- gradient checkpointing: the graph has the checkpointed operations, and stores their activations


@contextmanager
def traced_checkpoints() -> Iterator[None]:
    """Trace the functions that reentrant checkpoints call, in a block. All callers of `checkpoint` reach `apply`."""
    CheckpointFunction.apply = _call
    try:
        yield
    finally:
        del CheckpointFunction.apply


def _call(function: Callable[..., object], preserve_rng_state: bool, *args: object) -> object:
    return function(*args)


def is_checkpointed() -> bool:
    """Return whether the caller runs in a function that torch.utils.checkpoint has called."""
    return any(frame.f_code.co_filename == checkpoint.__file__ for frame, _ in traceback.walk_stack(None))
