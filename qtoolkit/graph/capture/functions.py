"""Functions that the tracer records as one node, functions that it inlines, and tests of values that it answers."""

import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType

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
    """Replace attributes by other values in a block."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
    for owner, name, value in patches:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


Message = str | Callable[[], object] | None  # of an error, as torch._check takes it
TYPES_OF_LIMITS = ("finfo", "iinfo")
MAKERS = ("zeros", "ones", "empty", "full", "arange", "rand", "randn")


def recorded_functions() -> list[Patch]:
    """Return functions of torch with others that torch.fx records where an argument is traced.

    It does not record the limits of dtypes, which are types, nor functions that make a tensor of a size: torch reads the size.
    """
    return [(torch, name, _recorded(getattr(torch, name))) for name in (*TYPES_OF_LIMITS, *MAKERS)] + _checks()


def _checks() -> list[Patch]:
    """Return the functions behind torch._check and its kin, which refuse traced values, with others that take them.

    Where a torch has no such functions, `prepare` names the line of the check.
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


def _recorded(function: Callable[..., object]) -> Callable[..., object]:
    def call(*args: object, **kwargs: object) -> object:
        proxy = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, fx.Proxy)), None)
        if proxy is None:
            return function(*args, **kwargs)
        return proxy.tracer.create_proxy("call_function", function, args, kwargs)

    return call


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
