"""The pass of convert(arithmetic="integer"): give each op between quantizers the integer kernel that a runtime has for it."""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from qtoolkit.errors import with_article
from qtoolkit.graph.capture.rewrites.in_place import changes_first
from qtoolkit.graph.graph_module import QuantizedGraphModule, plan_in
from qtoolkit.graph.module_calls import ModuleCalls, call_of_layer, number_calls
from qtoolkit.graph.nodes import (
    bounds_of,
    callable_of,
    is_quantizer,
    is_weight_quantizer,
    kind_of,
    name_of,
    quantizes_its_input,
    returns_tuple,
    tensor_inputs,
    users_of,
)
from qtoolkit.graph.passes.insert import add_holder, free_name
from qtoolkit.graph.placement.sources import source_of_input
from qtoolkit.graph.placement.traversal import source_of
from qtoolkit.graph.plan import Computed
from qtoolkit.graph.weighted_functions import bias_node, layer_of, rounding_of, weight_node
from qtoolkit.integer.functions import FunctionKernel
from qtoolkit.integer.kernels import Kernel, OpKernel
from qtoolkit.nn import QuantWeighted
from qtoolkit.nn.layer_call import LayerCall
from qtoolkit.nn.refusals import NO_GRID
from qtoolkit.op_kinds.kind import Bounds
from qtoolkit.op_kinds.rules import called_module, module_of
from qtoolkit.quantizers.clip_range import saturates
from qtoolkit.quantizers.frozen import Grid
from qtoolkit.quantizers.quantizer import Quantizer
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer
from qtoolkit.runtimes.table import Runtime
from qtoolkit.verdicts import Cause, Refusal

HOLDER = "integer_kernels"


def run(gm: QuantizedGraphModule, runtime: Runtime) -> QuantizedGraphModule:
    """Give layers their kernels, and replace calls of other ops by kernels. The plan says which, and why others stay float."""
    holder, calls = add_holder(gm, HOLDER), ModuleCalls(gm.graph)
    computed: dict[str, Computed] = {}
    behind: dict[fx.Node, Grid | None] = {}
    for node in list(gm.graph.nodes):
        how = _put_kernel(gm, node, runtime, holder, calls, behind)
        behind[node] = _grid_behind(node, runtime, behind)
        if how is not None:
            computed[node.name] = how
    if not list(gm.get_submodule(holder).children()):
        gm.delete_submodule(holder)
    _link_outputs(gm, runtime, calls)
    if plan_in(gm) is not None:
        gm.plan = replace(gm.plan, computed=computed)
    gm.graph.lint()
    gm.recompile()
    return gm


def _put_kernel(
    gm: QuantizedGraphModule,
    node: fx.Node,
    runtime: Runtime,
    holder: str,
    calls: ModuleCalls,
    behind: Mapping[fx.Node, Grid | None],
) -> Computed | None:
    """Let a kernel compute an op, if there is one; return how it computes, or None for an op that takes no quantized tensors.

    `behind` has the quantizer after each node before this one.
    """
    sources = [behind[source] for source in tensor_inputs(node)]
    grids = [grid for grid in sources if grid is not None]
    unknown = node.op == "output" or is_quantizer(node) or not (grids or _has_quantized_weight(node))
    if unknown or kind_of(node).name in runtime.carries:
        return None
    if quantizes_its_input(node):
        return _as_called("it is called inside a leaf module too")
    if not grids:
        return Computed.in_float(NO_GRID)
    if weight_node(node) is not None and len(grids) == 1:
        return _replace_function(gm, node, grids[0], runtime, holder)
    if len(grids) < len(sources):
        return Computed.in_float(Refusal(Cause.INPUT_CODES, "one of its inputs is not quantized"))
    if isinstance(called_module(node), QuantWeighted):
        return _give_layer(node, grids[0], runtime, calls.of(module_of(node)))
    return _replace_op(gm, node, grids, runtime, holder)


def _link_outputs(gm: QuantizedGraphModule, runtime: Runtime, calls: ModuleCalls) -> None:
    """Tell the quantizers of kernels' outputs, unless they quantize other tensors too; and how the runtime rounds."""
    for grid in (module for module in gm.modules() if isinstance(module, Grid)):
        of_activation = not grid.of_weight and grid.capability_now.codes
        grid.quantizes_as = runtime.quantizes_as if of_activation else None
    for kernel in gm.modules():
        if isinstance(kernel, Kernel) and kernel.output is not None:
            found = calls.of(kernel.output.grid)
            if len(found) == 1 and not _is_behind_a_clip(found[0]):
                kernel.output.grid.computed_by(kernel)


def _is_behind_a_clip(quantizer: fx.Node) -> bool:
    """Return whether an activation stands before a quantizer that may move a kernel's values off its grid.

    Its bounds are within half a step of the lowest and the highest value; zero, the bound of a ReLU, is on every grid.
    """
    source = source_of(quantizer)
    while source is not None and (kind_of(source).returns_input or kind_of(source).clips):
        if kind_of(source).clips and not kind_of(source).is_relu:
            return True
        source = source_of(source)
    return False


def _as_called(why: str) -> Computed:
    return Computed.in_float(Refusal(Cause.CALL, why))


def _has_quantized_weight(node: fx.Node) -> bool:
    """Return whether a node calls a layer or a function of other inputs than indices whose weight is quantized."""
    layer = called_module(node)
    of_layer = isinstance(layer, QuantWeighted) and layer.weight_quantizer is not None
    return (of_layer or weight_node(node) is not None) and not kind_of(node).takes_indices


def _give_layer(node: fx.Node, source: Grid, runtime: Runtime, calls: Sequence[fx.Node]) -> Computed:
    layer: Any = module_of(node)
    if len(calls) > 1 and not number_calls(layer, calls):
        return _as_called("it is called more than once")
    last, output = output_of(node, runtime)
    kernel = runtime.kernel_of(layer, source, output)
    if isinstance(kernel, Refusal):
        return Computed.in_float(kernel)
    call = call_of_layer(layer, node)
    setattr(layer, call.kernel_name, kernel(layer, source, output, call))
    return Computed(kernel.NAME, last=last.name)


def _replace_function(gm: QuantizedGraphModule, node: fx.Node, source: Grid, runtime: Runtime, holder: str) -> Computed:
    layer = layer_of(gm, node)
    if layer is None:
        what = with_article(kind_of(node))
        if kind_of(node).layer:
            return _as_called(f"{what} whose bias or geometry is computed")
        return Computed.in_float(Refusal(Cause.NO_KERNEL, f"{what} with a weight"))
    last, output = output_of(node, runtime)
    kernel = runtime.kernel_of(layer, source, output)
    if isinstance(kernel, Refusal):
        return Computed.in_float(kernel)
    if plan_in(gm) is not None and rounding_of(bias_node(node)) is not None:
        layer.layer_calls = (LayerCall(integer_bias=True, sums_over=source_of_input(node, gm.plan.backend)),)
    computes = kernel(layer, source, output, layer.layer_calls[0])
    _call(gm, node, FunctionKernel(callable_of(node), computes, kind_of(node).name, name_of(node)), holder)
    return Computed(kernel.NAME, last=last.name)


def _replace_op(gm: QuantizedGraphModule, node: fx.Node, inputs: list[Grid], runtime: Runtime, holder: str) -> Computed:
    last, output = output_of(node, runtime)
    kind, op = kind_of(node).name, callable_of(node)
    if _changes_a_tensor(node):
        return _as_called("it changes a tensor in place, which another op takes")
    followers = {kind_of(user) for user in users_of(node)}
    kernel = runtime.op_kernel(kind, node, followers, inputs, output)
    if isinstance(kernel, Refusal):
        return Computed.in_float(kernel)
    _call(gm, node, kernel(op, inputs, output, kind, name_of(node)), holder)
    return Computed(kernel.NAME, last=last.name)


def _call(gm: QuantizedGraphModule, node: fx.Node, kernel: OpKernel, holder: str) -> None:
    """Let a node call a kernel instead of its op."""
    target = f"{holder}.{free_name(gm.get_submodule(holder), node.name)}"
    gm.add_submodule(target, kernel)
    node.op, node.target = "call_module", target


def _changes_a_tensor(node: fx.Node) -> bool:
    source = source_of(node)
    return kind_of(node).sums and changes_first(node) and source is not None and len(source.users) > 1


def _grid_behind(node: fx.Node, runtime: Runtime, behind: Mapping[fx.Node, Grid | None]) -> Grid | None:
    """Return the quantizer whose integers a node passes on; None where they reach it as floats, or from several quantizers."""
    if is_quantizer(node):
        grid = module_of(node)
        return grid if isinstance(grid, Grid) and not is_weight_quantizer(node) else None
    carries = kind_of(node).name in runtime.carries and (runtime.picks or not _picks_with_a_number(node))
    sources = tensor_inputs(node) if carries else []
    grids = {behind[source] for source in sources}
    return grids.pop() if len(grids) == 1 else None


def _picks_with_a_number(node: fx.Node) -> bool:
    """Return whether a node takes x[0] of a tensor: ONNX has a Gather for it, through which runtimes do not follow integers."""
    index = node.args[1] if node.target is operator.getitem else 0 if node.target in (torch.select, "select") else None
    parts = index if isinstance(index, tuple) else (index,)
    source = source_of(node)
    from_tuple = source is not None and returns_tuple(source)
    return not from_tuple and any(isinstance(part, int) for part in parts)


def output_of(node: fx.Node, runtime: Runtime) -> tuple[fx.Node, Grid | None]:
    """Return the last op that a kernel of this op computes, and the quantizer of its output.

    Activations between the two are computed by saturation, if their bounds are the ends of the grid's range or beyond; not
    for a grid with several scales or more than 8 bits, which no kernel has.
    """
    reached = reached_quantizer(node, runtime)
    if reached is None:
        return node, None
    grid, last, bounds = reached
    if not grid.capability_now.codes:
        return node, grid
    if not all(each.known for each in bounds):  # a parameter, which is smaller than the range or not
        return node, None
    low, high = max(each.low for each in bounds), min(each.high for each in bounds)
    low = -math.inf if low == 0 and runtime.clips_at_zero else low
    return (last, grid) if saturates(low, high, grid) else (node, None)


def reached_quantizer(node: fx.Node, runtime: Runtime) -> tuple[Grid, fx.Node, list[Bounds]] | None:
    """Return the quantizer after an op and activations that kernels absorb, the last of these, and all their bounds."""
    last, bounds = node, [Bounds()]
    while len(users := users_of(last)) == 1:
        (user,) = users
        quantizer = module_of(user) if is_quantizer(user) else None
        if isinstance(quantizer, Grid | TensorQuantizer):
            return expected_grid(quantizer), last, bounds
        kind = kind_of(user)
        if not kind.returns_input and kind.name not in runtime.absorbs:
            return None
        last, bounds = user, [*bounds, bounds_of(user) or Bounds()]
    return None


def expected_grid(quantizer: Quantizer) -> Grid:
    """Return a grid; for a quantizer in training, a grid as for tensors above zero, whose range activations do not clip."""
    if isinstance(quantizer, Grid):
        return quantizer
    spec = quantizer.grid_spec if isinstance(quantizer, TensorQuantizer) else quantizer.spec
    scale, zero = (torch.tensor(value, dtype=torch.float32, device="cpu") for value in (2.0**-100, spec.qmin))
    return Grid(scale, None if spec.symmetric else zero, spec)
