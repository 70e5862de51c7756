"""The first steps of a training: ranges of activations follow the data, and what goes wrong with a range is said by name.

After each step of an optimizer, the quantizers that were calibrated lately are visited once. So all forwards of a step, and
those that gradient checkpointing runs again in backward, have the same scale, and nothing waits for the device but the few
steps in `LOOKED_AT`.
"""

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from qtoolkit.processes import own_part
from qtoolkit.quantizers.optimizer_steps import OptimizerSteps, trained_by
from qtoolkit.quantizers.spec_ops import per_element

if TYPE_CHECKING:
    from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer

FOLLOWED_STEPS = 200  # after a wrong start, 0.9^200 of it is left
MOMENTUM = 0.1  # the weight of each forward's range
LOOKED_AT = (2, 10, 100, 250)  # the steps whose forwards say how much is clipped
COUNTED_STEPS = max(LOOKED_AT) + 1
GROWTH_AT = (1, 2, 5, 10, 20, 50, 100)  # the steps after which learned scales are compared with their start
FAR = 8.0  # times its start, or this part of it
MUCH_CLIPPED = 0.05  # the best range of eight levels for a normal distribution clips 3 %


def much_clipped(quantizer: "TensorQuantizer", share: float | None) -> bool:
    """Return whether a share of clipped values is too much, which a percentile may ask for, and few codes make best."""
    asked = quantizer.spec.bits <= 2 or quantizer.spec.observer_args.get("method") == "percentile"
    return (share or 0) > MUCH_CLIPPED and not asked


def look(quantizer: "TensorQuantizer", x: Tensor) -> Tensor:
    """Return the share of x beyond the grid by more than half a step, and whether x is rounded to zeros alone."""
    x, spec, group = x.detach(), quantizer.spec, quantizer.group
    values = (*quantizer.kind.input_ends(quantizer), quantizer.scale / 2)
    low, high, half = (per_element(value, x, spec, group) for value in values)
    clipped = ((x < low - half) | (x > high + half)).float().mean()
    vanished = (x.abs() < half).all() & (x != 0).any()
    return torch.stack((clipped, vanished.float()))


def _say_what_is_wrong(quantizers: Sequence["TensorQuantizer"]) -> None:
    looked = [quantizer for quantizer in quantizers if quantizer.looked is not None]
    for quantizer, (clipped, vanished) in zip(looked, _values(q.looked for q in looked), strict=True):
        quantizer.looked = None
        if quantizer.follows_data:  # a range that follows may lag behind, as that of a branch that begins with zeros
            continue
        if vanished:
            _warn(quantizer, f"rounds its whole input to zero after {quantizer.steps} steps of training", RANGES)
        elif much_clipped(quantizer, clipped):
            _warn(quantizer, f"clips {clipped:.1%} of its input after {quantizer.steps} steps of training", RANGES)
    warn_of_growth([quantizer for quantizer in quantizers if quantizer.steps in GROWTH_AT])


def warn_of_growth(quantizers: Sequence["TensorQuantizer"]) -> None:
    """Warn once of each learned scale that has left [1/8, 8] times its start. Waits for the device."""
    grown = [(quantizer, quantizer.kind.growth(quantizer)) for quantizer in quantizers if not quantizer.warned]
    own = [(quantizer, own_part(growth).flatten()) for quantizer, growth in grown if growth is not None]
    known = [(quantizer, growth) for quantizer, growth in own if growth.numel()]
    farthest = (growth[growth.log2().abs().argmax()].reshape(1) for _, growth in known)
    for (quantizer, _), (times,) in zip(known, _values(farthest), strict=True):
        if math.isnan(times):
            _warn(
                quantizer, "has a learned scale that is NaN", "qtoolkit.stop_on_nonfinite finds where the first one is"
            )
        elif not 1 / FAR <= times <= FAR:
            found = f"has a learned scale that is {times:.3g} times its start"
            _warn(quantizer, found, "Train the scales at a lower rate (scale_lr of qtoolkit.parameter_groups)")


def warn_of_capture(quantizer: "TensorQuantizer") -> None:
    """Warn once of a range that follows the data by hooks of the optimizer, which a CUDA graph does not call."""
    found = "is captured in a CUDA graph while its range follows the data, which it does not when the graph runs"
    remedy = f"Capture the step after the first {FOLLOWED_STEPS}, or call qtoolkit.freeze_ranges(model) before"
    _warn(quantizer, found, remedy)


RANGES = (
    "Calibrate again on data like that of training (qtoolkit.calibrate), with the model in training mode, and take a signed "
    "spec for values of both signs"
)


def _values(of: Iterable[Tensor | None]) -> list[list[float]]:
    """Return the values of small tensors of one size, by one copy from each device."""
    tensors = [tensor.double() for tensor in of if tensor is not None]
    if len({tensor.device for tensor in tensors}) > 1:
        tensors = [tensor.cpu() for tensor in tensors]
    return torch.stack(tensors).tolist() if tensors else []


def _warn(quantizer: "TensorQuantizer", found: str, remedy: str) -> None:
    if not quantizer.warned:
        quantizer.warned = True
        warnings.warn(f"quantizer {quantizer.name!r} {found}. {remedy}; see docs/training.md.", stacklevel=6)


def restored_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and those in it, but for what pickle restores after it: layers and their integer kernels form cycles."""
    waiting, seen = [module], {module}
    while waiting:
        part = waiting.pop()
        if "_modules" in vars(part):
            yield part
            children = {child for child in part._modules.values() if child is not None} - seen
            waiting += children
            seen |= children


class FirstSteps(OptimizerSteps):
    """The quantizers that are in their first steps: those of the optimizers that train their model.

    Those of which no model is noted go by each step behind a forward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.quantizers: WeakSet[TensorQuantizer] = WeakSet()  # those in their first steps
        self._models: WeakKeyDictionary[TensorQuantizer, ref[nn.Module]] = WeakKeyDictionary()

    def note_model(self, model: nn.Module, quantizers: Iterable["TensorQuantizer"]) -> None:
        """Note the model that holds quantizers, which do not know it, unless a larger one is noted that holds it."""
        for quantizer in quantizers:
            known = self._models.get(quantizer, lambda: None)()
            if quantizer.counts_steps and (known is None or model not in restored_modules(known)):
                self._models[quantizer] = ref(model)

    def count(self, quantizer: "TensorQuantizer") -> None:
        """Count the steps of a quantizer from now on, if it is in its first ones."""
        if not quantizer.counts_steps:
            self.quantizers.discard(quantizer)
            return
        self.quantizers.add(quantizer)
        self.begin()

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> None:
        if not self.quantizers or torch.compiler.is_compiling():
            return
        super()._after_step(optimizer, args, kwargs)
        trained = trained_by(optimizer)
        # A conversion in place gives a quantizer another class.
        counted = [quantizer for quantizer in tuple(self.quantizers) if getattr(quantizer, "counts_steps", False)]
        took_part = [quantizer for quantizer in counted if self._takes_part(quantizer, trained)]
        stepped = self._without_other_models(took_part, trained)
        with torch.no_grad():
            for quantizer in stepped:
                quantizer.end_step()
            _say_what_is_wrong(stepped)

    def _takes_part(self, quantizer: "TensorQuantizer", trained: set[int]) -> bool:
        """Return whether a step of an optimizer counts: that of the one that trains the scale, if one does."""
        own = [*quantizer.parameters()]
        held = [parameter for parameter in own if id(parameter) in trained]
        if held:
            return quantizer.seen_in_step or any(parameter.grad is not None for parameter in held)
        return quantizer.seen_in_step and not self.of(own)

    def _without_other_models(
        self, quantizers: Sequence["TensorQuantizer"], trained: set[int]
    ) -> list["TensorQuantizer"]:
        """Leave out the quantizers of models that other optimizers train."""
        models = {quantizer: self._models[quantizer]() for quantizer in quantizers if quantizer in self._models}
        others = {
            model for model in {*models.values()} if model is not None and self._is_trained_otherwise(model, trained)
        }
        return [quantizer for quantizer in quantizers if models.get(quantizer) not in others]

    def _is_trained_otherwise(self, model: nn.Module, trained: set[int]) -> bool:
        trains = any(id(parameter) in trained for parameter in model.parameters())  # mostly the first one
        return not trains and bool(self.of(model.parameters()))


FIRST_STEPS = FirstSteps()
