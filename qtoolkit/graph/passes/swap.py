"""Replace float layers by QAT layers, by table and by the user's mapping; note what stays float, and why."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import fx, nn

from qtoolkit.backends import Backend
from qtoolkit.config import QConfig, QConfigMapping, QuantSpec
from qtoolkit.graph.graph_module import QuantizedGraphModule
from qtoolkit.graph.placement.first_last import at_ends
from qtoolkit.nn import QAT_MODULES, QuantModule
from qtoolkit.op_kinds.nodes import OTHER, kind_of, module_of, object_type_of

QatModules = Mapping[type[nn.Module], type[nn.Module]]


def name_of(node: fx.Node) -> str:
    """Return what a user calls a node: its module's dotted name, or the node's own name."""
    return str(node.target) if node.op == "call_module" else node.name


def config_of(node: fx.Node, backend: Backend, mapping: QConfigMapping | None) -> QConfig | None:
    """Return the config that holds for a node: the mapping's, else the backend's default."""
    match = mapping.match(name_of(node), object_type_of(node)) if mapping is not None else None
    if match is not None and match.source != "global":
        return match.qconfig
    qconfig = backend.qconfig if match is None else match.qconfig
    return qconfig if backend.end_bits is None else at_ends(node, qconfig, backend.end_bits)


def weight_spec(node: fx.Node, kind: str, backend: Backend, mapping: QConfigMapping | None) -> QuantSpec | None:
    """Return the spec of a layer's weight.

    Axis 0 of a default, or of a global rule, stands for the output channel, and (with a group_size) axis 1 for the input
    channel, whatever axes those are in the layer's weight; a rule for a type or a name says the axis itself. Of a kind that
    the backend computes in float, only a rule for a type or a name quantizes the weight.
    """
    return weight_spec_by_rule(config_of(node, backend, mapping), _has_own_rule(node, mapping), kind, backend)


def weight_spec_by_rule(qconfig: QConfig | None, own: bool, kind: str, backend: Backend) -> QuantSpec | None:
    """Return the spec of the weight of a layer of some kind by its config, which is its own or a general one."""
    if qconfig is None or qconfig.weight is None:
        return None
    if own:
        return qconfig.weight
    if backend.roles.get(kind, "float") == "float":
        return None
    return _for_conv_transpose(qconfig.weight, backend) if kind == "conv_transpose" else qconfig.weight


def _for_conv_transpose(spec: QuantSpec, backend: Backend) -> QuantSpec:
    # Its weight is (in, out / groups, k...).
    if spec.group_size is None:
        return replace(spec, axis=backend.conv_transpose_axis) if spec.axis == 0 else spec
    return replace(spec, axis=1 - spec.axis) if spec.axis in (0, 1) else spec


def check_table(qat_modules: object, what: str = "prepare", argument: str = "qat_modules") -> None:
    """Check the user's mapping of float types to QAT types.

    Args:
        qat_modules: The mapping.
        what: Who was called with it, for errors.
        argument: By which argument.

    Raises:
        TypeError: It is no mapping, or names something that is no module type, or one without `from_float`.
    """
    if not isinstance(qat_modules, Mapping):
        raise TypeError(
            f"{what}: {argument} must map float module types to QAT types, got a {type(qat_modules).__name__}."
        )
    for float_type, qat_type in qat_modules.items():
        for role, value in (("key", float_type), ("value", qat_type)):
            if not isinstance(value, type) or not issubclass(value, nn.Module):
                raise TypeError(f"{what}: each {role} of {argument} must be a torch.nn.Module type, got {value!r}.")
        if not callable(getattr(qat_type, "from_float", None)):
            raise TypeError(
                f"{what}: {argument} maps {float_type.__name__} to {qat_type.__name__}, which has no class method "
                f"from_float(module, weight, name, activation); derive it from qtoolkit.nn.QuantWeighted or QuantModule."
            )


def run(
    gm: QuantizedGraphModule,
    backend: Backend,
    mapping: QConfigMapping | None = None,
    qat_modules: QatModules | None = None,
) -> QuantizedGraphModule:
    """Replace each float layer that the config quantizes and the table knows. A shared layer stays shared.

    Raises:
        ValueError: A spec does not fit a layer's weight.
        TypeError: A `from_float` returns no module.
    """
    table: dict[type[nn.Module], type[Any]] = {**QAT_MODULES, **(qat_modules or {})}
    for node in gm.graph.nodes:
        if node.op != "call_module" or type(module_of(node)) not in table:
            continue
        module = module_of(node)
        qat_type = table[type(module)]
        spec = weight_spec(node, getattr(qat_type, "KIND", OTHER), backend, mapping)
        if spec is not None:
            qconfig = config_of(node, backend, mapping)
            activation = None if qconfig is None else qconfig.activation
            gm.set_submodule(str(node.target), from_float(module, qat_type, spec, activation, name_of(node)))
    return gm


def from_float(
    module: nn.Module,
    qat_type: type[Any],
    weight: QuantSpec | None,
    activation: QuantSpec | None,
    name: str,
    what: str = "prepare",
) -> nn.Module:
    """Return the QAT module of a float one; `what` is who needs it, for the error.

    Raises:
        TypeError: The type's `from_float` returns no module.
    """
    new = qat_type.from_float(module, weight, name, activation)
    if not isinstance(new, nn.Module):
        raise TypeError(
            f"{what}: {qat_type.__name__}.from_float must return a torch.nn.Module for {name!r}, got {type(new).__name__}."
        )
    return new


def reason_float(node: fx.Node, backend: Backend, mapping: QConfigMapping | None) -> str | None:
    """Return why a layer has a float weight, or None where its weight is quantized."""
    if isinstance(module_of(node), QuantModule):
        return None
    if _is_float_to(node, kind_of(node), backend, mapping):
        return f"a {kind_of(node)}, which {backend.name} computes in float"
    qconfig = config_of(node, backend, mapping)
    return "the qconfig_mapping says so" if qconfig is None or qconfig.weight is None else "no QAT module for its type"


def _is_float_to(node: fx.Node, kind: str, backend: Backend, mapping: QConfigMapping | None) -> bool:
    # A rule of the user's own, by name, regex or type, holds against the backend's table.
    return not _has_own_rule(node, mapping) and backend.roles.get(kind, "float") == "float"


def _has_own_rule(node: fx.Node, mapping: QConfigMapping | None) -> bool:
    match = mapping.match(name_of(node), object_type_of(node)) if mapping is not None else None
    return match is not None and match.source != "global"
