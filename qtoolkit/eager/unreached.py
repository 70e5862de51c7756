"""Layers with own input quantizers that no data reached, such as layers that forward never calls: they stay float."""

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from qtoolkit.eager.record import record_of, set_record
from qtoolkit.graph.graph_module import QuantizedGraphModule, plan_in
from qtoolkit.graph.plan import Plan
from qtoolkit.nn import QuantModule, QuantWeighted
from qtoolkit.nn.batch_norm import identity_of
from qtoolkit.nn.module import drop_output_quantizer
from qtoolkit.nn.replacement import replace_in_place
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer, quantizers_of
from qtoolkit.shared_modules import outermost
from qtoolkit.verdicts import UNREACHED


def unreached_layers(model: nn.Module, state: Mapping[str, object] | None = None) -> dict[str, nn.Module]:
    """Return the layers without a range of any input or output, by their first names.

    The ranges are in the model, or in the state dict of a converted one. If no activation quantizer has a range,
    nothing was calibrated, or the state dict is of another model: then there are no such layers.
    """

    def is_reached(name: str, quantizer: TensorQuantizer) -> bool:
        if state is None or quantizer.dynamic:
            return quantizer.ready
        return f"{name}.scale" in state or f"{name}.grid.scale" in state

    reached = {n: is_reached(n, q) for n, q in quantizers_of(model).items() if not q.of_weight}
    layers = dict(outermost(model, _has_own_quantizers)) if any(reached.values()) else {}
    own = {name: [reached[n] for n in reached if n.startswith(f"{name}.")] for name in layers}
    return {name: layer for name, layer in layers.items() if own[name] and not any(own[name])}


def leave_in_float(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Replace layers of a model by their float layers, in place; its reports say why."""
    for layer in layers.values():
        if isinstance(layer, QuantWeighted) and layer.batch_norm is not None:
            bn = layer.batch_norm
            layer.fold_batch_norm(bn)
            replace_in_place(bn, identity_of(bn))
        if isinstance(layer, QuantModule):
            replace_in_place(layer, layer.to_float())
        else:
            drop_output_quantizer(layer)
    for part, module in model.named_modules():
        prefix = f"{part}." if part else ""
        of_part = {name.removeprefix(prefix) for name in layers if name.startswith(prefix)}
        if isinstance(module, QuantizedGraphModule) and plan_in(module) is not None:
            module.plan = _without(module.plan, of_part)
        elif (record := record_of(module)).plan is not None:
            set_record(module, replace(record, plan=_without(record.plan, of_part)))


def _without(plan: Plan, layers: set[str]) -> Plan:
    edges = tuple(edge for edge in plan.edges if edge.consumer not in layers)
    return replace(plan, edges=edges, inside={**plan.inside, **{n: UNREACHED for n in plan.inside if n in layers}})


def _has_own_quantizers(module: nn.Module) -> bool:
    """Return whether a module is a QAT layer, or has a quantized output."""
    return isinstance(module, QuantModule) or "output_quantizer" in module._modules
