"""convert(): a calibrated model in the form in which it is deployed."""

from collections.abc import Mapping
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from qtoolkit.eager.record import check_links, plan_of
from qtoolkit.eager.unreached import leave_in_float, unreached_layers
from qtoolkit.errors import check_known, shown, some, warn, with_article
from qtoolkit.finite import check_finite
from qtoolkit.foreign import refuse_foreign_quantizers
from qtoolkit.graph.graph_module import QuantizedGraphModule, compiled_once, plan_in
from qtoolkit.graph.passes import freeze, integers
from qtoolkit.graph.plan import Tracing
from qtoolkit.model_state import deepcopy_model
from qtoolkit.nn import QuantWeighted
from qtoolkit.quantizers.first_steps import MUCH_CLIPPED, look, much_clipped
from qtoolkit.quantizers.float16_scales import warn_of_raised
from qtoolkit.quantizers.frozen import Grid
from qtoolkit.quantizers.quantizer import Quantizer, named_quantizers
from qtoolkit.quantizers.tensor_quantizer import quantizers_of
from qtoolkit.runtimes.table import RUNTIMES, Runtime, RuntimeName
from qtoolkit.wrapped import unwrapped, wrapper_of

M = TypeVar("M", bound=nn.Module)

QUANTIZED = (Quantizer, QuantizedGraphModule)  # a model with quantizers has one of these


def convert(
    prepared: M,
    arithmetic: Literal["float", "integer"] = "float",
    state_dict: Mapping[str, Tensor] | None = None,
    runtime: RuntimeName | None = None,
) -> M:
    """Turn a calibrated (and trained) model into its reference form: batch norms folded, scales frozen, in eval mode.

    The result computes what the deployed model computes: every quantizer is a `Grid`. A quantizer that is off stays off, with
    a warning. Each quantized layer also has `forward_fp32`; with `qtoolkit.disable_quantization(converted)` every op,
    functions too, computes in float. The prepared model does not change.

    With `arithmetic="integer"`, ops between quantizers are computed in integers, as the runtime's own kernels do: exact
    integer sums, an int32 bias, and the runtime's order of roundings. Every quantizer then gives the quantized values
    of the deployed file. An op for which the runtime has no integer kernel stays float, as in the runtime;
    `plan.computed` and `qtoolkit.quantization_report` list the kernels, and the reasons why other ops have none.

    Args:
        prepared: The result of `qtoolkit.prepare` or `qtoolkit.quant_modules.replace`, or any other model with
            quantizers, calibrated. If it is wrapped in DistributedDataParallel, DataParallel or torch.compile, the
            model inside is converted.
        arithmetic: "float": layers compute in float on dequantized values. "integer": they compute in integers, for a
            model that `qtoolkit.prepare` returned, in float32.
        state_dict: The state dict of a converted model that has the same float model, backend and QConfigMapping. The
            result has its weights and scales, and `prepared` needs no data: this restores a converted model in a new
            process.
        runtime: The runtime whose integer arithmetic is computed: "onnxruntime", "openvino", "xnnpack", "litert" (its
            reference kernels) or "tensorrt" (as documented). None: the runtime of the backend.

    Returns:
        A model of the same type, in eval mode, without observers. In a model without a graph, a folded batch norm is an
        Identity.

    Warns:
        UserWarning: A layer that no data reached stays in float, a quantizer is off, a range clips many values, or a
            range leaves out NaN or infinities.

    Raises:
        RuntimeError: Nothing was calibrated, or a quantizer of the graph saw no data. The error names it.
        ValueError: A scale is not positive and finite, a parameter or a statistic of a batch norm is not finite,
            `arithmetic` or `runtime` is not known, the model has no graph or the backend no runtime for "integer", a
            batch norm that is linked to a layer was removed from the model, or `runtime` is given without "integer".
        TypeError: The model has no quantizers, or only quantizers of `qtoolkit.compat.pytorch_quantization`; or `state_dict` is
            no mapping.
        RuntimeError, ValueError: `state_dict` does not fit the model.

    Example:
        >>> import qtoolkit as qt
        >>> from torch import nn
        >>> prepared = qt.prepare(nn.Sequential(nn.Linear(4, 2)).eval(), backend="onnxruntime")
        >>> report = qt.calibrate(prepared, [torch.rand(8, 4)], progress=False)
        >>> converted = qt.convert(prepared)
        >>> bool((converted(torch.ones(1, 4)) == prepared(torch.ones(1, 4))).all())
        True
        >>> new = qt.prepare(nn.Sequential(nn.Linear(4, 2)).eval(), backend="onnxruntime")
        >>> restored = qt.convert(new, state_dict=converted.state_dict())
        >>> bool((converted(torch.ones(1, 4)) == restored(torch.ones(1, 4))).all())
        True
    """
    check_known("arithmetic", arithmetic, ("float", "integer"))
    prepared = check_quantized(prepared, "convert")
    chosen = _runtime_for(prepared, arithmetic, runtime)
    with compiled_once():
        converted = in_reference_form(prepared) if state_dict is None else _restored(prepared, state_dict)
        if chosen is not None and isinstance(converted, QuantizedGraphModule):
            integers.run(converted, chosen)
    return converted


@compiled_once()
def in_reference_form(prepared: M) -> M:
    """Return a copy of a model with quantizers in its reference form, as `convert` returns it without options."""
    _check_chains_and_branches(prepared)
    check_finite(prepared, "convert")
    _warn_of_skipped(prepared)
    _warn_of_those_off(prepared)
    warn_of_raised(quantizers_of(prepared), "convert")
    copied = deepcopy_model(prepared, what="convert")
    unreached = unreached_layers(copied)
    leave_in_float(copied, unreached)
    converted = freeze.run(copied)
    if unreached:
        warn(
            f"convert: no data reached the layers {some(list(map(repr, unreached)))}, which stay in float; calibrate with "
            f"batches that reach them if the deployed model calls them, else name them in exclude.",
        )
    _warn_of_clipped_weights(prepared, converted)
    return converted


def _restored(prepared: M, state_dict: Mapping[str, Tensor]) -> M:
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"convert: state_dict must be a mapping of names to tensors, got {type(state_dict).__name__}.")
    _check_chains_and_branches(prepared)
    copied = deepcopy_model(prepared, what="convert")
    leave_in_float(copied, unreached_layers(copied, state_dict))
    restored = freeze.restore(copied, state_dict)
    check_finite(restored, "convert: state_dict")
    return restored


def _check_chains_and_branches(model: nn.Module) -> None:
    """Raise ValueError for a batch norm that was replaced, and a graph with training mode's branch in eval mode."""
    check_links(model)
    for gm in (part for part in model.modules() if isinstance(part, QuantizedGraphModule)):
        tracing = Tracing() if (plan := plan_in(gm)) is None else plan.tracing
        if tracing.training and tracing.branches:
            raise ValueError(
                f"convert: Python branches on self.training in {', '.join(tracing.branches)}, and the graph has the "
                f"branch of training mode alone. Move the branch into a module without parameters, "
                f"which becomes a leaf module; or name the submodule in `untraced` of prepare; or prepare the model in eval "
                f"mode."
            )


def _runtime_for(model: nn.Module, arithmetic: str, runtime: str | None) -> Runtime | None:
    """Return the runtime whose integer arithmetic a model gets; None where it computes in float."""
    if arithmetic != "integer":
        if runtime is not None:
            raise ValueError(
                f'convert: runtime={runtime!r} needs arithmetic="integer", got {arithmetic!r}; write arithmetic="integer", '
                f"or leave runtime out."
            )
        return None
    if (plan := plan_in(model)) is None:
        raise ValueError(
            f'convert: arithmetic="integer" needs the graph of the model, to know the quantizer of each output; quantize it '
            f"by qtoolkit.prepare, got {with_article(type(model))} without a graph."
        )
    if any(parameter.dtype != torch.float32 for parameter in model.parameters() if parameter.is_floating_point()):
        raise ValueError('convert: arithmetic="integer" needs a model in float32; convert model.float().')
    name = plan.backend.runtime if runtime is None else runtime
    if name is None:
        raise ValueError(
            f'convert: arithmetic="integer": the backend {plan.backend.name!r} has no runtime with published '
            f"arithmetic; name one in runtime=: {', '.join(map(repr, RUNTIMES))}."
        )
    check_known("runtime", name, RUNTIMES)
    return RUNTIMES[name]


def _warn_of_skipped(model: nn.Module) -> None:
    """Warn of quantizers whose ranges leave out NaN or infinities."""
    names = [name for name, q in quantizers_of(model).items() if q.ready and not q.observer.finite()]
    if names:
        warn(
            f"convert: {len(names)} quantizers got NaN or infinities in training, which their ranges leave out: "
            f"{some(names)}; qtoolkit.stop_on_nonfinite finds the first one.",
        )


def _warn_of_those_off(model: nn.Module) -> None:
    names = [name for name, quantizer in quantizers_of(model).items() if not quantizer.active]
    if names:
        warn(
            f"convert: {len(names)} quantizers are off and stay off, so that their tensors are in float: {some(names)}; "
            f"qtoolkit.enable_quantization(prepared) turns them on.",
        )


def _warn_of_clipped_weights(prepared: nn.Module, converted: nn.Module) -> None:
    """Warn of weights that are larger than a range that does not follow them."""
    clipped = []
    for name, quantizer in quantizers_of(prepared).items():
        layer = converted.get_submodule(name.rpartition(".")[0])
        stays = quantizer.active and quantizer.capability.direct and not (quantizer.follows or quantizer.kind.LEARNED)
        if quantizer.of_weight and stays and isinstance(layer, QuantWeighted):
            share, _ = look(quantizer, layer.weight).tolist()
            clipped += [f"{name!r} ({share:.1%})"] if much_clipped(quantizer, share) else []
    if clipped:
        warn(
            f"convert: ranges that were frozen or set do not follow their weights, and clip more than "
            f"{MUCH_CLIPPED:.0%} of these (batch norms folded): {some(clipped)}. Set "
            f"quantizer.following = True to take these ranges anew; in training, freeze batch norms with the ranges "
            f"(qtoolkit.freeze_batch_norm).",
        )


def _check_parts_not_wrapped(model: nn.Module, what: str) -> None:
    for name, part in model.named_modules():
        if isinstance(part, DistributedDataParallel | nn.DataParallel):
            raise ValueError(
                f"{what}: submodule {name!r} is wrapped in {wrapper_of(part)}, and a copy of it would send tensors to other "
                f"processes or devices; put {name}.module in its place, or wrap the whole model."
            )


def check_converted(model: object, what: str) -> nn.Module:
    """Return a model without a wrapper, before `what` is done with it; TypeError unless `convert` returned it."""
    if isinstance(model, nn.Module):
        refuse_foreign_quantizers(model, what)
        if named_quantizers(model, Grid) and not quantizers_of(model):
            return unwrapped(model)
    raise TypeError(
        f"{what}: the model must be what qtoolkit.convert returned, got {shown(model)} that was not converted; prepare and "
        f"calibrate the model, and pass qtoolkit.convert(prepared)."
    )


def check_quantized(model: M, what: str) -> M:
    """Return a model without a wrapper, before `what` is done with it.

    Raises TypeError unless it was prepared or replaced, or has quantizers of qtoolkit; ValueError where a part of it is wrapped
    for several devices: a copy of the wrapper would send tensors to other processes.
    """
    if isinstance(model, nn.Module):
        refuse_foreign_quantizers(model, what)
        inner = unwrapped(model)
        if any(isinstance(part, QUANTIZED) for part in inner.modules()) or plan_of(inner) is not None:
            _check_parts_not_wrapped(inner, what)
            return inner
    raise TypeError(
        f"{what}: the model must be what qtoolkit.prepare, qtoolkit.quant_modules.replace or qtoolkit.convert returned, or "
        f"another module with quantizers, got {type(model).__name__}."
    )
