"""Helpers for error estimates: checks of choices, changes of weights, squared gradients."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from qtoolkit.config import QConfig
from qtoolkit.model_state import check_module, removing
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer
from qtoolkit.report import quantization_report
from qtoolkit.report.layer_costs import input_of
from qtoolkit.tuning.mixed_precision.costs import weight_quantizer_of
from qtoolkit.tuning.mixed_precision.hessian import Loss, differentiable, scalar_loss

Configs = Mapping[str, Mapping[str, QConfig | None]]
Errors = dict[str, dict[str, float]]


def check_quantized(model: nn.Module, names: Iterable[str], choice: str) -> None:
    """Raise ValueError if a model that `build` returned does not quantize one of these layers."""
    check_module(model, "MixedPrecision", "the result of build")
    lines = {line.name: line for line in quantization_report(model).layers}
    quantized = {line.name for line in quantization_report(model).quantized}
    for name in names:
        if name not in quantized:
            reason = f" ({lines[name].reason})" if name in lines and lines[name].reason else ""
            raise ValueError(
                f"MixedPrecision: the layer {name!r} is not quantized with the choice {choice!r}{reason}: give it the choice "
                "None in fixed, or build a model in which it is quantized."
            )


def check_same_activations(configs: Configs) -> None:
    """Raise ValueError if the choices of a layer differ in their activations."""
    for name, of in configs.items():
        specs = {choice: config and config.activation for choice, config in of.items() if config is not None}
        (first, wanted), *others = specs.items() or [("", None)]
        for choice, spec in others:
            if spec != wanted:
                raise ValueError(
                    f"MixedPrecision: hessian_errors covers only weights, but the choices {first!r} and {choice!r} of layer "
                    f"{name!r} differ in their activations; use gradient_errors or measured_errors."
                )


@torch.no_grad()
def weight_change(module: nn.Module, config: QConfig | None, name: str) -> Tensor:
    """Return the quantized weight minus the weight."""
    weight = module.get_parameter("weight").detach()
    if config is None or config.weight is None:
        return torch.zeros_like(weight)
    quantized: Tensor = weight_quantizer_of(module, config.weight, name).eval()(weight)
    return quantized - weight


class SquaredGradients:
    """The errors of all choices by squared gradients, batch by batch (see `MixedPrecision.gradient_errors`), in eval mode."""

    def __init__(self, model: nn.Module, modules: Mapping[str, nn.Module], configs: Configs, loss: Loss) -> None:
        self.model, self.modules, self.loss = model, modules, loss
        self.changes = {
            name: {choice: weight_change(modules[name], config, name) for choice, config in of.items()}
            for name, of in configs.items()
        }
        self.quantizers = {
            name: {
                choice: TensorQuantizer(config.activation, name=name)
                for choice, config in of.items()
                if config is not None and config.activation is not None
            }
            for name, of in configs.items()
        }

    @torch.no_grad()
    def calibrate(self, batches: Iterable[object]) -> None:
        """Set the ranges of the activations from all batches."""
        quantizers = [quantizer for of in self.quantizers.values() for quantizer in of.values()]
        for quantizer in quantizers:
            quantizer.observing, quantizer.quantizing = True, False

        def observe(name: str, x: Tensor) -> Tensor:
            for quantizer in self.quantizers[name].values():
                quantizer.to(x.device)(x)
            return x

        with _inputs_through(self.modules, observe):
            for batch in batches:
                scalar_loss("gradient_errors", self.loss, self.model, batch)
        for quantizer in quantizers:
            quantizer.observing, quantizer.quantizing = False, True
            if quantizer.observer.seen() or not quantizer.observer.finite():
                quantizer.load_observed()

    def of(self, batch: object) -> Errors:
        """Return N / 2 * sum (g * change)^2 of each choice of each layer on a batch of N samples."""
        inputs: list[tuple[str, Tensor]] = []

        def keep(name: str, x: Tensor) -> Tensor:
            # A separate tensor for this layer: the gradients of other layers that take x are not added to it.
            own = x.view_as(x) if x.requires_grad else x.detach().requires_grad_()
            inputs.append((name, own))
            return own

        weights = [module.get_parameter("weight") for module in self.modules.values()]
        with differentiable(weights), torch.enable_grad(), _inputs_through(self.modules, keep):
            value = scalar_loss("gradient_errors", self.loss, self.model, batch)
            gradients = torch.autograd.grad(value, [*weights, *(x for _, x in inputs)], materialize_grads=True)
        squares = {
            name: {choice: float((gradient * change).double().square().sum()) for choice, change in of.items()}
            for (name, of), gradient in zip(self.changes.items(), gradients, strict=False)
        }
        with torch.no_grad():
            for (name, x), gradient in zip(inputs, gradients[len(weights) :], strict=True):
                for choice, quantizer in self.quantizers[name].items():
                    squares[name][choice] += float((gradient * (quantizer(x) - x)).double().square().sum())
        samples = inputs[0][1].size(0) if inputs else 1
        return {name: {choice: samples / 2 * total for choice, total in of.items()} for name, of in squares.items()}


@contextmanager
def _inputs_through(modules: Mapping[str, nn.Module], function: Callable[[str, Tensor], Tensor]) -> Iterator[None]:
    """Pass the floating-point input of each layer through function(name, x), within a `with` block."""

    def pass_through(
        name: str, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        """Forward pre-hook: pass a floating-point input through the function."""
        x = input_of(args, kwargs)
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return None
        new = function(name, x)
        return ((new, *args[1:]), kwargs) if args else (args, kwargs | {"input": new})

    hooks = {name: partial(pass_through, name) for name in modules}
    handles = [modules[name].register_forward_pre_hook(hook, with_kwargs=True) for name, hook in hooks.items()]
    with removing(handles):
        yield
