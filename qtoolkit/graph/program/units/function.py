"""A quantizer with the function before it, in one op: an activation or a norm, or none; a norm with the add before it."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qtoolkit import ops
from qtoolkit.graph.program.units.base import CachedFusedOp, Fields, Result, UnitPlan, Varying
from qtoolkit.nn.fusion import Unit, fusion
from qtoolkit.nn.hooks import is_ordinary
from qtoolkit.nn.output_grid import (
    NO_FUNCTION,
    Function,
    gives_codes,
    grid_at_each_call,
    grid_of,
    output_grid,
    quantized_by,
    quantized_in_op,
)
from qtoolkit.quantizers.codes import TensorCodes, rounded
from qtoolkit.running import Run


def _named(name: str) -> Function:
    return name, (), None, None, 0.0


def _gelu(approximate: str) -> Function:
    return _named("gelu" if approximate == "none" else "gelu_tanh")


def _rms_norm(module: nn.RMSNorm) -> Function | None:
    """Return the function of an RMS norm; None where its eps depends on the type of its input, and no weight has this type."""
    weight: Tensor | None = module.weight
    eps = module.eps
    if eps is None:
        if weight is None:
            return None
        eps = torch.finfo(torch.promote_types(weight.dtype, torch.float32)).eps  # of the type of the computation
    return "rms_norm", module.normalized_shape, weight, None, eps


OF_OP = ("function", "shape", "weight", "bias", "eps")
"""The fields of a `Function`."""

NONE, PRELU, HEADS = NO_FUNCTION, "prelu", "heads"
COMPILED = ("gelu", "gelu_tanh", "silu", PRELU)
"""Functions that a compiled forward computes before the op: the compiler's gradients are faster than torch's."""

OF_MODULE: Mapping[type[nn.Module], Callable[[Any], Function | None]] = {
    nn.GELU: lambda m: _gelu(m.approximate),
    nn.ReLU: lambda m: None if m.inplace else _named("relu"),
    nn.SiLU: lambda m: None if m.inplace else _named("silu"),
    nn.PReLU: lambda m: (PRELU, (), m.weight, None, 0.0),
    nn.LayerNorm: lambda m: ("layer_norm", m.normalized_shape, m.weight, m.bias, m.eps),
    nn.RMSNorm: _rms_norm,
}
OF_FUNCTION: Mapping[Any, Function] = {F.gelu: _gelu("none"), torch.relu: _named("relu"), F.silu: _named("silu")}
"""Functions that are called with their input alone."""


@dataclass(slots=True)
class FunctionPlan(UnitPlan):
    """The arguments of the op for some inputs."""

    function: str  # what is computed before the quantizer


class FunctionUnit(CachedFusedOp[FunctionPlan]):
    """A function of one tensor and the quantizer of its result; the forward of a prepared model calls `run`.

    The function is the `module` of this name, or the function that is `called` in the graph and computes `function`; or
    there is none. `with_codes` is whether an op takes the result as integers, and `narrow` whether a layer alone takes the
    result: then autocast would round it to its type, and the op does. `adds` computes the sum that a norm takes.
    """

    KIND = torch.classes.qtoolkit.FunctionUnit

    def __init__(
        self,
        root: nn.Module,
        module: str | None,
        quantizer: str,
        called: Callable[[Tensor], Tensor] | None,
        function: Function,
        with_codes: bool,
        narrow: bool = False,
        adds: Callable[[Tensor, Tensor], Tensor] = torch.add,
    ) -> None:
        super().__init__(root, (module, quantizer))
        self.called, self.function, self.with_codes, self.narrow = called, function, with_codes, narrow
        self.adds = adds

    def run(self, run: Run, x: Tensor) -> Result:
        """Return the unit's output, with its integers."""
        if run.compiled:
            return self._compiled(run, x, *self.modules_now())
        self.refresh_if_modules_changed(run)
        modules = self.modules
        needed = type(x) is Tensor and x.requires_grad and torch.is_grad_enabled()
        found = self.by_op(run, modules, x) if needed else None
        return self._one_by_one(run, x, *modules) if found is None else found

    def run_adding(self, run: Run, x: Tensor, residual: Tensor) -> tuple[Tensor, TensorCodes | None, Tensor]:
        """Return the same of the sum of two tensors, which `adds` computes, and the sum."""
        if type(x) is type(residual) is Tensor and not run.compiled and torch.is_grad_enabled():
            self.refresh_if_modules_changed(run)
            needed = x.requires_grad or residual.requires_grad
            plan = self.plan_of(run, self.modules, x, residual) if needed else None
            results = None if plan is None else self.results_of(run, plan, self.modules, x, residual)
            if plan is not None and results is not None:
                *of_output, total = results
                return *self.output(run, plan, self.modules[-1], *of_output), total
        total = self.adds(x, residual)
        return *self.run(run, total), total

    def _one_by_one(self, run: Run, x: Tensor, module: Any, quantizer: Any) -> Result:
        y = x if self.called is None else self.called(x)
        return quantized_by(run, quantizer, y if module is None else module(y), self.with_codes)

    def _compiled(self, run: Run, x: Tensor, module: Any, quantizer: Any) -> Result:
        """Compute the unit in a compiled forward, which keeps no plan: by the op too, except for functions in COMPILED."""
        function = self.function if module is None else function_of_module(module)
        if function is not None and function[0] not in COMPILED and _is_one_op(run, module, quantizer):
            takes = _takes(function, x, x.dtype)
            found = quantized_in_op(run, quantizer, x, function, self.with_codes) if takes else None
            if found is not None:
                return found
        return self._one_by_one(run, x, module, quantizer)

    def kind_of(self, run: Run, modules: tuple[Any, ...], x: Tensor, *others: Any) -> Hashable:
        """Return the values on which a plan depends besides the modules."""
        return x.shape, x.dtype, x.device, _autocast_type(x), *((t.shape, t.dtype, t.device) for t in others)

    def _planned(self, run: Run, modules: tuple[Any, ...], x: Tensor, *others: Any) -> FunctionPlan | None:
        module, quantizer = modules
        tensors = (x, *others)
        if not (all(_may_be_added(run, t, x) for t in tensors) and _is_one_op(run, module, quantizer)):
            return None
        function = self.function if module is None else function_of_module(module)
        dtype = reduce(torch.promote_types, (t.dtype for t in tensors))
        if function is None or not _takes(function, x, dtype) or (others and not function[1]):
            return None  # an add is before a norm alone
        like = x.detach().to("meta", dtype)
        output = grid_at_each_call(quantizer, like) if function[0] == PRELU else output_grid(run, quantizer, like)
        fields: Fields = {"residual": None, **dict(zip(OF_OP, function, strict=True))}
        fields["with_codes"] = self.with_codes and gives_codes(quantizer)
        fields["dtype"] = _autocast_type(x) if self.narrow and dtype == torch.float32 else None
        return FunctionPlan(quantizer, output, fields, function[0])

    def results_of(
        self, run: Run, plan: FunctionPlan, modules: tuple[Any, ...], x: Tensor, *others: Any
    ) -> list[Tensor] | None:
        """Return the results of the op; a PReLU has another one, which takes the scale and gives no integers."""
        if plan.function != PRELU:
            return super().results_of(run, plan, modules, x, *others)
        grid = grid_of(plan.output)
        scale: Any = grid.start  # there is one: of a quantizer
        codes = (grid.qmin, grid.qmax, grid.grad_factor)
        y = ops.prelu_fake_quant(x, modules[0].weight, scale, grid.zero_point, *codes)
        zero_point = rounded(grid.zero_point)
        return [y, y.new_empty(0), scale.detach().abs(), *([] if zero_point is None else [zero_point])]

    def _varying(self, run: Run, plan: FunctionPlan, modules: tuple[Any, ...], x: Tensor, *others: Any) -> Varying:
        return plan.with_output(dict(zip(("x", "residual"), (x, *others), strict=False)), {})


def function_of_module(module: nn.Module) -> Function | None:
    """Return the function of a module, if an op computes it with a quantizer."""
    found = OF_MODULE.get(type(module))
    return None if found is None else found(module)


def is_norm(module: nn.Module) -> bool:
    """Return whether the function of a module is a norm of rows."""
    found = function_of_module(module)
    return found is not None and bool(found[1])


def _is_one_op(run: Run, module: nn.Module | None, quantizer: nn.Module) -> bool:
    return isinstance(fusion(run, activation=module, quantizer=quantizer), Unit)


def _autocast_type(x: Tensor) -> torch.dtype | None:
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _may_be_added(run: Run, t: Tensor, x: Tensor) -> bool:
    return is_ordinary(run, t) and t.is_floating_point() and (t.shape, t.device) == (x.shape, x.device)


def _takes(function: Function, x: Tensor, dtype: torch.dtype) -> bool:
    """Return whether the op computes a function of a tensor like x, of a type, as torch does, in the type of its parameters."""
    name, shape, *parameters, _ = function
    if name == PRELU:
        return _takes_prelu(function[2], x)
    if not shape:
        return True
    types = {p.dtype for p in parameters if p is not None} | {dtype}
    # Autocast computes a layer norm in float32, on CUDA: there it widens narrower types, and leaves others.
    wide = _autocast_type(x) is None or dtype in (torch.float32, torch.float64)
    plain = all(p is None or type(p) is nn.Parameter for p in parameters)
    return wide and plain and len(types) == 1 and x.shape[x.dim() - len(shape) :] == shape


def _takes_prelu(weight: Any, x: Tensor) -> bool:
    """Return whether the op gives a result of torch's dtype; PReLU itself has the errors for other inputs."""
    if type(weight) is not nn.Parameter or (weight.numel() != 1 and (x.dim() < 2 or x.size(1) != weight.numel())):
        return False
    if (autocast := _autocast_type(x)) is not None:
        return x.dtype == autocast
    return x.dtype == weight.dtype and weight.device == x.device
