"""A quantizer with the function before it, in one op: an activation or a layer norm, or none."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qtoolkit._native import library
from qtoolkit.nn.hooks import all_watched, is_ordinary, is_watched
from qtoolkit.nn.units.base import (
    Decided,
    GridNow,
    gives_codes,
    grid_of,
    is_learned,
    output_grid,
)
from qtoolkit.quantizers.handed_over import Handed, handed_with

_function_fake_quant = library.function_fake_quant.default

Function = tuple[str, tuple[int, ...], Tensor | None, Tensor | None, float]
"""The op's name of a function, and the arguments of a layer norm."""


def _named(name: str) -> Function:
    return name, (), None, None, 0.0


def _gelu(approximate: str) -> Function:
    return _named("gelu" if approximate == "none" else "gelu_tanh")


NONE = _named("none")
OF_MODULE: Mapping[type[nn.Module], Callable[[Any], Function | None]] = {
    nn.GELU: lambda m: _gelu(m.approximate),
    nn.ReLU: lambda m: None if m.inplace else _named("relu"),
    nn.SiLU: lambda m: None if m.inplace else _named("silu"),
    nn.LayerNorm: lambda m: ("layer_norm", m.normalized_shape, m.weight, m.bias, m.eps),
}
OF_FUNCTION: Mapping[Any, Function] = {F.gelu: _gelu("none"), torch.relu: _named("relu"), F.silu: _named("silu")}
"""Functions that are called with their input alone."""


class Plan(NamedTuple):
    """The arguments of the op for some inputs, in its order.

    Attributes:
        function: What is computed before the quantizer.
        output: The output's scale and grid.
        with_codes: Whether the op returns the codes of its output.
    """

    function: Function
    output: GridNow
    with_codes: bool


class FunctionUnit(Decided):
    """A function of one tensor and the quantizer of its result; the code of a prepared model calls `run`.

    Args:
        root: The model, or the block of it in which the unit runs.
        module: The name of the module that is the function; None where it is none, or there is no function.
        quantizer: The name of the quantizer.
        called: The function of the graph, which is not a module; None without one.
        function: What it computes.
        with_codes: Whether a unit takes the codes of the result.
        gives: Whether others than units take the result, which are handed its grid with it.
    """

    def __init__(
        self,
        root: nn.Module,
        module: str | None,
        quantizer: str,
        called: Callable[[Tensor], Tensor] | None,
        function: Function,
        with_codes: bool,
        gives: bool,
    ) -> None:
        super().__init__(root, (module, quantizer), gives)
        self.called, self.function, self.with_codes = called, function, with_codes

    def run(self, x: Tensor) -> tuple[Tensor, Handed | None]:
        """Return the unit's output, with its codes."""
        if torch.compiler.is_compiling():
            return self._one_by_one(x, *self.modules_now()), None
        self.look()
        if type(x) is Tensor and x.requires_grad and torch.is_grad_enabled():
            autocast = torch.is_autocast_enabled(x.device.type)
            plan: Plan | None = self.plan((x.shape, x.dtype, x.device, autocast), x, autocast)
            if plan is not None:
                return self.compute(plan, x)
        y = self._one_by_one(x, *self.modules)
        return y, handed_with(y)

    def _one_by_one(self, x: Tensor, module: Any, quantizer: Any) -> Tensor:
        y = x if self.called is None else self.called(x)
        return quantizer(y if module is None else module(y))  # type: ignore[no-any-return]  # a Tensor

    def planned(self, x: Tensor, autocast: bool) -> Plan | None:
        """Ask the modules for the plan."""
        module, quantizer = self.modules
        if all_watched() or not is_ordinary(x) or not x.is_floating_point() or self.quantizer_in_op() is None:
            return None
        function = self.function if module is None else function_of_module(module)
        if function is None or not _takes(function, x, autocast):
            return None
        output = output_grid(quantizer, x.detach().to("meta"))
        return Plan(function, output, self.with_codes and gives_codes(quantizer))

    def compute(self, plan: Plan, x: Tensor) -> tuple[Tensor, Handed | None]:
        """Compute the unit by the op."""
        quantizer = self.modules[1]
        output = grid_of(plan.output)
        learned = is_learned(output)
        keeps_x = learned or plan.function is not NONE
        y, codes, scale, *_ = _function_fake_quant(x, *plan.function, keeps_x, *output, learned, plan.with_codes)
        return self.output(y, codes if plan.with_codes else None, scale, output, quantizer)


def function_of_module(module: nn.Module) -> Function | None:
    """Return what the op computes for a module as it is now; None where the module must be called."""
    found = OF_MODULE.get(type(module))
    return None if found is None or is_watched(module) else found(module)


def _takes(function: Function, x: Tensor, autocast: bool) -> bool:
    """Return whether the op computes a function of x as torch does: of a layer norm, in the type of its parameters."""
    _, shape, *parameters, _ = function
    if not shape:
        return True
    types = {p.dtype for p in parameters if p is not None} | {x.dtype}
    plain = all(p is None or type(p) is nn.Parameter for p in parameters)
    return not autocast and plain and len(types) == 1 and x.shape[x.dim() - len(shape) :] == shape
