"""Which modules in a row become one op in training: the one place that decides it.

Units, the epilogue of a batch norm, attentions, replaced layers and the report ask here. The answer holds for the modules as
they are at the call; whether an op takes the tensors is asked where these are.
"""

from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from qtoolkit.errors import with_article
from qtoolkit.nn import on_codes
from qtoolkit.nn.batch_norm import (
    LinkedBatchNorm,
    QuantBatchNorm1d,
    QuantBatchNorm2d,
    QuantBatchNorm3d,
    QuantFrozenBatchNorm,
    QuantSyncBatchNorm,
    is_folded,
    process_group_of,
)
from qtoolkit.nn.computed_weights import is_parametrized
from qtoolkit.nn.hooks import all_watched, is_watched
from qtoolkit.op_kinds.kind import Bounds
from qtoolkit.op_kinds.table import bounds_of_module
from qtoolkit.quantizers.first_steps import FOLLOWED_STEPS
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer
from qtoolkit.running import Run
from qtoolkit.verdicts import Cause, Refusal

# Numbers of dimensions of the inputs of each type of batch norm that the op computes.
DIMENSIONS: dict[type[nn.Module], tuple[int, ...]] = {
    **dict.fromkeys((nn.BatchNorm1d, QuantBatchNorm1d), (2, 3)),
    **dict.fromkeys((nn.BatchNorm2d, QuantBatchNorm2d), (4,)),
    **dict.fromkeys((nn.BatchNorm3d, QuantBatchNorm3d), (5,)),
    QuantSyncBatchNorm: (2, 3, 4, 5),
    QuantFrozenBatchNorm: (4, 5),
}
NO_BOUNDS = Bounds()
ALL_WATCHED = Refusal(Cause.CALL, "hooks of all modules are registered")
CALLED = Refusal(Cause.CALL, "its layer is called as a module")
IN_EVAL_MODE = Refusal(Cause.CALL, "it is in eval mode")
NOT_ADDED = Refusal(Cause.CALL, "its residual has another shape, type or device")


class Unit(NamedTuple):
    """The part of a row of modules that one op computes.

    Attributes:
        layer: Why the layer has to be called as a module, and its output unscaled; None where it need not.
        whole: Whether the op computes the layer too. Otherwise it takes the layer's output.
        folded: Whether the layer computes its batch norm, by constants.
        bounds: The bounds of the activation, if the op computes one; None where that is called after it.
        quantizer: The quantizer that it computes; None where that is called after it, or there is none.
        end: Why it does not compute all that follows; None where it does.
    """

    layer: Refusal | None = None
    whole: bool = False
    folded: bool = False
    bounds: Bounds | None = NO_BOUNDS
    quantizer: TensorQuantizer | None = None
    end: Refusal | None = None


def fusion(
    run: Run,
    layer: Any = None,
    batch_norm: Any = None,
    adds: bool = True,
    activation: nn.Module | Bounds | None = None,
    quantizer: nn.Module | None = None,
    *,
    in_training: bool = False,
) -> Unit | Refusal:
    """Return the part of a row of modules that one op computes, as they are now; or why none computes the first of them.

    Args:
        run: What runs the forward.
        layer: A QAT layer or a projection of an attention; or why none is called before the batch norm.
        batch_norm: The batch norm after it, or alone.
        adds: Whether the op may add the residual, if there is one.
        activation: The activation after a batch norm, or its bounds if it is a function. Without a batch norm, the
            module of the function before a quantizer.
        quantizer: The quantizer at the end.
        in_training: Whether a batch norm counts as in training mode, for a report.

    Example:
        >>> found = fusion(Run.EAGER, activation=nn.GELU(), quantizer=nn.Identity())
        >>> found.text
        'an Identity is not a TensorQuantizer'
    """
    if all_watched():
        return ALL_WATCHED
    if batch_norm is not None:
        return _with_batch_norm(run, layer, batch_norm, adds, activation, quantizer, in_training)
    refusal = None if quantizer is None else _of_quantizer(run, quantizer)
    in_op = cast("TensorQuantizer | None", quantizer)
    if layer is not None:
        if not layer.training or layer.batch_norm is not None or not _is_plain(layer):
            return CALLED
        return Unit(whole=True, quantizer=in_op if refusal is None else None, end=refusal)
    return _of_function(activation) or refusal or _of_prelu(activation, quantizer) or Unit(quantizer=in_op)


def _with_batch_norm(
    run: Run, layer: Any, bn: Any, adds: bool, activation: nn.Module | Bounds | None, quantizer: Any, in_training: bool
) -> Unit | Refusal:
    folded = is_folded(bn) if bn.training or not in_training else getattr(bn, "frozen", False)
    refusal = _of_batch_norm(bn, folded)
    if refusal is None and not (folded or in_training or bn.training):
        refusal = IN_EVAL_MODE
    if refusal is None and not folded and run.compiled and bn.momentum is None:
        refusal = Refusal(Cause.CALL, "its momentum is a number from a buffer")  # which is no constant
    if refusal is not None:
        return refusal
    apart = None if layer is None else _of_layer(layer, bn, folded)
    if folded and apart is not None:
        return Refusal(apart.cause, f"its layer folds it, and is not fused: {apart.text}")
    whole = layer is not None and apart is None and _is_plain(layer) and _is_constant_enough(bn, folded)
    bounds, end = _of_activation(activation) if adds else (None, NOT_ADDED)
    if end is None and quantizer is not None:
        end = _of_quantizer(run, quantizer)
    return Unit(apart, whole, folded, bounds, None if end is not None else quantizer, end)


# ---- the rules of each module


def _of_batch_norm(bn: nn.Module, folded: bool) -> Refusal | None:
    """Return why the op does not compute a batch norm in training mode; the layer computes a `folded` one."""
    if isinstance(bn, nn.SyncBatchNorm) and not folded:
        # torch's exchanges statistics in another way: where one rank has hooks on it, all would wait.
        if not isinstance(bn, QuantSyncBatchNorm):
            return Refusal(Cause.NO_KERNEL, "a SyncBatchNorm that no layer is linked to")
        if process_group_of(bn) is None:
            return Refusal(Cause.CALL, "a SyncBatchNorm without a process group of several ranks")
    if type(bn) not in DIMENSIONS:
        return Refusal(Cause.NO_KERNEL, f"it is {with_article(type(bn))}")
    if isinstance(bn, LinkedBatchNorm) and not folded and bn.strategy != "unscale":
        return Refusal(Cause.NO_KERNEL, f"its strategy is {bn.strategy!r}")
    return Refusal(Cause.CALL, "it has hooks") if is_watched(bn) else None


def _of_layer(layer: nn.Module | Refusal, bn: nn.Module, folded: bool) -> Refusal | None:
    """Return why a layer must be called as a module, and its output is unscaled, before its batch norm."""
    if isinstance(layer, Refusal):
        return layer
    from qtoolkit.nn.weighted import QuantWeighted  # whose quantizers ask here too

    if not isinstance(layer, QuantWeighted) or layer.batch_norm is not bn:
        return Refusal(Cause.CALL, "its layer is linked to another batch norm")
    if type(layer).forward is not QuantWeighted.forward:
        return Refusal(Cause.CALL, f"{with_article(type(layer))} has a forward of its own")
    if not (folded or layer.weight_quantizer_active):
        return Refusal(Cause.CALL, "the quantizer of its weight is off")
    return Refusal(Cause.CALL, "its layer has hooks") if is_watched(layer) else None


def _is_plain(layer: Any) -> bool:
    """Return whether an op may compute a layer, and quantize its weight, as its modules are now."""
    from qtoolkit.nn.weighted import QuantWeighted  # whose quantizers ask here too

    quantizer = layer.weight_quantizer
    if not on_codes.gives_grid(quantizer) or not quantizer.ready or quantizer.stopping:
        return False
    kinds: tuple[type, ...] = (nn.Parameter,)
    if not isinstance(layer, nn.Module):  # a projection, whose weight may be a part of another one's rows
        kinds = (Tensor, nn.Parameter)
    elif type(layer).forward is not QuantWeighted.forward or is_watched(layer) or is_parametrized(layer):
        return False  # before the weight is read, which a parametrization would compute
    elif layer.integer_kernel is not None or layer.input_quantizer is not None:
        return False
    return all(type(p) in kinds for p in (layer.weight, layer.bias) if p is not None)


def _is_constant_enough(bn: Any, folded: bool) -> bool:
    """Return whether the op of a whole layer computes its batch norm, whose numbers it gets once."""
    if bn.running_var is None or not (folded or bn.momentum is not None):
        return False
    kind = Tensor if type(bn) is QuantFrozenBatchNorm else nn.Parameter
    return all(type(p) is kind for p in (bn.weight, bn.bias) if p is not None)


def _of_activation(activation: nn.Module | Bounds | None) -> tuple[Bounds | None, Refusal | None]:
    """Return the bounds of an activation after a batch norm that the op computes, or why it does not."""
    if not isinstance(activation, nn.Module):
        return activation or NO_BOUNDS, None
    bounds = bounds_of_module(activation)
    if bounds is None:
        why = f"{with_article(type(activation))} is not one of the activations that can be fused"
        return None, Refusal(Cause.NO_KERNEL, why)
    return (None, Refusal(Cause.CALL, "its activation has hooks")) if is_watched(activation) else (bounds, None)


def _of_function(function: Any) -> Refusal | None:
    """Return why the op of a quantizer does not compute the module of a function before it."""
    return Refusal(Cause.CALL, "it has hooks") if function is not None and is_watched(function) else None


def _of_quantizer(run: Run, quantizer: nn.Module) -> Refusal | None:
    """Return why the op does not quantize its output as a quantizer does."""
    if type(quantizer) is not TensorQuantizer:
        return Refusal(Cause.OUTPUT_CODES, f"{with_article(type(quantizer))} is not a TensorQuantizer")
    spec = quantizer.spec
    if not quantizer.capability.plain or spec.axis is not None:
        return Refusal(Cause.OUTPUT_CODES, f"{spec.describe()} is not an integer format with one scale")
    if quantizer.reads_input(run):
        first = f"in the first {FOLLOWED_STEPS} steps " if quantizer.follows_data else ""
        return Refusal(Cause.OUTPUT_CODES, f"{first}its quantizer observes its input")
    if not (quantizer.quantizing and quantizer.ready):
        return Refusal(Cause.OUTPUT_CODES, "its quantizer is disabled or not calibrated")
    return Refusal(Cause.CALL, "its quantizer has hooks") if is_watched(quantizer) else None


def _of_prelu(function: Any, quantizer: Any) -> Refusal | None:
    """Return why the op of a PReLU, which has no gradient for a zero point, does not compute its quantizer."""
    if type(function) is not nn.PReLU:
        return None
    zero_point = quantizer.kind.grid(quantizer)[1]
    trained = zero_point is not None and zero_point.requires_grad
    return Refusal(Cause.OUTPUT_CODES, "its quantizer trains a zero point") if trained else None
