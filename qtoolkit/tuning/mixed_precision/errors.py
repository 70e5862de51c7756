"""Three estimates of what each choice of each layer costs: measured, by the curvature, by squared gradients."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qtoolkit.batches import no_batch
from qtoolkit.config import QConfig, QConfigMapping
from qtoolkit.debug.sensitivity import sensitivity
from qtoolkit.layer_costs import input_of
from qtoolkit.model_state import check_module, evaluating, removing
from qtoolkit.progress import batches_of
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer
from qtoolkit.report import quantization_report
from qtoolkit.tuning.mixed_precision.costs import weight_quantizer_of
from qtoolkit.tuning.mixed_precision.hessian import Loss, Trace, differentiable, hessian_traces, scalar_loss

Configs = Mapping[str, Mapping[str, QConfig | None]]
Errors = dict[str, dict[str, float]]


# ---- measured


def measured(
    configs: Configs,
    choices: Mapping[str, QConfig | None],
    build: Callable[[QConfigMapping], nn.Module],
    evaluate: Callable[[nn.Module], float],
    higher_is_better: bool,
    progress: bool,
) -> Errors:
    """Return by how much each choice of each layer alone worsens a score (see `MixedPrecision.measured_errors`)."""
    errors: Errors = {name: {} for name in configs}
    for choice, config in choices.items():
        names = [name for name in configs if choice in configs[name]]
        if config is None:
            errors = {name: of | ({choice: 0.0} if name in names else {}) for name, of in errors.items()}
        elif names:
            mapping = QConfigMapping().set_global(None)
            for name in names:
                mapping.set_module_name(name, configs[name][choice])
            model = build(mapping)
            _check_quantized(model, names, choice)
            found = sensitivity(model, evaluate, names=names, higher_is_better=higher_is_better, progress=progress)
            for row in found.rows:
                errors[row.name][choice] = row.drop
    return errors


def _check_quantized(model: nn.Module, names: Iterable[str], choice: str) -> None:
    check_module(model, "MixedPrecision", "the result of build")
    lines = {line.name: line for line in quantization_report(model).layers}
    quantized = {line.name for line in quantization_report(model).quantized}
    for name in names:
        if name not in quantized:
            reason = f" ({lines[name].reason})" if name in lines and lines[name].reason else ""
            raise ValueError(
                f"MixedPrecision: the layer {name!r} is not quantized with the choice {choice!r}{reason}: give it a choice of "
                f"None by fixed, or build a model in which it is."
            )


# ---- by the curvature


def by_hessian(
    model: nn.Module,
    modules: Mapping[str, Any],
    configs: Configs,
    loss: Loss,
    batches: Iterable[Any],
    probes: int,
    seed: int,
    traces: Mapping[str, Trace] | None,
    progress: bool,
) -> Errors:
    """Return trace / weights * |Q(w) - w|^2 / 2 for each choice of each layer (see `MixedPrecision.hessian_errors`)."""
    _check_same_activations(configs)
    weights = {name: module.weight for name, module in modules.items()}
    found = traces
    if found is None:
        found = hessian_traces(model, loss, batches, weights, probes, seed, progress)
    return {
        name: {
            choice: found[name].at_least
            / weights[name].numel()
            * float(_weight_change(modules[name], config, name).double().square().sum())
            / 2
            for choice, config in of.items()
        }
        for name, of in configs.items()
    }


def _check_same_activations(configs: Configs) -> None:
    for name, of in configs.items():
        specs = {choice: config and config.activation for choice, config in of.items() if config is not None}
        (first, wanted), *others = specs.items() or [("", None)]
        for choice, spec in others:
            if spec != wanted:
                raise ValueError(
                    f"MixedPrecision: hessian_errors sees weights alone, and the choices {first!r} and {choice!r} of layer "
                    f"{name!r} differ in their activations; take gradient_errors or measured_errors."
                )


@torch.no_grad()
def _weight_change(module: Any, config: QConfig | None, name: str) -> Tensor:
    """Return the quantized weight less the weight."""
    weight: Tensor = module.weight.detach()
    if config is None or config.weight is None:
        return torch.zeros_like(weight)
    quantized: Tensor = weight_quantizer_of(module, config.weight, name).eval()(weight)
    return quantized - weight


# ---- by squared gradients


def by_gradients(
    model: nn.Module, modules: Mapping[str, Any], configs: Configs, loss: Loss, batches: Iterable[Any], progress: bool
) -> Errors:
    """Return N / 2 * sum (g * change)^2 for each choice of each layer (see `MixedPrecision.gradient_errors`)."""
    check_module(model, "gradient_errors")
    if iter(batches) is batches:
        raise ValueError("MixedPrecision: gradient_errors runs batches twice; pass a list of batches.")
    quantizers = {
        (name, choice): TensorQuantizer(config.activation, name=name)
        for name, of in configs.items()
        for choice, config in of.items()
        if config is not None and config.activation is not None
    }
    changes = {
        (name, choice): _weight_change(modules[name], config, name)
        for name, of in configs.items()
        for choice, config in of.items()
    }
    totals: dict[tuple[str, str], float] = dict.fromkeys(changes, 0.0)
    count = 0
    with evaluating(model):
        _calibrate(model, modules, quantizers, loss, batches_of("gradients: ranges", batches, progress))
        for batch in batches_of("gradients", batches, progress):
            count += 1
            for place, change in _squares(model, modules, quantizers, changes, loss, batch).items():
                totals[place] += change
    if not count:
        raise no_batch("gradient_errors")
    return {name: {choice: totals[name, choice] / count for choice in of} for name, of in configs.items()}


Places = Mapping[tuple[str, str], Any]


@torch.no_grad()
def _calibrate(
    model: nn.Module, modules: Mapping[str, Any], quantizers: Places, loss: Loss, batches: Iterable[Any]
) -> None:
    for quantizer in quantizers.values():
        quantizer.observing, quantizer.quantizing = True, False

    def observe(name: str, x: Tensor) -> Tensor:
        for (of, _), quantizer in quantizers.items():
            if of == name:
                quantizer.to(x.device)(x)
        return x

    with _inputs_through(modules, observe):
        for batch in batches:
            scalar_loss("gradient_errors", loss, model, batch)
    for quantizer in quantizers.values():
        quantizer.observing, quantizer.quantizing = False, True
        if quantizer.observer.seen() or not quantizer.observer.finite():
            quantizer.load_observed()


def _squares(
    model: nn.Module, modules: Mapping[str, Any], quantizers: Places, changes: Places, loss: Loss, batch: Any
) -> dict[tuple[str, str], float]:
    """Return N / 2 * sum (g * change)^2 of each choice on one batch of N samples."""
    inputs: dict[str, list[Tensor]] = defaultdict(list)

    def keep(name: str, x: Tensor) -> Tensor:
        # A tensor of its own for this layer: its gradient is not that of the other layers that take x.
        own = x.view_as(x) if x.requires_grad else x.detach().requires_grad_()
        inputs[name].append(own)
        return own

    weights = {name: module.weight for name, module in modules.items()}
    with differentiable(weights.values()), torch.enable_grad(), _inputs_through(modules, keep):
        value = scalar_loss("gradient_errors", loss, model, batch)
        flat = [(name, x) for name, of in inputs.items() for x in of]
        wanted = [*weights.values(), *(x for _, x in flat)]
        gradients = torch.autograd.grad(value, wanted, materialize_grads=True)
    of_weights = dict(zip(weights, gradients, strict=False))
    samples = flat[0][1].size(0) if flat else 1
    squares = {
        place: float((of_weights[place[0]] * change).double().square().sum()) for place, change in changes.items()
    }
    with torch.no_grad():
        for (name, x), gradient in zip(flat, gradients[len(weights) :], strict=True):
            for (of, choice), quantizer in quantizers.items():
                if of == name:
                    squares[name, choice] += float((gradient * (quantizer(x) - x)).double().square().sum())
    return {place: samples / 2 * total for place, total in squares.items()}


@contextmanager
def _inputs_through(modules: Mapping[str, Any], function: Callable[[str, Tensor], Tensor]) -> Iterator[None]:
    """Pass the floating-point input of each layer through function(name, x), for a `with` block."""

    def pass_through(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Pass the input of a layer through the function, if it is a tensor of floats: a forward pre-hook."""
        x = input_of(args, kwargs)
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return None
        new = function(name, x)
        return ((new, *args[1:]), kwargs) if args else (args, kwargs | {"input": new})

    hooks = {name: partial(pass_through, name) for name in modules}
    handles = [modules[name].register_forward_pre_hook(hook, with_kwargs=True) for name, hook in hooks.items()]
    with removing(handles):
        yield
